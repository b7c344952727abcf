"""Makes an exported graph plain: blocks under a context are written out, in-place operators become functional.

``torch.export`` keeps ``with torch.no_grad()`` and ``with torch.autocast(...)`` as calls of graphs of their own; the
nodes of those take the call's place here. What autocast computes in its dtype is remembered
(:data:`AUTOCAST` in a node's ``meta``), since the graph does not show the casts.

``torch.export`` also has a pass that makes graphs functional: it traces them once more, which takes longer than the
export. Most in-place operators need none of that: an activation's or a residual sum's ``relu_`` or ``add_`` changes a
tensor that the operator before has just made, and that no view is read of later. Such operators are replaced by their
functional namesakes, and whoever reads the changed tensor reads the new one.

Left out, for the export's own pass: changes of inputs, parameters, buffers, views, and of tensors of which a view made
before is read later; casts that the functional form would not make.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

AUTOCAST = "drk_autocast"
"""Key in a node's ``meta``: the name of the dtype of the autocast block that the node was written in."""

# fmt: off
_FRESH = frozenset((
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "linear",
    "matmul", "mm", "bmm", "addmm", "baddbmm", "add", "sub", "mul", "div", "neg", "pow", "exp", "sqrt",
    "rsqrt", "sigmoid", "tanh", "relu", "gelu", "silu", "elu", "leaky_relu", "softmax", "log_softmax", "mean", "sum",
    "layer_norm", "group_norm", "rms_norm", "batch_norm", "cat", "stack", "where", "zeros", "ones", "full", "empty",
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "clone", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "scaled_dot_product_attention", "embedding", "arange", "cumsum", "masked_fill", "index_add", "scatter",
    "scatter_add", "eq", "ne", "lt", "le", "gt", "ge", "clamp", "abs", "hardtanh", "hardswish", "hardsigmoid", "relu6",
))
# fmt: on
"""Operators (bare names) whose result always is a new tensor that shares memory with nothing.

``einsum`` is none: where it only permutes it returns a view.
"""
# fmt: off
_IN_PLACE = frozenset((
    "relu_", "relu6_", "leaky_relu_", "elu_", "selu_", "celu_", "silu_", "mish_", "gelu_", "sigmoid_", "tanh_",
    "hardtanh_", "hardswish_", "hardsigmoid_", "threshold_", "add_", "sub_", "mul_", "div_", "clamp_", "clamp_min_",
    "clamp_max_", "exp_", "log_", "sqrt_", "rsqrt_", "reciprocal_", "square_", "pow_", "neg_", "abs_", "sin_", "cos_",
    "addcmul_", "addcdiv_", "lerp_", "masked_fill_", "tril_", "triu_", "index_put_", "index_add_", "scatter_",
    "scatter_add_",
))
# fmt: on
"""In-place operators whose namesake computes the same for floating tensors of one type."""
_BLOCKS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Calls of graphs, and which of their arguments is the graph."""


def write_out_blocks(program: torch.export.ExportedProgram) -> None:
    """Put the nodes of ``no_grad`` and ``autocast`` blocks in the place of the calls, blocks in blocks too."""
    if not _write_out_calls(program.graph_module):
        return
    results = next(node for node in program.graph.nodes if node.op == "output").args[0]
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(node, fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = node.name


def _write_out_calls(module: fx.GraphModule) -> bool:
    """Write out the blocks that ``module`` calls; whether there were any."""
    graph, found = module.graph, False
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        at = _BLOCKS.get(node.target.__name__)
        if at is None:
            continue
        inner = getattr(module, str(node.args[at].target))
        _write_out_calls(inner)
        _write_out(graph, node, inner, list(node.args[at + 1 :]), _autocast_of(node) if at == 4 else None)
        found = True
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    return found


def _autocast_of(node: fx.Node) -> str:
    """Name of the dtype that a block's autocast computes in, or an empty text where it is off."""
    kind, dtype, enabled = node.args[:3]
    if not enabled:
        return ""
    chosen = torch.get_autocast_dtype(str(kind)) if dtype is None else dtype
    return str(chosen).removeprefix("torch.")


def _write_out(
    graph: fx.Graph, call: fx.Node, inner: fx.GraphModule, operands: list[Any], autocast: str | None
) -> None:
    table: dict[fx.Node, Any] = {}
    given = iter(operands)
    result: Any = None
    with graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                table[node] = next(given)
            elif node.op == "output":
                result = fx.map_arg(node.args[0], lambda item: table[item])
            else:
                table[node] = copied = graph.node_copy(node, lambda item: table[item])
                if autocast is not None:
                    copied.meta.setdefault(AUTOCAST, autocast)
    for user in list(call.users):
        if user.target is not operator.getitem:
            user.replace_input_with(call, result)
            continue
        user.replace_all_uses_with(result[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)


def mutates(graph: fx.Graph) -> bool:
    """Whether an operator of ``graph`` changes a tensor."""
    return any(_changes(node) for node in graph.nodes)


def _changes(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._schema.is_mutable and _bare(node) != "detach_":
        return True
    return _bare(node) in {"batch_norm", "instance_norm"} and True in node.args[5:6]


def size_by_values(node: fx.Node) -> bool:
    """Whether the shape of ``node``'s result depends on values of what it reads, as that of ``nonzero`` does."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in node.target.tags:
        return False
    if _bare(node) != "index":
        return True
    masks = [item.meta.get("val") for item in node.all_input_nodes[1:]]
    return any(isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in masks)


def make_functional(graph: fx.Graph) -> bool:
    """Replace in-place operators where that is plain (see above); whether none are left.

    A graph of which this says False is as it was.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    changing = [node for node in graph.nodes if _changes(node)]
    sharing: dict[fx.Node, list[fx.Node]] = {}
    """A tensor and the in-place operators that have changed it, under each of them: all are the same memory."""
    for node in changing:
        target = node.args[0] if node.args else None
        if not isinstance(target, fx.Node) or functional_namesake(node) is None or not _same_dtype(node, target):
            return False
        names = sharing.setdefault(target, [target])
        if not _is_fresh(names[0]) or any(_viewed(name, order, order[node]) for name in names):
            return False
        names.append(node)
        sharing[node] = names
    for node in changing:
        _replace(node, order)
    return True


def _viewed(name: fx.Node, order: dict[fx.Node, int], place: int) -> bool:
    """Whether something made of ``name`` before ``place``, which may be a view of it, is read behind ``place``."""
    users = [user for user in name.users if order[user] < place and not _is_fresh(user) and not _changes(user)]
    return any(order[reader] > place for user in users for reader in user.users) or any(
        _viewed(user, order, place) for user in users
    )


def functional_namesake(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return ``relu`` for ``relu_``: the overload with the same arguments, or None."""
    target: Any = node.target
    if target.namespace != "aten" or _bare(node) not in _IN_PLACE:
        return None
    packet = getattr(torch.ops.aten, _bare(node)[:-1])
    overload = getattr(packet, target.__name__.split(".")[-1], None)
    if not isinstance(overload, torch._ops.OpOverload):
        return None
    own, others = ([(item.name, str(item.type)) for item in op._schema.arguments] for op in (target, overload))
    return overload if own == others else None


def _same_dtype(node: fx.Node, target: fx.Node) -> bool:
    """Whether no operand is of another type than the changed tensor, which would make it the result's."""
    own = target.meta.get("val")
    if not isinstance(own, torch.Tensor) or not own.is_floating_point():
        return False
    others = [item.meta.get("val") for item in node.all_input_nodes if item is not target]
    kinds = [item.dtype for item in others if isinstance(item, torch.Tensor) and item.is_floating_point()]
    return all(kind == own.dtype for kind in kinds) and not any(isinstance(item, complex) for item in node.args)


def _is_fresh(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _bare(node) in _FRESH


def _replace(node: fx.Node, order: dict[fx.Node, int]) -> None:
    """Put the functional form in the place of ``node``; whoever reads the changed tensor later reads its result."""
    target: Any = node.args[0]
    node.target = functional_namesake(node)  # type: ignore[assignment]
    for user in list(target.users):
        if order[user] > order[node]:
            user.replace_input_with(target, node)


def _bare(node: fx.Node) -> str:
    target: Any = node.target
    return str(target.overloadpacket.__name__)
