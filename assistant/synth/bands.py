"""Triangular and banded factors and results of matrix products: what ``tril`` or ``triu`` make zero is skipped.

``tril(a) @ b`` walks over the columns of ``a`` up to the diagonal only, ``triu(tril(a, w), -w) @ b`` over the band, and
``tril(a @ b)`` leaves out the tiles above the diagonal altogether. The masks themselves become part of the kernel.

Left out: matrices that merely hold zeros (what the values are is not looked at), and triangular right factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drk.assistant.synth.expression import FLOATS
from drk.gym.graph import Graph, Ref, TensorMeta


@dataclass(frozen=True)
class Band:
    """What is kept of ``source``: elements whose column less row lies in ``lower..upper`` (None: no limit)."""

    source: str
    lower: int | None = None
    upper: int | None = None

    def condition(self, rows: str, cols: str) -> str:
        """Triton expression that says which elements are kept."""
        tests = [f"({cols} - {rows} >= {self.lower})"] if self.lower is not None else []
        tests += [f"({cols} - {rows} <= {self.upper})"] if self.upper is not None else []
        return " & ".join(tests)


def bands_of(graph: Graph, metas: Mapping[str, TensorMeta]) -> dict[str, Band]:
    """The band of each value that ``tril`` or ``triu`` made, by name."""
    found: dict[str, Band] = {}
    for node in graph.nodes:
        if node.op not in {"aten.tril.default", "aten.triu.default"} or not isinstance(node.args[0], Ref):
            continue
        source = node.args[0].name
        if source not in metas or len(metas[source].shape) < 2 or metas[source].dtype not in FLOATS:
            continue
        offset = int(node.args[1]) if len(node.args) > 1 else 0
        band = Band(source, upper=offset) if node.bare_op == "tril" else Band(source, lower=offset)
        found[node.name] = band
    return found


def within(outer: Band, inner: Band) -> Band:
    """What both bands keep, of the outer one's source."""
    lower = max((item.lower for item in (outer, inner) if item.lower is not None), default=None)
    upper = min((item.upper for item in (outer, inner) if item.upper is not None), default=None)
    return Band(outer.source, lower, upper)


def loop_lines(left: Band | None, result: Band | None, rows: str) -> list[str]:
    """Statements that set ``first_inner`` and ``last_inner``: the part of the inner dimension that a tile needs."""
    top, low = f"tl.min({rows})", f"tl.max({rows})"
    lines = ["first_inner = 0", "last_inner = n_inner"]
    if left is not None and left.lower is not None:
        lines[0] = f"first_inner = tl.maximum({top} + {left.lower}, 0) // BLOCK_K * BLOCK_K"
    if left is not None and left.upper is not None:
        lines[1] = f"last_inner = tl.minimum({low} + {left.upper + 1}, n_inner)"
    outside = []
    if result is not None and result.upper is not None:
        outside.append(f"(tl.min(cols) - {low} > {result.upper})")
    if result is not None and result.lower is not None:
        outside.append(f"(tl.max(cols) - {top} < {result.lower})")
    if outside:
        lines.append(f"last_inner = tl.where({' | '.join(outside)}, 0, last_inner)  # the whole tile is zero")
    return lines
