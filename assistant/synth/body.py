"""The part of a kernel that all writers share: loads, one statement per value, stores, the formula for the docstring.

Values that are used once are put into their user's expression while it stays short. Reductions are left to the writer
of row kernels, which passes their source text in. Masks: ``mask`` for full tiles, ``row_mask`` and ``col_mask`` for
operands that vary along one side only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drk.assistant.synth.domain import Domain, Operand, fold, offset
from drk.assistant.synth.expression import expression, is_pointwise, kind_of, scalar_text
from drk.assistant.synth.gathers import OUTSIDE, gather_lines, position_text
from drk.assistant.synth.regions import REDUCTIONS, Region
from drk.assistant.synth.row_joins import Joined, join_lines
from drk.assistant.synth.shortcuts import shortcut
from drk.gym.graph import Node, Ref, TensorMeta

INLINE_LIMIT = 64
"""Longest text that is put into its user's expression."""


@dataclass(frozen=True)
class KernelText:
    """Source of one kernel and of the function that launches it.

    ``inputs`` and ``outputs`` are value names of the graph, in the launcher's argument and result order.
    """

    name: str
    kernel: str
    launcher: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    formula: str


def tidy(text: str) -> str:
    """Drop needless parentheses from an expression."""
    return ast.unparse(ast.parse(text, mode="eval"))


@dataclass
class Body:
    """Emits the statements of one region; ``two_dimensional`` tiles have rows and columns.

    Rows are the tile's first axis, or its last one where ``columns_first``.
    """

    region: Region
    names: Mapping[str, str]
    metas: Mapping[str, TensorMeta]
    two_dimensional: bool
    extra_operands: tuple[Operand, ...] = ()
    steady: frozenset[str] = frozenset()
    """Indices of row groups that are one number for a whole tile."""
    columns_first: bool = False
    domain: Domain = field(init=False)
    _inlined: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        operands = [*self.region.inputs, *self.region.outputs, *self.extra_operands]
        operands += [operand for operand, _ in self.region.positions.values()]
        self.domain = fold(self.region.shape, self.region.columns, operands)

    # -- operands

    def pointer(self, value: str) -> str:
        """Kernel argument that points to a value."""
        return f"{self.names[value]}_ptr"

    @property
    def suffixes(self) -> tuple[str, str]:
        """What shapes a vector of row indices, and one of column indices, for the tile."""
        if not self.two_dimensional:
            return "", ""
        return ("[None, :]", "[:, None]") if self.columns_first else ("[:, None]", "[None, :]")

    def address(self, operand: Operand) -> str:
        """Pointer expression of an operand."""
        row, column = self.suffixes
        where = offset(operand, self.names[operand.value], self.domain, row, column, self.steady)
        return f"{self.pointer(operand.value)} + {where}" if where else self.pointer(operand.value)

    def mask(self, operand: Operand) -> str:
        """Name of the mask that fits the operand's own shape, or an empty string for a single element."""
        edge = len(self.region.shape) - self.region.columns
        steady = {dim for group in self.domain.rows if group.index in self.steady for dim in group.dims}
        by_row = any(operand.varies[dim] for dim in range(edge) if dim not in steady)
        by_column = any(operand.varies[edge:])
        if not self.two_dimensional:
            return "mask" if by_row else ""
        return {(True, True): "mask", (True, False): "row_mask", (False, True): "col_mask"}.get((by_row, by_column), "")

    def load(self, operand: Operand) -> str:
        """Statement that loads an operand in its compute type."""
        kind = kind_of(operand.meta.dtype)
        mask = self.mask(operand)
        masked = f", mask={mask}, other={'0.0' if kind == 'float' else '0'}" if mask else ""
        cast = ".to(tl.float32)" if kind == "float" else ""
        return f"{self.names[operand.value]} = tl.load({self.address(operand)}{masked}){cast}"

    def loads(self, operands: Iterable[Operand]) -> list[str]:
        """Statements that load ``operands``, but for tables, whose rows the region's gathers load.

        Whole tiles come last: Triton lays a tile's values out as its last large load does, and a load of a single row
        (a bias) would spread each row over all warps, where every reduction takes a barrier.
        """
        tables = {name for item in self.region.gathers for name in item.tables}
        found = [operand for operand in operands if operand.value not in tables]
        return [self.load(operand) for operand in sorted(found, key=lambda operand: self.mask(operand) == "mask")]

    def store(self, operand: Operand) -> str:
        """Statement that stores an output; the pointer's type does the rounding."""
        value = self.text(Ref(operand.value), kind_of(operand.meta.dtype))
        mask, address = self.mask(operand), self.address(operand)
        if self.two_dimensional and not mask:
            # A single result of a single row: the tile has the others only as padding.
            mask, address = "row_mask", f"{address} + rows{self.suffixes[0]}"
        return f"tl.store(out_{address}, {tidy(value)}{f', mask={mask}' if mask else ''})"

    # -- values

    def text(self, value: Any, kind: str) -> str:
        """Source of an argument in compute type ``kind``; parenthesised unless it is a single token."""
        if not isinstance(value, Ref):
            text = scalar_text(value, kind)
            return f"({text})" if text.startswith("-") else text
        if value.name in self.region.scalars:
            return self.text(self.region.scalars[value.name], kind)
        if value.name in self.region.positions:
            source = position_text(self, value.name, kind)
        else:
            source = f"({self._inlined[value.name]})" if value.name in self._inlined else self.names[value.name]
        have = self.kind(value.name)
        if have == kind:
            return source
        if kind == "bool":
            return f"({source} != 0)"
        return f"{source}.to(tl.{'float32' if kind == 'float' else 'int32'})"

    def rename(self, name: str, text: str) -> None:
        """Let the value ``name`` be the expression ``text``."""
        self._inlined[name] = text

    def kind(self, name: str) -> str:
        """Compute type of a value."""
        return kind_of(self.metas[name].dtype)

    def statements(self, nodes: Iterable[Node], keep: frozenset[str] = frozenset()) -> list[str]:
        """Statements of pointwise nodes in order; values in ``keep`` always get a name of their own."""
        nodes = list(nodes)
        lines: list[str] = []
        uses = self._uses()
        stored = {operand.value for operand in self.region.outputs}
        gathers = {item.node.name: item for item in self.region.gathers}
        for node in nodes:
            if node.name in gathers:
                picked = gathers[node.name]
                lines += join_lines(self, picked) if isinstance(picked, Joined) else gather_lines(self, picked)
                continue
            short = shortcut(node, self.region.nodes, self.metas, self.text)
            text = tidy(short or expression(node, self.text, self.metas))
            single = uses.get(node.name, 0) == 1 and node.name not in stored and node.name not in keep
            if single and len(text) <= INLINE_LIMIT:
                self._inlined[node.name] = text
            else:
                lines.append(f"{self.names[node.name]} = {text}")
        return lines

    def _uses(self) -> dict[str, int]:
        """How often each value's text appears in the region (a reduction counts as many, it needs a name)."""
        counts: dict[str, int] = {}
        for node in self.region.nodes:
            pointwise = is_pointwise(node, self.metas)
            repeated = node.bare_op in {"pow", "square", "hardswish", "softsign", "lerp"}
            for name in _argument_names(node):
                counts[name] = counts.get(name, 0) + (1 if pointwise and not repeated else 2)
        return counts

    # -- documentation

    def remarks(self) -> list[str]:
        """What the kernel's docstring says beside its formula."""
        return [OUTSIDE] if any(item.picks for item in self.region.gathers) else []

    def formula(self, outputs: Iterable[str]) -> list[str]:
        """One line ``name = ...`` per output, in ordinary notation, cut at 300 characters."""
        made = {node.name: node for node in self.region.nodes}
        lines = []
        for name in outputs:
            text = tidy(_pretty(Ref(name), made, self.names, self.region, 0))
            lines.append(f"{self.names[name]} = {text if len(text) <= 300 else text[:297] + '...'}")
        return lines


def _argument_names(node: Node) -> list[str]:
    return [arg.name for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, Ref)]


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}


def _pretty(value: Any, made: Mapping[str, Node], names: Mapping[str, str], region: Region, depth: int) -> str:
    if not isinstance(value, Ref):
        return repr(value) if isinstance(value, bool | int | float) else "..."
    if value.name in region.scalars:
        return repr(region.scalars[value.name])
    if value.name not in made or depth > 24:
        return names[value.name]
    node = made[value.name]
    product = next((item for item in region.products if item.node is node), None)
    if product is not None and product.of_pixels:
        return f"{node.bare_op}({names[product.right]}, {names[product.left]})"
    if product is not None:
        transposed = ".T" if product.transposed else ""
        text = f"({names[product.left]} @ {names[product.right]}{transposed})"
        return f"({text} + {names[product.bias]})" if product.bias else text
    gather = next((item for item in region.gathers if item.node is node), None)
    if isinstance(gather, Joined):
        return f"cat({', '.join(names[piece] for piece in gather.pieces)})"
    if gather is not None and node.bare_op not in {"gather", "take_along_dim"}:
        before = [":"] * gather.picks[0].axis
        picked = [_pretty(Ref(pick.index), made, names, region, depth + 1) for pick in gather.picks]
        return f"{names[gather.table]}[{', '.join([*before, *picked])}]"
    parts = [_pretty(arg, made, names, region, depth + 1) for arg in node.args]
    if node.bare_op in _INFIX and len(parts) == 2:
        return f"({parts[0]} {_INFIX[node.bare_op]} {parts[1]})"
    if node.bare_op in {*REDUCTIONS, "to", "_to_copy", "contiguous"}:
        parts = parts[:1]
    return f"{node.bare_op}({', '.join(parts)})"


def indent(lines: Iterable[str], spaces: int = 4) -> str:
    """Join lines, each indented."""
    return "\n".join(" " * spaces + line if line else line for line in lines)
