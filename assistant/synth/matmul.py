"""Writes kernels for matrix products with a fused epilogue; two products that share their left operand become one.

float32 operands are multiplied with ``input_precision="tf32x3"``: three TF32 products that together are as accurate as
IEEE float32 and faster than it on tensor cores. float16 and bfloat16 use the tensor cores natively. Accumulation and
epilogue are float32; the result is rounded once.

Batched products, with one or two leading dimensions, take each factor by its own strides (0 where it is broadcast).
A convolution with windows of one element is such a product too, weights times the pixels of each image.

Tensor cores take float32's second factor with the inner dimension innermost only (the first may come from registers in
any order). Where the right factor lies otherwise and the left one does not, a tile of the transposed product is
computed; where neither does, the smaller one is copied first. So are factors whose rows are of odd length
(:mod:`drk.assistant.synth.alignment`).
Few tiles with a long inner dimension are split along it (:mod:`drk.assistant.synth.split_product`).
Left out: persistent kernels, tensor descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from drk.assistant.synth.alignment import (
    PADDED_TO,
    Unit,
    copies_of,
    copy_parts,
    units_of,
    worth_copying,
)
from drk.assistant.synth.bands import Bands
from drk.assistant.synth.body import Body, KernelText
from drk.assistant.synth.domain import index_lines
from drk.assistant.synth.factors import (
    batch_arguments,
    batch_offset,
    factor_names,
    factor_values,
    laid_out,
    product_operands,
)
from drk.assistant.synth.launcher import (
    allocation_lines,
    call_lines,
    function_source,
    kernel_source,
    layout_lines,
    pointer_arguments,
    result_line,
    shape_arguments,
)
from drk.assistant.synth.regions import Product, Region
from drk.assistant.synth.split_product import PART_LINES, parts_lines, store_lines, sum_kernel, sum_launch_lines
from drk.assistant.synth.tiles import Tile
from drk.gym.graph import TensorMeta

LEAST_TURNED = 64
"""Tensor cores take so many rows of the first factor: products of fewer columns are not turned."""
_SCHEDULE = [
    "# Tiles that run at the same time share operands in L2: walk down GROUP_M row tiles, then one column on.",
    "tiles_m = tl.cdiv(n_rows, BLOCK_M)",
    "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
    "{position}",
    "width = GROUP_M * tiles_n",
    "first = pid // width * GROUP_M",
    "height = tl.minimum(tiles_m - first, GROUP_M)",
    "tile_m = first + pid % width % height",
    "tile_n = pid % width // height",
    "{rows} = tile_m.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)",
    "cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)",
    "inner = tl.arange(0, BLOCK_K)",
]
_FLAT = {"position": "pid = tl.program_id(0)", "rows": "rows", "local": "rows"}
_BATCHED = {
    "position": "pid = tl.program_id(0) % (tiles_m * tiles_n)",
    "rows": "matrix_rows",
    "local": "matrix_rows",
}


def write_matmul(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    tile: Tile,
) -> KernelText:
    """Return kernel and launcher of a matmul region; ``owned`` values are known to be contiguous."""
    if region.products[0].of_pixels or _bands(region):
        tile = replace(tile, parts=1)
    body = Body(region, names, metas, two_dimensional=True, extra_operands=product_operands(region, metas))
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    outputs = tuple(operand.value for operand in region.outputs)
    formula = body.formula(outputs)
    factors = factor_values(region)
    batched = region.products[0].batched
    words = _BATCHED if batched else _FLAT
    schedule = _schedule_lines(region, words)
    order, parted = _order(body), tile.parts > 1
    lines = [*_known_lines(order), *schedule, *_product_lines(body, words["local"], order, parted=parted)]
    accumulators = [names[item.node.name] for item in region.products]
    lines += store_lines(accumulators, words["local"]) if parted else _epilogue_lines(body, words["local"])
    parameters = [
        *(f"{item}_mat" for item in factor_names(body)),
        *(["parts_ptr", "all_rows"] if parted else pointers.parameters),
        *("n_rows", "n_cols", "n_inner"),
        *(f"stride_{item}_{axis}" for item in factor_names(body) for axis in (0, 1)),
        *(parameter for parameter, _ in batch_arguments(body, dict.fromkeys(factor_names(body), ""))),
        *(() if parted else shapes.parameters),
        *(f"{item}: tl.constexpr" for item in ("INDEX", "PRECISION", "EVEN_INNER", *(["PARTS"] if parted else []))),
        *(f"{item.name}: tl.constexpr" for item in order.units),
        *(f"{item}: tl.constexpr" for item in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")),
    ]
    kernel = kernel_source(f"{name}_kernel", parameters, ["One output tile per program:", *formula], lines)
    if parted:
        doc_lines = ["One part of an output tile's sums per program, for the product in", *formula]
        kernel = kernel_source(f"{name}_pass1_kernel", parameters, doc_lines, lines)
        kernel += f"\n\n{sum_kernel(body, name, pointers, shapes, formula, _epilogue_lines(body, 'rows'))}"
    inputs = tuple(dict.fromkeys([*factors, *(operand.value for operand in region.inputs)]))
    doc = f"Launch ``{name}_kernel`` over the output's tiles."
    launch = _launch_lines(body, name, tile, owned, order)
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, len(outputs))
    if order.copied:
        copy_kernel, copy_launcher = copy_parts(f"{name}_copy")
        kernel = f"{copy_kernel}\n\n{copy_launcher}\n\n{kernel}"
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


def _schedule_lines(region: Region, words: Mapping[str, str]) -> list[str]:
    """Statements that find the program's tile."""
    schedule = [line.format(**words) for line in _SCHEDULE]
    if region.products[0].batched:
        schedule += [
            "batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)",
            "rows = batch * n_rows + matrix_rows",
        ]
    if _bands(region).lower_left:
        at = next(index for index, line in enumerate(schedule) if line.startswith(f"{words['local']} = tile_m"))
        schedule.insert(at, "tile_m = tiles_m - 1 - tile_m  # lower rows have the longer sums: they go first")
    return schedule


@dataclass(frozen=True)
class _Order:
    """How tiles are computed: ``turned`` as the transposed product's, with ``copied`` laid out anew before."""

    turned: bool = False
    copied: frozenset[str] = frozenset()
    units: tuple[Unit, ...] = ()


def _order(body: Body) -> _Order:
    """What loads 16 bytes, and what tensor cores take without moving a tile's elements to other lanes one by one."""
    region, product, factors = body.region, body.region.products[0], laid_out(body)
    if product.of_pixels:
        return _Order(units=units_of(factors, frozenset()))
    left, *rights = factors
    worth = worth_copying(region, left.meta.shape[-1])
    copied, turned = copies_of(factors) if worth else frozenset(), False
    if product.node.meta.dtype == "float32":
        first, *others = (item.name in copied or item.inner_last for item in factors)
        turned = first and not all(others) and region.shape[-1] >= LEAST_TURNED
        if worth and not first and not all(others) and len(rights) == 1:
            turned = left.meta.numel <= rights[0].meta.numel
            copied |= {left.name if turned else rights[0].name}
    return _Order(turned, copied, units_of(factors, copied))


def _known_lines(order: _Order) -> list[str]:
    """Statements that tell the compiler what sizes and strides are multiples of."""
    found = list(dict.fromkeys(line for item in order.units for line in item.kernel_lines))
    if found:
        found.insert(0, "# Multiples of these units, as the compiler is to know: it loads so many elements at once.")
    if order.copied:
        found.append(f"padded_inner = tl.cdiv(n_inner, {PADDED_TO}) * {PADDED_TO}  # of copied factors")
    return found


def _bands(region: Region) -> Bands:
    product = region.products[0]
    return Bands(product.left_band, product.right_band, product.result_band, product.transposed)


def _band_masks(product: Product, rows: str, cols: str, inner: tuple[str, str], right: str) -> list[str]:
    """Zero what a triangular or banded factor has outside of its band; ``inner`` runs down and along a tile."""
    lines = []
    if product.left_band is not None:
        kept = product.left_band.condition(rows, f"({inner[1]} + start)")
        lines.append(f"    left = tl.where({kept}, left, 0.0)")
    if product.right_band is not None:
        stored = (f"({inner[0]} + start)", cols)
        kept = product.right_band.condition(*(stored[::-1] if product.transposed else stored))
        lines.append(f"    {right}_tile = tl.where({kept}, {right}_tile, 0.0)")
    return lines


def _product_lines(body: Body, rows: str, order: _Order, *, parted: bool) -> list[str]:
    left, *rights = factor_names(body)
    product = body.region.products[0]
    column, step = (0, 1) if product.transposed else (1, 0)
    accumulators = [body.names[item.node.name] for item in body.region.products]
    down, along = ("[:, None]", "[None, :]") if not order.turned else ("[None, :]", "[:, None]")

    def limit(name: str) -> str:
        return "padded_inner" if name in order.copied else "n_inner"

    lines = [
        "# Out-of-range rows and columns wrap around: their products are never stored.",
        f"left_rows = {rows} % n_rows",
        "right_cols = (cols % n_cols).to(INDEX)",
        f"left_ptrs = {batch_offset(body, left)} + left_rows{down} * stride_{left}_0 + inner{along} * stride_{left}_1",
    ]
    for right in rights:
        by_column = f"right_cols{along} * stride_{right}_{column}"
        lines.append(f"{right}_ptrs = {batch_offset(body, right)} + {by_column} + inner{down} * stride_{right}_{step}")
    if order.turned:
        lines.append("# Tiles of the transposed product: its second factor is the one whose rows are contiguous.")
    shape = "(BLOCK_N, BLOCK_M)" if order.turned else "(BLOCK_M, BLOCK_N)"
    lines += (f"{name} = tl.zeros({shape}, dtype=tl.float32)" for name in accumulators)
    bands = _bands(body.region)
    if bands or parted:
        lines += bands.loop_lines(rows) if bands else PART_LINES
        lines.append(f"left_ptrs += first_inner * stride_{left}_1")
        lines += [f"{right}_ptrs += first_inner * stride_{right}_{step}" for right in rights]
    lines += [
        f"for start in range({'first_inner, last_inner' if bands or parted else '0, n_inner'}, BLOCK_K):",
        "    if EVEN_INNER:",
        "        left = tl.load(left_ptrs)",
        *(f"        {right}_tile = tl.load({right}_ptrs)" for right in rights),
        "    else:",
        f"        left = tl.load(left_ptrs, mask=inner{along} < {limit(left)} - start, other=0.0)",
        *(
            f"        {right}_tile = tl.load({right}_ptrs, mask=inner{down} < {limit(right)} - start, other=0.0)"
            for right in rights
        ),
    ]
    lines += _band_masks(product, f"{rows}{down}", f"cols{along}", (f"inner{down}", f"inner{along}"), rights[0])
    for accumulator, right in zip(accumulators, rights, strict=True):
        tiles = f"{right}_tile, left" if order.turned else f"left, {right}_tile"
        lines.append(f"    {accumulator} = tl.dot({tiles}, {accumulator}, input_precision=PRECISION)")
    lines.append(f"    left_ptrs += BLOCK_K * stride_{left}_1")
    lines += [f"    {right}_ptrs += BLOCK_K * stride_{right}_{step}" for right in rights]
    return lines + ([f"{name} = tl.trans({name})" for name in accumulators] if order.turned else [])


def _epilogue_lines(body: Body, rows: str) -> list[str]:
    products = {product.node.name: product for product in body.region.products}
    biases = [f"{body.names[p.node.name]} += {body.names[p.bias]}" for p in products.values() if p.bias]
    pointwise = [node for node in body.region.nodes if node.name not in products]
    for item in products.values():
        if item.result_band is not None:
            kept, result = item.result_band.condition(f"{rows}[:, None]", "cols[None, :]"), body.names[item.node.name]
            biases.append(f"{result} = tl.where({kept}, {result}, 0.0)")
    return [
        "",
        f"row_mask = {rows}[:, None] < n_rows",
        "col_mask = cols[None, :] < n_cols",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.rows, "rows"),
        *index_lines(body.domain.cols, "cols"),
        *(body.load(operand) for operand in body.region.inputs),
        *biases,
        *body.statements(pointwise),
        *(body.store(operand) for operand in body.region.outputs),
    ]


def _copy_lines(body: Body, name: str, order: _Order) -> tuple[list[str], dict[str, str]]:
    """Lay factors out with the inner dimension innermost; the launcher's names of all factors afterwards."""
    lines, texts = [], {}
    for item in laid_out(body):
        texts[item.name] = item.text
        if item.name in order.copied:
            texts[item.name] = f"{item.name}_padded"
            copy = f"{name}_copy({item.text})" if item.own == -2 else f"{name}_copy({item.text}.mT).mT"
            lines.append(f"{item.name}_padded = {copy}")
    return lines, texts


def _launch_lines(body: Body, name: str, tile: Tile, owned: frozenset[str], order: _Order) -> list[str]:
    region, names = body.region, body.names
    product = region.products[0]
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    precision = "tf32x3" if product.node.meta.dtype == "float32" else "ieee"
    lines = [*layout_lines(body, owned), *allocation_lines(body)]
    tiles, sizes = _size_lines(body, tile)
    copies, texts = _copy_lines(body, name, order)
    left, *rights = texts.values()
    axes = (-2, -1) if product.batched and not product.of_pixels else (0, 1)
    strides = [f"{item}.stride({axis})" for item in (left, *rights) for axis in axes]
    if product.of_pixels:
        strides[2:] = [f"{rights[0]}.stride(1)", f"{rights[0]}.stride(2)"]
    largest = ["n_rows * n_cols" if not product.batched else f"out_{names[region.outputs[0].value]}.numel()"]
    largest += [f"{item}.numel()" for item in (left, *rights[:1])]
    lines += [*sizes, *copies]
    parted = tile.parts > 1
    if parted:
        lines += parts_lines(body, tile, f"out_{names[region.outputs[0].value]}")
        largest.append("parts.numel()")
    lines += [
        f"block_m = max(16, min({tile.block_m}, triton.next_power_of_2(n_rows)))",
        f"index_type = tl.int32 if max({', '.join(largest)}) < 2**31 else tl.int64",
    ]
    values = [left, *rights, *(["parts", "all_rows"] if parted else pointers.values)]
    values += ["n_rows", "n_cols", "n_inner", *strides, *(value for _, value in batch_arguments(body, texts))]
    values += () if parted else shapes.values
    options = [
        "INDEX=index_type",
        f'PRECISION="{precision}"',
        f"EVEN_INNER=n_inner % {tile.block_k} == 0",
        *([f"PARTS={tile.parts}"] if parted else []),
        *(item.option for item in order.units),
        "BLOCK_M=block_m",
        f"BLOCK_N={tile.block_n}",
        f"BLOCK_K={tile.block_k}",
        f"GROUP_M={tile.group_m}",
        f"num_warps={tile.num_warps}",
        f"num_stages={tile.num_stages}",
    ]
    if not parted:
        return [*lines, *call_lines(f"{name}_kernel", f"({tiles},)", values, options), result_line(body)]
    lines += call_lines(f"{name}_pass1_kernel", f"({tiles}, {tile.parts})", values, options)
    return [*lines, *sum_launch_lines(name, pointers, shapes, tile), result_line(body)]


def _size_lines(body: Body, tile: Tile) -> tuple[str, list[str]]:
    """The number of tiles, and statements that set the sizes it is counted from."""
    region, names = body.region, body.names
    product = region.products[0]
    left, right = names[product.left], names[product.right]
    column = -2 if product.transposed else -1
    tiles = f"triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, {tile.block_n})"
    if product.of_pixels:
        lines = [f"{right}_pixels = {right}.flatten(2)", f"n_rows, n_inner = {left}.shape[:2]"]
        return f"{tiles} * {right}_pixels.shape[0]", [*lines, f"n_cols = {right}_pixels.shape[2]"]
    if product.batched:
        out = f"out_{names[region.outputs[0].value]}"
        lines = [f"n_rows, n_inner = {left}.shape[-2:]", f"n_cols = {right}.shape[{column}]"]
        return f"{tiles} * ({out}.numel() // (n_rows * n_cols))", lines
    matrix = len(body.metas[product.left].shape) == 2
    flat = left if matrix else f"{left}_2d"
    lines = [] if matrix else [f"{flat} = {left}.reshape(-1, {left}.shape[-1])"]
    return tiles, [*lines, f"n_rows, n_inner = {flat}.shape", f"n_cols = {right}.shape[{column + 2}]"]
