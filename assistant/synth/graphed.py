"""Candidates whose kernels are replayed by a CUDA graph: their text, and when there may be one.

A graph repeats device work only. So modules that draw random numbers, change state or read values back to the host get
none, nor do those that return (views of) inputs or weights, since results of a replay are always copies.

When one is worth trying: :mod:`drk.assistant.synth.graphed_choice`. Left out: graphs over several calls, and candidates
that others wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from drk.assistant.random_operators import draws
from drk.gym.graph import Graph, Node, Ref, TensorMeta, references
from drk.gym.graph_cost import VIEWS

ATTRIBUTE = "graphed"
"""Attribute of ``ModelNew`` that holds the graphs."""
METHOD = "launch"
"""Method of ``ModelNew`` that a graph replays; it takes all tensors flat."""
IMPORTS = ("import logging", "import os", "import threading", "from typing import Any", "")
NOTE = "in a CUDA graph"
"""Ends the note of every candidate of this kind."""

_MARK = "class GraphedCalls:"
_SYNCHRONISING = frozenset(
    ("item", "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "unique", "unique_dim", "_unique2",
     "unique_consecutive", "bincount", "argwhere", "equal", "is_nonzero", "repeat_interleave", "histc")
)  # fmt: skip


def graphed_calls() -> str:
    """Return the source of the class that records and replays."""
    text = Path(__file__).with_name("graphed_template.py").read_text(encoding="utf-8")
    text = re.split(r"^# --- drk graphed -+\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    return re.sub(r"  # type: ignore\[[^\]]*\]", "", text).strip() + "\n"


def is_graphed(source: str) -> bool:
    """Say whether a candidate's kernels are replayed by a graph."""
    return _MARK in source


# --- may it be? ----------------------------------------------------------------------------------------------


def why_not_graphed(graph: Graph, rewritten: Graph) -> str:
    """Return why a module's calls cannot be replayed, or an empty string.

    Args:
        graph: as it was captured: it says what state changes.
        rewritten: what is compiled, without the dropout of eval mode and the like.
    """
    if graph.mutations:
        return "it changes its state"
    if not any(item.kind == "input" for item in graph.placeholders):
        return "it has no input that is a tensor"
    keys = {item.key.split(".")[0] for item in graph.state}
    if keys & {ATTRIBUTE, METHOD}:
        return f"it has a part called {' or '.join(sorted(keys & {ATTRIBUTE, METHOD}))}"
    metas = rewritten.metas()
    for node in rewritten.nodes:
        if draws(node):
            return f"{node.op} draws random numbers"
        if node.bare_op in _SYNCHRONISING or _is_masked(node, metas):
            return f"{node.op} needs values on the host"
    if any(_is_given(name, rewritten) for name in references(rewritten.output)):
        return "it returns an input or a weight, or a view of one"
    return ""


def _is_masked(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Say whether ``node`` indexes by a mask: how much it selects is known to the device only."""
    return node.bare_op.startswith("index") and any(
        metas[name].dtype in ("bool", "uint8") for name in node.inputs()[1:] if name in metas
    )


def _is_given(name: str, graph: Graph) -> bool:
    """Say whether the value ``name`` lies in memory that a call is given."""
    nodes = {node.name: node for node in graph.nodes}
    while name in nodes:
        node = nodes[name]
        if node.bare_op not in VIEWS | {"to", "getitem"} or not node.args or not isinstance(node.args[0], Ref):
            return False
        name = node.args[0].name
    return True
