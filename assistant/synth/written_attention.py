"""The library's attention written out, so that a kernel of this project can take its place.

``scaled_dot_product_attention`` is the library's best operator, and often the best there is. Where a module is nothing
else, or computes in float32, an attention kernel (:mod:`drk.assistant.synth.attention`) is worth a try all the same:
variants with the rule ``written_attention`` have each call as a product, a scale, a softmax and a second product.

A query that a mask leaves no key gives zeros, as it does in the library: with a mask the softmax is a safe one.

Left out: dropout, and grouped heads.
"""

from __future__ import annotations

import math
from dataclasses import replace

from drk.assistant.synth.draft import contiguous_meta, fresh_name
from drk.assistant.synth.expression import FLOATS
from drk.gym.graph import Graph, Node, Ref, Symbol, TensorMeta


def is_library_attention(node: Node) -> bool:
    """Whether ``node`` is attention that :func:`with_written_attention` may write out."""
    if node.op != "aten.scaled_dot_product_attention.default" or len(node.metas) != 1 or node.metas[0] is None:
        return False
    dropout = _given(node, 4, "dropout_p", 0.0)
    return dropout == 0.0 and not node.kwargs.get("enable_gqa") and node.meta.dtype in FLOATS


def mask_of(node: Node) -> Ref | None:
    """Return the mask that attention is given, if any."""
    mask = _given(node, 3, "attn_mask", None)
    return mask if isinstance(mask, Ref) else None


def _given(node: Node, index: int, name: str, default: object) -> object:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def with_written_attention(graph: Graph) -> Graph:
    """Return the graph with the library's attention as products and a softmax."""
    metas = graph.metas()
    taken = set(graph.names())
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _written(node, metas, taken) if is_library_attention(node) else [node]
    return replace(graph, nodes=tuple(nodes))


def _written(node: Node, metas: dict[str, TensorMeta], taken: set[str]) -> list[Node]:
    query, key, value = (metas[item.name] for item in node.args[:3])
    shapes = {meta.shape[:-2] for meta in (query, key, value)}
    mask = mask_of(node)
    if len(shapes) != 1 or not 3 <= len(query.shape) <= 4:
        return [node]
    if mask is not None and metas[mask.name].dtype not in {"bool", query.dtype}:
        return [node]
    made: list[Node] = []

    def emit(op: str, args: tuple[object, ...], meta: TensorMeta, **kwargs: object) -> Ref:
        name = fresh_name(f"{op.split('.')[0]}_of_attention", taken)
        made.append(replace(node, name=name, op=f"aten.{op}", args=args, kwargs=kwargs, metas=(meta,)))
        return Ref(name)

    rank, rows, columns = len(query.shape), query.shape[-2], key.shape[-2]
    whole = contiguous_meta((*query.shape[:-1], columns), query.dtype)
    turned = replace(
        key,
        shape=(*key.shape[:-2], *key.shape[:-3:-1]),
        strides=(*key.strides[:-2], *key.strides[:-3:-1]),
    )
    keys = emit("transpose.int", (node.args[1], rank - 2, rank - 1), turned)
    scores = emit("matmul.default", (node.args[0], keys), whole)
    scale = node.kwargs.get("scale")
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = emit("mul.Tensor", (scores, factor), whole)
    if _given(node, 5, "is_causal", False) is True:
        square = contiguous_meta((rows, columns), "bool")
        kinds = {"dtype": Symbol("dtype", "bool"), "device": Symbol("device", "cuda")}
        future = emit("triu.default", (emit("ones.default", ((rows, columns),), square, **kinds), 1), square)
        scores = emit("masked_fill.Scalar", (scores, future, -math.inf), whole)
    if mask is not None and metas[mask.name].dtype == "bool":
        scores = emit("where.ScalarOther", (mask, scores, -math.inf), whole)
    elif mask is not None:
        scores = emit("add.Tensor", (scores, mask), whole)
    weights = emit("_safe_softmax.default" if mask else "softmax.int", (scores, -1), whole)
    return [*made, replace(node, op="aten.matmul.default", args=(weights, node.args[2]), kwargs={})]
