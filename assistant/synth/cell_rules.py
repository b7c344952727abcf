"""Recurrent cells written out: two layers over input and state, then the gates as elementwise operators.

PyTorch computes the gates of ``GRUCell``, ``LSTMCell`` and ``RNNCell`` in one operator of its own on a GPU, behind two
matrix products. Written out the second product takes the first one's result in its epilogue, or the gates join one
kernel. Formulas are those of the PyTorch documentation. Rules have the form that
:mod:`drk.assistant.synth.decompositions` describes; they are for inference.

Left out: whole recurrent layers (``nn.LSTM``, ``nn.GRU``), which stay with the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.reduction_rules import Rule
from drk.gym.graph import Node, Ref


def _layers(node: Node, draft: Draft, state: Ref) -> tuple[Ref, Ref] | None:
    """What input and state weigh in at the gates; None for types that kernels do not take."""
    x, _, *weights = node.args
    weights = [*weights, None, None][:4]
    operands = [item for item in (x, state, *weights) if item is not None]
    metas = [draft.metas.get(item.name) for item in operands]
    known = [meta for meta in metas if meta is not None and meta.dtype in FLOATS]
    if not draft.by_channel or len(known) != len(operands) or len({meta.dtype for meta in known}) != 1:
        return None
    made = [_layer(node, draft, source, weights[i], weights[2 + i]) for i, source in enumerate((x, state))]
    return made[0], made[1]


def _layer(node: Node, draft: Draft, source: Ref, weight: Any, bias: Any) -> Ref:
    meta = draft.metas[source.name]
    wide = contiguous_meta((*meta.shape[:-1], draft.metas[weight.name].shape[0]), meta.dtype)
    args = (source, weight) if bias is None else (source, weight, bias)
    return draft.append(replace(node, op="aten.linear.default", args=args, kwargs={}, metas=(wide,)), "gates")


def _parts(node: Node, draft: Draft, gates: Ref, count: int) -> list[Ref]:
    """The gates, which stand side by side in the last dimension."""
    rank = len(draft.metas[gates.name].shape)
    size = draft.metas[gates.name].shape[-1] // count
    return [draft.emit(node, "gate", "slice.Tensor", gates, rank - 1, i * size, (i + 1) * size) for i in range(count)]


def _of(node: Node, draft: Draft, function: str, *operands: Ref) -> Ref:
    """``function`` of a value, or of the sum of two."""
    value = operands[0] if len(operands) == 1 else draft.emit(node, "gate_sum", "add.Tensor", *operands)
    return draft.emit(node, "opened", f"{function}.default", value)


def _simple(function: str) -> Rule:
    def rule(node: Node, draft: Draft) -> Ref | None:
        layers = _layers(node, draft, node.args[1])
        return None if layers is None else _of(node, draft, function, *layers)

    return rule


def _gru(node: Node, draft: Draft) -> Ref | None:
    """``n + z * (h - n)`` with ``n = tanh(i_n + r * h_n)``."""
    state = node.args[1]
    layers = _layers(node, draft, state)
    if layers is None:
        return None
    own, former = (_parts(node, draft, layer, 3) for layer in layers)
    reset, update = (_of(node, draft, "sigmoid", own[i], former[i]) for i in range(2))
    new = _of(node, draft, "tanh", own[2], draft.emit(node, "kept", "mul.Tensor", reset, former[2]))
    change = draft.emit(node, "change", "sub.Tensor", state, new)
    return draft.emit(node, "state", "add.Tensor", new, draft.emit(node, "step", "mul.Tensor", update, change))


def _lstm(node: Node, draft: Draft) -> Ref | None:
    """Both results are renamed: ``o * tanh(c)`` and ``c = f * c + i * g``."""
    state, cell = node.args[1]
    meta = draft.metas.get(cell.name)
    layers = _layers(node, draft, state)
    if layers is None or meta is None or meta.dtype != draft.metas[state.name].dtype:
        return None
    gates = _parts(node, draft, draft.emit(node, "gate_sum", "add.Tensor", *layers), 4)
    into, forget, out = (_of(node, draft, "sigmoid", gates[i]) for i in (0, 1, 3))
    fresh = draft.emit(node, "fresh", "mul.Tensor", into, _of(node, draft, "tanh", gates[2]))
    kept = draft.emit(node, "kept", "mul.Tensor", forget, cell)
    memory = draft.emit(node, "memory", "add.Tensor", kept, fresh)
    shown = draft.emit(node, "state", "mul.Tensor", out, _of(node, draft, "tanh", memory))
    draft.renamed[f"{node.name}[0]"], draft.renamed[f"{node.name}[1]"] = shown.name, memory.name
    return None


CELL_RULES: Mapping[str, Rule] = {
    "gru_cell": _gru,
    "lstm_cell": _lstm,
    "rnn_tanh_cell": _simple("tanh"),
    "rnn_relu_cell": _simple("relu"),
}
"""Rules by operator."""
