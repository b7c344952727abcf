"""Writes kernels for matrix products with a fused epilogue; two products that share their left operand become one.

float32 operands are multiplied with ``input_precision="tf32x3"``: three TF32 products that together are as accurate as
IEEE float32 and faster than it on tensor cores. float16 and bfloat16 use the tensor cores natively. Accumulation and
epilogue are float32; the result is rounded once.

Batched products, with one or two leading dimensions, take each factor by its own strides (0 where it is broadcast).
A convolution with windows of one element is such a product too, weights times the pixels of each image.

Tensor cores take float32's second factor with the inner dimension innermost only (the first may come from registers in
any order). Where the right factor lies otherwise and the left one does not, a tile of the transposed product is
computed; where neither does, the smaller one is copied first.
Left out: split-K for thin outputs, persistent kernels, tensor descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drk.assistant.synth.bands import loop_lines
from drk.assistant.synth.body import Body, KernelText
from drk.assistant.synth.domain import Operand, index_lines
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
from drk.assistant.synth.regions import Region
from drk.assistant.synth.tiles import Tile
from drk.gym.graph import TensorMeta

COPY_FROM = 512
"""From so many rows and columns on a copy of a factor is small beside the product."""

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
    body = Body(region, names, metas, two_dimensional=True, extra_operands=_product_operands(region, metas))
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    outputs = tuple(operand.value for operand in region.outputs)
    formula = body.formula(outputs)
    factors = _factors(region)
    batched = region.products[0].batched
    words = _BATCHED if batched else _FLAT
    schedule = [line.format(**words) for line in _SCHEDULE]
    if batched:
        schedule += [
            "batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)",
            "rows = batch * n_rows + matrix_rows",
        ]
    order = _order(region, metas)
    lines = [*schedule, *_product_lines(body, words["local"], order), *_epilogue_lines(body, words["local"])]
    parameters = [
        *(f"{names[value]}_mat" for value in factors),
        *pointers.parameters,
        *("n_rows", "n_cols", "n_inner"),
        *(f"stride_{names[value]}_{axis}" for value in factors for axis in (0, 1)),
        *(parameter for parameter, _ in _batch_arguments(body)),
        *shapes.parameters,
        *(f"{item}: tl.constexpr" for item in ("INDEX", "PRECISION", "EVEN_INNER")),
        *(f"{item}: tl.constexpr" for item in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")),
    ]
    kernel = kernel_source(f"{name}_kernel", parameters, ["One output tile per program:", *formula], lines)
    inputs = tuple(dict.fromkeys([*factors, *(operand.value for operand in region.inputs)]))
    doc = f"Launch ``{name}_kernel`` over the output's tiles."
    launch = _launch_lines(body, name, tile, owned, order)
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, len(outputs))
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


def _factors(region: Region) -> list[str]:
    return [region.products[0].left, *(product.right for product in region.products)]


@dataclass(frozen=True)
class _Order:
    """How tiles are computed: ``turned`` as the transposed product's, with ``copied`` laid out anew before."""

    turned: bool = False
    copied: str = ""


def _order(region: Region, metas: Mapping[str, TensorMeta]) -> _Order:
    """What tensor cores take without moving a tile's elements to other lanes one by one (see the module's text)."""
    product = region.products[0]
    if product.node.meta.dtype != "float32" or product.of_pixels:
        return _Order()
    left, rights = metas[product.left], [metas[item.right] for item in region.products]
    inner = -1 if product.transposed else -2
    if all(right.strides[inner] == 1 for right in rights):
        return _Order()
    if left.strides[-1] == 1:
        return _Order(turned=True)
    rows, columns = region.shape[-2], region.shape[-1]
    if min(rows, columns) < COPY_FROM or len(rights) > 1:
        return _Order()
    return _Order(turned=True, copied=product.left) if left.numel <= rights[0].numel else _Order(copied=product.right)


def _product_operands(region: Region, metas: Mapping[str, TensorMeta]) -> tuple[Operand, ...]:
    """The factors, seen as operands that tell sizes: the left one for the rows, the first right one for the columns."""
    product = region.products[0]
    first, second = metas[product.left], metas[product.right]
    if product.of_pixels:
        rank = len(region.shape)
        channels = tuple(dim == 1 for dim in range(rank))
        weights = Operand(
            product.left, first, channels, tuple(-rank if item else None for item in channels), fixed=True
        )
        return factor_operand(product.right, second, region.shape, 1 - rank), weights
    left = factor_operand(product.left, first, region.shape, -1)
    if product.batched:
        return left, factor_operand(product.right, second, region.shape, -2)
    rank = len(region.shape)
    columns = tuple(dim == rank - 1 for dim in range(rank))
    axes = tuple((-2 if product.transposed else -1) if item else None for item in columns)
    return left, Operand(product.right, second, columns, axes, fixed=True)


def factor_operand(value: str, meta: TensorMeta, shape: tuple[int, ...], inner: int) -> Operand:
    """A factor as an operand; ``inner`` is the axis that the product sums over."""
    rank = len(shape)
    axes = tuple(
        dim - rank
        if dim - rank != inner and rank - dim <= len(meta.shape) and meta.shape[dim - rank] == shape[dim]
        else None
        for dim in range(rank)
    )
    return Operand(value, meta, tuple(axis is not None for axis in axes), axes)


def _batch_arguments(body: Body) -> list[tuple[str, str]]:
    """(parameter, launcher expression) of the strides along the batch dimensions, and of the inner batch size."""
    product = body.region.products[0]
    if not product.batched:
        return []
    if product.of_pixels:
        right = body.names[product.right]
        return [(f"stride_{right}_batch_0", f"{right}_pixels.stride(0)")]
    rank = len(body.region.shape)
    found = []
    for value in _factors(body.region):
        operand = factor_operand(value, body.metas[value], body.region.shape, 0)
        for dim in range(rank - 2):
            name, axis = body.names[value], operand.axes[dim]
            found.append((f"stride_{name}_batch_{dim}", "0" if axis is None else f"{name}.stride({axis})"))
    if rank > 3:
        operands = [item for item in body.extra_operands if item.varies[1]]
        axis = operands[0].axes[1]
        found.append(("inner_batches", f"{body.names[operands[0].value]}.shape[{axis}]"))
    return found


def _batch_offset(body: Body, name: str) -> str:
    """Pointer to a factor's matrix of the program's batch."""
    product = body.region.products[0]
    if not product.batched or (product.of_pixels and name == body.names[product.left]):
        return f"{name}_mat"
    if product.of_pixels or len(body.region.shape) == 3:
        return f"{name}_mat + batch * stride_{name}_batch_0"
    outer, inner = f"batch // inner_batches * stride_{name}_batch_0", f"batch % inner_batches * stride_{name}_batch_1"
    return f"{name}_mat + {outer} + {inner}"


def _product_lines(body: Body, rows: str, order: _Order) -> list[str]:
    left, *rights = (body.names[value] for value in _factors(body.region))
    product = body.region.products[0]
    column, step = (0, 1) if product.transposed else (1, 0)
    accumulators = [body.names[item.node.name] for item in body.region.products]
    down, along = ("[:, None]", "[None, :]") if not order.turned else ("[None, :]", "[:, None]")
    lines = [
        "# Out-of-range rows and columns wrap around: their products are never stored.",
        f"left_rows = {rows} % n_rows",
        "right_cols = (cols % n_cols).to(INDEX)",
        f"left_ptrs = {_batch_offset(body, left)} + left_rows{down} * stride_{left}_0 + inner{along} * stride_{left}_1",
    ]
    for right in rights:
        by_column = f"right_cols{along} * stride_{right}_{column}"
        lines.append(f"{right}_ptrs = {_batch_offset(body, right)} + {by_column} + inner{down} * stride_{right}_{step}")
    if order.turned:
        lines.append("# Tiles of the transposed product: its second factor is the one whose rows are contiguous.")
    shape = "(BLOCK_N, BLOCK_M)" if order.turned else "(BLOCK_M, BLOCK_N)"
    lines += [f"{name} = tl.zeros({shape}, dtype=tl.float32)" for name in accumulators]
    banded = product.left_band is not None or product.result_band is not None
    if banded:
        lines += loop_lines(product.left_band, product.result_band, rows)
        lines.append(f"left_ptrs += first_inner * stride_{left}_1")
        lines += [f"{right}_ptrs += first_inner * stride_{right}_{step}" for right in rights]
    lines += [
        f"for start in range({'first_inner, last_inner' if banded else '0, n_inner'}, BLOCK_K):",
        "    if EVEN_INNER:",
        "        left = tl.load(left_ptrs)",
        *(f"        {right}_tile = tl.load({right}_ptrs)" for right in rights),
        "    else:",
        f"        left = tl.load(left_ptrs, mask=inner{along} < n_inner - start, other=0.0)",
        *(
            f"        {right}_tile = tl.load({right}_ptrs, mask=inner{down} < n_inner - start, other=0.0)"
            for right in rights
        ),
    ]
    if product.left_band is not None:
        kept = product.left_band.condition(f"{rows}{down}", f"(inner{along} + start)")
        lines.append(f"    left = tl.where({kept}, left, 0.0)")
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


def _copy_lines(body: Body, order: _Order) -> list[str]:
    """Lay out a factor with the inner dimension innermost."""
    name, product = body.names.get(order.copied, ""), body.region.products[0]
    if not order.copied:
        return []
    contiguous = order.copied == product.left or product.transposed
    return [f"{name} = {name}{'.contiguous()' if contiguous else '.mT.contiguous().mT'}"]


def _launch_lines(body: Body, name: str, tile: Tile, owned: frozenset[str], order: _Order) -> list[str]:
    region, names = body.region, body.names
    product = region.products[0]
    left, *rights = (names[value] for value in _factors(region))
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    precision = "tf32x3" if product.node.meta.dtype == "float32" else "ieee"
    lines = [*layout_lines(body, owned), *_copy_lines(body, order), *allocation_lines(body)]
    column = -2 if product.transposed else -1
    tiles = f"triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, {tile.block_n})"
    out = f"out_{names[region.outputs[0].value]}"
    if product.of_pixels:
        flat, pixels = left, f"{rights[0]}_pixels"
        rights = [pixels]
        strides = [f"{left}.stride(0)", f"{left}.stride(1)", f"{pixels}.stride(1)", f"{pixels}.stride(2)"]
        lines += [f"{pixels} = {names[product.right]}.flatten(2)", f"n_rows, n_inner = {left}.shape[:2]"]
        lines += [f"n_cols = {pixels}.shape[2]"]
        tiles = f"{tiles} * {pixels}.shape[0]"
        largest = f"{out}.numel(), {pixels}.numel()"
    elif product.batched:
        flat, strides = left, [f"{item}.stride({axis})" for item in (left, *rights) for axis in (-2, -1)]
        lines += [f"n_rows, n_inner = {left}.shape[-2:]", f"n_cols = {rights[0]}.shape[{column}]"]
        tiles = f"{tiles} * ({out}.numel() // (n_rows * n_cols))"
        largest = f"{left}.numel(), {out}.numel(), {rights[0]}.numel()"
    else:
        matrix = len(body.metas[product.left].shape) == 2
        flat = left if matrix else f"{left}_2d"
        strides = [f"{item}.stride({axis})" for item in (flat, *rights) for axis in (0, 1)]
        lines += [] if matrix else [f"{flat} = {left}.reshape(-1, {left}.shape[-1])"]
        lines += [f"n_rows, n_inner = {flat}.shape"]
        lines += [f"n_cols = {rights[0]}.shape[{column + 2}]"]
        largest = f"{flat}.numel(), n_rows * n_cols, {rights[0]}.numel()"
    lines += [
        f"block_m = max(16, min({tile.block_m}, triton.next_power_of_2(n_rows)))",
        f"index_type = tl.int32 if max({largest}) < 2**31 else tl.int64",
    ]
    values = [flat, *rights, *pointers.values, "n_rows", "n_cols", "n_inner", *strides]
    values += [*(value for _, value in _batch_arguments(body)), *shapes.values]
    options = [
        "INDEX=index_type",
        f'PRECISION="{precision}"',
        f"EVEN_INNER=n_inner % {tile.block_k} == 0",
        "BLOCK_M=block_m",
        f"BLOCK_N={tile.block_n}",
        f"BLOCK_K={tile.block_k}",
        f"GROUP_M={tile.group_m}",
        f"num_warps={tile.num_warps}",
        f"num_stages={tile.num_stages}",
    ]
    return [*lines, *call_lines(f"{name}_kernel", f"({tiles},)", values, options), result_line(body)]
