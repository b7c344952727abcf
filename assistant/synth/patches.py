"""``unfold`` and ``fold`` of images: each patch a column, and columns added up to an image again.

A program of ``unfold`` takes a tile of results: rows are a channel's places in the window, columns the windows; each
element is loaded from where it lies in the image, zeros outside of it. A program of ``fold`` takes pixels and adds up
what the windows over each of them hold: nothing is added by atomics, so that results are the same from run to run.
Numbers of windows are told by the image at run time.

Left out: operators before and behind, and images in channels-last layout, which are copied first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drk.assistant.synth.body import KernelText
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source, row_major_lines
from drk.assistant.synth.lone_region import lone_region
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Facts, Region
from drk.gym.graph import Node, Ref, TensorMeta

WIDEST = 256
"""Widest tile."""
MAX_UNROLLED = 32
"""Largest window whose elements a program asks for all at once."""


@dataclass(frozen=True)
class Patches:
    """``unfold``, or ``fold`` to an image of ``size``; other pairs are of height and width."""

    node: Node
    source: str
    kernel: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int]
    stride: tuple[int, int]
    size: tuple[int, int] | None = None


def patches_of(node: Node, metas: Mapping[str, TensorMeta]) -> Patches | None:
    """Read ``im2col`` and ``col2im``, or return None."""
    folds = node.op == "aten.col2im.default"
    if not (folds or node.op == "aten.im2col.default") or node.kwargs or len(node.metas) != 1 or node.metas[0] is None:
        return None
    source, *rest = node.args
    meta = metas.get(source.name) if isinstance(source, Ref) else None
    if meta is None or meta.dtype not in FLOATS or not meta.numel or not node.meta.numel:
        return None
    pairs = [tuple(item) if isinstance(item, tuple) else (item, item) for item in rest]
    if len(pairs) != 4 + folds or any(len(pair) != 2 for pair in pairs):
        return None
    size = pairs.pop(0) if folds else None
    kernel, dilation, padding, stride = pairs
    return Patches(node, source.name, kernel, dilation, padding, stride, size)


def build_patch_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of one ``unfold`` or ``fold``, or None."""
    found = patches_of(nodes[0], facts.metas) if len(nodes) == 1 else None
    if found is None:
        return None
    return lone_region("patches", nodes, [found.source], facts, nodes[0].meta.shape)


def write_patches(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher; ``owned`` values are known to be contiguous."""
    found = patches_of(region.nodes[0], metas)
    assert found is not None
    source, result = names[found.source], f"out_{names[found.node.name]}"
    folds = found.size is not None
    sizes = ["height", "width", "n_across"]
    parameters = [f"{source}_ptr", f"{result}_ptr", "n_rows", "n_cols", *sizes, *(["n_windows"] if folds else [])]
    parameters += ["INDEX: tl.constexpr", "BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"]
    word = "fold" if folds else "unfold"
    formula = f"{names[found.node.name]} = {word}({source}) of {found.kernel[0]} x {found.kernel[1]} windows"
    title = "The windows over each pixel, added up:" if folds else "Each element of each window, zeros outside:"
    lines = [*_tile_lines(), *(_fold_lines if folds else _unfold_lines)(found, source, result)]
    kernel = kernel_source(f"{name}_kernel", parameters, [title, formula], lines)
    launch = [
        *row_major_lines(region.inputs[0], names, owned),
        *(_fold_sizes if folds else _unfold_sizes)(found, source, result),
        f"index_type = tl.int32 if max({source}.numel(), {result}.numel()) < 2**31 else tl.int64",
        f"block_n = min({WIDEST}, triton.next_power_of_2(n_cols))",
        f"block_m = min({block.elements} // block_n, triton.next_power_of_2(n_rows))",
        *call_lines(
            f"{name}_kernel",
            "(triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, block_n),)",
            [source, result, "n_rows", "n_cols", *sizes, *(["n_windows"] if folds else [])],
            [
                "INDEX=index_type",
                "BLOCK_M=block_m",
                "BLOCK_N=block_n",
                f"num_warps={block.elements // block.per_warp}",
            ],
        ),
        f"return {result}",
    ]
    doc = f"Launch ``{name}_kernel`` over the result."
    launcher = function_source(name, [source], doc, launch, 1)
    return KernelText(name, kernel, launcher, (found.source,), (found.node.name,), formula)


def _tile_lines() -> list[str]:
    return [
        "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
        "rows = (tl.program_id(0) // tiles_n).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]",
        "cols = (tl.program_id(0) % tiles_n * BLOCK_N).to(INDEX) + tl.arange(0, BLOCK_N)[None, :]",
        "mask = (rows < n_rows) & (cols < n_cols)",
    ]


def _unfold_lines(found: Patches, source: str, result: str) -> list[str]:
    (high, wide), (down, across), (top, left) = found.kernel, found.dilation, found.padding
    step_y, step_x = found.stride
    return [
        f"y = cols // n_across * {step_y} + rows // {wide} % {high} * {down} - {top}",
        f"x = cols % n_across * {step_x} + rows % {wide} * {across} - {left}",
        "inside = mask & (y >= 0) & (y < height) & (x >= 0) & (x < width)",
        f"place = rows // {high * wide} * height * width + y * width + x",
        f"values = tl.load({source}_ptr + place, mask=inside, other=0.0)",
        f"tl.store({result}_ptr + rows * n_cols + cols, values, mask=mask)",
    ]


def _fold_lines(found: Patches, source: str, result: str) -> list[str]:
    (high, wide), (down, across), (top, left) = found.kernel, found.dilation, found.padding
    step_y, step_x = found.stride
    walk = "tl.static_range" if high * wide <= MAX_UNROLLED else "range"
    return [
        "total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)",
        f"for row in {walk}({high}):",
        f"    for column in {walk}({wide}):",
        f"        y = cols // width + {top} - row * {down}  # times the stride: which window has this pixel there",
        f"        x = cols % width + {left} - column * {across}",
        f"        window_y = y // {step_y}",
        f"        window_x = x // {step_x}",
        f"        inside = (y >= 0) & (x >= 0) & (y % {step_y} == 0) & (x % {step_x} == 0)",
        "        inside = inside & (window_y < height) & (window_x < n_across) & mask",
        f"        place = (rows * {high * wide} + row * {wide} + column) * n_windows + window_y * n_across + window_x",
        f"        total += tl.load({source}_ptr + place, mask=inside, other=0.0).to(tl.float32)",
        f"tl.store({result}_ptr + rows * n_cols + cols, total, mask=mask)",
    ]


def _windows(found: Patches, dim: int, size: str) -> str:
    """Text of how many windows there are along a dimension."""
    less = found.dilation[dim] * (found.kernel[dim] - 1) + 1 - 2 * found.padding[dim]
    return f"({size} - {less}) // {found.stride[dim]} + 1" if less else f"{size} // {found.stride[dim]} + 1"


def _unfold_sizes(found: Patches, source: str, result: str) -> list[str]:
    window = found.kernel[0] * found.kernel[1]
    return [
        f"height, width = {source}.shape[-2:]",
        f"n_across = {_windows(found, 1, 'width')}",
        f"n_cols = ({_windows(found, 0, 'height')}) * n_across",
        f"{result} = {source}.new_empty((*{source}.shape[:-3], {source}.shape[-3] * {window}, n_cols))",
        f"n_rows = {result}.numel() // max(1, n_cols)",
    ]


def _fold_sizes(found: Patches, source: str, result: str) -> list[str]:
    assert found.size is not None
    window, (height, width) = found.kernel[0] * found.kernel[1], found.size
    return [
        f"width, n_windows = {width}, {source}.shape[-1]",
        f"height = {_windows(found, 0, str(height))}  # of the grid of windows",
        f"n_across = {_windows(found, 1, 'width')}",
        "if height * n_across != n_windows:",
        '    raise ValueError("there are more or fewer windows than the image has")',
        f"{result} = {source}.new_empty((*{source}.shape[:-2], {source}.shape[-2] // {window}, {height}, {width}))",
        f"n_cols = {height * width}",
        f"n_rows = {result}.numel() // n_cols",
    ]
