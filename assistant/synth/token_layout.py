"""Images as sequences of tokens (``x.flatten(2).transpose(1, 2)``), said so that channels-last images lie right for it.

What is flattened and transposed is a permutation that puts channels last, and a view: in channels-last layout neither
moves an element, and tokens lie one after the other. As it is written the flattened image has to be row-major first.

Left out: other ways to come from images to tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import fresh_name
from drk.assistant.synth.rewrites import without_dead
from drk.gym.graph import Graph, Node, Ref, TensorMeta

_FLATTENING = frozenset({"flatten", "reshape", "view"})


def with_permuted_tokens(graph: Graph) -> Graph:
    """Return the graph with tokens taken from permuted images."""
    metas, taken = graph.metas(), set(graph.names())
    by_name = {node.name: node for node in graph.nodes}
    nodes: list[Node] = []
    for node in graph.nodes:
        image = _image(node, by_name, metas)
        if image is None:
            nodes.append(node)
            continue
        meta = metas[image]
        order = (0, *range(2, len(meta.shape)), 1)
        turned = TensorMeta(
            tuple(meta.shape[axis] for axis in order), meta.dtype, tuple(meta.strides[axis] for axis in order)
        )
        name = fresh_name(f"{node.name}_pixels", taken)
        args = (Ref(image), order)
        nodes.append(replace(node, name=name, op="aten.permute.default", args=args, kwargs={}, metas=(turned,)))
        nodes.append(replace(node, op="aten.reshape.default", args=(Ref(name), node.meta.shape), kwargs={}))
    return without_dead(replace(graph, nodes=tuple(nodes)))


def _image(node: Node, by_name: Mapping[str, Node], metas: Mapping[str, TensorMeta]) -> str | None:
    """The row-major image whose pixels ``node`` has as tokens, or None."""
    rank = 3
    turns = node.op == "aten.transpose.int" and {dim % rank for dim in node.args[1:3]} == {1, 2}
    turns = turns or (node.op == "aten.permute.default" and tuple(dim % rank for dim in node.args[1]) == (0, 2, 1))
    if not turns or len(node.metas) != 1 or node.metas[0] is None or len(node.meta.shape) != rank:
        return None
    flat = by_name.get(node.args[0].name)
    if flat is None or flat.bare_op not in _FLATTENING or not isinstance(flat.args[0], Ref):
        return None
    image = metas.get(flat.args[0].name)
    whole = image is not None and len(image.shape) in (4, 5) and image.contiguous
    return flat.args[0].name if whole and image is not None and flat.meta.shape[:2] == image.shape[:2] else None
