"""Families of generated modules, first part: pointwise chains, general DAGs, reductions, row norms, gates, losses.

A family takes a :class:`drk.training.task_writer.Writer` and returns the values that ``forward`` returns. Shapes are
two- to four-dimensional; what a family repeats or leaves out it draws. The second part, with matrix products, layers of
``torch.nn``, pooling, convolution and attention, is :mod:`drk.training.layer_families`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from drk.training.operations import BINARY, REDUCTIONS, ROW_NORMS, Operation
from drk.training.task_writer import Shape, Value, Writer, draw

Family = Callable[[Writer], list[Value]]


def any_shape(writer: Writer) -> Shape:
    """Return a shape of one to four dimensions, two mostly."""
    kind = writer.rng.random()
    if kind < 0.5:
        return (writer.rows(), writer.width())
    if kind < 0.75:
        return (writer.size(8, 16), writer.size(64, 128, 256), writer.size(128, 256, 512, 768))
    if kind < 0.95:
        return (
            writer.size(4, 8, 16),
            writer.size(16, 32, 64, 96),
            writer.size(28, 32, 56, 64),
            writer.size(28, 32, 64),
        )
    return (writer.size(2**16, 2**18, 2**20),)


def chain_length(writer: Writer, most: int = 10) -> int:
    """Return how many operations a chain has: short ones mostly."""
    return min(most, writer.rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10)))


def partner(writer: Writer, value: Value) -> Value:
    """Return something that ``value`` can be combined with: an input, a parameter that is broadcast, a channel's."""
    shape, kind = value.shape, writer.rng.random()
    if kind < 0.4:
        return writer.input(shape)
    if kind < 0.75 or len(shape) < 3:
        return writer.parameter(shape[-1:])
    if len(shape) == 4 and kind < 0.95:
        form = writer.rng.random()
        if form < 0.5:
            return writer.parameter((shape[1], 1, 1))
        parameter = writer.parameter(shape[1:2])
        view = writer.rng.choice(("{}.view(1, -1, 1, 1)", "{}[None, :, None, None]", "{}.reshape(1, -1, 1, 1)"))
        return Value(view.format(parameter.text), (1, shape[1], 1, 1), tight=True)
    return writer.input(shape[-1:])


def mixed_chain(writer: Writer, value: Value, count: int) -> Value:
    """Apply ``count`` operations; some take a second value."""
    for _ in range(count):
        if writer.rng.random() < 0.2:
            other = partner(writer, value)
            left, right = (value, other) if writer.rng.random() < 0.75 else (other, value)
            value = writer.join(left, right)
        else:
            value = writer.chain(value, 1)
    return value


def pointwise(writer: Writer) -> list[Value]:
    """Return a chain, sometimes with second inputs and parameters; sometimes of half precision."""
    if writer.rng.random() < 0.15:
        writer.dtype = writer.rng.choice(("float16", "bfloat16"))
        value = writer.owned(writer.input(any_shape(writer)))
        return [writer.chain(value, chain_length(writer))]
    value = writer.owned(writer.input(any_shape(writer)))
    return [mixed_chain(writer, value, chain_length(writer))]


def dag(writer: Writer) -> list[Value]:
    """Return a general small DAG: values are used once or twice, and all of them in the end."""
    shape, rng = any_shape(writer), writer.rng
    pool = [writer.input(shape) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    if rng.random() < 0.4:
        pool.append(partner(writer, pool[0]))
    unused = list(pool)
    for _ in range(rng.randint(2, 6)):
        kind = rng.random()
        sources = [unused.pop(rng.randrange(len(unused))) if unused and rng.random() < 0.7 else rng.choice(pool)]
        if kind < 0.45:
            value = writer.chain(sources[0], rng.choice((1, 1, 2)))
        elif kind < 0.9 or len(pool) < 3:
            other = rng.choice(pool)
            value = writer.join(sources[0], other)
            unused = [one for one in unused if one is not other]
        else:
            others = rng.sample(pool, 2)
            value = writer.blend(sources[0], *others)
            unused = [one for one in unused if one not in others]
        value = replace(writer.named(value), own=False)
        writer.ops.append(f"#{len(sources)}")
        pool.append(value)
        unused.append(value)
    value = unused[0]
    for other in unused[1:]:
        value = writer.join(value, other)
    return [mixed_chain(writer, value, rng.choice((0, 0, 1, 2)))]


def reduced(value: Value, axis: int, *, keep: bool) -> Shape:
    """Return the shape after a reduction."""
    sizes = list(value.shape)
    place = axis % len(sizes)
    if keep:
        sizes[place] = 1
    else:
        del sizes[place]
    return tuple(sizes)


def drawn_axis(writer: Writer, value: Value) -> int:
    """Return a dimension: the last mostly."""
    rank = len(value.shape)
    if writer.rng.random() < 0.6:
        return -1
    axes: list[int] = [*range(1, rank), *range(-rank + 1, 0), -1]
    return writer.rng.choice(axes)


def reduce_once(writer: Writer, value: Value, axis: int, *, keep: bool) -> Value:
    """Reduce over ``axis``."""
    text = writer.rng.choice((", keepdim=True",)) if keep else ""
    shape = reduced(value, axis, keep=keep)
    writer.ops.append(f"@{axis}")
    return writer.apply(draw(REDUCTIONS, writer.rng), value, shape=shape, a=str(axis), k=text)


def reduction(writer: Writer) -> list[Value]:
    """Return reductions with chains around them; the reduced value is sometimes put back beside the whole."""
    rng = writer.rng
    shape = any_shape(writer)
    shape = shape if len(shape) > 1 else (writer.rows(), writer.width())
    whole = writer.owned(writer.input(shape))
    whole = mixed_chain(writer, whole, rng.choice((0, 0, 1, 2, 3)))
    axis, kind = drawn_axis(writer, whole), rng.random()
    if kind < 0.35:
        whole = replace(writer.named(whole), own=False)
        part = writer.chain(reduce_once(writer, whole, axis, keep=True), rng.choice((0, 0, 1)))
        value = writer.apply(draw([one for one in BINARY if "2" in one.name], rng), whole, part)
        value = writer.chain(value, rng.choice((0, 1, 2)))
        if rng.random() < 0.3:
            value = reduce_once(writer, value, axis, keep=False)
        return [value]
    value = reduce_once(writer, whole, axis, keep=rng.random() < 0.35)
    if kind > 0.85 and len(value.shape) > 1 and value.shape[-1] > 1:
        value = reduce_once(writer, writer.chain(value, rng.choice((0, 1))), -1, keep=False)
    value = writer.chain(value, rng.choice((0, 0, 1, 2, 3)))
    if rng.random() < 0.06 and value.shape != whole.shape:
        return [value, whole] if whole.name and not whole.own else [value]
    return [value]


def row_norm(writer: Writer, value: Value, axis: int) -> Value:
    """Apply a shape-keeping operation along ``axis``, written by hand or called."""
    writer.ops.append(f"@{axis}")
    return writer.apply(draw(ROW_NORMS, writer.rng), value, shape=value.shape, a=str(axis))


def row(writer: Writer) -> list[Value]:
    """Return softmaxes and norms by hand, with chains before and after, sometimes two, sometimes with a residual."""
    rng = writer.rng
    shape = any_shape(writer)
    shape = shape if len(shape) > 1 else (writer.rows(), writer.width())
    first = writer.input(shape)
    value = mixed_chain(writer, first, rng.choice((0, 0, 1, 1, 2, 3)))
    axis = drawn_axis(writer, value)
    value = row_norm(writer, value, axis)
    if rng.random() < 0.25:
        value = row_norm(writer, writer.chain(value, rng.choice((0, 1))), axis)
    if rng.random() < 0.4:
        value = writer.join(value, writer.parameter(shape[-1:]))
    value = mixed_chain(writer, value, rng.choice((0, 0, 1, 2, 3)))
    if rng.random() < 0.25:
        writer.ops.append("skip")
        value = writer.join(first, value) if rng.random() < 0.5 else writer.join(value, first)
    return [value]


_HALVES = (
    "{a}, {b} = {x}.chunk(2, dim={d})",
    "{a}, {b} = torch.chunk({x}, 2, dim={d})",
    "{a}, {b} = {x}.split({n}, dim={d})",
    "{a}, {b} = {x}.chunk(2, {d})",
)


def halves(writer: Writer, value: Value, axis: int) -> tuple[Value, Value]:
    """Split ``value`` in two along ``axis``."""
    value = writer.named(value)
    half = value.shape[axis] // 2
    shape = list(value.shape)
    shape[axis] = half
    writer.ops.append("chunk")
    form = writer.rng.choice((*_HALVES, "slice"))
    a, b = writer.dress.local(), writer.dress.local()
    if form == "slice" and axis == -1:
        size = writer.rng.choice((str(half), f"{value.text}.shape[-1] // 2"))
        writer.lines += [f"{a} = {value.text}[..., :{size}]", f"{b} = {value.text}[..., {size}:]"]
    else:
        form = _HALVES[0] if form == "slice" else form
        writer.lines.append(form.format(a=a, b=b, x=value.text, n=half, d=axis))
    return tuple(Value(one, tuple(shape), name=True, own=True, tight=True) for one in (a, b))  # type: ignore[return-value]


GLU = Operation("glu", ("F.glu({x}, dim={a})", "nn.GLU(dim={a})"))
_GATES = tuple(one for one in BINARY if "gate" in one.name) + tuple(one for one in BINARY if one.name == "mul2")


def gated(writer: Writer) -> list[Value]:
    """Return a gate: of two halves (the GLU family), of two inputs, or of two branches of one."""
    rng, kind = writer.rng, writer.rng.random()
    if kind < 0.45:
        rows, width = writer.rows(), writer.width()
        shape: Shape = (
            (rows, width * 2) if rng.random() < 0.6 else (writer.size(8, 16), writer.size(64, 128), width * 2)
        )
        value = writer.owned(writer.input(shape))
        value = writer.chain(value, rng.choice((0, 0, 1)))
        axis = -1 if rng.random() < 0.8 else 1
        if shape[axis] % 2:
            axis = -1
        if rng.random() < 0.25:
            value = writer.apply(GLU, value, shape=_half(shape, axis), a=str(axis))
            return [mixed_chain(writer, value, rng.choice((0, 1, 2)))]
        left, right = halves(writer, value, axis)
        left = writer.chain(left, rng.choice((0, 0, 1)))
        value = writer.apply(draw(_GATES, rng), left, right)
        return [mixed_chain(writer, value, rng.choice((0, 0, 1, 2)))]
    shape = any_shape(writer)
    first = writer.input(shape)
    second = writer.input(shape) if rng.random() < 0.5 else first
    left = writer.named(writer.chain(first, rng.choice((1, 1, 2, 3))))
    writer.ops.append("|")
    right = writer.named(writer.chain(second, rng.choice((0, 1, 2, 3))))
    value = writer.join(left, right) if rng.random() < 0.5 else writer.apply(draw(_GATES, rng), left, right)
    return [mixed_chain(writer, value, rng.choice((0, 0, 1, 2)))]


def _half(shape: Shape, axis: int) -> Shape:
    sizes = list(shape)
    sizes[axis] //= 2
    return tuple(sizes)


_LOSSES = (
    Operation("mse", ("F.mse_loss({x}, {y})", "(({x} - {y}) ** 2).mean()", "torch.mean(({x} - {y}).pow(2))"), weight=2),
    Operation("l1", ("F.l1_loss({x}, {y})", "torch.abs({x} - {y}).mean()")),
    Operation(
        "smooth_l1", ("F.smooth_l1_loss({x}, {y})", "F.smooth_l1_loss({x}, {y}, beta=0.5)", "F.huber_loss({x}, {y})")
    ),
    Operation("bce_logits", ("F.binary_cross_entropy_with_logits({x}, torch.sigmoid({y}))",)),
    Operation("softplus_loss", ("F.softplus(-{x} * {y}).mean()", "F.softplus({y} - {x}).mean()")),
    Operation("hinge", ("torch.clamp(1 - {x} * {y}, min=0).mean()", "F.relu({c} - ({x} - {y})).mean()"), 0.2, 1.5),
    Operation("charbonnier", ("torch.sqrt(({x} - {y}) ** 2 + {c}).mean()",), 0.001, 0.1),
    Operation(
        "kl",
        (
            "(F.softmax({x}, dim=-1) * (F.log_softmax({x}, dim=-1) - F.log_softmax({y}, dim=-1))).sum(dim=-1).mean()",
            "F.kl_div(F.log_softmax({x}, dim=-1), F.softmax({y}, dim=-1), reduction='batchmean')",
        ),
    ),
    Operation("soft_ce", ("-(F.softmax({y}, dim=-1) * F.log_softmax({x}, dim=-1)).sum(dim=-1).mean()",)),
    Operation("cosine_loss", ("(1 - F.cosine_similarity({x}, {y}, dim=-1)).mean()",)),
    Operation("log_cosh", ("torch.log(torch.cosh(({x} - {y}).clamp(-20, 20))).mean()",), weight=0.5),
    Operation("gauss_nll", ("(0.5 * torch.exp(-{y}) * {x} ** 2 + 0.5 * {y}).mean()",), weight=0.6),
)


def loss(writer: Writer) -> list[Value]:
    """Return a loss of a prediction and a target, sometimes by row, sometimes weighted or of class numbers."""
    rng = writer.rng
    shape = (writer.rows(), writer.size(10, 64, 128, 256, 1000, 1024))
    first = writer.input(shape)
    value = mixed_chain(writer, first, rng.choice((0, 0, 0, 1, 2)))
    kind = rng.random()
    if kind < 0.12:
        target = writer.input(shape[:1], dtype="int64", fill="integers", high=shape[1])
        op = Operation("cross_entropy", ("F.cross_entropy({x}, {y})", "F.nll_loss(F.log_softmax({x}, dim=-1), {y})"))
        return [writer.apply(op, value, target, shape=())]
    target = writer.input(shape)
    if kind < 0.55:
        result = writer.apply(draw(_LOSSES, rng), value, target, shape=())
    else:
        error = writer.apply(
            draw([one for one in BINARY if "diff" in one.name or one.name == "sub2"], rng), value, target
        )
        error = writer.chain(error, rng.choice((0, 1, 1, 2)))
        if rng.random() < 0.3:
            error = writer.join(error, writer.input(shape))
        if rng.random() < 0.5:
            return [reduce_once(writer, error, -1, keep=False)]
        total = Operation("total", ("{x}.mean()", "torch.mean({x})", "{x}.sum()", "torch.sum({x}) / {x}.numel()"))
        result = writer.apply(total, error, shape=())
    return [writer.chain(result, rng.choice((0, 0, 0, 1)))]


def long_chain(writer: Writer) -> list[Value]:
    """Return a chain two operations longer than any that is trained on: for measuring only."""
    return [mixed_chain(writer, writer.owned(writer.input((writer.rows(), writer.width()))), 12)]


MEASURED_ONLY: dict[str, Family] = {"long-chain": long_chain}
"""Families that no training set draws from unless asked by name."""

FAMILIES: dict[str, Family] = {
    "pointwise": pointwise,
    "dag": dag,
    "reduction": reduction,
    "row": row,
    "gated": gated,
    "loss": loss,
}
