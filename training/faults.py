"""Faults put into a right candidate, for demonstrations of repair and for tests: each with what a person would call it.

Kinds, by how the gym sees them: ``syntax`` (does not parse), ``crash`` (a missing name when it runs), ``compile`` (a
Triton function that does not exist), and wrong results: ``wrong`` (what is stored is off), ``constant`` (a constant
was copied wrongly), ``axis`` (a reduction over the wrong axis), ``mask`` (the tail is not masked), ``stride`` (rows
are addressed by the wrong size), ``epilogue`` (the last step is missing), ``half`` (intermediate results in half
precision), ``operand`` (one value in the place of another). A kind that finds nothing to change gives none. What a
fault does is not promised: the gym judges it like any candidate.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "syntax", "compile", "wrong", "crash", "constant", "axis", "mask", "stride", "epilogue", "half", "operand"
]  # fmt: skip
KINDS: tuple[FaultKind, ...] = ("syntax", "compile", "wrong", "crash")
"""The kinds that nearly every kernel allows and that are sure to be judged wrong."""
ALL_KINDS: tuple[FaultKind, ...] = (*KINDS, "constant", "axis", "mask", "stride", "epilogue", "half", "operand")
Change = tuple[str, str]


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
    made = _MAKERS[kind](source, rng)
    if made is None or made[0] == source:
        return None
    return Fault(made[0], kind, made[1])


def _syntax(source: str, rng: random.Random) -> Change | None:
    places = list(re.finditer(r"\)\n", source))
    rng.shuffle(places)
    for place in places:
        broken = source[: place.start()] + source[place.end() - 1 :]
        try:
            ast.parse(broken)
        except SyntaxError:  # one inside a docstring breaks nothing
            return broken, "a closing parenthesis is missing"
    return None


def _compile(source: str, rng: random.Random) -> Change | None:
    pattern = r"\btl\.(load|store|arange|where|exp|sum|maximum|minimum|dot)\("
    return _swap(source, rng, pattern, lambda found: f"tl.{found[1]}_all(", "a tl function does not exist")


def _crash(source: str, rng: random.Random) -> Change | None:
    pattern = r"\btorch\.(empty_like|empty|zeros)\("
    return _swap(source, rng, pattern, lambda found: f"torc.{found[1]}(", "the name torch is misspelt")


def _wrong(source: str, rng: random.Random) -> Change | None:
    change, what = rng.choice([("({} + 0.5)", "0.5 is added"), ("(-{} - 0.1)", "the sign is wrong")])
    return _change_stored(source, rng, lambda text: change.format(f"({text})"), f"what is stored is off: {what}")


def _epilogue(source: str, rng: random.Random) -> Change | None:
    """Store what went into the last operation instead of its result."""

    def before(text: str) -> str:
        for line in source.splitlines():
            head, equals, value = line.strip().partition(" = ")
            if head == text and equals:
                names = [one.id for one in ast.walk(ast.parse(value)) if isinstance(one, ast.Name)]
                names = [one for one in names if re.search(rf"^    {re.escape(one)} = ", source, re.MULTILINE)]
                return rng.choice(names) if names else text
        return text

    return _change_stored(source, rng, before, "the last step is missing")


def _half(source: str, rng: random.Random) -> Change | None:
    pattern = r"(= tl\.load\(.*\)\.to\()tl\.float32\)"
    return _swap(source, rng, pattern, lambda f: f"{f[1]}tl.float16)", "intermediate results are in half precision")


def _constant(source: str, rng: random.Random) -> Change | None:
    def other(found: re.Match[str]) -> str:
        value = float(found[0])
        return repr(round(rng.choice((value * 2, value + 1, value / 10)), 4))

    return _swap(source, rng, r"(?<![\w.])\d+\.\d{1,3}(?![\w.])", other, "a constant is wrong", body=True)


def _axis(source: str, rng: random.Random) -> Change | None:
    swap = {"axis=1)[:, None]": "axis=0)[None, :]", "axis=1)": "axis=0)"}
    pattern = r"axis=1\)(?:\[:, None\])?"
    return _swap(source, rng, pattern, lambda found: swap[found[0]], "a reduction goes over the wrong axis", body=True)


def _mask(source: str, rng: random.Random) -> Change | None:
    pattern = r"tl\.where\(col_mask, (.*?), (?:0\.0|float\(\"-?inf\"\))\)|, mask=mask(?=\)$)"
    return _swap(source, rng, pattern, lambda found: found[1] or "", "the tail is not masked", body=True)


def _stride(source: str, rng: random.Random) -> Change | None:
    return _swap(source, rng, r"\* n_cols\b", lambda _: "* n_rows", "rows are addressed by the wrong size", body=True)


def _operand(source: str, rng: random.Random) -> Change | None:
    loaded = re.findall(r"^    (\w+) = tl\.load\(", source, re.MULTILINE)
    if len(set(loaded)) < 2:
        return None
    old, new = rng.sample(sorted(set(loaded)), 2)
    pattern = rf"(?<=[ (-]){re.escape(old)}(?=[ ),])(?! = )"
    return _swap(source, rng, pattern, lambda _: new, f"{new} stands in the place of {old}", body=True)


_MAKERS: Mapping[FaultKind, Callable[[str, random.Random], Change | None]] = {
    "syntax": _syntax, "compile": _compile, "wrong": _wrong, "crash": _crash, "constant": _constant, "axis": _axis,
    "mask": _mask, "stride": _stride, "epilogue": _epilogue, "half": _half, "operand": _operand,
}  # fmt: skip


def _swap(
    source: str,
    rng: random.Random,
    pattern: str,
    make: Callable[[re.Match[str]], str],
    what: str,
    *,
    body: bool = False,
) -> Change | None:
    """Change one place that ``pattern`` finds; ``body``: inside a kernel's statements only."""
    places = [
        place for place in re.finditer(pattern, source, re.MULTILINE) if not body or _in_kernel(source, place.start())
    ]
    if not places:
        return None
    place = rng.choice(places)
    return source[: place.start()] + make(place) + source[place.end() :], what


def _in_kernel(source: str, place: int) -> bool:
    """Say whether a place lies in a kernel, not in a device function or a launcher, and not in its parameters."""
    start = source.rfind("\ndef ", 0, place)
    end = source.find("\n\n\n", start)
    name = source[start + 5 : source.find("(", start)]
    head = source.find("):\n", start)
    return start >= 0 and name.endswith("_kernel") and head < place < (end if end > 0 else len(source))


def _change_stored(source: str, rng: random.Random, change: Callable[[str], str], what: str) -> Change | None:
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
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    last = (value.end_lineno or value.lineno) - 1
    # offsets count bytes; what follows the value is cut first, in case both stand on one line
    after = lines[last][value.end_col_offset or 0 :]
    before = lines[value.lineno - 1][: value.col_offset]
    lines[value.lineno - 1 : last + 1] = [before + change(ast.unparse(value)).encode() + after]
    return b"".join(lines).decode(), what
