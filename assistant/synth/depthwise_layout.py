"""Which layout a graph with depthwise convolutions is tried in first.

Kernels of such convolutions are bound by memory, whichever way tensors lie; what a layout costs is the copy into it.
So row-major images stay so, unless what stands behind the convolution wants channels innermost: a norm over channels,
or a permutation that puts them there.

Left out: what other convolutions gain from channels-last tensors in half precision; there that layout stays first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from drk.assistant.synth.expression import is_pointwise
from drk.assistant.synth.frames import is_channels_last
from drk.assistant.synth.regions import reduced_dims
from drk.assistant.synth.windows import Window, window_of
from drk.gym.graph import Graph, Node, TensorMeta

Item = TypeVar("Item")


def row_major_first(graph: Graph) -> bool:
    """Whether a graph has depthwise convolutions and is better tried without channels-last tensors first."""
    metas, users = graph.metas(), graph.users()
    by_name = {node.name: node for node in graph.nodes}
    windows = [item for node in graph.nodes if (item := window_of(node, metas)) is not None and item.weight is not None]
    if not windows or any(_half_convolution(node, windows) for node in graph.nodes):
        return False
    if any(is_channels_last(metas[window.source]) for window in windows):
        return False
    return not any(_wants_channels(window.node, by_name, users, metas) for window in windows)


def swapped(pairs: Sequence[Item]) -> list[Item]:
    """Return neighbours in the other order, two by two; a last one without neighbour stays."""
    found = list(pairs)
    for place in range(0, len(found) - 1, 2):
        found[place], found[place + 1] = found[place + 1], found[place]
    return found


def innermost_channels(node: Node) -> bool:
    """Whether ``node`` is the permutation that puts channels last."""
    if node.bare_op != "permute" or len(node.metas) != 1 or node.metas[0] is None:
        return False
    rank = len(node.metas[0].shape)
    return rank in (4, 5) and tuple(dim % rank for dim in node.args[1]) == (0, *range(2, rank), 1)


def _half_convolution(node: Node, windows: Sequence[Window]) -> bool:
    """Whether ``node`` is a convolution of other kind in half precision."""
    convolution = node.op.startswith("aten.conv") and len(node.metas) == 1 and node.metas[0] is not None
    return convolution and node.meta.dtype != "float32" and all(node is not item.node for item in windows)


def _wants_channels(
    node: Node,
    by_name: Mapping[str, Node],
    users: Mapping[str, tuple[str, ...]],
    metas: Mapping[str, TensorMeta],
) -> bool:
    """Whether pointwise operators lead from ``node`` to what goes over channels."""
    for name in users[node.name]:
        reader = by_name.get(name)
        if reader is None:
            continue
        dims = reduced_dims(reader, metas)
        if innermost_channels(reader) or (dims is not None and dims[0] == (1,)):
            return True
        if is_pointwise(reader, metas) and _wants_channels(reader, by_name, users, metas):
            return True
    return False
