"""Families of generated modules, second part: products with epilogues, layers of ``torch.nn``, pooling, attention.

As in :mod:`drk.training.families`. Convolutions stay the library's in the teacher's answers; they are here so that what
stands around them is learned. Sizes are those that layers allow: channels are multiples of groups, heads of widths.
"""

from __future__ import annotations

from dataclasses import replace

from drk.training.families import Family, any_shape, halves, mixed_chain, reduce_once, row_norm
from drk.training.operations import BINARY, Operation
from drk.training.task_writer import Shape, Value, Writer, draw


def channels(writer: Writer) -> int:
    """Return a number of channels that groups divide."""
    return writer.rng.choice((8, 16)) if writer.small else writer.rng.choice((16, 32, 48, 64, 96, 128))


def image(writer: Writer) -> Shape:
    """Return the shape of a batch of images."""
    side = writer.rng.choice((6, 8)) if writer.small else writer.rng.choice((14, 28, 32, 56, 64))
    return (2 if writer.small else writer.rng.choice((8, 16, 32, 64)), channels(writer), side, side)


def dense(writer: Writer, value: Value, out: int) -> Value:
    """Return a matrix product of ``value`` with weights, in one of the ways that people write it."""
    rng, inner = writer.rng, value.shape[-1]
    shape = (*value.shape[:-1], out)
    writer.ops.append("linear")
    kind = rng.random()
    if kind < 0.65:
        bias = rng.choice(("", "", ", bias=True", ", bias=False"))
        layer = writer.module(f"nn.Linear({writer.argument(inner)}, {writer.argument(out)}{bias})")
        return writer.assign(Value(f"{layer}({writer.plain(value).text})", shape, tight=True))
    value = writer.named(value)
    forms: tuple[str, ...]
    if kind < 0.9:
        weight = writer.parameter((inner, out), around="torch.randn")
        forms = ("torch.matmul({x}, {w})", "{x} @ {w}", "{x}.matmul({w})", 'torch.einsum("...i,io->...o", {x}, {w})')
        if len(shape) == 2:
            forms = (*forms, "torch.mm({x}, {w})", 'torch.einsum("bi,io->bo", {x}, {w})')
    else:
        weight = writer.parameter((out, inner), around="torch.randn")
        forms = ("F.linear({x}, {w})", "{x} @ {w}.t()", "torch.matmul({x}, {w}.T)")
    return writer.assign(Value(rng.choice(forms).format(x=value.text, w=weight.text), shape))


def product_shape(writer: Writer) -> Shape:
    """Return the shape of a product's left side."""
    width = writer.size(128, 256, 512, 768, 1024)
    if writer.rng.random() < 0.75:
        return (writer.size(128, 256, 512, 1024, 2048), width)
    return (writer.size(8, 16), writer.size(64, 128, 256), width)


def linear(writer: Writer) -> list[Value]:
    """Return a product with an epilogue, sometimes of two inputs, sometimes followed by a reduction of its rows."""
    rng = writer.rng
    value = writer.owned(writer.input(product_shape(writer)))
    value = writer.chain(value, rng.choice((0, 0, 0, 0, 1)))
    value = dense(writer, value, writer.size(64, 128, 256, 512, 1024))
    kind = rng.random()
    value = mixed_chain(writer, value, rng.choice((1, 1, 2, 3, 4)) if kind < 0.7 else rng.choice((0, 1, 2)))
    if kind > 0.85:
        value = reduce_once(writer, value, -1, keep=rng.random() < 0.5)
        return [writer.chain(value, rng.choice((0, 1, 2)))]
    if kind > 0.7:
        value = mixed_chain(writer, row_norm(writer, value, -1), rng.choice((0, 1)))
    return [value]


def gemm(writer: Writer) -> list[Value]:
    """Return a product of two inputs, of matrices or batches of them, with an epilogue."""
    rng = writer.rng
    m, k, n = (writer.size(128, 256, 512, 1024) for _ in range(3))
    batched = rng.random() < 0.35
    head = (writer.size(4, 8, 16),) if batched else ()
    left, right = writer.input((*head, m, k)), writer.input((*head, k, n))
    forms: tuple[str, ...] = (
        "torch.bmm({x}, {y})",
        "torch.matmul({x}, {y})",
        "{x} @ {y}",
        'torch.einsum("bik,bkj->bij", {x}, {y})',
    )
    if not batched:
        forms = ("torch.matmul({x}, {y})", "{x} @ {y}", "torch.mm({x}, {y})", 'torch.einsum("ik,kj->ij", {x}, {y})')
    writer.ops.append("matmul")
    value = writer.assign(Value(rng.choice(forms).format(x=left.text, y=right.text), (*head, m, n)))
    return [mixed_chain(writer, value, rng.choice((1, 1, 2, 3, 4)))]


def mlp(writer: Writer) -> list[Value]:
    """Return two products with activations: a feed-forward block, plain, sequential or gated."""
    rng, shape = writer.rng, product_shape(writer)
    value, hidden = writer.input(shape), writer.size(128, 256, 512, 1024)
    kind = rng.random()
    if kind < 0.3:
        sizes = [writer.argument(shape[-1]), writer.argument(hidden), writer.argument(shape[-1])]
        act = rng.choice(("nn.ReLU()", "nn.GELU()", "nn.SiLU()", "nn.Tanh()", "nn.Sigmoid()"))
        writer.ops += ["sequential", act]
        layers = f"nn.Linear({sizes[0]}, {sizes[1]}), {act}, nn.Linear({sizes[1]}, {sizes[2]})"
        net = writer.module(f"nn.Sequential({layers})")
        result = writer.assign(Value(f"{net}({value.text})", shape, tight=True))
    elif kind < 0.6:
        writer.ops.append("swiglu")
        left, right = dense(writer, value, hidden), dense(writer, value, hidden)
        gates = [one for one in BINARY if "gate" in one.name]
        result = writer.apply(draw(gates, rng), left, right)
        result = dense(writer, result, shape[-1]) if rng.random() < 0.5 else result
    else:
        result = dense(writer, mixed_chain(writer, dense(writer, value, hidden), rng.choice((1, 1, 2))), shape[-1])
        result = mixed_chain(writer, result, rng.choice((0, 0, 1, 2)))
    if result.shape == shape and rng.random() < 0.4:
        writer.ops.append("skip")
        result = writer.join(value, result)
    return [result]


def norm_layer(writer: Writer, value: Value) -> Value:
    """Apply a norm of ``torch.nn`` or ``torch.nn.functional`` that fits the shape."""
    rng, rank = writer.rng, len(value.shape)
    if rank == 4:
        count = writer.argument(value.shape[1])
        made = rng.choice(
            (
                ("batch_norm", f"nn.BatchNorm2d({count})"),
                ("group_norm", f"nn.GroupNorm({rng.choice((2, 4, 8))}, {count})"),
                ("instance_norm", f"nn.InstanceNorm2d({count})"),
            )
        )
    else:
        size = writer.argument(value.shape[-1])
        made = rng.choice(
            (
                ("layer_norm", f"nn.LayerNorm({size})"),
                ("layer_norm", f"nn.LayerNorm({size}, eps=1e-6)"),
                ("layer_norm_plain", f"nn.LayerNorm({size}, elementwise_affine=False)"),
                ("rms_norm", f"nn.RMSNorm({size})"),
                ("layer_norm_f", "F"),
                *([("batch_norm", f"nn.BatchNorm1d({size})")] if rank == 2 else []),
            )
        )
    writer.ops.append(made[0])
    if made[1] == "F":
        weight, bias = writer.parameter(value.shape[-1:]), writer.parameter(value.shape[-1:])
        value = writer.named(value)
        shape = rng.choice((f"({value.shape[-1]},)", f"{value.text}.shape[-1:]", f"{weight.text}.shape"))
        tail = rng.choice(("", f", {weight.text}, {bias.text}", f", weight={weight.text}, bias={bias.text}"))
        return writer.assign(Value(f"F.layer_norm({value.text}, {shape}{tail})", value.shape, tight=True))
    reached = writer.module(made[1])
    return writer.assign(Value(f"{reached}({writer.plain(value).text})", value.shape, tight=True))


def norm(writer: Writer) -> list[Value]:
    """Return a norm layer with chains around it, sometimes in a residual connection."""
    rng = writer.rng
    shape = image(writer) if rng.random() < 0.35 else (*any_shape(writer),)
    shape = (writer.rows(), writer.width()) if len(shape) == 1 else shape
    shape = image(writer) if len(shape) == 4 else shape
    first = writer.input(shape)
    value = mixed_chain(writer, first, rng.choice((0, 0, 1, 2)))
    if rng.random() < 0.3:
        writer.ops.append("skip")
        value = writer.join(value, writer.input(shape))
    value = mixed_chain(writer, norm_layer(writer, value), rng.choice((0, 1, 1, 2, 3)))
    if rng.random() < 0.35:
        writer.ops.append("skip")
        value = writer.join(first, value)
    return [value]


def residual(writer: Writer) -> list[Value]:
    """Return a skip connection around a norm, a product or a chain, with a scale per channel now and then."""
    rng = writer.rng
    shape: Shape = product_shape(writer)
    first = writer.input(shape)
    value = norm_layer(writer, first) if rng.random() < 0.6 else row_norm(writer, first, -1)
    if rng.random() < 0.4:
        value = dense(writer, value, shape[-1])
    value = mixed_chain(writer, value, rng.choice((1, 2, 3)))
    if rng.random() < 0.4:
        value = writer.apply(Operation("layer_scale", ("{x} * {y}", "{y} * {x}")), value, writer.parameter(shape[-1:]))
    writer.ops.append("skip")
    joins = [one for one in BINARY if one.name in ("add2", "axpy2", "lerp2")]
    value = writer.apply(draw(joins, rng), first, value)
    return [norm_layer(writer, value)] if rng.random() < 0.3 else [value]


def pool(writer: Writer) -> list[Value]:
    """Return a pooling of images or sequences, with chains and sometimes a norm around it."""
    rng, shape = writer.rng, image(writer)
    value = writer.owned(writer.input(shape))
    value = mixed_chain(writer, value, rng.choice((0, 1, 2, 3)))
    value = norm_layer(writer, value) if rng.random() < 0.2 else value
    kind = rng.random()
    forms: tuple[str, ...]
    more: tuple[str, ...]
    if kind < 0.45:
        size = (*shape[:2], shape[2] // 2, shape[3] // 2)
        forms = ("nn.MaxPool2d(2)", "nn.AvgPool2d(2)", "F.max_pool2d({x}, 2)", "F.avg_pool2d({x}, 2)")
        more = ("F.avg_pool2d({x}, kernel_size=2, stride=2)", "nn.MaxPool2d(kernel_size=2, stride=2)")
        value = writer.apply(Operation("pool2", (*forms, *more)), value, shape=size)
    elif kind < 0.8:
        flat = shape[:2]
        forms = ("{x}.mean(dim=(2, 3))", "{x}.mean(dim=[2, 3])", "F.adaptive_avg_pool2d({x}, 1).flatten(1)")
        more = ("{x}.flatten(2).mean(-1)", "{x}.amax(dim=(2, 3))", "{x}.view({x}.size(0), {x}.size(1), -1).mean(dim=2)")
        value = writer.apply(Operation("global_pool", (*forms, *more)), value, shape=flat)
    elif kind < 0.9:
        forms = (
            "F.avg_pool2d({x}, 3, 1, 1)",
            "F.avg_pool2d({x}, 3, stride=1, padding=1)",
            "F.max_pool2d({x}, 3, 1, 1)",
        )
        more = ("nn.AvgPool2d(3, stride=1, padding=1)", "nn.MaxPool2d(3, 1, 1)")
        value = writer.apply(Operation("window3", (*forms, *more)), value)
    else:
        forms = ("nn.AdaptiveAvgPool2d(1)", "nn.AdaptiveAvgPool2d((1, 1))", "{x}.mean(dim=(2, 3), keepdim=True)")
        value = writer.apply(Operation("global_pool", forms), value, shape=(*shape[:2], 1, 1))
    return [mixed_chain(writer, value, rng.choice((0, 1, 2, 3)))]


def conv(writer: Writer) -> list[Value]:
    """Return a convolution with what usually follows it: norm, activation, scale, pooling, residual."""
    rng, shape = writer.rng, image(writer)
    first = writer.input(shape)
    out = shape[1] if rng.random() < 0.5 else channels(writer)
    a, b = writer.argument(shape[1]), writer.argument(out)
    kernel, pad = rng.choice(((3, 1), (1, 0), (3, 1), (5, 2)))
    bias = rng.choice(("", "", ", bias=False"))
    layer = writer.module(f"nn.Conv2d({a}, {b}, {rng.choice(('', 'kernel_size='))}{kernel}, padding={pad}{bias})")
    writer.ops.append("conv2d")
    value = writer.assign(Value(f"{layer}({first.text})", (shape[0], out, *shape[2:]), tight=True))
    value = norm_layer(writer, value) if rng.random() < 0.4 else value
    value = mixed_chain(writer, value, rng.choice((1, 2, 3)))
    if out == shape[1] and rng.random() < 0.3:
        writer.ops.append("skip")
        value = writer.join(value, first)
    if rng.random() < 0.2:
        value = writer.apply(Operation("global_pool", ("{x}.mean(dim=(2, 3))",)), value, shape=value.shape[:2])
    return [value]


def scores(writer: Writer) -> list[Value]:
    """Return attention-like scores: similarities, scaled, masked or capped, then a softmax, sometimes its average."""
    rng = writer.rng
    batch, length, width = writer.size(4, 8, 16), writer.size(64, 128, 256), writer.size(32, 64, 128)
    query, key = writer.input((batch, length, width)), writer.input((batch, length, width))
    forms = ("torch.matmul({x}, {y}.transpose(-2, -1))", "{x} @ {y}.transpose(1, 2)", "torch.bmm({x}, {y}.mT)")
    more = ('torch.einsum("bid,bjd->bij", {x}, {y})', "torch.matmul({x}, {y}.transpose(-1, -2))")
    square = (batch, length, length)
    value = writer.apply(Operation("similarity", (*forms, *more)), query, key, shape=square)
    value = writer.chain(value, rng.choice((0, 1, 1)))
    scale = Operation("scale", ("{x} / math.sqrt({n})", "{x} * ({n} ** -0.5)", "{x} * {c}"), 0.05, 0.3)
    value = writer.apply(scale, value, shape=square, n=str(width))
    if rng.random() < 0.3:
        value = writer.join(value, writer.input((length, length)))
    value = row_norm(writer, value, -1)
    if rng.random() < 0.5:
        memory = writer.input((batch, length, width))
        average = Operation("average", ("torch.matmul({x}, {y})", "{x} @ {y}", "torch.bmm({x}, {y})"))
        value = writer.apply(average, value, memory, shape=(batch, length, width))
    return [mixed_chain(writer, value, rng.choice((0, 0, 1)))]


def pair_norm_gate(writer: Writer) -> list[Value]:
    """Return a norm of one half gated by the other, or of one input modulated by scale and shift (FiLM, AdaLN)."""
    rng = writer.rng
    batch, length, width = writer.size(8, 16), writer.size(64, 128), writer.size(128, 256, 512)
    first = writer.input((batch, length, width))
    value = norm_layer(writer, first) if rng.random() < 0.7 else row_norm(writer, first, -1)
    value = replace(writer.named(value), own=False)
    condition = writer.input((batch, 2 * width))
    if rng.random() < 0.5:
        condition = writer.chain(condition, 1)
    scale, shift = halves(writer, condition, -1)
    form = rng.choice(("{v} * (1 + {s}.unsqueeze(1)) + {t}.unsqueeze(1)", "{v} * {s}[:, None] + {t}[:, None, :]"))
    writer.ops.append("modulate")
    text = form.format(v=value.text, s=scale.text, t=shift.text)
    return [mixed_chain(writer, writer.assign(Value(text, first.shape)), rng.choice((0, 1, 2)))]


LAYER_FAMILIES: dict[str, Family] = {
    "linear": linear,
    "gemm": gemm,
    "mlp": mlp,
    "norm": norm,
    "residual": residual,
    "pool": pool,
    "conv": conv,
    "scores": scores,
    "modulate": pair_norm_gate,
}
