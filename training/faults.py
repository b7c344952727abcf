"""Faults put into a right candidate, for demonstrations of repair and for tests: each with what a person would call it.

Kinds: ``syntax`` (a line that does not parse), ``compile`` (a Triton function that does not exist), ``wrong`` (what
is stored is off by a constant or a sign), ``crash`` (a missing name when it runs). A kind that finds nothing to change
gives none. What a fault does is not promised: the gym judges it like any candidate.
"""

from __future__ import annotations

import ast
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
    """Return ``source`` with one fault of ``kind``, or None where there is nothing to change.

    Raises:
        SyntaxError: ``source`` does not parse to begin with.
    """
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
    values = [
        call.args[1]
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in function.decorator_list)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.store" and len(call.args) > 1
    ]
    if not values:
        return None
    value = rng.choice(values)
    change, what = rng.choice([("({} + 0.5)", "0.5 is added"), ("(-{} - 0.1)", "the sign is wrong")])
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    text = ast.unparse(value)
    last = (value.end_lineno or value.lineno) - 1
    # offsets count bytes; what follows the value is cut first, in case both stand on one line
    after = lines[last][value.end_col_offset or 0 :]
    before = lines[value.lineno - 1][: value.col_offset]
    lines[value.lineno - 1 : last + 1] = [before + change.format(f"({text})").encode() + after]
    return b"".join(lines).decode(), f"what is stored is off: {what}"


def _crash(source: str, rng: random.Random) -> tuple[str, str] | None:
    calls = list(re.finditer(r"\btorch\.(empty_like|empty|zeros)\(", source))
    if not calls:
        return None
    call = rng.choice(calls)
    return source[: call.start()] + "torc" + source[call.start() + 5 :], "the name torch is misspelt"
