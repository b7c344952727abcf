"""Families of generated modules, third part: patterns between operations rather than operations.

Statistics of one or two inputs put together, broadcasting of every pair, neighbours along a dimension, columns of a
narrow tensor, formulas with named steps. As in :mod:`drk.training.families`; denominators are sums of squares or of
absolute values, so that no result hangs on the last bits of a difference. The fourth part is
:mod:`drk.training.scale_families`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drk.training.families import Family, any_shape, mixed_chain, reduce_once, reduced, row_norm
from drk.training.operations import BINARY, Operation
from drk.training.task_writer import Fill, Shape, Value, Writer, draw

TOTAL = Operation("total", ("{x}.mean()", "torch.mean({x})", "{x}.sum()", "{x}.mean()"))
OVER: tuple[Operation, ...] = (
    Operation("sum", ("{x}.sum(dim={a}{k})", "torch.sum({x}, dim={a}{k})", "{x}.sum({a}{k})"), weight=3),
    Operation("mean", ("{x}.mean(dim={a}{k})", "torch.mean({x}, dim={a}{k})", "{x}.mean({a}{k})"), weight=3),
    Operation("std", ("{x}.std(dim={a}{k})", "torch.std({x}, dim={a}{k}, unbiased=False)")),
    Operation("var", ("{x}.var(dim={a}{k}, unbiased=False)", "torch.var({x}, dim={a}{k}, unbiased=False)")),
    Operation("amax", ("{x}.amax(dim={a}{k})", "torch.amax({x}, dim={a}{k})")),
    Operation("norm2", ("{x}.norm(dim={a}{k})", "torch.norm({x}, p=2, dim={a}{k})")),
)
TERMS: tuple[Operation, ...] = (
    Operation("product", ("{x} * {y}", "torch.mul({x}, {y})"), weight=3),
    Operation("sqdiff", ("({x} - {y}) ** 2", "({x} - {y}).pow(2)", "torch.square({x} - {y})"), weight=2),
    Operation("absdiff", ("({x} - {y}).abs()", "torch.abs({x} - {y})")),
    Operation("rest_product", ("(1 - {x}) * {y}", "{x} * (1 - {y})", "(1.0 - {x}) * (1.0 - {y})")),
    Operation("least", ("torch.minimum({x}, {y})", "torch.max({x}, {y})")),
)
_POSITIVE: tuple[Operation, ...] = (
    Operation("squares", ("{x} ** 2", "{x}.pow(2)", "{x} * {x}", "torch.square({x})"), weight=2),
    Operation("sizes", ("{x}.abs()", "torch.abs({x})")),
    Operation("squares2", ("{x} ** 2 + {y} ** 2", "{x}.pow(2) + {y}.pow(2)", "{x} * {x} + {y} * {y}")),
    Operation("sizes2", ("{x}.abs() + {y}.abs()", "torch.maximum({x}.abs(), {y}.abs())")),
)
_RATIOS: tuple[Operation, ...] = (
    Operation(
        "ratio", ("{x} / ({y} + {c})", "{x} / {y}.clamp(min={c})", "{x} / torch.clamp({y}, min={c})"), 1e-8, 2e-3
    ),
    Operation("smooth_ratio", ("({x} + {c}) / ({y} + {c})", "(2 * {x} + {c}) / ({y} + {c})"), 0.5, 1.5),
    Operation("root_ratio", ("{x} / torch.sqrt({y} + {c})", "{x} * ({y} + {c}).rsqrt()"), 1e-8, 2e-3),
)


def drawn_axes(writer: Writer, shape: Shape) -> tuple[int, ...]:
    """Return the dimensions that a statistic runs over: the last, one of them, or several; the first stays mostly."""
    rng, rank = writer.rng, len(shape)
    if rank <= 2 or rng.random() < 0.45:
        return (rng.choice((-1, -1, rank - 1, 0 if rng.random() < 0.3 else -1)),)
    several = [tuple(range(1, rank)), (rank - 2, rank - 1), (-2, -1)]
    return rng.choice([*several, (0, *range(2, rank))] if rank > 2 else several)


def over(writer: Writer, value: Value, axes: Sequence[int], *, keep: bool, op: Operation | None = None) -> Value:
    """Reduce over ``axes``."""
    shape = value.shape
    for axis in sorted((axis % len(value.shape) for axis in axes), reverse=True):
        shape = reduced(replace(value, shape=shape), axis, keep=keep)
    text = str(axes[0])
    if len(axes) > 1:
        text = writer.rng.choice(("({})", "[{}]")).format(", ".join(map(str, axes)))
    known = [one for one in OVER if len(axes) == 1 or one.name != "norm2"]
    writer.ops.append(f"@{','.join(map(str, axes))}")
    return writer.apply(op or draw(known, writer.rng), value, shape=shape, a=text, k=", keepdim=True" if keep else "")


def statistics(writer: Writer) -> list[Value]:
    """Return two or three statistics of one or two inputs, put together; sometimes beside the whole, or averaged."""
    rng = writer.rng
    shape = any_shape(writer)
    shape = shape if len(shape) > 1 else (writer.rows(), writer.width())
    first = writer.named(writer.chain(writer.input(shape), rng.choice((0, 0, 0, 1))))
    if rng.random() < 0.25:
        first = writer.named(row_norm(writer, first, rng.choice((-1, 1))))
    second = first if rng.random() < 0.3 else _second(writer, shape)
    axes, keep = drawn_axes(writer, shape), rng.random() < 0.4
    top = first if rng.random() < 0.25 else writer.apply(draw(TERMS, rng), first, second)
    top = writer.named(over(writer, top, axes, keep=keep))
    low = writer.apply(draw(_POSITIVE, rng), first, second)
    low = writer.named(over(writer, low, axes, keep=keep, op=OVER[rng.randrange(2)]))
    if rng.random() < 0.3:
        more = writer.apply(draw(_POSITIVE, rng), second, first)
        low = writer.apply(Operation("plus", ("{x} + {y}", "{x} + {y}")), low, over(writer, more, axes, keep=keep))
    if not keep and rng.random() < 0.15:
        writer.ops.append("side by side")
        form = rng.choice(
            ("torch.cat([{x}, {y}], dim={a})", "torch.cat(({x}, {y}), {a})", "torch.stack([{x}, {y}], dim={a})")
        )
        text = form.format(x=top.text, y=low.text, a=-1)
        if top.shape == low.shape and top.shape:
            sizes = (*top.shape, 2) if "stack" in form else (*top.shape[:-1], 2 * top.shape[-1])
            return [writer.assign(Value(text, sizes, tight=True))]
    value = writer.apply(draw(_RATIOS, rng), top, low)
    value = writer.chain(value, rng.choice((0, 0, 1, 1, 2)))
    if keep and rng.random() < 0.7:
        return [mixed_chain(writer, writer.join(first, value), rng.choice((0, 0, 1)))]
    return [writer.apply(TOTAL, value, shape=()) if rng.random() < 0.4 else value]


def _second(writer: Writer, shape: Shape) -> Value:
    kind = writer.rng.random()
    if kind < 0.25:
        return writer.input(shape, fill="bernoulli")
    return writer.input(shape, fill="uniform", high=1) if kind < 0.5 else writer.input(shape)


_LEFT = ("{x}[:, None]", "{x}.unsqueeze(1)")
_RIGHT = ("{y}[None]", "{y}.unsqueeze(0)")
_LEFT3 = ("{x}[:, :, None]", "{x}.unsqueeze(2)", "{x}[:, :, None, ...]")
_RIGHT3 = ("{y}[:, None]", "{y}.unsqueeze(1)", "{y}[:, None, ...]")


def pairwise(writer: Writer) -> list[Value]:
    """Return something of every pair: of two sets of vectors, or of one set and a grid of numbers on the module."""
    rng = writer.rng
    n, m, width = writer.size(64, 128, 256), writer.size(64, 96, 128), writer.rng.choice((3, 4, 8, 16))
    if rng.random() < 0.3:
        value = _grid(writer, m)
    else:
        head: Shape = (writer.size(4, 8),) if rng.random() < 0.35 else ()
        tail: Shape = (width,) if rng.random() < 0.6 else ()
        left = writer.input((*head, n, *tail))
        right = left if rng.random() < 0.25 else writer.input((*head, m, *tail))
        lefts, rights = (_LEFT3, _RIGHT3) if head else (_LEFT, _RIGHT)
        x = Value(rng.choice(lefts).format(x=left.text), (*head, n, 1, *tail), tight=True)
        y = Value(rng.choice(rights).format(y=right.text), (*head, 1, right.shape[len(head)], *tail), tight=True)
        writer.ops.append("pairs")
        value = writer.apply(draw([one for one in BINARY if one.name != "div2"], rng), x, y)
    value = writer.chain(value, rng.choice((0, 1, 1, 2)))
    kind = rng.random()
    if kind < 0.5:
        value = over(writer, value, (-1,), keep=False, op=rng.choice(OVER[:2]))
    elif kind < 0.7:
        value = row_norm(writer, value, -1)
    elif kind < 0.8:
        value = writer.apply(TOTAL, value, shape=())
    return [writer.chain(value, rng.choice((0, 0, 1, 2)))]


def _grid(writer: Writer, count: int) -> Value:
    """Return an input against evenly spaced numbers, which a buffer holds."""
    rng, size = writer.rng, writer.argument(count)
    shape = rng.choice(((writer.rows(),), (writer.size(8, 16), writer.size(64, 128))))
    values = writer.input(shape, fill=rng.choice(("normal", "uniform")), high=rng.choice((1, 4)))
    make = rng.choice(
        (
            "torch.linspace(0, 1, {n})",
            "torch.linspace(-2.0, 2.0, {n})",
            "torch.arange({n}).float() / {n}",
            "torch.rand({n})",
        )
    )
    name = writer.dress.name("attribute")
    writer.setup.append(f'self.register_buffer("{name}", {make.format(n=size)})')
    writer.ops.append("grid")
    text = rng.choice(("{x}.unsqueeze(-1) {o} self.{b}", "{x}[..., None] {o} self.{b}"))
    text = text.format(x=values.text, b=name, o=rng.choice(("-", "*", "-")))
    return writer.assign(Value(text, (*shape, count)))


def neighbours(writer: Writer) -> list[Value]:
    """Return differences and averages of neighbours, by slices or by rolling; or a tensor of exchanged halves."""
    rng, shape = writer.rng, any_shape(writer)
    shape = (writer.size(8, 16), writer.size(128, 256, 512)) if len(shape) == 1 else shape
    first, kind = writer.named(writer.chain(writer.input(shape), rng.choice((0, 0, 1)))), writer.rng.random()
    axis = rng.randrange(1, len(shape))
    if kind < 0.4:
        parts = [_differences(writer, first, axis)]
        if rng.random() < 0.35 and len(shape) > 2:
            other = 1 + axis % (len(shape) - 1)
            parts = [writer.apply(TOTAL, one, shape=()) for one in (*parts, _differences(writer, first, other))]
            return [writer.apply(Operation("plus", ("{x} + {y}", "{x} + {c} * {y}"), 0.1, 2.0), *parts)]
        value = writer.chain(parts[0], rng.choice((0, 1, 2)))
        return [value if rng.random() < 0.5 else writer.apply(TOTAL, value, shape=())]
    if kind < 0.7:
        return [_rolled(writer, first, axis)]
    return [_exchanged(writer, first)]


def _differences(writer: Writer, value: Value, axis: int) -> Value:
    """Return an operation of each element and the next along ``axis``, or of every second one and its neighbour."""
    rng, before = writer.rng, ":, " * axis
    sizes = list(value.shape)
    after = rng.choice(("", ", :" * (len(sizes) - 1 - axis)))
    if axis == len(sizes) - 1 and len(sizes) > 2 and rng.random() < 0.4:
        before, after = "..., ", ""
    even = sizes[axis] % 2 == 0 and rng.random() < 0.3
    cuts = rng.choice((("0::2", "1::2"), ("::2", "1::2"))) if even else rng.choice((("1:", ":-1"), (":-1", "1:")))
    sizes[axis] = sizes[axis] // 2 if even else sizes[axis] - 1
    writer.ops.append(f"{'halves' if even else 'next'}@{axis}")
    cut = [Value(f"{value.text}[{before}{one}{after}]", tuple(sizes), tight=True) for one in cuts]
    known = [one for one in BINARY if one.name in ("sub2", "sqdiff2", "absdiff2", "axpy2", "mul2", "max2", "add2")]
    return writer.apply(draw(known, rng), *cut)


def _rolled(writer: Writer, value: Value, axis: int) -> Value:
    """Return a step of a periodic stencil: neighbours by rolling, less the middle, and some of that added."""
    rng, axes = writer.rng, [axis]
    if len(value.shape) > 2 and rng.random() < 0.6:
        axes.append(axis % (len(value.shape) - 1) + 1)
    form = rng.choice(("{x}.roll({s}, {a})", "torch.roll({x}, {s}, dims={a})", "torch.roll({x}, shifts={s}, dims={a})"))
    both = rng.random() < 0.7
    shifts = (1, -1) if both else (rng.choice((1, -1, 2)),)
    rolls = [form.format(x=value.text, s=shift, a=one) for one in axes for shift in shifts]
    writer.ops.append(f"roll{len(axes)}{len(shifts)}")
    rest = f"{len(rolls)} * {value.text}" if len(rolls) > 1 else value.text
    change = writer.assign(Value(f"{' + '.join(rolls)} - {rest}", value.shape))
    change = writer.chain(change, rng.choice((0, 0, 1)))
    step = Operation("step", ("{x} + {c} * {y}", "{x} - {c} * {y}", "{y} * {c}"), 0.01, 0.5)
    return mixed_chain(writer, writer.apply(step, value, change), rng.choice((0, 0, 1)))


def _exchanged(writer: Writer, value: Value) -> Value:
    """Return the last dimension's halves (or alternating elements), changed and put together again."""
    rng, width = writer.rng, value.shape[-1]
    half = width // 2 * 2 // 2
    if width % 2:
        return mixed_chain(writer, value, 2)
    form = rng.choice(("{x}.chunk(2, dim=-1)", "{x}[..., :{h}], {x}[..., {h}:]", "{x}[..., 0::2], {x}[..., 1::2]"))
    h = rng.choice((str(half), f"{value.text}.shape[-1] // 2"))
    a, b = writer.dress.local(), writer.dress.local()
    writer.lines.append(f"{a}, {b} = {form.format(x=value.text, h=h)}")
    writer.ops.append(f"exchange{form[4:6]}")
    shape = (*value.shape[:-1], half)
    one, two = (Value(name, shape, name=True, tight=True) for name in (a, b))
    left = writer.plain(writer.chain(two, rng.choice((0, 1))) if rng.random() < 0.6 else writer.join(one, two))
    right = writer.plain(writer.chain(one, rng.choice((0, 1))) if rng.random() < 0.6 else writer.join(two, one))
    put = rng.choice(("torch.cat([{x}, {y}], dim=-1)", "torch.cat(({x}, {y}), -1)"))
    sign = rng.choice(("", "", "-"))
    text = put.format(x=f"{sign}{left.text}" if left.tight or not sign else f"-({left.text})", y=right.text)
    turned = writer.assign(Value(text, value.shape, tight=True))
    if rng.random() < 0.6:
        return mixed_chain(writer, turned, rng.choice((0, 1)))
    table = [writer.parameter(value.shape[-2:]) for _ in range(2)]
    forms = ("{v} * {p} + {t} * {q}", "({v} * {p}) + ({t} * {q})", "{p} * {v} - {q} * {t}")
    writer.ops.append("rotate")
    text = rng.choice(forms).format(v=value.text, t=turned.text, p=table[0].text, q=table[1].text)
    return writer.assign(Value(text, value.shape))


def columns(writer: Writer) -> list[Value]:
    """Return formulas over the columns of narrow tensors, stacked again or as they are."""
    rng = writer.rng
    count, rows = rng.choice((2, 3, 4, 4, 6)), writer.size(1024, 2048, 4096, 8192)
    shape: Shape = (rows, count) if rng.random() < 0.6 else (writer.size(8, 16), writer.size(128, 256, 512), count)
    pool = _parts_of(writer, writer.input(shape))
    if rng.random() < 0.5:
        pool += _parts_of(writer, writer.input(shape))
    made: list[Value] = []
    for _ in range(rng.randint(2, 5)):
        one, two = rng.choice(pool), rng.choice(pool)
        value = writer.join(one, two) if rng.random() < 0.7 else writer.chain(one, 1)
        value = replace(writer.named(value), own=False)
        made.append(value)
        pool.append(value)
    ends = made[-rng.choice((1, 2, 3)) :]
    if len(ends) == 1:
        return [writer.apply(TOTAL, ends[0], shape=()) if rng.random() < 0.4 else writer.chain(ends[0], 1)]
    form = rng.choice(("torch.stack([{x}], dim=-1)", "torch.stack(({x}), -1)", "torch.stack([{x}], dim=%d)"))
    form = form % (len(shape) - 1) if "%d" in form else form
    writer.ops.append(f"stack{len(ends)}")
    text = form.format(x=", ".join(one.text for one in ends))
    return [writer.assign(Value(text, (*shape[:-1], len(ends)), tight=True))]


def _parts_of(writer: Writer, value: Value) -> list[Value]:
    rng, count, rank = writer.rng, value.shape[-1], len(value.shape)
    shape = value.shape[:-1]
    writer.ops.append(f"columns{count}")
    if rng.random() < 0.5:
        names = [writer.dress.local() for _ in range(count)]
        form = rng.choice(("{x}.unbind(-1)", "{x}.unbind(dim=-1)", "torch.unbind({x}, dim=-1)"))
        writer.lines.append(f"{', '.join(names)} = {form.format(x=value.text)}")
        return [Value(name, shape, name=True, tight=True) for name in names]
    index = "..., {i}" if rank > 2 or rng.random() < 0.4 else ":, {i}"
    return [Value(f"{value.text}[{index.format(i=i)}]", shape, tight=True) for i in range(count)]


def formula(writer: Writer) -> list[Value]:
    """Return a formula of several inputs with named steps, over numbers that the constructor takes."""
    rng = writer.rng
    shape = rng.choice(((writer.size(2**14, 2**16, 2**18),), (writer.rows(), writer.width()), any_shape(writer)))
    fill: Fill = rng.choice(("normal", "normal", "uniform"))
    pool = [writer.input(shape, fill=fill, low=rng.choice((0, 0.1, 0.5)), high=rng.choice((1, 2, 4)))]
    pool += [writer.input(shape) for _ in range(rng.choice((1, 2, 2, 3)))]
    fresh = list(pool)
    for _ in range(rng.randint(2, 5)):
        one = fresh.pop(0) if fresh else rng.choice(pool)
        two = rng.choice(pool)
        kind = rng.random()
        if kind < 0.3:
            value = writer.chain(one, rng.choice((1, 2)))
        elif kind < 0.85:
            value = writer.join(one, two)
        else:
            value = writer.blend(one, two, rng.choice(pool))
        value = replace(writer.named(value), own=False)
        pool.append(value)
    last = pool[-1]
    for one in fresh:
        last = writer.join(last, one)
    kind = rng.random()
    if kind < 0.2 and len(pool) > 4:
        return [last, pool[-2]] if pool[-2] is not last else [last]
    if kind < 0.45:
        return [writer.apply(TOTAL, last, shape=())]
    return [reduce_once(writer, last, -1, keep=False) if kind < 0.6 and len(shape) > 1 else last]


PATTERN_FAMILIES: dict[str, Family] = {
    "statistics": statistics,
    "pairwise": pairwise,
    "neighbours": neighbours,
    "columns": columns,
    "formula": formula,
}
