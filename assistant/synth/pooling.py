"""Writes kernels for pooling: each program computes a tile of results from their windows.

A tile's columns follow the innermost dimension in memory, its rows the next one; outer dimensions are walked flat. So a
tile's place costs a few divisions for each program and none for an element, a warp reads neighbouring elements, and
what windows share comes from the L1 cache. Windows are unrolled; the pooled tensor is read by its own strides, so that
no layout has to be made (images and channels of row-major ones are one dimension).

Left out: sharing of partial windows between neighbouring results, which pays for large windows only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drk.assistant.synth.body import Body, KernelText, tidy
from drk.assistant.synth.domain import Operand, index_lines, stride_arguments
from drk.assistant.synth.expression import kind_of
from drk.assistant.synth.frames import transposed
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
WIDTHS = (64, 32, 16, 8)
"""Widths of tiles: the launcher takes the one with the fewest empty lanes and edges."""
HEIGHTS = (16, 8, 4, 2, 1)
"""Heights of tiles, likewise; the rest of a program's elements are in further images, channels or rows."""
_KEEPS_ZERO = frozenset(
    {"relu", "relu6", "abs", "neg", "tanh", "silu", "gelu", "leaky_relu", "sqrt", "hardswish", "to"}
)
"""Operators that make 0 of 0: what lies outside the tensor is read as 0."""


@dataclass(frozen=True)
class _Tile:
    """How a program's tile lies in the result: ``cols`` and ``second`` are its sides, ``outer`` dimensions are flat.

    Where ``folded``, the dimensions 0 and 1 are one, since all early operands that have them are row-major.
    """

    outer: tuple[int, ...]
    second: int
    cols: int
    folded: bool
    flat: bool
    """Whether a tile is one row of lanes: then no version of Triton can lay its warps along the tile's rows."""

    @property
    def shape(self) -> str:
        """Shape of the tile's blocks in the kernel."""
        return "(BLOCK_M * BLOCK_N,)" if self.flat else "(BLOCK_M, BLOCK_N)"

    def row(self, text: str) -> str:
        """A vector along the tile's rows, shaped for the tile."""
        return text if self.flat else f"{text}[:, None]"

    def place(self, dim: int, prefix: str = "at") -> str:
        """Index along a dimension of the result (prefix ``at``) or of the window (``in``), shaped for the tile."""
        index = self.index(dim, prefix)
        return self.row(index) if dim != self.cols or self.flat else f"{index}[None, :]"

    def index(self, dim: int, prefix: str = "at") -> str:
        """The same as a vector."""
        return "cols" if dim == self.cols and prefix == "at" else f"{prefix}_{dim}"


def write_pooling(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a pooling region; ``owned`` values are known to be contiguous."""
    window, tile = _window(region), _tile(region)
    columns = 0 if tile.flat else 1
    body = Body(replace(region, columns=columns), names, metas, two_dimensional=not tile.flat)
    outputs = tuple(operand.value for operand in region.outputs)
    inputs = tuple(dict.fromkeys(operand.value for operand in (*region.pooled, *region.inputs)))
    before = leading_names(region.nodes, window.source)
    after = [node for node in region.nodes if node.name not in before and node is not window.node]
    lines = [
        *_place_lines(region, tile, window),
        *index_lines(body.domain.rows, "index" if tile.flat else "rows"),
        *_run_lines(body),
        *_window_lines(region, tile, names, metas, before),
        *(body.load(operand) for operand in region.inputs),
        *body.statements(after),
        *(body.store(operand) for operand in region.outputs),
    ]
    arguments = _arguments(body, tile, names)
    formula = body.formula(outputs)
    doc = ["A tile of results, windows unrolled:", *formula]
    kernel = kernel_source(f"{name}_kernel", arguments.parameters, doc, lines)
    launch = _launch_lines(body, tile, name, arguments.values, owned, block)
    words = f"Launch ``{name}_kernel`` over the pooled result."
    launcher = function_source(name, [names[value] for value in inputs], words, launch, len(outputs))
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


def _tile(region: Region) -> _Tile:
    *outer, second, cols = region.order
    window, plain = _window(region), sorted(region.order) == list(region.order)
    images = [operand for operand in region.pooled if operand.varies[0] or operand.varies[1]]
    whole = all(operand.varies[0] and operand.varies[1] and _row_major(operand) for operand in images)
    folded = plain and len(outer) > 1 and whole
    turned = any(transposed(operand, 1) for operand in region.outputs)
    return _Tile(tuple(outer), second, cols, folded, flat=cols >= len(region.shape) - window.rank and not turned)


def _window(region: Region) -> Window:
    assert region.window is not None
    return region.window


def _row_major(operand: Operand) -> bool:
    return operand.order is not None and not operand.channels_last


# --- Kernel text ---------------------------------------------------------------------------------------------


def _arguments(body: Body, tile: _Tile, names: Mapping[str, str]) -> Arguments:
    """Pointers, sizes, strides, and the constants that only the kernel has."""
    region, rows = body.region, body.domain.rows
    early = [operand.value for operand in region.pooled]
    pointers = pointer_arguments(body)
    strides = [pair for operand in region.pooled for pair in _strides(operand, tile, names[operand.value])]
    for operand in region.inputs:
        strides += stride_arguments(operand, names[operand.value], body.domain)
    made = [pair for item in region.outputs for pair in stride_arguments(item, names[item.value], body.domain)]
    strides += [(parameter, f"out_{value}") for parameter, value in made]
    inner = tile.outer[2 if tile.folded else 1 :]
    counts = [
        *("n_outer", "tiles_m", "tiles_n"),
        *(f"size_{dim}" for dim in range(2, len(region.shape))),
        *(f"result_{dim}" for dim in (*inner, tile.second)),
    ]
    parameters = [
        *(f"{names[value]}_ptr" for value in early),
        *pointers.parameters,
        *counts,
        "n_cols",
        *(parameter for parameter, _ in strides),
        *(group.size for group in rows[1:]),
        *(f"{item}: tl.constexpr" for item in ("INDEX", "HEIGHT", "BLOCK_M", "BLOCK_N")),
    ]
    values = [
        *(names[value] for value in early),
        *pointers.values,
        *counts,
        f"result_{tile.cols}",
        *(value for _, value in strides),
        *(" * ".join(f"result_{region.order[dim]}" for dim in group.dims) for group in rows[1:]),
    ]
    return Arguments(tuple(parameters), tuple(values))


def _strides(operand: Operand, tile: _Tile, name: str) -> list[tuple[str, str]]:
    """(parameter, launcher expression) of an early operand's strides, one for each dimension along which it varies."""
    found = []
    for dim, moves in enumerate(operand.varies):
        if not moves or (tile.folded and dim == 0):
            continue
        if tile.folded and dim == 1:
            # Of sizes: a tensor with one channel may say anything of that channel's stride.
            sizes = [f"size_{later}" for later in range(2, len(operand.varies)) if operand.varies[later]]
            found.append((f"stride_{name}_1", " * ".join(sizes) or "1"))
        else:
            found.append((f"stride_{name}_{dim}", f"{name}.stride({operand.axes[dim]})"))
    return found


def _place_lines(region: Region, tile: _Tile, window: Window) -> list[str]:
    """Where the program's tile lies: an index for each dimension of the result, flat rows and columns, masks."""
    second, result = f"at_{tile.second}", f"result_{tile.second}"
    columns = f"(pid % tiles_n * BLOCK_N).to(INDEX) + {'lane % BLOCK_N' if tile.flat else 'tl.arange(0, BLOCK_N)'}"
    if tile.cols >= len(region.shape) - window.rank:
        # A thread with neighbouring results would read elements that are a window's step away from its neighbour's.
        columns = f"tl.max_contiguous({columns}, 1)  # a thread's results are not neighbours, those of a warp are"
    first, inner = ("plane", tile.outer[2:]) if tile.folded else ("at_0", tile.outer[1:])
    outer = "outer" if inner else first
    row = ["lane = tl.arange(0, BLOCK_M * BLOCK_N)", "row = lane // BLOCK_N"]
    rows = f"{outer} * {result} + {second}"
    lines = [
        "pid = tl.program_id(0)",
        *(row if tile.flat else ["row = tl.arange(0, BLOCK_M)"]),
        f"{outer} = (pid // tiles_n // tiles_m).to(INDEX) * (BLOCK_M // HEIGHT) + row // HEIGHT",
        f"{second} = (pid // tiles_n % tiles_m * HEIGHT).to(INDEX) + row % HEIGHT",
        *([] if tile.flat else [f"rows = {rows}"]),
        f"cols = {columns}",
        *([f"index = ({rows}) * n_cols + cols"] if tile.flat else []),
        f"row_mask = ({tile.row(outer)} < n_outer) & ({tile.row(second)} < {result})",
        f"col_mask = {tile.place(tile.cols)} < n_cols",
        "mask = row_mask & col_mask",
    ]
    rest = outer
    for dim in reversed(inner):
        lines.append(f"at_{dim} = {rest} % result_{dim}")
        rest = f"{rest} // result_{dim}"
    return [*lines, f"{first} = {rest}"] if inner else lines


def _run_lines(body: Body) -> list[str]:
    """Tell Triton that a tile's rows are neighbours, so that results which are turned in memory are stored by rows.

    It holds for all lanes but those that are masked.
    """
    *outer, inner = body.domain.rows
    if not outer or not any(transposed(operand, 1) for operand in body.region.outputs):
        return []
    constant = [f"{group.index} = tl.max_constancy({group.index}, HEIGHT)" for group in outer]
    return [*constant, f"{inner.index} = tl.max_contiguous({inner.index}, HEIGHT)"]


def _window_lines(
    region: Region, tile: _Tile, names: Mapping[str, str], metas: Mapping[str, TensorMeta], before: frozenset[str]
) -> list[str]:
    window, rank = _window(region), len(region.shape)
    pooled = list(range(rank - window.rank, rank))
    moving = [operand for operand in region.pooled if any(operand.varies[dim] for dim in pooled)]
    fixed = [operand for operand in region.pooled if operand not in moving]
    lines = [_load(operand, names, tile, window, _fixed_mask(operand, tile)) for operand in fixed]
    result = names[window.node.name]
    start = 'float("-inf")' if window.largest else "0.0"
    lines.append(f"{result} = tl.full({tile.shape}, {start}, dtype=tl.float32)")
    total = math.prod(window.sizes)
    loop = "tl.static_range" if total <= UNROLLED else "range"
    checks = ["mask"]
    for place, dim in enumerate(pooled):
        indent = "    " * place
        lines.append(f"{indent}for k_{dim} in {loop}({window.sizes[place]}):")
        padding, dilation = window.paddings[place], window.dilations[place]
        step = f"k_{dim}" if dilation == 1 else f"k_{dim} * {dilation}"
        first = f"{tile.index(dim)}{f' * {window.strides[place]}' if window.strides[place] != 1 else ''}"
        lines.append(f"{indent}    in_{dim} = {first}{f' - {padding}' if padding else ''} + {step}")
        if padding or window.ceil:
            lines.append(f"{indent}    inside_{dim} = (in_{dim} >= 0) & (in_{dim} < size_{dim})")
            checks.append(tile.place(dim, "inside"))
    inside = "mask" if len(checks) == 1 else "inside"
    inner = [f"inside = {' & '.join(checks)}"] if len(checks) > 1 else []
    other = 'float("-inf")' if window.largest and not before else "0"
    inner += [_load(operand, names, tile, window, inside, other) for operand in moving]
    inner += _taken_lines(region, names, metas, before, inside)
    lines += ["    " * window.rank + line for line in inner]
    return [*lines, *_average_lines(window, tile, result, pooled, total)]


def _taken_lines(
    region: Region,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    before: frozenset[str],
    inside: str,
) -> list[str]:
    """What becomes of one element of the window, and how it joins the result."""
    window = _window(region)
    nodes = tuple(node for node in region.nodes if node.name in before)
    body = Body(replace(region, nodes=nodes, inputs=region.pooled, outputs=(), window=None), names, metas, False)
    lines = body.statements(nodes)
    taken, result = tidy(body.text(Ref(window.source), "float")), names[window.node.name]
    if window.largest:
        taken = f'tl.where({inside}, {taken}, float("-inf"))' if nodes else taken
        return [*lines, f"{result} = tl.maximum({result}, {taken}, propagate_nan=tl.PropagateNan.ALL)"]
    zero = all(node.bare_op in _KEEPS_ZERO and len(node.inputs()) == 1 for node in nodes)
    taken = taken if zero else f"tl.where({inside}, {taken}, 0.0)"
    return [*lines, f"{result} += {taken}"]


def _average_lines(window: Window, tile: _Tile, result: str, pooled: list[int], total: int) -> list[str]:
    if window.largest:
        return []
    if window.divisor is not None or (window.counts_padding and not window.ceil):
        return [f"{result} = {result} / {float(window.divisor or total)}"]
    lines, counts = [], []
    for place, dim in enumerate(pooled):
        padding = window.paddings[place]
        end = f"size_{dim} + {padding}" if window.counts_padding and padding else f"size_{dim}"
        lines.append(f"first_{dim} = {tile.index(dim)} * {window.strides[place]} - {padding}")
        first = f"first_{dim}" if window.counts_padding else f"tl.maximum(first_{dim}, 0)"
        lines.append(f"count_{dim} = tl.minimum(first_{dim} + {window.sizes[place]}, {end}) - {first}")
        counts.append(tile.place(dim, "count"))
    return [*lines, f"{result} = {result} / ({' * '.join(counts)}).to(tl.float32)"]


def _fixed_mask(operand: Operand, tile: _Tile) -> str:
    """The mask of an operand that is the same for a whole window."""
    by_column = operand.varies[tile.cols]
    by_row = any(moves for dim, moves in enumerate(operand.varies) if dim != tile.cols)
    return {(True, True): "mask", (True, False): "row_mask", (False, True): "col_mask"}.get((by_row, by_column), "")


def _load(operand: Operand, names: Mapping[str, str], tile: _Tile, window: Window, mask: str, other: str = "0") -> str:
    name, kind = names[operand.value], kind_of(operand.meta.dtype)
    rank = len(operand.varies)
    terms = []
    for dim, moves in enumerate(operand.varies):
        if tile.folded and dim == 1 and moves:
            terms.append(f"{tile.row('plane')} * stride_{name}_1")
        elif moves and not (tile.folded and dim == 0):
            terms.append(f"{tile.place(dim, 'in' if dim >= rank - window.rank else 'at')} * stride_{name}_{dim}")
    cast = ".to(tl.float32)" if kind == "float" else ""
    masked = f", mask={mask}, other={other}" if mask else ""
    return f"{name} = tl.load({' + '.join([f'{name}_ptr', *terms])}{masked}){cast}"


# --- Launcher ------------------------------------------------------------------------------------------------


def _launch_lines(
    body: Body, tile: _Tile, name: str, values: Sequence[str], owned: frozenset[str], block: Block
) -> list[str]:
    region, names = body.region, dict(body.names)
    window, rank = _window(region), len(body.region.shape)
    whole = next(operand for operand in region.pooled if all(operand.varies))
    lines = [*layout_lines(body, owned)]
    if tile.folded:
        together = [item for item in region.pooled if item.varies[0] and item.value not in owned]
        lines += [f"{names[item.value]} = {names[item.value]}.contiguous()" for item in together]
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
        f"n_outer = {' * '.join(f'result_{dim}' for dim in tile.outer)}",
        f"index_type = tl.int32 if max({names[whole.value]}.numel(), {first}.numel()) < 2**31 else tl.int64",
        "# As wide and as high as leaves few lanes empty and few elements to be read by two tiles.",
        f"block_n = min({WIDTHS}, key=lambda width: triton.cdiv(result_{tile.cols}, width) * (width + 4))",
        f"height = min({HEIGHTS}, key=lambda height: triton.cdiv(result_{tile.second}, height) * (height + 1))",
        f"block_m = {block.elements} // block_n",
        f"tiles_m = triton.cdiv(result_{tile.second}, height)",
        f"tiles_n = triton.cdiv(result_{tile.cols}, block_n)",
        *call_lines(
            f"{name}_kernel",
            "(triton.cdiv(n_outer, block_m // height) * tiles_m * tiles_n,)",
            values,
            [
                "INDEX=index_type",
                "HEIGHT=height",
                "BLOCK_M=block_m",
                "BLOCK_N=block_n",
                f"num_warps={block.elements // block.per_warp}",
            ],
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
