"""Triangular and banded factors and results of matrix products: what ``tril`` or ``triu`` make zero is skipped.

``tril(a) @ b`` walks over the columns of ``a`` up to the diagonal only, ``triu(tril(a, w), -w) @ b`` over the band, and
``tril(a @ b)`` leaves out the tiles above the diagonal altogether. The masks themselves become part of the kernel.

Left out: matrices that merely hold zeros (what the values are is not looked at).
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


@dataclass(frozen=True)
class Bands:
    """What is kept of a product's factors, as they are stored, and of its result."""

    left: Band | None = None
    right: Band | None = None
    result: Band | None = None
    transposed: bool = False
    """The right factor is stored (columns, inner)."""

    def __bool__(self) -> bool:
        """Whether there is any."""
        return not self.left is self.right is self.result is None

    @property
    def lower_left(self) -> bool:
        """Whether later rows have longer sums."""
        return self.left is not None and self.left.lower is None and self.left.upper is not None

    def loop_lines(self, rows: str) -> list[str]:
        """Statements that set ``first_inner`` and ``last_inner``: the part of the inner dimension that a tile needs."""
        top, low = f"tl.min({rows})", f"tl.max({rows})"
        first, last = [], []
        if self.left is not None and self.left.lower is not None:
            first.append(f"{top} + {self.left.lower}")
        if self.left is not None and self.left.upper is not None:
            last.append(f"{low} + {self.left.upper + 1}")
        right = self.right
        if right is not None and not self.transposed:
            right = Band(right.source, *(None if item is None else -item for item in (right.upper, right.lower)))
        if right is not None and right.lower is not None:
            first.append(f"tl.min(cols) + {right.lower}")
        if right is not None and right.upper is not None:
            last.append(f"tl.max(cols) + {right.upper + 1}")
        lines = ["first_inner = 0", *(f"first_inner = tl.maximum({item}, first_inner)" for item in first)]
        if first:
            lines.append("first_inner = first_inner // BLOCK_K * BLOCK_K")
        lines += ["last_inner = n_inner", *(f"last_inner = tl.minimum({item}, last_inner)" for item in last)]
        outside = []
        if self.result is not None and self.result.upper is not None:
            outside.append(f"(tl.min(cols) - {low} > {self.result.upper})")
        if self.result is not None and self.result.lower is not None:
            outside.append(f"(tl.max(cols) - {top} < {self.result.lower})")
        if outside:
            lines.append(f"last_inner = tl.where({' | '.join(outside)}, 0, last_inner)  # the whole tile is zero")
        return lines
