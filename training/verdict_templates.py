"""Verdicts written from templates, for demonstrations in bulk: the texts are the gym's, the judging did not happen.

Judging one candidate takes seconds, writing one takes milliseconds; so the bulk of multi-turn demonstrations shows
verdicts made here, in the words of real ones (a test compares them with the gym's under the interpreter). Each says so
in ``notes`` (:data:`TEMPLATE_NOTE`), and nothing that is rewarded or reported ever comes from here.

Errors and speeds are drawn; which error belongs to which fault is fixed. Where a fault may turn out harmless (a mask
that no tail needed), only the gym can tell: such kinds are written as wrong here.
"""

from __future__ import annotations

import ast
import random
import re

from drk.gym.schema import (
    Candidate,
    Cell,
    Evidence,
    Failure,
    Interval,
    KernelRow,
    Rung,
    Speedups,
    Verdict,
)
from drk.training.faults import FaultKind

TEMPLATE_NOTE = "written from a template, not judged"
_LIMITS = (2.38e-07, 1.91e-06)


def fault_verdict(candidate: Candidate, kind: FaultKind, rng: random.Random) -> Verdict:
    """Return what the gym would say about a candidate with a fault of ``kind``."""
    evidence: Evidence = "gpu" if rng.random() < 0.6 else "interpreter"
    if kind == "syntax":
        return _failed(evidence, None, _syntax_failure(candidate.source))
    if kind == "crash":
        line = _line_of(candidate.source, r"\btorc\.")
        return _failed(evidence, "loaded", Failure("run", "exception", "NameError: name 'torc' is not defined", line))
    if kind == "compile":
        found = re.search(r"\btl\.(\w+_all)\(", candidate.source)
        name = found[1] if found else "load_all"
        message = f"AttributeError(\"module 'triton.language' has no attribute '{name}'\")"
        line = _line_of(candidate.source, rf"\btl\.{name}\(")
        if evidence == "gpu":
            return _failed(evidence, "loaded", Failure("compile", "compile-error", message, line))
        return _failed(evidence, "loaded", Failure("run", "exception", f"InterpreterError: {message}", line))
    return _wrong(evidence, kind, rng)


def right_verdict(candidate: Candidate, rng: random.Random, *, share: float, slow: bool = False) -> Verdict:
    """Return what the gym would say about a right candidate that does ``share`` (0 to 1) of the work itself."""
    names = re.findall(r"^def (\w+_kernel)\(", candidate.source, re.MULTILINE)
    if rng.random() < 0.4:
        rows = tuple(KernelRow(name, owned=True) for name in names)
        return Verdict(
            "accepted", "interpreter", "correct", correct=True, honest=None, coverage_estimate=round(share, 3),
            kernels=rows, weights="copied", notes=(TEMPLATE_NOTE,),
        )  # fmt: skip
    base = rng.uniform(0.6, 1.15) if slow else rng.uniform(1.0, 4.0)
    speed = Interval(base, base * 0.985, base * 1.015, rng.randint(20, 200))
    time_us = rng.uniform(5.0, 400.0)
    own = [KernelRow(name, True, 1, share * time_us / len(names), share / len(names)) for name in names]
    rest = [KernelRow("vectorized_elementwise_kernel", False, 1, (1 - share) * time_us, 1 - share)] if share < 1 else []
    return Verdict(
        "accepted", "gpu", "measured", correct=True, honest=True, speedups=Speedups(speed), headline="eager",
        coverage=round(share, 3), kernels=tuple(own + rest), weights="copied", notes=(TEMPLATE_NOTE,),
    )  # fmt: skip


def _failed(evidence: Evidence, reached: Rung | None, error: Failure) -> Verdict:
    return Verdict("failed", evidence, reached, correct=False, honest=None, error=error, notes=(TEMPLATE_NOTE,))


def _wrong(evidence: Evidence, kind: FaultKind, rng: random.Random) -> Verdict:
    size = 10 ** (rng.uniform(-5, -3) if kind == "half" else rng.uniform(-2, 0.5))
    own = 10 ** rng.uniform(-8, -7)
    rms_limit, max_limit = (_LIMITS[0], _LIMITS[1]) if rng.random() < 0.6 else (own * 3, own * 40)
    reason = f"RMS error {size:.3g} exceeds {rms_limit:.3g} (the reference's own is {own:.3g})"
    names = ["seed0 eval out", "seed1 eval out"][: rng.randint(1, 2)]
    worst = size * rng.uniform(1.2, 6.0)
    cells = tuple(
        Cell(name, False, reason, rms=size, max=worst, reference_rms=own, rms_limit=rms_limit, max_limit=max_limit)
        for name in names
    )
    error = Failure("check", "wrong-output", f"{names[0]}: {reason}")
    return Verdict(
        "rejected", evidence, "ran", correct=False, honest=None, cells=cells, error=error,
        coverage_estimate=1.0 if evidence == "interpreter" else None, weights="copied", notes=(TEMPLATE_NOTE,),
    )  # fmt: skip


def _syntax_failure(source: str) -> Failure:
    try:
        ast.parse(source)
    except SyntaxError as error:
        return Failure("parse", "syntax-error", str(error.msg), error.lineno)
    return Failure("parse", "syntax-error", "invalid syntax", 1)


def _line_of(source: str, pattern: str) -> int | None:
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(pattern, line):
            return number
    return None
