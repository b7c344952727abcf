"""Training-mode batch norms as the one operator that updates its running statistics itself.

Export makes ``forward`` functional: a batch norm in training becomes an operator with five results, two of which are
written into the buffers afterwards. PyTorch's own ``batch_norm`` does both at once and reaches cuDNN, so the pair is
put back together here.

Left out: a norm whose running statistics are used in any other way (the same module called twice, say). It stays as
export wrote it, and the emitted module copies the new values into its buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.gym.graph import Graph, Node, Ref

_NAME = "_native_batch_norm_legit_functional"
_NEW_STATISTICS = (3, 4)
"""Which results hold the new running mean and variance; result 0 is the normalised tensor."""


def updating_batch_norms(graph: Graph) -> Graph:
    """Return the graph with functional batch norms replaced by ``aten.batch_norm`` where that means the same."""
    users = graph.users()
    picked = {(node.args[0].name, node.args[1]): node for node in graph.nodes if node.op == "getitem"}
    paths = {item.name: item.path for item in graph.placeholders if item.kind == "buffer"}
    mutations = dict(graph.mutations)
    replaced: dict[str, Node | None] = {}
    for node in graph.nodes:
        if node.bare_op != _NAME or not _writes_back(node, picked, paths, mutations, users):
            continue
        output = picked[node.name, 0]
        args = (*node.args[:8], True)
        replaced[node.name] = None
        replaced[output.name] = replace(
            node, name=output.name, op="aten.batch_norm.default", args=args, metas=output.metas
        )
        for index in _NEW_STATISTICS:
            replaced[picked[node.name, index].name] = None
            del mutations[paths[node.args[index].name]]
    nodes = (replaced.get(node.name, node) for node in graph.nodes)
    return replace(graph, nodes=tuple(node for node in nodes if node is not None), mutations=mutations)


def _writes_back(
    node: Node,
    picked: Mapping[tuple[str, int], Node],
    paths: Mapping[str, str],
    mutations: Mapping[str, str],
    users: Mapping[str, tuple[str, ...]],
) -> bool:
    """Whether the statistics are buffers that only this node reads and that take exactly its new values."""
    for index in _NEW_STATISTICS:
        old, new = node.args[index], picked.get((node.name, index))
        if not isinstance(old, Ref) or old.name not in paths or new is None:
            return False
        if users[old.name] != (node.name,) or users[new.name] != ("output",):
            return False
        if mutations.get(paths[old.name]) != new.name:
            return False
    read = {index for (name, index), item in picked.items() if name == node.name and users[item.name]}
    return read == {0, *_NEW_STATISTICS}
