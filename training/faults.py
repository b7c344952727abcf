"""Faults put into a right candidate, for demonstrations of repair and for tests: each with what a person would call it.

Kinds: ``syntax`` (a line that does not parse), ``compile`` (a Triton function that does not exist), ``wrong`` (a sign,
a constant or a mask is off), ``crash`` (a missing name when it runs). A fault is found by text, so a kind that finds
nothing to change gives none. What a fault does is not promised: the gym judges it like any candidate.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["syntax", "compile", "wrong", "crash"]
KINDS: tuple[FaultKind, ...] = ("syntax", "compile", "wrong", "crash")


@dataclass(frozen=True)
class Fault:
    """A faulty source, its kind, and what was changed."""

    source: str
    kind: FaultKind
    what: str


def insert_fault(source: str, kind: FaultKind, *, seed: int = 0) -> Fault | None:
    """Return ``source`` with one fault of ``kind``, or None where there is nothing to change."""
    rng = random.Random(f"{kind}:{seed}")
    makers = {"syntax": _syntax, "compile": _compile, "wrong": _wrong, "crash": _crash}
    made = makers[kind](source, rng)
    if made is None or made[0] == source:
        return None
    return Fault(made[0], kind, made[1])


def _syntax(source: str, rng: random.Random) -> tuple[str, str] | None:
    places = list(re.finditer(r"\)\n", source))
    if not places:
        return None
    place = rng.choice(places)
    return source[: place.start()] + source[place.end() - 1 :], "a closing parenthesis is missing"


def _compile(source: str, rng: random.Random) -> tuple[str, str] | None:
    calls = list(re.finditer(r"\btl\.(load|store|arange|where|exp|sum|maximum|minimum|dot)\(", source))
    if not calls:
        return None
    call = rng.choice(calls)
    wrong = f"{call[1]}_all"
    return source[: call.start(1)] + wrong + source[call.end(1) :], f"tl.{wrong} does not exist"


def _wrong(source: str, rng: random.Random) -> tuple[str, str] | None:
    # inside kernels only: lines that compute a value, not addresses, sizes or masks
    lines = source.splitlines(keepends=True)
    inside, places = False, []
    for number, line in enumerate(lines):
        if line.startswith("@triton.jit"):
            inside = True
        elif line.startswith(("class ", "def ")) and not lines[number - 1].startswith("@triton.jit"):
            inside = False
        if inside and re.search(r"tl\.store\(", line):
            places.append(number)
    if not places:
        return None
    number = rng.choice(places)
    found = re.search(r"(tl\.store\([^,]+, *)([A-Za-z_]\w*)", lines[number])
    if not found:
        return None
    change, what = rng.choice(
        [("({} + 0.5)", "0.5 is added"), ("(-{})", "the sign is wrong"), ("({} * 1.1)", "a factor")]
    )
    lines[number] = lines[number].replace(found[0], found[1] + change.format(found[2]), 1)
    return "".join(lines), f"what is stored is off: {what}"


def _crash(source: str, rng: random.Random) -> tuple[str, str] | None:
    calls = list(re.finditer(r"\btorch\.(empty_like|empty|zeros)\(", source))
    if not calls:
        return None
    call = rng.choice(calls)
    return source[: call.start()] + "torc" + source[call.start() + 5 :], "the name torch is misspelt"
