"""Writes kernels for attention regions: scores by tiles, online softmax, no scores in memory (FlashAttention's scheme).

A program holds a block of queries and walks over the keys. The running maximum rescales what was summed before
(Milakov and Gimelshein; Dao et al.). float32 operands are multiplied with ``tf32x3``, so that results are as accurate
as the library's IEEE products; sums are float32. Where the module turns heads back into features next, the result is
laid out so that this is a view.

Left out: splitting the keys of one query block over programs (few long queries), and a backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drk.assistant.synth.body import Body, KernelText, indent, tidy
from drk.assistant.synth.domain import Operand, index_lines
from drk.assistant.synth.factors import factor_operand
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source, layout_lines, shape_arguments
from drk.assistant.synth.regions import Region
from drk.gym.graph import Ref, TensorMeta

SCAN = 128
"""Keys of which a mask is looked at in one step; a multiple of all tiles' ``block_n``."""


@dataclass(frozen=True)
class AttentionTile:
    """Queries and keys of one step, warps, and loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


FP32_TILES = (AttentionTile(64, 32, 4, 2), AttentionTile(64, 64, 8, 2), AttentionTile(128, 32, 8, 2))
HALF_TILES = (AttentionTile(128, 64, 8, 3), AttentionTile(128, 128, 8, 2), AttentionTile(64, 64, 4, 3))
WIDE_FP32_TILES = (AttentionTile(32, 32, 4, 2), AttentionTile(64, 32, 8, 2))
"""For heads of more than 64: their tiles take twice the registers and shared memory."""


def write_attention(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    rank: int,
    *,
    features_next: bool,
) -> KernelText:
    """Return kernel and launcher; ``rank`` picks the tile, ``features_next`` the layout (batch, query, head, width)."""
    first, second = region.products
    values = [first.left, first.right, second.right]
    query, key, value = (names[item] for item in values)
    # The second product's shape has the value's width where the scores have keys.
    body = Body(region, names, metas, two_dimensional=True, extra_operands=_telling(region, metas))
    shapes = shape_arguments(body)
    out = f"out_{names[second.node.name]}"
    batches = [pair for item in values for pair in _batch_strides(item, region, names, metas)]
    strides = [
        (f"stride_{item}_{axis}", f"{item}.stride({axis - 2})") for item in (query, key, value) for axis in (0, 1)
    ]
    results = [(f"stride_out_{axis}", f"{out}.stride({axis})") for axis in range(len(region.shape))]
    sizes = ["n_rows", "n_cols", "n_head", "n_width", *(["inner_batches"] if len(region.shape) == 4 else [])]
    constants = ("INDEX", "PRECISION", "BLOCK_M", "BLOCK_N", "BLOCK_HEAD", "BLOCK_WIDTH")
    extra = [names[operand.value] for operand in region.inputs]
    parameters = [
        *(f"{item}_ptr" for item in (query, key, value, *extra)),
        "out_ptr",
        *sizes,
        *(parameter for parameter, _ in (*strides, *batches, *results)),
        *shapes.parameters,
        *(f"{item}: tl.constexpr" for item in constants),
    ]
    formula = f"{names[second.node.name]} = softmax(scores of {query} @ {key}) @ {value}"
    kernel = kernel_source(
        f"{name}_kernel",
        parameters,
        ["A block of queries against all keys, softmax online:", formula],
        _kernel_lines(body, (query, key, value), metas[first.left].dtype == "float32"),
    )
    arguments = [query, key, value, *extra, out, *sizes, *(text for _, text in (*strides, *batches, *results))]
    inputs = tuple(dict.fromkeys([*values, *(operand.value for operand in region.inputs)]))
    lines = [*layout_lines(body, owned), *_size_lines(region, (query, key, value), out, metas, features_next)]
    lines += _launch(name, [*arguments, *shapes.values], _tile(region, metas, rank), metas[first.left].dtype)
    lines.append(f"return {out}")
    doc = f"Launch ``{name}_kernel`` over blocks of queries."
    launcher = function_source(name, [names[item] for item in inputs], doc, lines, 1)
    return KernelText(name, kernel, launcher, inputs, (second.node.name,), formula)


def _telling(region: Region, metas: Mapping[str, TensorMeta]) -> tuple[Operand, ...]:
    """Query and key as operands that tell the scores' sizes."""
    first = region.products[0]
    left = factor_operand(first.left, metas[first.left], region.shape, -1)
    return left, factor_operand(first.right, metas[first.right], region.shape, -2)


def _batch_strides(
    value: str, region: Region, names: Mapping[str, str], metas: Mapping[str, TensorMeta]
) -> list[tuple[str, str]]:
    rank, shape = len(region.shape), metas[value].shape
    found = []
    for dim in range(rank - 2):
        present = rank - dim <= len(shape) and shape[dim - rank] == region.shape[dim]
        text = f"{names[value]}.stride({dim - rank})" if present else "0"
        found.append((f"stride_{names[value]}_batch_{dim}", text))
    return found


def _offset(name: str, region: Region, prefix: str = "") -> str:
    """Pointer of a batch's matrix."""
    stride = f"stride_{prefix or name}"
    word = "_" if prefix else "_batch_"
    if len(region.shape) == 3:
        return f"{name}_ptr + batch * {stride}{word}0"
    return f"{name}_ptr + batch // inner_batches * {stride}{word}0 + batch % inner_batches * {stride}{word}1"


def _kernel_lines(body: Body, operands: tuple[str, str, str], single: bool) -> list[str]:
    region, rank = body.region, len(body.region.shape)
    query, key, value = operands
    assert region.attention is not None
    loop = _loop_lines(body, region.attention.scores, operands, single)
    end = "tl.minimum(n_cols, (tile + 1) * BLOCK_M)" if region.attention.causal else "n_cols"
    scan, end = _scan_lines(body, region.attention.seen_where, end)
    return [
        "tiles_m = tl.cdiv(n_rows, BLOCK_M)",
        "tile = tl.program_id(0) % tiles_m",
        "batch = (tl.program_id(0) // tiles_m).to(INDEX)",
        "matrix_rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)",
        "rows = batch * n_rows + matrix_rows",
        "row_mask = matrix_rows[:, None] < n_rows",
        *index_lines(body.domain.rows, "rows"),
        "head = tl.arange(0, BLOCK_HEAD)",
        "width = tl.arange(0, BLOCK_WIDTH)",
        f"{query}_ptrs = {_offset(query, region)}"
        f" + matrix_rows[:, None] * stride_{query}_0 + head[None, :] * stride_{query}_1",
        f"{query}_tile = tl.load({query}_ptrs, mask=row_mask & (head[None, :] < n_head), other=0.0)",
        f"{key}_ptrs = {_offset(key, region)} + head[:, None] * stride_{key}_0",
        f"{value}_ptrs = {_offset(value, region)} + width[None, :] * stride_{value}_1",
        *(body.load(operand) for operand in region.inputs if body.mask(operand) == "row_mask"),
        'top = tl.full((BLOCK_M, 1), float("-inf"), dtype=tl.float32)',
        "total = tl.zeros((BLOCK_M, 1), dtype=tl.float32)",
        "result = tl.zeros((BLOCK_M, BLOCK_WIDTH), dtype=tl.float32)",
        *scan,
        f"for start in range(0, {end}, BLOCK_N):",
        *indent(loop).split("\n"),
        f"out_ptrs = {_offset('out', region, 'out')}"
        f" + matrix_rows[:, None] * stride_out_{rank - 2} + width[None, :] * stride_out_{rank - 1}",
        *(["total = tl.where(total == 0.0, 1.0, total)  # queries that see no key"] if region.attention.safe else []),
        "tl.store(out_ptrs, result / total, mask=row_mask & (width[None, :] < n_width))",
    ]


def _column_lines(body: Body, first: str, count: str) -> list[str]:
    """Lines that say which keys a step has, which of them there are, and where operands have them."""
    return [
        f"cols = {first} + tl.arange(0, {count})",
        "col_mask = cols[None, :] < n_cols",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.cols, "cols"),
    ]


def _scan_lines(body: Body, seen_where: Mapping[str, str], end: str) -> tuple[list[str], str]:
    """Lines that find where the keys end that any of the block's queries sees, and that end's name."""
    masks = [operand for operand in body.region.inputs if operand.value in seen_where]
    if not masks:
        return [], end
    tests = [f"({body.names[operand.value]} {seen_where[operand.value]})" for operand in masks]
    step = [
        f"before = (last - 1) // {SCAN} * {SCAN}",
        *_column_lines(body, "before", str(SCAN)),
        *(body.load(operand) for operand in masks),
        f"seen = tl.max((mask & {' & '.join(tests)}).to(tl.int32), axis=None)",
        "last = tl.where(seen > 0, last, before)",
    ]
    return [
        f"last, seen = {end}, 0  # keys from ``last`` on are hidden from all of these queries",
        "while (seen == 0) & (last > 0):",
        *indent(step).split("\n"),
    ], "last"


def _loop_lines(body: Body, scores: str, operands: tuple[str, str, str], single: bool) -> list[str]:
    """One tile of keys: its scores, the running maximum and sum, and what it adds to the result."""
    region = body.region
    query, key, value = operands
    first, second = region.products
    names = {first.node.name, second.node.name}
    order = [node for node in region.nodes if node.name not in names]
    chain = order[: next((i + 1 for i, node in enumerate(order) if node.name == scores), 0)]
    product = body.names[first.node.name]
    exp = "exp" if single else "tl.exp"
    cast = "" if single else f".to({value}_tile.dtype)"
    score = tidy(body.text(Ref(scores), "float")) if not chain else ""
    loop = [
        *_column_lines(body, "start", "BLOCK_N"),
        f"{key}_mask = (head[:, None] < n_head) & col_mask",
        f"{key}_tile = tl.load({key}_ptrs + cols[None, :] * stride_{key}_1, mask={key}_mask, other=0.0)",
        f"{product} = tl.dot({query}_tile, {key}_tile, input_precision=PRECISION)",
        *(body.load(operand) for operand in region.inputs if body.mask(operand) != "row_mask"),
        *body.statements(chain),
    ]
    score = score or tidy(body.text(Ref(scores), "float"))
    return [
        *loop,
        f'scores = tl.where(col_mask, {score}, float("-inf"))',
        "higher = tl.maximum(top, tl.max(scores, axis=1)[:, None])",
        'shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but masked keys so far',
        f"weights = {exp}(scores - shift)",
        f"rescale = {exp}(top - shift)",
        "total = total * rescale + tl.sum(weights, axis=1)[:, None]",
        f"{value}_tile = tl.load({value}_ptrs + cols[:, None] * stride_{value}_0, "
        f"mask=(cols[:, None] < n_cols) & (width[None, :] < n_width), other=0.0)",
        f"result = tl.dot(weights{cast}, {value}_tile, result * rescale, input_precision=PRECISION)",
        "top = higher",
    ]


def _size_lines(
    region: Region, operands: tuple[str, str, str], out: str, metas: Mapping[str, TensorMeta], features_next: bool
) -> list[str]:
    query, key, value = operands
    first, second = region.products
    rank = len(region.shape)
    sizes = []
    for dim in range(rank - 2):
        sources = ((query, first.left), (key, first.right))
        name = next(
            n
            for n, v in sources
            if rank - dim <= len(metas[v].shape) and metas[v].shape[dim - rank] == region.shape[dim]
        )
        sizes.append(f"{name}.shape[{dim - rank}]")
    lines = [
        f"n_rows, n_head = {query}.shape[-2:]",
        f"n_cols, n_width = {value}.shape[-2:]",
    ]
    options = f"device={query}.device, dtype=torch.{second.node.meta.dtype}"
    if rank == 4:
        lines.append(f"outer_batches, inner_batches = {sizes[0]}, {sizes[1]}")
        shape = (
            "(outer_batches, n_rows, inner_batches, n_width)"
            if features_next
            else "(outer_batches, inner_batches, n_rows, n_width)"
        )
        lines.append(f"{out} = torch.empty({shape}, {options}){'.transpose(1, 2)' if features_next else ''}")
    else:
        lines.append(f"{out} = torch.empty(({sizes[0]}, n_rows, n_width), {options})")
    return lines


def _tile(region: Region, metas: Mapping[str, TensorMeta], rank: int) -> AttentionTile:
    first, second = region.products
    wide = max(metas[first.left].shape[-1], metas[second.right].shape[-1]) > 64
    single = metas[first.left].dtype == "float32"
    tiles = (WIDE_FP32_TILES if wide else FP32_TILES) if single else HALF_TILES
    return tiles[min(rank, len(tiles) - 1)]


def _launch(name: str, arguments: list[str], tile: AttentionTile, dtype: str) -> list[str]:
    out = next(item for item in arguments if item.startswith("out_"))
    precision = "tf32x3" if dtype == "float32" else "ieee"
    query, key = arguments[:2]
    return [
        f"block_m = max(16, min({tile.block_m}, triton.next_power_of_2(n_rows)))",
        f"batches = {out}.numel() // (n_rows * n_width)",
        f"largest = max({query}.numel(), {key}.numel(), batches * n_rows * n_cols)",
        "index_type = tl.int32 if largest < 2**31 else tl.int64",
        *call_lines(
            f"{name}_kernel",
            "(triton.cdiv(n_rows, block_m) * batches,)",
            arguments,
            [
                "INDEX=index_type",
                f'PRECISION="{precision}"',
                "BLOCK_M=block_m",
                f"BLOCK_N={tile.block_n}",
                "BLOCK_HEAD=max(16, triton.next_power_of_2(n_head))",
                "BLOCK_WIDTH=max(16, triton.next_power_of_2(n_width))",
                f"num_warps={tile.num_warps}",
                f"num_stages={tile.num_stages}",
            ],
        ),
    ]
