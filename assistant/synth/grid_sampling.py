"""``grid_sample`` of images: elements at places that a grid tells, between neighbours or the nearest one.

A program takes a tile of channels and places. Places and their weights are worked out once for each column of the tile,
as PyTorch does it (``aten/src/ATen/native/GridSampler.h``); what is left for an element are its loads and their sum.

Left out: bicubic sampling, volumes, and operators before and behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drk.assistant.synth.body import KernelText
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source
from drk.assistant.synth.lone_region import lone_region
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Facts, Region
from drk.gym.graph import Node, Ref, TensorMeta

MOST_CHANNELS = 16
"""Most channels of a tile."""
BILINEAR, NEAREST = 0, 1
ZEROS, BORDER, REFLECTION = 0, 1, 2
_AXES = ("x", "y")


@dataclass(frozen=True)
class GridSample:
    """One operator; ``mode`` and ``outside`` are PyTorch's numbers for interpolation and padding."""

    node: Node
    source: str
    grid: str
    mode: int
    outside: int
    corners: bool


def grid_sample_of(node: Node, metas: Mapping[str, TensorMeta]) -> GridSample | None:
    """Read ``grid_sampler`` of images, or return None."""
    if node.op not in {"aten.grid_sampler.default", "aten.grid_sampler_2d.default"} or node.kwargs:
        return None
    if len(node.args) != 5 or len(node.metas) != 1 or node.metas[0] is None or not node.meta.numel:
        return None
    source, grid, mode, outside, corners = node.args
    if not (isinstance(source, Ref) and isinstance(grid, Ref)) or mode not in (BILINEAR, NEAREST):
        return None
    image, places = metas.get(source.name), metas.get(grid.name)
    if image is None or places is None or len(image.shape) != 4 or len(places.shape) != 4 or not image.numel:
        return None
    if image.dtype not in FLOATS or image.dtype != places.dtype or outside not in (ZEROS, BORDER, REFLECTION):
        return None
    return GridSample(node, source.name, grid.name, mode, outside, corners is True)


def build_grid_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of one ``grid_sample``, or None."""
    found = grid_sample_of(nodes[0], facts.metas) if len(nodes) == 1 else None
    if found is None or found.source == found.grid:
        return None
    return lone_region("grid", nodes, [found.source, found.grid], facts, nodes[0].meta.shape, columns=2)


def write_grid_sample(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    _owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher; images and grid are read by their own strides."""
    found = grid_sample_of(region.nodes[0], metas)
    assert found is not None
    source, grid, result = names[found.source], names[found.grid], f"out_{names[found.node.name]}"
    strides = [f"{tensor}_stride_{axis}" for tensor in (source, grid) for axis in range(4)]
    sizes = ["n_channels", "height", "width", "n_places", "n_across"]
    parameters = [f"{source}_ptr", f"{grid}_ptr", f"{result}_ptr", *sizes, *strides]
    parameters += ["INDEX: tl.constexpr", "BLOCK_C: tl.constexpr", "BLOCK_P: tl.constexpr"]
    way = "nearest" if found.mode == NEAREST else "bilinear"
    formula = f"{names[found.node.name]} = grid_sample({source}, {grid}), {way}"
    lines = [*_tile_lines(grid), *_place_lines(found), *_sum_lines(found, source), _store_line(result)]
    kernel = kernel_source(f"{name}_kernel", parameters, ["A tile of channels and places:", formula], lines)
    values = [source, grid, result, *sizes]
    values += [f"{tensor}.stride({axis})" for tensor in (source, grid) for axis in range(4)]
    launch = [
        f"n_images, n_channels, height, width = {source}.shape",
        f"n_across = {grid}.shape[2]",
        f"n_places = {grid}.shape[1] * n_across",
        f"{result} = {source}.new_empty((n_images, n_channels, {grid}.shape[1], n_across))",
        f"largest = max({source}.numel(), {result}.numel(), {grid}.numel())",
        "index_type = tl.int32 if largest < 2**31 else tl.int64",
        f"block_c = min({MOST_CHANNELS}, triton.next_power_of_2(n_channels))",
        f"block_p = {block.elements} // block_c",
        "programs = n_images * triton.cdiv(n_channels, block_c) * triton.cdiv(n_places, block_p)",
        *call_lines(
            f"{name}_kernel",
            "(programs,)",
            values,
            [
                "INDEX=index_type",
                "BLOCK_C=block_c",
                "BLOCK_P=block_p",
                f"num_warps={block.elements // block.per_warp}",
            ],
        ),
        f"return {result}",
    ]
    doc = f"Launch ``{name}_kernel`` over the result."
    launcher = function_source(name, [source, grid], doc, launch, 1)
    return KernelText(name, kernel, launcher, (found.source, found.grid), (found.node.name,), formula)


def _tile_lines(grid: str) -> list[str]:
    start = f"{grid}_ptr + image * {grid}_stride_0 + place // n_across * {grid}_stride_1"
    at = f"{start} + place % n_across * {grid}_stride_2"
    return [
        "tiles_p = tl.cdiv(n_places, BLOCK_P)",
        "tiles_c = tl.cdiv(n_channels, BLOCK_C)",
        "place = (tl.program_id(0) % tiles_p * BLOCK_P).to(INDEX) + tl.arange(0, BLOCK_P)[None, :]",
        "channel = (tl.program_id(0) // tiles_p % tiles_c * BLOCK_C).to(INDEX) + tl.arange(0, BLOCK_C)[:, None]",
        "image = (tl.program_id(0) // (tiles_p * tiles_c)).to(INDEX)",
        "place_mask = place < n_places",
        "mask = (channel < n_channels) & place_mask",
        f"x = tl.load({at}, mask=place_mask, other=0.0).to(tl.float32)",
        f"y = tl.load({at} + {grid}_stride_3, mask=place_mask, other=0.0).to(tl.float32)",
    ]


def _place_lines(found: GridSample) -> list[str]:
    """Statements that make coordinates of the grid's places, and weights of the neighbours there."""
    lines: list[str] = []
    for axis, size in zip(_AXES, ("width", "height"), strict=True):
        if found.corners:
            lines.append(f"{axis} = ({axis} + 1.0) * 0.5 * ({size} - 1)")
        else:
            lines.append(f"{axis} = (({axis} + 1.0) * {size} - 1.0) * 0.5")
        if found.outside == REFLECTION:
            low, span = ("0.0", f"({size} - 1)") if found.corners else ("-0.5", size)
            lines.append(f"{axis} = mirrored({axis}, {low}, {span} * 1.0)")
        if found.outside != ZEROS:
            lines.append(f"{axis} = tl.minimum(tl.maximum({axis}, 0.0), {size} - 1.0)  # NaN is led to the border")
        lines.append(f"{axis} = tl.where(tl.abs({axis}) < 1.0e9, {axis}, -100.0)  # what is not finite is outside")
        if found.mode == NEAREST:
            lines.append(f"{axis}_0 = rounded({axis}).to(tl.int32)")
            continue
        lines += [
            f"{axis}_0 = tl.floor({axis}).to(tl.int32)",
            f"{axis}_1 = {axis}_0 + 1",
            f"{axis}_share_1 = {axis} - {axis}_0.to(tl.float32)",
            f"{axis}_share_0 = {axis}_1.to(tl.float32) - {axis}",
        ]
    return lines


def _sum_lines(found: GridSample, source: str) -> list[str]:
    """Statements that add up the neighbours."""
    lines = [f"base = {source}_ptr + image * {source}_stride_0 + channel * {source}_stride_1"]
    taps = (0,) if found.mode == NEAREST else (0, 1)
    terms: list[str] = []
    for y in taps:
        for x in taps:
            lines += [
                f"inside = (x_{x} >= 0) & (x_{x} < width) & (y_{y} >= 0) & (y_{y} < height)",
                f"offset = y_{y}.to(INDEX) * {source}_stride_2 + x_{x}.to(INDEX) * {source}_stride_3",
                f"tap_{y}{x} = tl.load(base + offset, mask=mask & inside, other=0.0).to(tl.float32)",
            ]
            if found.mode == BILINEAR:
                lines.append(f"tap_{y}{x} = tl.where(inside, tap_{y}{x} * (x_share_{x} * y_share_{y}), 0.0)")
            terms.append(f"tap_{y}{x}")
    return [*lines, f"sampled = {' + '.join(terms)}"]


def _store_line(result: str) -> str:
    return f"tl.store({result}_ptr + (image * n_channels + channel) * n_places + place, sampled, mask=mask)"
