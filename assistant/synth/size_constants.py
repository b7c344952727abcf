"""Numbers in a graph that were sizes of the inputs: written as sizes again, so that the module also runs at others.

Capture specialises shapes: ``torch.ones(n, n)`` becomes ``ones([768, 768])`` and ``x / x.shape[0]`` a division by 4096.
A number that equals exactly one dimension of the inputs (or the product of neighbouring ones) is taken for it. That is
a guess, but a safe one: at the captured sizes both are the same number.

Left out: numbers that several different dimensions or a parameter's size could explain; they stay numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from drk.gym.graph import Graph, Node, Ref, TensorMeta

CUT = "aten.alias.default"
"""What capture makes of a slice that happened to take everything, ``mask[:, :, :length]`` say."""
LEAST = 3
"""Smaller numbers are never taken for sizes."""
LEAST_SCALAR = 65
"""Smaller operands of arithmetic are taken as the numbers that they are."""
_ARITHMETIC = frozenset({"div", "mul", "add", "sub", "rsub"})


@dataclass(frozen=True)
class SizeConstants:
    """Which numbers are sizes: single dimensions, and products of neighbouring ones, each as (input, dimensions)."""

    single: Mapping[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    products: Mapping[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def text(self, value: object, names: Mapping[str, str], *, scalar: bool = False) -> str | None:
        """Expression for ``value``, or None where it is no size; ``scalar``: it is an operand of arithmetic."""
        if type(value) is not int or value < (LEAST_SCALAR if scalar else LEAST):
            return None
        found = self.single.get(value) or (self.products.get(value) if scalar else None)
        if found is None:
            return None
        return " * ".join(f"{names[found[0]]}.shape[{dim}]" for dim in found[1])

    def explains(self, value: int) -> bool:
        """Whether ``value`` is a size of the inputs."""
        return self.text(value, _AnyName()) is not None

    def scales(self, node: Node) -> bool:
        """Whether ``node`` is arithmetic with a size of the inputs."""
        operands = node.args[1:2]
        return node.bare_op in _ARITHMETIC and any(self.text(item, _AnyName(), scalar=True) for item in operands)


class _AnyName(dict[str, str]):
    """Names everything by itself."""

    def __missing__(self, key: str) -> str:
        return key


def size_constants(graph: Graph) -> SizeConstants:
    """Collect the sizes of ``graph``'s inputs that can be told apart from one another and from parameters' sizes."""
    inputs = [item for item in graph.placeholders if item.kind == "input"]
    cut = {node.args[0].name for node in graph.nodes if node.op == CUT and isinstance(node.args[0], Ref)}
    kept = [item for item in graph.placeholders if item.kind != "input" and item.name not in cut]
    taken = {size for item in kept for size in item.meta.shape}
    single = _unique([(item.name, item.meta) for item in inputs], range(1, 2))
    products = _unique([(item.name, item.meta) for item in inputs], range(2, 5))
    return SizeConstants({size: where for size, where in single.items() if size not in taken}, products)


def _unique(tensors: list[tuple[str, TensorMeta]], widths: range) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Runs of dimensions by the product of their sizes; two runs at different places make a number ambiguous."""
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    ambiguous: set[int] = set()
    for name, meta in tensors:
        for width in widths:
            for start in range(len(meta.shape) - width + 1):
                dims = tuple(range(start, start + width))
                size = math.prod(meta.shape[dim] for dim in dims)
                if found.setdefault(size, (name, dims))[1] != dims:
                    ambiguous.add(size)
    return {size: where for size, where in found.items() if size not in ambiguous}
