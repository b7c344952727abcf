"""Writes one generated module: values, statements, attributes and constructor arguments, each choice from a seed.

Structure comes from ``rng``, what does not reach the graph from a :class:`drk.training.dressing.Dress`; the two never
mix, so that one structure can be written again in other words. A :class:`Value` is a text with its shape; applying an
operation gives another. Names given here are those of the module's file. Shapes are lists of sizes at capture.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from drk.training.dressing import Dress
from drk.training.operations import BINARY, TERNARY, UNARY, Operation

Shape = tuple[int, ...]
Fill = Literal["normal", "integers", "uniform", "bernoulli"]
_ATTRIBUTE = re.compile(r"self\.\w+")
LONG_TEXT = 60
"""An expression of so many characters is given a name before it is used further."""


@dataclass(frozen=True)
class Value:
    """A text that evaluates to a tensor. ``name``: it is a plain name; ``own``: that name may be assigned again."""

    text: str
    shape: Shape
    name: bool = False
    own: bool = False
    tight: bool = False
    """Binds more tightly than any operator: a name, a call, an attribute."""


@dataclass
class InputSpec:
    """One input of ``forward``. ``fill``: ``normal``, ``integers`` and ``uniform`` of [low, high), ``bernoulli``."""

    name: str
    shape: Shape
    dtype: str = "float32"
    fill: Fill = "normal"
    low: float = 0
    high: float = 0


@dataclass
class Writer:
    """Collects a module. ``ops`` is the composition: names of operations in order, with marks for its topology."""

    rng: random.Random
    dress: Dress
    small: bool = False
    inputs: list[InputSpec] = field(default_factory=list)
    arguments: list[tuple[str, bool | int | float | str]] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    dtype: str = "float32"
    defaults: int = 0
    given: int | None = None
    """How many of the constructor's last arguments have defaults, and how many the task gives (None: all)."""

    # --- names and sizes -------------------------------------------------------------------------------------

    def size(self, *choices: int) -> int:
        """Return one of the sizes, or a small one where a CPU is to judge it."""
        chosen = self.rng.choice(choices)
        return chosen if not self.small else {True: chosen, False: (8, 12, 16, 24, 32, 48)[chosen % 6]}[chosen <= 16]

    def rows(self) -> int:
        """Return a leading size."""
        return self.size(64, 128, 256, 512, 1024, 2048, 4096)

    def width(self) -> int:
        """Return a size of the last dimension."""
        return self.size(256, 384, 512, 768, 1000, 1024, 2048, 4096)

    def input(
        self, shape: Sequence[int], *, dtype: str = "", fill: Fill = "normal", low: float = 0, high: float = 1
    ) -> Value:
        """Declare an input and return it; bounds are those of ``uniform`` and ``integers``."""
        name = self.dress.name("input")
        self.inputs.append(InputSpec(name, tuple(shape), dtype or self.dtype, fill, low, high))
        return Value(name, tuple(shape), name=True, tight=True)

    def argument(self, value: bool | int | float | str) -> str:
        """Return a text for ``value`` in the constructor: an argument of it, or the value itself."""
        if self.rng.random() < 0.75:
            name = self.dress.name("argument")
            self.arguments.append((name, value))
            return name
        return repr(value)

    def module(self, expression: str) -> str:
        """Put ``expression`` on the module and return the text by which ``forward`` reaches it."""
        name = self.dress.name("attribute")
        self.setup.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def parameter(self, shape: Sequence[int], *, around: str = "") -> Value:
        """Declare a parameter (or a buffer) and return it."""
        sizes = ", ".join(self.argument(size) for size in shape)
        make = around or self.rng.choice(("torch.ones", "torch.randn", "torch.randn", "torch.zeros", "torch.rand"))
        name = self.dress.name("attribute")
        if self.rng.random() < 0.85:
            self.setup.append(f"self.{name} = nn.Parameter({make}({sizes}))")
        else:
            self.setup.append(f'self.register_buffer("{name}", {make}({sizes}))')
        return Value(f"self.{name}", tuple(shape), tight=True)

    def constant(self, low: float, high: float) -> str:
        """Return a text for a drawn constant: in place, on ``self``, or an argument with that value."""
        kind = self.rng.random()
        rest = kind > 0.6 and self.rng.random() < 0.08
        value = self.dress.constant(1 - high, 1 - low) if rest else self.dress.constant(low, high)
        if kind < 0.6:
            return number_text(value)
        name = self.dress.name("attribute")
        if kind < 0.75:
            self.setup.append(f"self.{name} = {number_text(value)}")
        else:
            # who writes a constructor names argument and attribute alike, mostly
            argument = self.dress.name("argument") if kind < 0.85 else name
            self.arguments.append((argument, value))
            self.setup.append(f"self.{name} = {argument}")
        return f"(1 - self.{name})" if rest else f"self.{name}"

    # --- values ----------------------------------------------------------------------------------------------

    def assign(self, value: Value, over: Value | None = None) -> Value:
        """Give ``value`` a name: that of ``over``, where it may be assigned again, or a new one."""
        comment = self.dress.comment()
        if comment:
            self.lines.append(comment)
        name = over.text if over is not None and over.own and self.dress.reuse else self.dress.local()
        self.lines.append(f"{name} = {value.text}")
        return Value(name, value.shape, name=True, own=True, tight=True)

    def named(self, value: Value) -> Value:
        """Return ``value`` as a plain name or attribute, so that it can be used several times."""
        return value if value.name or _ATTRIBUTE.fullmatch(value.text) else self.assign(value)

    def apply(self, op: Operation, *values: Value, shape: Sequence[int] | None = None, **texts: str) -> Value:
        """Return ``op`` of ``values``; statements are written where an operand is used twice or is long."""
        self.ops.append(op.name)
        spelling = self.rng.choice(op.spellings)
        constants = {}
        if "{c}" in spelling:
            constants["c"] = self.constant(op.low, op.high)
        if "{d}" in spelling:
            constants["d"] = self.constant(op.low2, op.high2)
        result = tuple(shape) if shape is not None else broadcast(*(value.shape for value in values))
        if spelling.startswith("nn."):
            reached = self.module(spelling.format(x="", **constants, **texts))
            value = self.plain(values[0])
            return self._settle(Value(f"{reached}({value.text})", result, tight=True), values)
        operands = {}
        for slot, value in zip("xyz", values, strict=False):
            twice = spelling.count(f"{{{slot}}}") > 1
            kept = self.named(value) if twice else self.plain(value)
            operands[slot] = kept.text if kept.tight or _is_argument(spelling, slot) else f"({kept.text})"
        text = spelling.format(**operands, **constants, **texts)
        return self._settle(Value(text, result, tight=_is_tight(spelling)), values)

    def plain(self, value: Value) -> Value:
        """Return ``value``, under a name where its text has grown long."""
        return value if value.name or len(value.text) < LONG_TEXT else self.assign(value)

    def _settle(self, value: Value, sources: Sequence[Value]) -> Value:
        if self.dress.chance(self.dress.nesting):
            return value
        return self.assign(value, sources[0] if len(sources) == 1 else None)

    def owned(self, value: Value) -> Value:
        """Say that nobody else needs ``value`` any more, so that its name may be assigned again."""
        return replace(value, own=value.name)

    def chain(self, value: Value, count: int) -> Value:
        """Apply ``count`` drawn unary operations, never the same one twice in a row."""
        for _ in range(count):
            last = self.ops[-1] if self.ops else ""
            value = self.apply(draw([one for one in UNARY if one.name != last], self.rng), value)
        return value

    def join(self, left: Value, right: Value) -> Value:
        """Combine two values by a drawn operation."""
        return self.apply(draw(BINARY, self.rng), left, right)

    def blend(self, one: Value, two: Value, three: Value) -> Value:
        """Combine three values by a drawn operation."""
        return self.apply(draw(TERNARY, self.rng), one, two, three)


def number_text(value: float) -> str:
    """Return a number as people write it: ``1e-6``."""
    return repr(value).replace("e-0", "e-")


def draw(operations: Sequence[Operation], rng: random.Random) -> Operation:
    """Return one operation, by weight."""
    return rng.choices(operations, [one.weight for one in operations])[0]


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape of an elementwise result."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def _is_argument(spelling: str, slot: str) -> bool:
    """Say whether the operand stands alone as a call's argument, so that it needs no brackets."""
    place = spelling.find(f"{{{slot}}}")
    before, after = spelling[:place].rstrip(), spelling[place + 3 :].lstrip()
    return before.endswith(("(", ",")) and after.startswith((")", ",")) and not spelling.startswith("(")


def _is_tight(spelling: str) -> bool:
    """Say whether the text is one call, whose result can be called upon without brackets."""
    depth = 0
    for place, sign in enumerate(spelling):
        depth += (sign in "([") - (sign in ")]")
        if depth == 0 and (sign in " +*/<>" or (sign == "-" and place == 0)):
            return False
    return True
