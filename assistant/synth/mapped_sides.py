"""The indices of a mapped kernel's tile: which side each part of the output is on, what follows from them, the guards.

Indices are named once, as vectors along their side (rows, columns) or numbers for the whole tile; used together they
become tiles. Guards compare an index with where a piece begins and ends. Where the index of a piece is folded with
what is inside of it, the piece's ends are multiplied instead of dividing the index.

Left out: guards are not joined where one implies another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from drk.assistant.synth.index_maps import Atoms
from drk.assistant.synth.index_text import is_number, product_text, sum_text, times
from drk.assistant.synth.mapped_terms import Line, SizeOf, before, whole_line

_SUFFIX = {"rows": "[:, None]", "cols": "[None, :]"}


@dataclass(frozen=True)
class Part:
    """Folded atoms, with the name of their index, their size as captured and as text."""

    atoms: tuple[int, ...]
    index: str
    size: int
    text: str

    @property
    def literal(self) -> bool:
        """Whether the size is a number."""
        return self.text.isdigit()


@dataclass(frozen=True)
class Index:
    """A name in the kernel and its side: ``rows``, ``cols``, none for a number, ``both`` for a tile."""

    name: str
    side: str

    @property
    def spread(self) -> str:
        """The index as it stands among tiles."""
        return self.name + _SUFFIX.get(self.side, "")


@dataclass
class Sides:
    """Parts by the side of the tile that they belong to, and the kernel's arguments by name."""

    outer: list[Part]
    rows: list[Part]
    cols: list[Part]
    atoms: Atoms
    size_of: SizeOf
    taken: set[str]
    arguments: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """Statements of bent indices and guards."""
    bent: dict[int, Index] = field(default_factory=dict)
    guards: dict[int, Index] = field(default_factory=dict)

    def part_of(self, atom: int) -> tuple[Part, Index] | None:
        """The part that holds an atom, and its index."""
        for parts, side in ((self.outer, ""), (self.rows, "rows"), (self.cols, "cols")):
            for part in parts:
                if atom in part.atoms:
                    return part, Index(side if side and len(parts) == 1 else part.index, side)
        return None

    def argument(self, name: str, text: str) -> str:
        """The name by which the kernel receives ``text``: itself where it is a number."""
        if is_number(text) and abs(int(text)) < 2**31:
            return text
        known = next((key for key, value in self.arguments.items() if value == text), None)
        if known is not None:
            return known
        while name in self.arguments or name in self.taken:
            name += "_"
        self.arguments[name] = text
        return name

    # -- bent indices

    def index_of(self, atom: int) -> Index:
        """The index of an atom: of a part that is one atom, or a bent one, which is stated here."""
        found = self.part_of(atom)
        if found is not None:
            return found[1]
        if atom not in self.bent:
            origin = self.atoms.origin(atom)
            assert origin is not None, "parts and what follows from them are all that there is"
            self._state(origin)
        return self.bent[atom]

    def _state(self, origin: int) -> None:
        """Append the statements of a bent index and of the parts that it was split into."""
        names, bend = self.atoms.names, self.atoms.bends[origin]
        line = whole_line(origin, self.atoms, self.size_of)
        size = self.argument(f"{names[origin]}_size", self.size_of(origin))
        if bend.kind == "roll":
            text, side = self._sum(line, names[origin])
            shift = self.argument(f"{names[origin]}_shift", self._rolled(-bend.shift, self.size_of(origin)))
            text = f"({text} + {shift}) % {size}"
        else:
            line.start += [(-sign, start) for sign, start in before(origin, self.atoms, self.size_of)]
            text, side = self._sum(line, names[origin])
            text = _led_back(bend.kind, text, size)
        own = Index(self._name(f"{names[origin]}_at"), side)
        self.lines.append(f"{own.name} = {text}")
        self.bent[origin] = own
        self._split(origin, own)

    def _rolled(self, shift: int, size: str) -> str:
        return str(shift % int(size)) if is_number(size) else f"{shift} % " + (f"({size})" if " " in size else size)

    def _split(self, atom: int, index: Index) -> None:
        """Append the statements of the parts that a bent index was split into."""
        if atom not in self.atoms.children:
            return
        outer, inner = self.atoms.children[atom]
        leaves = [self.size_of(leaf) for leaf in self.atoms.leaves(inner)]
        size = self.argument(f"{self.atoms.names[inner]}_size", product_text(leaves))
        for child, sign in ((outer, "//"), (inner, "%")):
            own = Index(self._name(f"{self.atoms.names[child]}_at"), index.side)
            self.lines.append(f"{own.name} = {index.name} {sign} {size}")
            self.bent[child] = own
            self._split(child, own)

    def _sum(self, line: Line, name: str) -> tuple[str, str]:
        """A line's text, and the side on which it lies."""
        indices = [(self.index_of(term.atom), term) for term in line.terms]
        side = joint_side(index.side for index, _ in indices)
        texts = []
        for index, term in indices:
            step = self.argument(f"{name}_{self.atoms.names[term.atom]}_step", term.text)
            text = index.spread if side == "both" else index.name
            text = text if step == "1" else f"{text} * {step}"
            texts.append(f"-{text}" if term.weight < 0 else text)
        start = self.argument(f"{name}_start", sum_text(line.start))
        texts += [start] if start != "0" or not texts else []
        return added(texts), side

    # -- guards

    def guard(self, atom: int) -> Index:
        """The name of the guard of a piece."""
        if atom not in self.guards:
            names, bend = self.atoms.names, self.atoms.bends[atom]
            line = whole_line(atom, self.atoms, self.size_of)
            start, line.start = [(-sign, text) for sign, text in line.start], []
            inner, index = self._compared(line, names[atom])
            begin = [*before(atom, self.atoms, self.size_of), *start]
            low = self._edge(f"{names[atom]}_begin", begin, inner)
            if bend.kind == "slot" and inner == "1":
                tests = [f"{index.name} == {low}"]
            else:
                end = [*begin, (1, "1" if bend.kind == "slot" else self.size_of(atom))]
                tests = [f"{index.name} >= {low}"] if low != "0" else []
                tests += [f"{index.name} < {self._edge(f'{names[atom]}_end', end, inner)}"] if not bend.last else []
            text = " & ".join(f"({test})" if len(tests) > 1 else test for test in tests) or f"{index.name} >= 0"
            own = Index(self._name(f"in_{names[atom]}_part"), index.side)
            self.lines.append(f"{own.name} = {text}")
            self.guards[atom] = own
        return self.guards[atom]

    def _edge(self, name: str, terms: Iterable[tuple[int, str]], inner: str) -> str:
        return self.argument(name, times(sum_text(terms), inner))

    def _compared(self, line: Line, name: str) -> tuple[str, Index]:
        """What edges are to be multiplied by for a comparison with the index that is returned."""
        if len(line.terms) == 1 and line.terms[0].weight == 1:
            found = self.part_of(line.terms[0].atom)
            if found is None:
                return "1", self.index_of(line.terms[0].atom)
            part, index = found
            return product_text([self.size_of(atom) for atom in part.atoms[1:]]), index
        text, side = self._sum(line, name)
        own = Index(self._name(f"{name}_whole"), side)
        self.lines.append(f"{own.name} = {text}")
        return "1", own

    def _name(self, wish: str) -> str:
        while wish in self.taken:
            wish += "_"
        self.taken.add(wish)
        return wish

    # -- text

    def index_lines(self, read: str) -> list[str]:
        """Statements that give each program its rows and columns, and each part its index where ``read`` names it."""
        lines = [
            "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
            "cols = (tl.program_id(0) % tiles_n).to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)",
        ]
        if self.outer:
            lines += [
                "tiles_m = tl.cdiv(n_rows, BLOCK_M)",
                "tile = tl.program_id(0) // tiles_n",
                "rows = (tile % tiles_m).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)",
                *_taken_apart(self.outer, "(tile // tiles_m).to(INDEX)"),
            ]
        else:
            lines.append("rows = (tl.program_id(0) // tiles_n).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)")
        lines += ["row_mask = rows[:, None] < n_rows", "col_mask = cols[None, :] < n_cols"]
        lines.append("mask = row_mask & col_mask")
        for parts, flat in ((self.rows, "rows"), (self.cols, "cols")):
            lines += _taken_apart(parts, flat) if len(parts) > 1 else []
        named = {part.index for part in (*self.outer, *self.rows, *self.cols)}
        text = "\n".join([read, *self.lines])

        def wanted(line: str) -> bool:
            name = line.split(" = ")[0]
            return name not in named or re.search(rf"\b{name}\b", text) is not None

        return [*(line for line in lines if wanted(line)), *self.lines]


def joint_side(sides: Iterable[str]) -> str:
    """The side of what is computed from indices on ``sides``."""
    found = {side for side in sides if side}
    return "both" if len(found) > 1 else next(iter(found), "")


def added(terms: Iterable[str]) -> str:
    """A sum's text; terms may begin with a sign."""
    first, *rest = terms
    return first + "".join(f" - {text[1:]}" if text.startswith("-") else f" + {text}" for text in rest)


def _led_back(kind: str, text: str, size: str) -> str:
    """Text of an index that is led back inside ``size``."""
    if kind == "reflect":
        return f"{size} - 1 - tl.abs({size} - 1 - tl.abs({text}))"
    if kind == "replicate":
        return f"tl.minimum(tl.maximum({text}, 0), {size} - 1)"
    return f"({text} + {size}) % {size}" if kind == "circular" else text


def _taken_apart(parts: list[Part], flat: str) -> list[str]:
    """Statements that split a flat index into those of its parts."""
    lines: list[str] = []
    for place in range(len(parts) - 1, -1, -1):
        inner = [part.text if part.literal else f"{part.index}_size" for part in parts[place + 1 :]]
        text = flat
        for size in reversed(inner):
            text = f"{text} // {size}"
        own = parts[place].text if parts[place].literal else f"{parts[place].index}_size"
        lines.append(f"{parts[place].index} = {text}" + (f" % {own}" if place else ""))
    return lines


def alone(atoms: Atoms, guards: Iterable[int], used: Iterable[int], size_of: SizeOf) -> tuple[set[int], set[int]]:
    """Atoms that must be no part with others, and those that nothing may be folded in front of.

    ``guards`` are the pieces that are told apart, ``used`` atoms those whose indices are wanted by themselves.
    """
    single, first = set[int](), set[int]()
    pending = [origin for atom in used if (origin := atoms.origin(atom)) is not None]
    seen: set[int] = set()
    for guard in guards:
        line = whole_line(guard, atoms, size_of)
        if len(line.terms) == 1 and line.terms[0].weight == 1:
            first.add(line.terms[0].atom)
        else:
            single |= {term.atom for term in line.terms}
        pending += [origin for term in line.terms if (origin := atoms.origin(term.atom)) is not None]
    while pending:
        origin = pending.pop()
        if origin in seen:
            continue
        seen.add(origin)
        line = whole_line(origin, atoms, size_of)
        single |= {term.atom for term in line.terms}
        pending += [other for term in line.terms if (other := atoms.origin(term.atom)) is not None]
    return single, first
