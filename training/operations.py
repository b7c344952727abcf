"""Tables of operations for the task generator: what each is called, how people spell it, and what it needs.

A spelling is a text with ``{x}`` (and ``{y}``, ``{z}``) for values and ``{c}``, ``{d}`` for constants; one that begins
with ``nn.`` is a module that the constructor makes. Spellings of one operation mean the same up to rounding; which one
is used is a choice of structure, since some give another graph. ``low`` and ``high`` bound the constant; all values are
chosen so that chains of them stay finite on standard normal inputs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One operation. ``low < high``: it takes a constant ``{c}``; ``low2 < high2``: a second one, ``{d}``."""

    name: str
    spellings: tuple[str, ...]
    low: float = 0.0
    high: float = 0.0
    low2: float = 0.0
    high2: float = 0.0
    weight: float = 1.0


UNARY: tuple[Operation, ...] = (
    Operation("relu", ("torch.relu({x})", "F.relu({x})", "{x}.relu()", "nn.ReLU()", "{x}.clamp(min=0)"), weight=2),
    Operation("sigmoid", ("torch.sigmoid({x})", "{x}.sigmoid()", "nn.Sigmoid()", "F.sigmoid({x})"), weight=2),
    Operation("tanh", ("torch.tanh({x})", "{x}.tanh()", "nn.Tanh()", "F.tanh({x})"), weight=2),
    Operation("silu", ("F.silu({x})", "nn.SiLU()", "{x} * torch.sigmoid({x})", "{x} * {x}.sigmoid()"), weight=2),
    Operation("gelu", ("F.gelu({x})", "nn.GELU()"), weight=2),
    Operation("gelu_tanh", ('F.gelu({x}, approximate="tanh")', 'nn.GELU(approximate="tanh")')),
    Operation("quick_gelu", ("{x} * torch.sigmoid({c} * {x})",), 1.2, 1.9, weight=0.5),
    Operation(
        "leaky_relu",
        ("F.leaky_relu({x}, {c})", "F.leaky_relu({x}, negative_slope={c})", "nn.LeakyReLU({c})"),
        0.01,
        0.3,
    ),
    Operation("elu", ("F.elu({x})", "nn.ELU()", "F.elu({x}, alpha=1.0)"), weight=0.8),
    Operation("selu", ("F.selu({x})", "nn.SELU()", "torch.selu({x})"), weight=0.5),
    Operation("softplus", ("F.softplus({x})", "nn.Softplus()"), weight=0.8),
    Operation("logsigmoid", ("F.logsigmoid({x})", "nn.LogSigmoid()"), weight=0.4),
    Operation("softsign", ("F.softsign({x})", "nn.Softsign()", "{x} / (1 + {x}.abs())"), weight=0.5),
    Operation("hardtanh", ("F.hardtanh({x})", "nn.Hardtanh()", "torch.clamp({x}, -1.0, 1.0)"), weight=0.6),
    Operation("hardsigmoid", ("F.hardsigmoid({x})", "nn.Hardsigmoid()"), weight=0.5),
    Operation("hardswish", ("F.hardswish({x})", "nn.Hardswish()"), weight=0.7),
    Operation("relu6", ("F.relu6({x})", "nn.ReLU6()", "{x}.clamp(0, 6)"), weight=0.5),
    Operation("mish", ("F.mish({x})", "nn.Mish()", "{x} * torch.tanh(F.softplus({x}))"), weight=0.8),
    Operation("abs", ("torch.abs({x})", "{x}.abs()"), weight=0.8),
    Operation(
        "square", ("{x} * {x}", "{x} ** 2", "torch.square({x})", "{x}.pow(2)", "{x}.square()", "torch.pow({x}, 2)")
    ),
    Operation("cube", ("{x} ** 3", "{x}.pow(3)"), weight=0.2),
    Operation(
        "sqrt",
        ("torch.sqrt(torch.abs({x}) + {c})", "({x} ** 2 + {c}).sqrt()", "torch.sqrt({x} * {x} + {c})"),
        0.01,
        1.0,
    ),
    Operation("rsqrt", ("torch.rsqrt({x} * {x} + {c})", "1.0 / torch.sqrt({x} ** 2 + {c})"), 0.1, 1.5, weight=0.5),
    Operation("exp_neg", ("torch.exp(-torch.abs({x}))", "torch.exp(-({x} ** 2))", "(-{x}.abs()).exp()"), weight=0.8),
    Operation("gaussian", ("torch.exp(-{c} * {x} ** 2)", "torch.exp(-({x} * {x}) / {c})"), 0.4, 2.5, weight=0.5),
    Operation("log1p", ("torch.log1p(torch.abs({x}))", "torch.log(torch.abs({x}) + {c})"), 0.5, 1.5, weight=0.6),
    Operation("sin", ("torch.sin({x})", "{x}.sin()"), weight=0.7),
    Operation("cos", ("torch.cos({x})", "{x}.cos()"), weight=0.6),
    Operation("neg", ("-{x}", "torch.neg({x})", "{x}.neg()"), weight=0.5),
    Operation(
        "reciprocal",
        ("1.0 / (1.0 + {x} ** 2)", "1 / ({x}.abs() + {c})", "torch.reciprocal({x}.abs() + {c})"),
        0.5,
        2.0,
        weight=0.5,
    ),
    Operation("one_minus", ("1 - {x}", "1.0 - {x}", "torch.sub(1.0, {x})"), weight=0.5),
    Operation("add", ("{x} + {c}", "torch.add({x}, {c})", "{c} + {x}", "{x}.add({c})"), -2.0, 2.0, weight=1.5),
    Operation("mul", ("{x} * {c}", "{c} * {x}", "torch.mul({x}, {c})", "{x}.mul({c})"), 0.2, 2.5, weight=2),
    Operation("sub", ("{x} - {c}", "torch.sub({x}, {c})"), -1.5, 1.5),
    Operation("rsub", ("{c} - {x}",), -1.5, 1.5, weight=0.5),
    Operation("div", ("{x} / {c}", "torch.div({x}, {c})"), 0.5, 4.0, weight=1.5),
    Operation("clamp_min", ("torch.clamp({x}, min={c})", "{x}.clamp(min={c})", "torch.clamp_min({x}, {c})"), -1.0, 0.5),
    Operation("clamp_max", ("torch.clamp({x}, max={c})", "{x}.clamp(max={c})"), 0.2, 3.0),
    Operation(
        "clamp",
        ("torch.clamp({x}, {c}, {d})", "{x}.clamp({c}, {d})", "torch.clamp({x}, min={c}, max={d})"),
        -2.0,
        -0.1,
        0.2,
        2.5,
    ),
    Operation("affine", ("{x} * {c} + {d}", "{d} + {c} * {x}", "({x} - {d}) / {c}"), 0.3, 2.0, -1.0, 1.0),
    Operation(
        "threshold",
        ("torch.where({x} > {c}, {x}, torch.zeros_like({x}))", "F.threshold({x}, {c}, 0.0)", "{x} * ({x} > {c})"),
        -0.5,
        1.0,
        weight=0.6,
    ),
    Operation(
        "where_scale",
        ("torch.where({x} > 0, {x}, {c} * {x})", "torch.where({x} >= 0, {x}, {x} * {c})"),
        0.05,
        0.6,
        weight=0.6,
    ),
    Operation(
        "sign_sqrt", ("torch.sign({x}) * torch.sqrt(torch.abs({x}))", "{x}.sign() * {x}.abs().sqrt()"), weight=0.3
    ),
    Operation(
        "softshrink", ("F.softshrink({x}, {c})", "torch.sign({x}) * F.relu({x}.abs() - {c})"), 0.1, 0.9, weight=0.3
    ),
    Operation("floor_frac", ("{x} - torch.floor({x})",), weight=0.2),
    Operation("erf", ("torch.erf({x})", "0.5 * {x} * (1.0 + torch.erf({x} / 1.4142135))"), weight=0.4),
    Operation("tanh_cap", ("{c} * torch.tanh({x} / {c})",), 2.0, 30.0, weight=0.5),
    Operation("temperature", ("{x} / {c}", "{x} * (1.0 / {c})"), 0.3, 8.0, weight=0.3),
    Operation(
        "power", ("{x}.abs() ** {c}", "{x}.clamp(min=0) ** {c}", "torch.pow({x}.abs(), {c})"), 0.5, 3.0, weight=0.5
    ),
    Operation(
        "log_floor",
        ("torch.log(torch.clamp({x}, min={c}))", "torch.log({x}.abs() + {c})", "torch.log10({x}.abs() + {c})"),
        0.001,
        0.1,
        weight=0.6,
    ),
    Operation("exp_cap", ("torch.exp(torch.clamp({x}, max={c}))", "{x}.clamp(max={c}).exp()"), 0.5, 4.0, weight=0.6),
    Operation("exp", ("torch.exp({x} * {c})", "({c} * {x}).exp()", "torch.expm1({c} * {x})"), 0.1, 0.6, weight=0.5),
    Operation(
        "sign_log",
        ("torch.sign({x}) * torch.log1p({x}.abs())", "{x}.sign() * torch.log1p({c} * {x}.abs())"),
        0.5,
        10.0,
        weight=0.4,
    ),
    Operation(
        "sin_square",
        ("torch.sin({x}) ** 2", "torch.sin({c} * {x}).pow(2)", "torch.cos({x} * {c}).square()"),
        0.5,
        4.0,
        weight=0.4,
    ),
    Operation(
        "normal_cdf",
        ("0.5 * (1 + torch.erf({x} / 1.4142135623730951))", "0.5 * (1.0 + torch.erf({x} / math.sqrt(2)))"),
        weight=0.4,
    ),
    Operation(
        "inside",
        ("{x} * ({x} < {c})", "{x} * ({x}.abs() < {c}).float()", "({x} > {c}).float() * {x}"),
        0.3,
        1.5,
        weight=0.4,
    ),
    Operation("identity_mix", ("{x} + {c} * torch.tanh({x})", "{x} - {c} * torch.sin({x})"), 0.1, 1.0, weight=0.4),
)

BINARY: tuple[Operation, ...] = (
    Operation("add2", ("{x} + {y}", "torch.add({x}, {y})", "{x}.add({y})"), weight=3),
    Operation("sub2", ("{x} - {y}", "torch.sub({x}, {y})"), weight=2),
    Operation("mul2", ("{x} * {y}", "torch.mul({x}, {y})", "{x}.mul({y})"), weight=3),
    Operation("div2", ("{x} / ({y}.abs() + {c})", "{x} / (1.0 + {y} ** 2)"), 0.5, 2.0, weight=0.8),
    Operation("max2", ("torch.maximum({x}, {y})", "torch.max({x}, {y})")),
    Operation("min2", ("torch.minimum({x}, {y})", "torch.min({x}, {y})"), weight=0.6),
    Operation("gate2", ("{x} * torch.sigmoid({y})", "{x} * {y}.sigmoid()", "torch.sigmoid({y}) * {x}"), weight=2),
    Operation("silu_gate2", ("F.silu({x}) * {y}", "F.silu({y}) * {x}"), weight=1.5),
    Operation("gelu_gate2", ("F.gelu({x}) * {y}",), weight=0.8),
    Operation("tanh_gate2", ("torch.tanh({x}) * torch.sigmoid({y})",), weight=1),
    Operation("axpy2", ("{x} + {c} * {y}", "torch.add({x}, {y}, alpha={c})", "{x} - {c} * {y}"), 0.1, 2.0, weight=1.5),
    Operation(
        "lerp2",
        ("torch.lerp({x}, {y}, {c})", "{c} * {x} + (1 - {c}) * {y}", "(1.0 - {c}) * {x} + {c} * {y}"),
        0.05,
        0.95,
    ),
    Operation("sqdiff2", ("({x} - {y}) ** 2", "({x} - {y}).pow(2)", "torch.square({x} - {y})"), weight=0.8),
    Operation("absdiff2", ("torch.abs({x} - {y})", "({x} - {y}).abs()"), weight=0.6),
    Operation(
        "hypot2",
        ("torch.sqrt({x} ** 2 + {y} ** 2 + {c})", "torch.sqrt({x} * {x} + {y} * {y} + {c})"),
        0.01,
        0.5,
        weight=0.5,
    ),
    Operation(
        "where2",
        ("torch.where({x} > {y}, {x}, {y} * {c})", "torch.where({y} > 0, {x}, {c} * {x})"),
        0.1,
        0.9,
        weight=0.7,
    ),
    Operation(
        "select2", ("torch.where({x} > {c}, {x}, {y})", "torch.where({x} < {c}, {y}, {x})"), -0.5, 0.5, weight=0.7
    ),
)

TERNARY: tuple[Operation, ...] = (
    Operation("addcmul3", ("torch.addcmul({x}, {y}, {z})", "{x} + {y} * {z}"), weight=2),
    Operation("addcmul_value3", ("torch.addcmul({x}, {y}, {z}, value={c})", "{x} + {c} * {y} * {z}"), 0.1, 1.5),
    Operation(
        "blend3", ("{z}.sigmoid() * {x} + (1 - {z}.sigmoid()) * {y}", "torch.lerp({x}, {y}, torch.sigmoid({z}))")
    ),
    Operation("where3", ("torch.where({z} > 0, {x}, {y})", "torch.where({z} > {c}, {x}, {y})"), -0.5, 0.5),
    Operation("affine3", ("({x} - {y}) * {z}", "{x} * {y} + {z}", "{x} * (1 + {y}) + {z}"), weight=2),
)

REDUCTIONS: tuple[Operation, ...] = (
    Operation("sum", ("{x}.sum(dim={a}{k})", "torch.sum({x}, dim={a}{k})", "{x}.sum({a}{k})"), weight=2),
    Operation("mean", ("{x}.mean(dim={a}{k})", "torch.mean({x}, dim={a}{k})", "{x}.mean({a}{k})"), weight=2),
    Operation(
        "amax",
        ("{x}.amax(dim={a}{k})", "torch.amax({x}, dim={a}{k})", "{x}.max(dim={a}{k}).values", "{x}.max(dim={a}{k})[0]"),
    ),
    Operation("amin", ("{x}.amin(dim={a}{k})", "torch.min({x}, dim={a}{k})[0]"), weight=0.6),
    Operation("logsumexp", ("torch.logsumexp({x}, dim={a}{k})",)),
    Operation(
        "norm2",
        (
            "{x}.norm(dim={a}{k})",
            "torch.norm({x}, dim={a}{k})",
            "torch.linalg.vector_norm({x}, dim={a}{k})",
            "{x}.norm(p=2, dim={a}{k})",
        ),
    ),
    Operation("norm1", ("{x}.abs().sum(dim={a}{k})", "torch.norm({x}, p=1, dim={a}{k})"), weight=0.5),
    Operation("rms", ("torch.sqrt(({x} ** 2).mean(dim={a}{k}))", "{x}.pow(2).mean(dim={a}{k}).sqrt()"), weight=0.6),
    Operation(
        "sumsq", ("({x} * {x}).sum(dim={a}{k})", "({x} ** 2).sum(dim={a}{k})", "torch.sum({x} ** 2, dim={a}{k})")
    ),
    Operation("var", ("{x}.var(dim={a}{k}, unbiased=False)", "torch.var({x}, dim={a}{k}, unbiased=False)"), weight=0.6),
    Operation("std", ("{x}.std(dim={a}{k})", "torch.std({x}, dim={a}{k})"), weight=0.5),
)
"""``{a}`` is the dimension, ``{k}`` the text of ``keepdim``."""

ROW_NORMS: tuple[Operation, ...] = (
    Operation(
        "softmax",
        (
            "torch.softmax({x}, dim={a})",
            "F.softmax({x}, dim={a})",
            "{x}.softmax(dim={a})",
            "nn.Softmax(dim={a})",
            "{x}.softmax({a})",
        ),
        weight=3,
    ),
    Operation(
        "log_softmax",
        (
            "F.log_softmax({x}, dim={a})",
            "torch.log_softmax({x}, dim={a})",
            "nn.LogSoftmax(dim={a})",
            "{x}.log_softmax({a})",
        ),
        weight=1.5,
    ),
    Operation("softmin", ("F.softmax(-{x}, dim={a})",), weight=0.3),
    Operation("centre", ("{x} - {x}.mean(dim={a}, keepdim=True)", "{x} - torch.mean({x}, dim={a}, keepdim=True)")),
    Operation(
        "l2_normalize",
        (
            "F.normalize({x}, dim={a})",
            "{x} / ({x}.norm(dim={a}, keepdim=True) + {c})",
            "F.normalize({x}, p=2, dim={a})",
        ),
        0.001,
        0.1,
        weight=1.5,
    ),
    Operation(
        "l1_normalize",
        (
            "{x} / ({x}.abs().sum(dim={a}, keepdim=True) + {c})",
            "{x} / torch.sum(torch.abs({x}), dim={a}, keepdim=True)",
        ),
        0.001,
        0.1,
        weight=0.5,
    ),
    Operation(
        "rms_by_hand",
        (
            "{x} * torch.rsqrt({x}.pow(2).mean(dim={a}, keepdim=True) + {c})",
            "{x} / torch.sqrt(({x} * {x}).mean(dim={a}, keepdim=True) + {c})",
            "{x} * torch.rsqrt(torch.mean({x} ** 2, dim={a}, keepdim=True) + {c})",
        ),
        0.001,
        0.01,
        weight=2,
    ),
    Operation(
        "standardize",
        (
            "({x} - {x}.mean(dim={a}, keepdim=True))"
            " / torch.sqrt({x}.var(dim={a}, keepdim=True, unbiased=False) + {c})",
            "({x} - {x}.mean({a}, keepdim=True)) / ({x}.std({a}, keepdim=True) + {c})",
        ),
        0.001,
        0.1,
        weight=1.5,
    ),
    Operation(
        "max_shift", ("{x} - {x}.amax(dim={a}, keepdim=True)", "{x} - {x}.max(dim={a}, keepdim=True)[0]"), weight=0.5
    ),
    Operation("softmax_by_hand", ("torch.exp({x} - torch.logsumexp({x}, dim={a}, keepdim=True))",), weight=0.3),
    Operation("log_shift", ("{x} - torch.logsumexp({x}, dim={a}, keepdim=True)",), weight=0.4),
    Operation(
        "minmax",
        (
            "({x} - {x}.amin(dim={a}, keepdim=True))"
            " / ({x}.amax(dim={a}, keepdim=True) - {x}.amin(dim={a}, keepdim=True) + {c})",
        ),
        0.01,
        0.5,
        weight=0.4,
    ),
)
"""Shape-keeping operations along one dimension."""
