"""Writes kernels for pooling and depthwise convolution: each program computes ``BLOCK`` results from their windows.

Windows are unrolled; overlapping ones read their common elements from the L1 cache. The walk over results is
channels-last where the result is. Indices are split into the result's dimensions once per element, the pooled
tensor is read by its own strides, so that no layout has to be made.

Left out: sharing of partial windows between neighbouring results, which pays for large windows only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from drk.assistant.synth.body import Body, KernelText, tidy
from drk.assistant.synth.domain import Operand, index_lines, stride_arguments
from drk.assistant.synth.expression import kind_of
from drk.assistant.synth.launcher import (
    Arguments,
    call_lines,
    function_source,
    kernel_source,
    layout_lines,
    memory_format,
    pointer_arguments,
    result_line,
)
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Region, leading_names
from drk.assistant.synth.windows import Window
from drk.gym.graph import Ref, TensorMeta

UNROLLED = 64
"""Largest window that is unrolled."""


def write_pooling(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a pooling region; ``owned`` values are known to be contiguous."""
    window = _window(region)
    body = Body(region, names, metas, two_dimensional=False)
    outputs = tuple(operand.value for operand in region.outputs)
    weights = [item for item in (window.weight, window.bias) if item is not None]
    inputs = tuple(dict.fromkeys([*(operand.value for operand in (*region.pooled, *region.inputs)), *weights]))
    before = leading_names(region.nodes, window.source)
    after = [node for node in region.nodes if node.name not in before and node is not window.node]
    lines = [
        "index = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)",
        "mask = index < n_elements",
        *_split_lines(region),
        *index_lines(body.domain.rows, "index"),
        *_window_lines(region, window, names, metas, before),
        *(body.load(operand) for operand in region.inputs),
        *body.statements(after),
        *(body.store(operand) for operand in region.outputs),
    ]
    arguments = _arguments(body, names, weights)
    formula = body.formula(outputs)
    kernel = kernel_source(
        f"{name}_kernel", arguments.parameters, ["One result per lane, windows unrolled:", *formula], lines
    )
    launch = _launch_lines(body, name, arguments.values, owned, block)
    doc = f"Launch ``{name}_kernel`` over the pooled result."
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, len(outputs))
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


def _arguments(body: Body, names: Mapping[str, str], weights: Sequence[str]) -> Arguments:
    """Pointers, sizes, strides, and the constants that only the kernel has."""
    region, rows = body.region, body.domain.rows
    early = [*(operand.value for operand in region.pooled), *weights]
    pointers = pointer_arguments(body)
    strides = [pair for operand in region.pooled for pair in _strides(operand, names[operand.value])]
    for operand in region.inputs:
        strides += stride_arguments(operand, names[operand.value], body.domain)
    for operand in region.outputs:
        made = stride_arguments(operand, names[operand.value], body.domain)
        strides += [(parameter, f"out_{value}") for parameter, value in made]
    groups = rows[1:] if len(rows) > 1 else []
    sizes = [f"size_{dim}" for dim in range(2, len(region.shape))]
    counts = ("n_elements", *sizes, *(f"result_{dim}" for dim in range(1, len(region.shape))))
    parameters = [
        *(f"{names[value]}_ptr" for value in early),
        *pointers.parameters,
        *counts,
        *(parameter for parameter, _ in strides),
        *(group.size for group in groups),
        *("INDEX: tl.constexpr", "BLOCK: tl.constexpr"),
    ]
    values = [
        *(names[value] for value in early),
        *pointers.values,
        *counts,
        *(value for _, value in strides),
        *(" * ".join(f"result_{region.order[dim]}" for dim in group.dims) for group in groups),
    ]
    return Arguments(tuple(parameters), tuple(values))


def _window(region: Region) -> Window:
    assert region.window is not None
    return region.window


def _strides(operand: Operand, name: str) -> list[tuple[str, str]]:
    """(parameter, launcher expression) of an early operand's strides, one for each dimension along which it varies."""
    return [
        (f"stride_{name}_{dim}", f"{name}.stride({operand.axes[dim]})")
        for dim, moves in enumerate(operand.varies)
        if moves
    ]


def _split_lines(region: Region) -> list[str]:
    """``at_0``, ``at_1``, ...: where in the result's dimensions an element is."""
    lines, rest = [], "index"
    for dim in reversed(region.order[1:]):
        lines.append(f"at_{dim} = {rest} % result_{dim}")
        rest = f"{rest} // result_{dim}"
    return [*lines, f"at_0 = {rest}"]


def _window_lines(
    region: Region, window: Window, names: Mapping[str, str], metas: Mapping[str, TensorMeta], before: frozenset[str]
) -> list[str]:
    nodes = tuple(node for node in region.nodes if node.name in before)
    early = replace(region, nodes=nodes, inputs=region.pooled, outputs=(), window=None)
    body = Body(early, names, metas, two_dimensional=False)
    rank, pooled = len(region.shape), range(len(region.shape) - window.rank, len(region.shape))
    moving = [operand for operand in region.pooled if any(operand.varies[dim] for dim in pooled)]
    fixed = [operand for operand in region.pooled if operand not in moving]
    lines = [_load(operand, names, rank, window, "mask") for operand in fixed]
    result = names[window.node.name]
    start = 'float("-inf")' if window.largest else "0.0"
    lines.append(f"{result} = tl.full((BLOCK,), {start}, dtype=tl.float32)")
    if window.bias is not None:
        lines.append(f"{result} += tl.load({names[window.bias]}_ptr + at_1, mask=mask, other=0.0).to(tl.float32)")
    inner: list[str] = []
    checks = ["mask"]
    for place, dim in enumerate(pooled):
        padding, dilation = window.paddings[place], window.dilations[place]
        step = f"k_{dim}" if dilation == 1 else f"k_{dim} * {dilation}"
        inner.append(f"in_{dim} = at_{dim} * {window.strides[place]}{f' - {padding}' if padding else ''} + {step}")
        if padding or window.ceil:
            checks.append(f"(in_{dim} >= 0) & (in_{dim} < size_{dim})")
    valid = " & ".join(checks)
    inner += [f"inside = {valid}"]
    inner += [_load(operand, names, rank, window, "inside") for operand in moving]
    inner += body.statements(nodes)
    taken = body.text(Ref(window.source), "float")
    if window.largest:
        taken = f'tl.where(inside, {tidy(taken)}, float("-inf"))'
        inner.append(f"{result} = tl.maximum({result}, {taken}, propagate_nan=tl.PropagateNan.ALL)")
    elif window.weight is not None:
        weight = f"tl.load({names[window.weight]}_ptr + {_weight_offset(window, list(pooled))}, mask=mask, other=0.0)"
        inner.append(f"{result} += tl.where(inside, {tidy(taken)}, 0.0) * {weight}.to(tl.float32)")
    else:
        inner.append(f"{result} += tl.where(inside, {tidy(taken)}, 0.0)")
    total = 1
    for size in window.sizes:
        total *= size
    loop = "tl.static_range" if total <= UNROLLED else "range"
    for place, dim in enumerate(pooled):
        lines.append("    " * place + f"for k_{dim} in {loop}({window.sizes[place]}):")
    lines += ["    " * window.rank + line for line in inner]
    return [*lines, *_average_lines(window, result, list(pooled), total)]


def _weight_offset(window: Window, pooled: list[int]) -> str:
    """Offset of the window's place in a weight of shape (channels, 1, *sizes)."""
    place = "at_1"
    for dim, size in zip(pooled, window.sizes, strict=True):
        place = f"({place}) * {size} + k_{dim}" if " " in place else f"{place} * {size} + k_{dim}"
    return place


def _average_lines(window: Window, result: str, pooled: list[int], total: int) -> list[str]:
    if window.largest or window.weight is not None:
        return []
    if window.counts_padding and not window.ceil:
        return [f"{result} = {result} / {total}.0"]
    lines, counts = [], []
    for place, dim in enumerate(pooled):
        padding = window.paddings[place]
        end = f"size_{dim} + {padding}" if window.counts_padding and padding else f"size_{dim}"
        lines.append(f"first_{dim} = at_{dim} * {window.strides[place]} - {padding}")
        first = f"first_{dim}" if window.counts_padding else f"tl.maximum(first_{dim}, 0)"
        counts.append(f"(tl.minimum(first_{dim} + {window.sizes[place]}, {end}) - {first})")
    return [*lines, f"{result} = {result} / ({' * '.join(counts)}).to(tl.float32)"]


def _load(operand: Operand, names: Mapping[str, str], rank: int, window: Window, mask: str) -> str:
    name, kind = names[operand.value], kind_of(operand.meta.dtype)
    terms = [
        f"{'in' if dim >= rank - window.rank else 'at'}_{dim} * stride_{name}_{dim}"
        for dim, moves in enumerate(operand.varies)
        if moves
    ]
    cast = ".to(tl.float32)" if kind == "float" else ""
    return f"{name} = tl.load({' + '.join([f'{name}_ptr', *terms])}, mask={mask}, other=0){cast}"


def _launch_lines(body: Body, name: str, values: Sequence[str], owned: frozenset[str], block: Block) -> list[str]:
    region, names = body.region, dict(body.names)
    window, rank = _window(region), len(body.region.shape)
    whole = next(operand for operand in region.pooled if all(operand.varies))
    lines = [*layout_lines(body, owned)]
    if window.weight is not None:
        lines.append(f"{names[window.weight]} = {names[window.weight]}.contiguous()")
    for dim in range(2, rank):
        lines.append(f"size_{dim} = {names[whole.value]}.shape[{dim}]")
    for dim in range(rank):
        lines += _result_size(window, dim, rank, f"{names[whole.value]}.shape[{dim}]")
    sizes = ", ".join(f"result_{dim}" for dim in range(rank))
    for output in region.outputs:
        options = [f"({sizes})", f"device={names[whole.value]}.device", f"dtype=torch.{output.meta.dtype}"]
        layout = memory_format(output)
        lines.append(f"out_{names[output.value]} = torch.empty({', '.join([*options, *([layout] if layout else [])])})")
    first = f"out_{names[region.outputs[0].value]}"
    return [
        *lines,
        f"n_elements = {first}.numel()",
        f"index_type = tl.int32 if max({names[whole.value]}.numel(), n_elements) < 2**31 else tl.int64",
        *call_lines(
            f"{name}_kernel",
            f"(triton.cdiv(n_elements, {block.elements}),)",
            values,
            ["INDEX=index_type", f"BLOCK={block.elements}", f"num_warps={block.elements // block.per_warp}"],
        ),
        result_line(body),
    ]


def _result_size(window: Window, dim: int, rank: int, size: str) -> list[str]:
    place = dim - (rank - window.rank)
    if place < 0:
        return [f"result_{dim} = {size}"]
    stride, padding = window.strides[place], window.paddings[place]
    margin = 2 * padding - window.dilations[place] * (window.sizes[place] - 1) - 1
    span = f"size_{dim} {'-' if margin < 0 else '+'} {abs(margin)}"
    if not window.ceil:
        return [f"result_{dim} = ({span}) // {stride} + 1"]
    return [
        f"result_{dim} = -(-({span}) // {stride}) + 1",
        f"result_{dim} -= (result_{dim} - 1) * {stride} >= size_{dim} + {padding}",
    ]
