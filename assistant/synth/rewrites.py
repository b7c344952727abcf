"""Graph rewrites that hold for all inputs: the algebra before fusion.

In order: operators that do nothing are dropped (dropout in eval mode, detach, same-dtype casts, same-shape views);
normalisations and softmax over trailing dimensions are written out as reductions and pointwise operators, so that they
fuse with what stands around them; eval-mode batch norm becomes a scale and a shift per channel; equal subexpressions
are computed once; dead nodes go.

Left out: anything that reorders floating-point sums (folding a norm into the next matrix product, say). Nodes that are
made here use ordinary ATen operators, so that they can still be emitted as torch code when no kernel takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.bags import equal_bags
from drk.assistant.synth.decompositions import DECOMPOSITIONS, through_split
from drk.assistant.synth.draft import Draft
from drk.assistant.synth.dtype_rules import in_asked_type
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.train_norms import updating_batch_norms
from drk.gym.graph import Graph, Node, Ref, TensorMeta


def rewrite(graph: Graph, *, by_channel: bool = False, channels_last: bool = False) -> Graph:
    """Return an equivalent graph that fuses better. See the module's docstring for the rules.

    ``by_channel``, for inference, lets norms over whole images be written by channel, which ``channels_last`` tensors
    need, and bags of equal length as gathers.
    """
    graph = equal_bags(graph) if by_channel else updating_batch_norms(graph)
    users = graph.users()
    inputs = {item.name for item in graph.placeholders}
    taken = inputs | {node.name for node in graph.nodes}
    draft = Draft(graph.metas(), taken=taken, users=users, by_channel=by_channel, channels_last=channels_last)
    by_name = {node.name: node for node in graph.nodes}
    seen: dict[str, str] = {}
    for original in graph.nodes:
        node = replace(
            original,
            args=draft.resolve(original.args),
            kwargs={key: draft.resolve(value) for key, value in original.kwargs.items()},
        )
        same = _identity_source(node, draft.metas) or _needless_expand(node, users[node.name], by_name, draft.metas)
        if same is not None and not ("output" in users[node.name] and same in inputs):
            draft.renamed[node.name] = same
            continue
        node = in_asked_type(node, draft)
        fingerprint = repr((node.op, node.args, sorted(node.kwargs.items())))
        if fingerprint in seen and not any(word in node.op for word in _RANDOM):
            draft.renamed[node.name] = seen[fingerprint]
            continue
        rule = DECOMPOSITIONS.get(node.bare_op)
        written_out = rule(node, draft) if rule else None
        if written_out is None and is_pointwise(node, draft.metas):
            written_out = through_split(node, draft)
        if written_out is not None:
            draft.renamed[node.name] = seen[fingerprint] = written_out.name
            continue
        seen[fingerprint] = node.name
        draft.nodes.append(node)
    output = draft.resolve(graph.output)
    mutations = {key: draft.renamed.get(name, name) for key, name in graph.mutations.items()}
    return without_dead(replace(graph, nodes=tuple(draft.nodes), output=output, mutations=mutations))


_RANDOM = ("rand", "drop", "bernoulli", "normal", "multinomial", "uniform", "exponential", "geometric", "poisson")


def without_dead(graph: Graph) -> Graph:
    """Return the graph without nodes that nothing reads."""
    users = {name: set(names) for name, names in graph.users().items()}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if users[node.name]:
            kept.append(node)
            continue
        for name in node.inputs():
            users[name].discard(node.name)
    return replace(graph, nodes=tuple(reversed(kept)))


# --- Operators that do nothing -------------------------------------------------------------------------------


def _identity_source(node: Node, metas: Mapping[str, TensorMeta]) -> str | None:
    """Name of the value that ``node`` merely repeats, or None."""
    if not node.args or not isinstance(node.args[0], Ref):
        return None
    source, name = node.args[0], node.bare_op
    if node.op == "getitem" or len(node.metas) != 1 or node.metas[0] is None or source.name not in metas:
        return None
    before, after = metas[source.name], node.metas[0]
    if name == "alias" and before.shape:
        return None  # a slice of a buffer that may be shorter at other sizes
    if name in {"detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy"}:
        return source.name
    if name == "dropout" or name.endswith("_dropout"):
        return source.name if len(node.args) > 2 and (node.args[2] is False or node.args[1] == 0) else None
    unchanged = before.shape == after.shape and before.dtype == after.dtype
    if name in {"sum", "mean", "amax", "amin", "logsumexp"} and unchanged and len(node.args) > 1:
        dims = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        single = before.dtype in FLOATS and all(isinstance(dim, int) and before.shape[dim] == 1 for dim in dims)
        return source.name if dims and single else None
    if name in {"clone", "to", "_to_copy", "contiguous", "type_as"}:
        return source.name if unchanged and before.strides == after.strides else None
    if name in {"view", "reshape", "expand", "_unsafe_view", "flatten", "squeeze"}:
        return source.name if unchanged else None
    return None


def _needless_expand(
    node: Node, users: tuple[str, ...], by_name: Mapping[str, Node], metas: Mapping[str, TensorMeta]
) -> str | None:
    """Source of an ``expand`` that pointwise users do by themselves, since another operand has the full shape."""
    if node.bare_op not in {"expand", "expand_as"} or not isinstance(node.args[0], Ref):
        return None
    for user in users:
        other = by_name.get(user)
        if other is None or not is_pointwise(other, metas):
            return None
        shapes = [metas[name].shape for name in other.inputs() if name != node.name]
        if other.meta.shape not in shapes:
            return None
    return node.args[0].name
