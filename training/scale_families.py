"""Families of generated modules, fourth part: values scaled, rounded, masked and weighted by others.

Parameters of a channel that are prepared before they are used, pooled gates, rounding to a grid, masks, losses by
element with weights, products that branch and meet, running sums, similarities of rows. As in
:mod:`drk.training.families`.
"""

from __future__ import annotations

from dataclasses import replace

from drk.training.families import Family, any_shape, mixed_chain, reduced, row_norm
from drk.training.layer_families import dense, image, norm_layer
from drk.training.operations import BINARY, TERNARY, Operation
from drk.training.pattern_families import OVER, TERMS, TOTAL, over
from drk.training.task_writer import Shape, Value, Writer, draw

_VIEWS = ("{x}.view({s})", "{x}.reshape({s})", "{x}[{i}]")
_PREPARED: tuple[Operation, ...] = (
    Operation("p_exp", ("{x}.exp()", "torch.exp({x})")),
    Operation("p_softplus", ("F.softplus({x})",)),
    Operation("p_sigmoid", ("torch.sigmoid({x})", "{x}.sigmoid()")),
    Operation("p_rsqrt", ("({x}.abs() + {c}).rsqrt()", "torch.rsqrt({x} * {x} + {c})"), 0.001, 0.1),
    Operation("p_inverse", ("1.0 / ({x} ** 2 + {c})", "({x}.abs() + {c}).reciprocal()"), 0.1, 1.0),
    Operation("p_plus", ("{x} + 1", "1 + {x}", "1.0 + {x}", "{x} + {c}"), 0.5, 1.5, weight=2),
    Operation("p_tanh", ("torch.tanh({x})", "{x}.tanh()")),
)


def prepared(writer: Writer) -> list[Value]:
    """Return an affine change by parameters and buffers of a channel, which are prepared and shaped first."""
    rng, shape = writer.rng, image(writer) if writer.rng.random() < 0.5 else any_shape(writer)
    shape = shape if len(shape) > 1 else (writer.rows(), writer.width())
    axis = 1 if len(shape) == 4 or (len(shape) == 3 and rng.random() < 0.4) else len(shape) - 1
    value = writer.named(writer.chain(writer.input(shape), rng.choice((0, 0, 1))))
    made = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        part = writer.parameter(shape[axis : axis + 1])
        part = writer.apply(draw(_PREPARED, rng), part) if rng.random() < 0.65 else part
        made.append(writer.named(_shaped(writer, writer.named(part), shape, axis)))
    for part in made:
        known = [one for one in BINARY if one.name not in ("div2", "hypot2", "sqdiff2")]
        value = writer.apply(draw(known, rng), value, part)
        value = writer.chain(value, rng.choice((0, 0, 1)))
    return [value]


def _shaped(writer: Writer, part: Value, shape: Shape, axis: int) -> Value:
    """Return a channel's values with ones for the dimensions after it (and sometimes before it)."""
    tail = len(shape) - 1 - axis
    if not tail:
        return part
    sizes = ", ".join(["1"] * axis + ["-1"] + ["1"] * tail)
    index = ", ".join(["None"] * axis + [":"] + ["None"] * tail)
    form = writer.rng.choice(_VIEWS)
    return Value(form.format(x=part.text, s=sizes, i=index), (1,) * axis + part.shape + (1,) * tail, tight=True)


def recalibrate(writer: Writer) -> list[Value]:
    """Return an input scaled by something that its own pooled values say, through products or none."""
    rng = writer.rng
    shape: Shape = image(writer) if rng.random() < 0.6 else (writer.size(8, 16), writer.size(64, 128), writer.width())
    whole = replace(writer.named(writer.chain(writer.input(shape), rng.choice((0, 0, 1)))), own=False)
    axes = (2, 3) if len(shape) == 4 else (1,)
    value = over(writer, whole, rng.choice((axes, tuple(one - len(shape) for one in axes))), keep=False)
    width = value.shape[-1]
    if rng.random() < 0.6:
        value = writer.chain(dense(writer, value, max(width // rng.choice((2, 4)), 4)), 1)
        value = dense(writer, value, width)
    elif rng.random() < 0.5:
        value = writer.join(value, writer.parameter((width,)))
    gates = ("torch.sigmoid({x})", "{x}.sigmoid()", "torch.tanh({x})", "F.hardsigmoid({x})", "F.softmax({x}, dim=-1)")
    gate = writer.named(writer.apply(Operation("gate", gates), value))
    forms = ("{g}[:, :, None, None]", "{g}.unsqueeze(-1).unsqueeze(-1)", "{g}.view({g}.shape[0], -1, 1, 1)")
    forms = forms if len(shape) == 4 else ("{g}[:, None]", "{g}.unsqueeze(1)", "{g}[:, None, :]")
    spread = Value(rng.choice(forms).format(g=gate.text), (*shape[:2], 1, 1) if len(shape) == 4 else shape, tight=True)
    writer.ops.append("spread")
    mix = Operation("scale2", ("{x} * {y}", "{y} * {x}", "{x} + {x} * {y}", "{x} * (1 + {y})"))
    return [mixed_chain(writer, writer.apply(mix, whole, spread, shape=shape), rng.choice((0, 0, 1)))]


def rounded(writer: Writer) -> list[Value]:
    """Return values rounded to a grid whose step is the largest one's share, or fixed; sometimes the error of that."""
    rng = writer.rng
    shape = (writer.rows(), writer.width())
    value = writer.named(writer.chain(writer.input(shape), rng.choice((0, 0, 1))))
    if rng.random() < 0.75:
        axis = rng.choice((-1, 1, -1, 0))
        forms = ("{x}.abs().amax(dim={a}, keepdim=True) / {c}", "torch.amax({x}.abs(), dim={a}, keepdim=True) / {c}")
        step = writer.apply(
            Operation("step_of", forms, 6.0, 130.0), value, shape=reduced(value, axis, keep=True), a=str(axis)
        )
        floor = Operation("floor", ("{x}.clamp(min={c})", "torch.clamp({x}, min={c})", "{x} + {c}"), 1e-8, 2e-3)
        step = writer.named(writer.apply(floor, step))
    else:
        step = writer.named(writer.parameter(shape[-1:], around="torch.ones"))
    grid = ("torch.round({x} / {y})", "({x} / {y}).round()", "torch.floor({x} / {y} + 0.5)")
    level = writer.apply(Operation("grid", grid), value, step, shape=shape)
    if rng.random() < 0.7:
        low, high = rng.choice(((-128, 127), (-8, 7), (-127, 127), (0, 255)))
        clamp = rng.choice(("{x}.clamp(%d, %d)", "torch.clamp({x}, %d, %d)", "{x}.clamp(min=%d, max=%d)")) % (low, high)
        level = writer.apply(Operation("levels", (clamp,)), level)
    back = writer.apply(Operation("back", ("{x} * {y}", "{y} * {x}")), level, step, shape=shape)
    if rng.random() < 0.2:
        back = writer.apply(draw(TERMS[1:3], rng), value, back)
    return [writer.chain(back, rng.choice((0, 0, 0, 1)))]


def masked(writer: Writer) -> list[Value]:
    """Return a chain under a mask that is an input: kept, filled, averaged over what is there, or a softmax of it."""
    rng = writer.rng
    batch, length, width = writer.size(8, 16, 32), writer.size(64, 128, 256), writer.size(64, 128, 256)
    kind = rng.random()
    if kind < 0.5:
        value = writer.chain(writer.input((batch, length, width)), rng.choice((0, 0, 1)))
        mask = writer.input((batch, length), fill="bernoulli")
        spread = writer.named(
            Value(
                rng.choice(("{m}.unsqueeze(-1)", "{m}[:, :, None]", "{m}[..., None]")).format(m=mask.text),
                (batch, length, 1),
                tight=True,
            )
        )
        total = over(writer, writer.apply(draw(TERMS[:1], rng), value, spread), (1,), keep=False, op=OVER[0])
        count = Operation(
            "count",
            ("{x}.sum(1).clamp(min={c})", "torch.clamp({x}.sum(dim=1), min={c})", "({x}.sum(1) + {c})"),
            1e-8,
            2e-3,
        )
        value = writer.apply(Operation("average", ("{x} / {y}",)), total, writer.apply(count, spread, shape=(batch, 1)))
        return [row_norm(writer, value, -1) if rng.random() < 0.4 else writer.chain(value, rng.choice((0, 1)))]
    shape: Shape = (writer.rows(), writer.width())
    value, mask = writer.chain(writer.input(shape), rng.choice((0, 1))), writer.input(shape, fill="bernoulli")
    fills = ("{x}.masked_fill({y} == 0, {f})", "{x}.masked_fill({y} < 0.5, {f})", "torch.where({y} > 0.5, {x}, {f})")
    fill = rng.choice(("-1e9", "-10000.0", "-1e4")) if kind < 0.75 else rng.choice(("0.0", "1.0", "-1.0"))
    value = writer.apply(Operation(f"fill{kind < 0.75}", tuple(one.replace("{f}", fill) for one in fills)), value, mask)
    if kind < 0.75:
        value = (
            row_norm(writer, value, -1)
            if rng.random() < 0.3
            else writer.apply(
                Operation("softmax", ("torch.softmax({x}, dim=-1)", "F.softmax({x}, dim=-1)", "{x}.softmax(-1)")), value
            )
        )
    return [mixed_chain(writer, value, rng.choice((0, 0, 1)))]


_ERRORS: tuple[Operation, ...] = (
    Operation("bce", ('F.binary_cross_entropy_with_logits({x}, {y}, reduction="none")',), weight=2),
    Operation("mse", ('F.mse_loss({x}, {y}, reduction="none")', "({x} - {y}) ** 2", "({x} - {y}).pow(2)"), weight=2),
    Operation("l1", ('F.l1_loss({x}, {y}, reduction="none")', "torch.abs({x} - {y})", "({x} - {y}).abs()")),
    Operation("smooth", ('F.smooth_l1_loss({x}, {y}, reduction="none")',)),
    Operation("margin", ("F.relu({c} - {x} * {y})", "torch.clamp({c} - {x} * {y}, min=0)"), 0.5, 1.5),
    Operation("surprise", ("-({y} * F.logsigmoid({x}))", "-F.logsigmoid({x} * (2 * {y} - 1))")),
    Operation("pinball", ("torch.maximum({c} * ({x} - {y}), ({c} - 1) * ({x} - {y}))",), 0.1, 0.9),
    Operation(
        "huber",
        ("torch.where(({x} - {y}).abs() < {c}, 0.5 * ({x} - {y}) ** 2, {c} * (({x} - {y}).abs() - 0.5 * {c}))",),
        0.5,
        1.5,
    ),
)


def weighted_loss(writer: Writer) -> list[Value]:
    """Return an error by element, weighted by something that the same inputs say, and reduced."""
    rng = writer.rng
    shape = (writer.rows(), writer.size(10, 64, 80, 128, 256))
    first, target = writer.input(shape), writer.input(shape, fill=rng.choice(("bernoulli", "uniform")), high=1)
    error = replace(writer.named(writer.apply(draw(_ERRORS, rng), first, target)), own=False)
    if rng.random() < 0.7:
        weight = writer.named(writer.apply(Operation("p", ("torch.sigmoid({x})", "{x}.sigmoid()")), first))
        forms = (
            "{x} * {y} + (1 - {x}) * (1 - {y})",
            "({x} - {y}).abs()",
            "{c} * {y} + (1 - {c}) * (1 - {y})",
            "{y} + {c}",
        )
        weight = writer.apply(Operation("weight", forms, 0.1, 0.9), weight, target)
        if rng.random() < 0.5:
            powers = ("(1 - {x}).clamp(min=0) ** {c}", "{x} ** {c}", "torch.pow({x}, {c})")
            weight = writer.apply(Operation("focus", powers, 1.5, 3.0), weight)
        error = writer.apply(Operation("weighted", ("{x} * {y}", "{y} * {x}")), error, weight)
    kind = rng.random()
    if kind < 0.55:
        return [writer.apply(Operation("total", ("{x}.mean()", "torch.mean({x})", "{x}.sum()")), error, shape=())]
    if kind < 0.8:
        part = over(writer, error, (rng.choice((1, -1)),), keep=False, op=rng.choice(OVER[:2]))
        return [writer.apply(TOTAL, part, shape=()) if rng.random() < 0.5 else part]
    by = writer.named(writer.apply(Operation("wanted", ("{x}.sum()",)), target, shape=()))
    ratio = Operation("per", ("{x}.sum() / {y}.clamp(min={c})", "{x}.sum() / ({y} + {c})"), 0.5, 1.5)
    return [writer.apply(ratio, error, by, shape=())]


def tower(writer: Writer) -> list[Value]:
    """Return products that branch and meet: two heads of one input, a product beside another input, a tail of norm."""
    rng = writer.rng
    shape: Shape = (writer.size(128, 256, 512), writer.size(128, 256, 512))
    first = writer.named(writer.input(shape))
    out = writer.size(16, 64, 128, 256)
    left = writer.named(dense(writer, first, out))
    kind = rng.random()
    if kind < 0.35:
        right = writer.named(dense(writer, first, rng.choice((1, out))))
        value = writer.join(right, left)
    elif kind < 0.7:
        right = writer.named(writer.input((shape[0], out)))
        value = (
            writer.blend(left, right, writer.input((shape[0], out))) if rng.random() < 0.3 else writer.join(right, left)
        )
    else:
        value = writer.apply(draw(TERNARY[-1:], rng), left, writer.parameter((out,)), writer.parameter((out,)))
    if rng.random() < 0.3:
        writer.ops.append("dropout")
        layer = writer.module(f"nn.Dropout({rng.choice(('0.1', '0.2', 'p=0.1'))})")
        value = writer.assign(Value(f"{layer}({writer.plain(value).text})", value.shape, tight=True))
    value = norm_layer(writer, value) if rng.random() < 0.4 and value.shape[-1] > 1 else value
    return [mixed_chain(writer, value, rng.choice((0, 1, 1, 2)))]


_SCANS: tuple[Operation, ...] = (
    Operation("cumsum", ("torch.cumsum({x}, dim={a})", "{x}.cumsum(dim={a})", "{x}.cumsum({a})"), weight=3),
    Operation("cumprod", ("torch.cumprod(torch.sigmoid({x}), dim={a})", "torch.sigmoid({x}).cumprod({a})")),
    Operation("logcumsumexp", ("torch.logcumsumexp({x}, dim={a})", "{x}.logcumsumexp({a})")),
    Operation("running_mean", ("{x}.cumsum({a}) / {n}", "torch.cumsum({x}, dim={a}) / {n}")),
)


def scan(writer: Writer) -> list[Value]:
    """Return a running sum or product along a dimension, beside what it ran over, sometimes reduced."""
    rng = writer.rng
    shape: Shape = (writer.size(64, 128, 256), writer.size(64, 128, 256, 512))
    shape = shape if rng.random() < 0.6 else (writer.size(8, 16), *shape)
    first = writer.named(writer.chain(writer.input(shape), rng.choice((0, 0, 1))))
    axis = rng.choice((-1, len(shape) - 1, len(shape) - 2, -1))
    value = writer.apply(draw(_SCANS, rng), first, shape=shape, a=str(axis), n=str(shape[axis]))
    if rng.random() < 0.6:
        value = writer.join(*rng.sample((first, value), 2))
    if rng.random() < 0.3:
        value = writer.apply(draw(TERMS[:1], rng), value, writer.input(shape))
    value = writer.chain(value, rng.choice((0, 0, 1)))
    if rng.random() < 0.4:
        value = over(writer, value, (-1,), keep=False, op=rng.choice(OVER[:2]))
    return [writer.apply(TOTAL, value, shape=()) if rng.random() < 0.2 else value]


def similarity(writer: Writer) -> list[Value]:
    """Return products of every row of one input with every row of another, of unit length or not, and what follows."""
    rng = writer.rng
    n, m, width = writer.size(128, 256, 512), writer.size(128, 256), writer.size(64, 128, 256)
    m = n if rng.random() < 0.4 else m
    left, right = writer.input((n, width)), writer.input((m, width))
    if rng.random() < 0.6:
        unit = Operation(
            "unit", ("F.normalize({x}, dim=-1)", "F.normalize({x}, p=2, dim=1)", "{x} / {x}.norm(dim=-1, keepdim=True)")
        )
        left, right = (writer.named(writer.apply(unit, one)) for one in (left, right))
    forms = ("{x} @ {y}.T", "torch.matmul({x}, {y}.t())", "torch.mm({x}, {y}.T)", "F.linear({x}, {y})")
    value = writer.apply(Operation("products", forms), left, right, shape=(n, m))
    if rng.random() < 0.6:
        value = writer.apply(Operation("temperature", ("{x} / {c}", "{x} * {c}"), 0.05, 2.0), value)
    kind = rng.random()
    if kind < 0.2 and n == m:
        value = writer.named(value)
        less = ("torch.logsumexp({x}, dim=1) - {x}.diagonal()", "{x}.logsumexp(dim=-1) - torch.diagonal({x})")
        value = writer.apply(Operation("own", less), value, shape=(n,))
        return [writer.apply(Operation("average", ("{x}.mean()", "torch.mean({x})")), value, shape=())]
    if kind < 0.55:
        return [mixed_chain(writer, row_norm(writer, value, -1), rng.choice((0, 1)))]
    if kind < 0.8:
        return [writer.chain(over(writer, value, (rng.choice((1, -1)),), keep=False), rng.choice((0, 1)))]
    return [mixed_chain(writer, value, rng.choice((1, 2)))]


SCALE_FAMILIES: dict[str, Family] = {
    "prepared": prepared,
    "recalibrate": recalibrate,
    "rounded": rounded,
    "masked": masked,
    "weighted-loss": weighted_loss,
    "tower": tower,
    "scan": scan,
    "similarity": similarity,
}
