"""Regions: nodes of a graph that one kernel can compute together.

:mod:`drk.assistant.synth.planner` chooses them. Kinds: ``matmul`` (one product, or two that share
their left operand, with pointwise operators after it), ``row`` (reductions over the last dimensions with pointwise
operators around them; ``split`` where rows are long or few) and ``pointwise``.

A region walks its dimensions in an order of its own, its frame: reduced dimensions come last whichever they are, and
channels come last where most tensors have them innermost. Left out: views inside a region, reductions behind a matrix
product. What no region takes stays a torch operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drk.assistant.synth.bands import Band, bands_of
from drk.assistant.synth.domain import Operand, fold, memory_order
from drk.assistant.synth.draft import contiguous_meta
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.frames import MAX_COLUMNS, MAX_TRANSPOSED, Frame, choose_frame, transposed
from drk.assistant.synth.gathers import Gather, Made, Position, known_operands, made_values
from drk.assistant.synth.hidden_keys import Attention
from drk.assistant.synth.resamples import Resample
from drk.assistant.synth.scatters import Scatter
from drk.assistant.synth.size_constants import CUT, size_constants
from drk.assistant.synth.windows import Window
from drk.gym.graph import Graph, Node, Ref, TensorMeta

MAX_OPERANDS = 24
MAX_BATCH_DIMS = 2
FEW_ROWS = 128
FEW_ROWS_COLUMNS = 8192
"""Up to so many rows of at least so many columns are taken in pieces."""
FEW_LONG_ROWS = 264
"""Up to so many rows of more than ``MAX_COLUMNS`` columns are taken in pieces: two for each multiprocessor."""
REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "prod", "argmax", "argmin"})
ARG_REDUCTIONS = frozenset({"argmax", "argmin"})


@dataclass(frozen=True)
class Product:
    """A matrix product ``left @ right``; ``transposed`` says that ``right`` is stored (columns, inner).

    In ``batched`` ones the right operand has leading dimensions too. ``of_pixels``: a convolution with windows of one
    element, weights (channels out, channels in) times the channels of every pixel, for each image of the batch.
    """

    node: Node
    left: str
    right: str
    transposed: bool
    bias: str | None = None
    batched: bool = False
    left_band: Band | None = None
    right_band: Band | None = None
    """Of the right factor as it is stored."""
    result_band: Band | None = None
    of_pixels: bool = False


@dataclass(frozen=True)
class Scan:
    """A running sum or product: the node's name, the value it scans, and the two flips of a scan from the end."""

    name: str
    source: str
    flips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """Nodes that become one kernel. ``dropped`` names values whose trailing dimensions a reduction removed."""

    kind: str
    nodes: tuple[Node, ...]
    shape: tuple[int, ...]
    columns: int
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    dropped: frozenset[str] = frozenset()
    products: tuple[Product, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    window: Window | None = None
    pooled: tuple[Operand, ...] = ()
    """What the window's operators read, aligned to the pooled tensor's shape."""
    resample: Resample | None = None
    scatter: Scatter | None = None
    attention: Attention | None = None
    scan: Scan | None = None
    absorbed: tuple[Node, ...] = ()
    """Nodes that the region stands for without naming their values."""
    cuts: tuple[Node, ...] = ()
    """Cuts into parts that nodes of a mapped region show; parts may be read elsewhere too."""
    order: tuple[int, ...] = ()
    """With a window or resampling: which dimension of its result each dimension of ``shape`` is."""
    gathers: tuple[Gather, ...] = ()
    positions: Mapping[str, tuple[Operand, Position]] = field(default_factory=dict)
    """Integers that are a tile's own indices, by name of the value, with how they lie in the region."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the region's nodes."""
        return frozenset(node.name for node in (*self.nodes, *self.absorbed))


@dataclass(frozen=True)
class Rules:
    """What the planner may do: the knobs that tell variants apart."""

    matmul: bool = True
    shared_left: bool = True
    attention: bool = True
    written_attention: bool = False
    """The library's attention is written out (:mod:`drk.assistant.synth.written_attention`)."""
    row: bool = True
    pool: bool = True
    depthwise: bool = True
    pointwise: bool = True
    gather: bool = True
    atomics: bool = True  # rows of floating-point numbers are added up so, in no fixed order
    pixels: bool = False
    """Convolutions with windows of one element as products with their epilogue."""
    views: bool = True
    """Elementwise kernels read through views (:mod:`drk.assistant.synth.mapped_region`)."""
    excluded: frozenset[str] = frozenset()
    """Names of nodes that must stay torch operators."""


@dataclass(frozen=True)
class Facts:
    """What the planner knows about a graph's values."""

    metas: Mapping[str, TensorMeta]
    users: Mapping[str, tuple[str, ...]]
    order: Mapping[str, int]
    fixed: frozenset[str]
    scalars: Mapping[str, float]
    bands: Mapping[str, Band] = field(default_factory=dict)
    sized: frozenset[str] = frozenset()
    """Nodes that scale by a size of the inputs: they stay torch operators, which can tell it at run time."""
    made: Made = field(default_factory=Made)
    special: frozenset[str] | None = None
    """Names of the nodes that need regions of their own kinds, where that is known."""


def leading_names(nodes: Sequence[Node], source: str) -> frozenset[str]:
    """Names of the nodes that the value ``source`` needs, its own included; ``nodes`` are in graph order."""
    found: set[str] = set()
    wanted = {source}
    for node in reversed(nodes):
        if node.name in wanted:
            found.add(node.name)
            wanted |= set(node.inputs())
    return frozenset(found)


def facts_of(graph: Graph) -> Facts:
    """Collect what :func:`plan` needs to know about a graph."""
    fixed = {item.name for item in graph.placeholders if item.kind != "input"}
    scalars = {p.name: p.value for p in graph.placeholders if not p.meta.shape and isinstance(p.value, int | float)}
    for node in graph.nodes:
        if node.inputs() and set(node.inputs()) <= fixed and node.op != CUT:
            fixed.add(node.name)
    order = {name: index for index, name in enumerate(graph.names())}
    sizes = size_constants(graph)
    sized = frozenset(node.name for node in graph.nodes if sizes.scales(node))
    metas = graph.metas()
    bands, made = bands_of(graph, metas), made_values(graph)
    return Facts(metas, graph.users(), order, frozenset(fixed), scalars, bands, sized, made)


# --- What a node can be --------------------------------------------------------------------------------------


def product_of(node: Node, metas: Mapping[str, TensorMeta]) -> Product | None:
    """Read ``linear``, ``mm``, ``addmm``, ``bmm`` and ``matmul`` of matrices as one form, or return None."""
    name, args = node.bare_op, node.args
    if not node.op.startswith("aten.") or len(node.metas) != 1 or node.metas[0] is None:
        return None
    bias: Any = None
    if name == "linear":
        left, right, transposed = args[0], args[1], True
        bias = args[2] if len(args) > 2 else None
    elif name in {"mm", "matmul", "bmm"}:
        left, right, transposed = args[0], args[1], False
    elif name == "addmm" and not node.kwargs:
        bias, left, right, transposed = args[0], args[1], args[2], False
    else:
        return None
    return _checked(node, metas, (left, right, bias), transposed=transposed)


def _checked(
    node: Node, metas: Mapping[str, TensorMeta], operands: tuple[Any, Any, Any], *, transposed: bool
) -> Product | None:
    left, right, bias = operands
    shapes = [metas.get(item.name) if isinstance(item, Ref) else None for item in (left, right)]
    if any(meta is None or meta.dtype not in FLOATS or len(meta.shape) < 2 for meta in shapes):
        return None
    first, second = metas[left.name], metas[right.name]
    if {first.dtype, second.dtype} != {node.meta.dtype} or node.meta.numel == 0 or first.shape[-1] == 0:
        return None
    batched = len(second.shape) > 2
    if batched and not 3 <= len(node.meta.shape) <= 2 + MAX_BATCH_DIMS:
        return None
    return Product(node, left.name, right.name, transposed, bias.name if isinstance(bias, Ref) else None, batched)


def reduced_dims(node: Node, metas: Mapping[str, TensorMeta]) -> tuple[tuple[int, ...], bool] | None:
    """(dimensions in order, keepdim) of a reduction that kernels can compute, else None."""
    if not node.op.startswith("aten.") or node.bare_op not in REDUCTIONS or len(node.metas) != 1:
        return None
    source = metas.get(node.args[0].name) if node.args and isinstance(node.args[0], Ref) else None
    if source is None or not source.shape or node.metas[0] is None or source.dtype not in FLOATS:
        return None
    extra = set(node.kwargs) - {"correction", "keepdim", "dim"}
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    place = node.bare_op in ARG_REDUCTIONS
    if extra or node.meta.dtype != ("int64" if place else source.dtype):
        return None
    if node.bare_op == "var" and (node.op != "aten.var.correction" or node.kwargs.get("correction") not in (0, 1)):
        return None
    rank = len(source.shape)
    if dims is None or dims == ():
        if node.bare_op == "prod" or (place and rank > 1):
            return None
        dims = tuple(range(rank))
    wanted = tuple(sorted(dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,))))
    keep = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    return wanted, keep is True


# --- Regions -------------------------------------------------------------------------------------------------


def build_region(nodes: list[Node], facts: Facts, rules: Rules) -> Region | None:
    """Return the region of ``nodes`` (in graph order), or None when no kernel can compute them together."""
    inside = {node.name for node in nodes}
    products = [item for item in (product_of(node, facts.metas) for node in nodes) if item is not None]
    reductions = [(node, dims) for node in nodes if (dims := reduced_dims(node, facts.metas)) is not None]
    if (products and reductions) or not _products_agree(products, inside, facts, rules):
        return None
    if products:
        product_shape = products[0].node.meta.shape
        frame: Frame | None = Frame(product_shape, tuple(range(len(product_shape))), 1)
    else:
        frame = choose_frame(nodes, reductions, facts.metas, facts.users)
    if frame is None:
        return None
    kind = "matmul" if products else "row" if reductions else "pointwise"
    dropped = dropped_names(nodes, reductions, inside, facts)
    if dropped is None:
        return None
    inputs = region_inputs(nodes, inside, frame, dropped, facts, products)
    outputs = region_outputs(nodes, inside, frame, dropped, facts)
    if inputs is None or outputs is None or len(inputs) + len(outputs) > MAX_OPERANDS:
        return None
    shape, columns = frame.shape, frame.columns
    if kind == "row" and rows_in_pieces(shape, columns, inputs):
        kind = "split"
        if _walks_apart(nodes, frame, inputs, outputs):
            return None
    used = {name for node in nodes for name in node.inputs()}
    scalars = {name: value for name, value in facts.scalars.items() if name in used}
    made = Made() if products else facts.made
    read, positions, numbers = known_operands(nodes, shape, inputs, made)
    scalars |= numbers
    own = tuple(products)
    return Region(kind, tuple(nodes), shape, columns, read, outputs, dropped, own, scalars, positions=positions)


def rows_in_pieces(shape: tuple[int, ...], columns: int, inputs: tuple[Operand, ...]) -> bool:
    """Whether rows are too few to keep the device busy with one program each, or too long to be walked by one.

    Long rows whose elements are to be found by division are taken in pieces however many they are: tiles of pieces
    stay inside the groups of columns.
    """
    edge = len(shape) - columns
    n_rows, n_cols = math.prod(shape[:edge]), math.prod(shape[edge:])
    if any(transposed(item, columns) for item in inputs):
        return n_cols > MAX_TRANSPOSED
    if n_cols > MAX_COLUMNS:
        return n_rows <= FEW_LONG_ROWS or len(fold(shape, columns, list(inputs)).cols) > 1
    return n_cols >= FEW_ROWS_COLUMNS and n_rows <= FEW_ROWS


def _walks_apart(nodes: list[Node], frame: Frame, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]) -> bool:
    """Whether full results of a region in pieces are better made by a kernel that walks as they lie in memory.

    They are where an element's place is to be found by division, or the reduced dimensions of an image are not
    innermost; the other kernel can then take more of what follows (pooling, another reduction). Reductions of
    reductions stay in one region: the later ones go over the tiles in any case.
    """
    edge = len(frame.shape) - frame.columns
    reduced: set[str] = set()
    for node in nodes:
        depends = any(name in reduced for name in node.inputs())
        if node.bare_op in REDUCTIONS and depends:
            return False
        if node.bare_op in REDUCTIONS or depends:
            reduced.add(node.name)
    if not any(item.value in reduced and any(item.varies[edge:]) for item in outputs):
        return False
    turned = len(frame.shape) >= 4 and any(transposed(item, frame.columns) for item in inputs)
    return turned or len(fold(frame.shape, frame.columns, [*inputs, *outputs]).cols) > 1


def _products_agree(products: list[Product], inside: set[str], facts: Facts, rules: Rules) -> bool:
    if not products:
        return True
    if len(products) > (2 if rules.shared_left else 1):
        return False
    if any(item.left in inside or item.right in inside for item in products):
        return False
    first = products[0]
    shape = facts.metas[first.right].shape
    return all(
        item.left == first.left and item.transposed == first.transposed and facts.metas[item.right].shape == shape
        for item in products
    )


def dropped_names(
    nodes: list[Node], reductions: list[tuple[Node, tuple[tuple[int, ...], bool]]], inside: set[str], facts: Facts
) -> frozenset[str] | None:
    """Names of values without their reduced dimensions; None when they meet values that have them."""
    dropped = {node.name for node, (_, keep) in reductions if not keep}
    reducing = {node.name for node, _ in reductions}
    for node in nodes:
        if node.name in reducing:
            if node.args[0].name in dropped:
                return None
            continue
        operands = [name for name in node.inputs() if facts.metas[name].shape]
        if any(name in dropped for name in operands):
            if any(name in inside and name not in dropped for name in operands):
                return None
            dropped.add(node.name)
    return frozenset(dropped)


def region_inputs(
    nodes: list[Node],
    inside: set[str],
    frame: Frame,
    dropped: frozenset[str],
    facts: Facts,
    products: list[Product],
) -> tuple[Operand, ...] | None:
    """What ``nodes`` read from outside, aligned to ``frame``; None when something does not fit."""
    found: dict[str, Operand] = {}
    for node in nodes:
        missing = node.name in dropped
        product = next((item for item in products if item.node is node), None)
        reads = False if reduced_dims(node, facts.metas) else missing
        names = ([product.bias] if product.bias else []) if product else list(node.inputs())
        for name in names:
            if name in inside or name in facts.scalars:
                continue
            operand = frame.place(name, facts.metas[name], dropped=reads, fixed=name in facts.fixed)
            if operand is None or found.setdefault(name, operand) != operand:
                return None
        if frame.place(node.name, node.meta, dropped=missing) is None:
            return None
    return tuple(found.values())


def region_outputs(
    nodes: list[Node], inside: set[str], frame: Frame, dropped: frozenset[str], facts: Facts
) -> tuple[Operand, ...] | None:
    """Operands that leave the region: full ones, or in row regions one value per row."""
    found: list[Operand] = []
    shape = frame.shape
    edge = len(shape) - frame.columns
    for node in nodes:
        if all(user in inside for user in facts.users[node.name]):
            continue
        meta = node.meta
        if memory_order(meta) is None:
            meta = contiguous_meta(meta.shape, meta.dtype)
        operand = frame.place(node.name, meta, dropped=node.name in dropped)
        if operand is None:
            return None
        sizes = tuple(1 if axis is None else meta.shape[axis] for axis in operand.axes)
        per_row = sizes != shape and sizes == shape[:edge] + (1,) * frame.columns
        if sizes != shape and not per_row:
            return None
        varies = tuple(index < edge or not per_row for index in range(len(shape)))
        found.append(replace(operand, varies=varies))
    return tuple(found)
