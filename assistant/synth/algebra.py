"""Algebra that saves a matrix product: a sum over the columns of ``x W`` is ``x`` times the sum of ``W``'s columns.

``(x W + b).sum(-1) == x @ W.sum(columns) + b.sum()`` holds for all inputs; the product of two matrices becomes one of a
matrix and a vector, written as a multiplication and a row sum that fuse with what follows. Means are sums over a
count. Sums over dimensions of size 1 are the value itself.

Left out: dtypes other than float32 (the vector would be rounded to half precision before use), and products that
something else reads too. The sum is taken in another order than the reference's: results differ by round-off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import contiguous_meta
from drk.assistant.synth.frames import MAX_COLUMNS
from drk.assistant.synth.regions import Product, product_of, reduced_dims
from drk.gym.graph import Graph, Node, Ref, TensorMeta


def thin_products(graph: Graph) -> Graph:
    """Return the graph with summed matrix products written as thin ones."""
    metas, users = graph.metas(), graph.users()
    products = {node.name: item for node in graph.nodes if (item := product_of(node, metas)) is not None}
    nodes: list[Node] = []
    for node in graph.nodes:
        source = node.args[0].name if node.args and isinstance(node.args[0], Ref) else ""
        product = products.get(source)
        if product is None or users[source] != (node.name,) or not _sums_columns(node, product, metas):
            nodes.append(node)
            continue
        nodes += _thin(node, product, metas)
    return _without_unread(replace(graph, nodes=tuple(nodes)), products)


def _sums_columns(node: Node, product: Product, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether ``node`` adds up, or averages, exactly the columns of a float32 product."""
    reduced = reduced_dims(node, metas)
    last = len(product.node.meta.shape) - 1
    if node.bare_op not in {"sum", "mean"} or reduced is None or reduced[0] != (last,):
        return False
    inner = metas[product.left].shape[-1]
    bias = metas[product.bias] if product.bias else None
    columns = product.node.meta.shape[-1]
    plain_bias = bias is None or bias.shape == (columns,)
    plain = plain_bias and not product.batched and product.node.meta.dtype == "float32"
    return plain and 2 <= inner <= MAX_COLUMNS and columns > 1


def _thin(node: Node, product: Product, metas: Mapping[str, TensorMeta]) -> list[Node]:
    """The nodes that replace the reduction ``node`` of ``product``; the last one bears its name."""
    left, columns = metas[product.left], product.node.meta.shape[-1]
    reduced = reduced_dims(node, metas)
    keep = reduced is not None and reduced[1]
    found: list[Node] = []

    def emit(hint: str, op: str, args: tuple[object, ...], shape: tuple[int, ...]) -> Ref:
        meta = contiguous_meta(shape, "float32")
        made = replace(node, name=f"{node.name}_{hint}", op=f"aten.{op}", args=args, kwargs={}, metas=(meta,))
        found.append(made)
        return Ref(made.name)

    axis = 0 if product.transposed else 1
    vector = emit("column_sum", "sum.dim_IntList", (Ref(product.right), (axis,), False), (left.shape[-1],))
    scaled = emit("scaled", "mul.Tensor", (Ref(product.left), vector), left.shape)
    result = emit("dot", "sum.dim_IntList", (scaled, (-1,), keep), node.meta.shape)
    if product.bias:
        offset = emit("bias_sum", "sum.dim_IntList", (Ref(product.bias), (0,), True), (1,))
        result = emit("shifted", "add.Tensor", (result, offset), node.meta.shape)
    if node.bare_op == "mean":
        emit("average", "div.Tensor", (result, float(columns)), node.meta.shape)
    found[-1] = replace(found[-1], name=node.name)
    return found


def _without_unread(graph: Graph, products: Mapping[str, Product]) -> Graph:
    """Drop the products that nothing reads any more."""
    users = graph.users()
    return replace(graph, nodes=tuple(n for n in graph.nodes if n.name not in products or users[n.name]))
