"""The forms in which ``drk check`` speaks to machines and people: text, GitHub annotations, JUnit XML.

Messages come from users' files and candidates, so control characters are made visible, and each form's own escapes are
used. JUnit is written by junitparser. A check without a GPU passes, and its system-out says that speed was not checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drk.assistant.check import Check
from drk.assistant.console import escape_controls, format_table


def checks_text(checks: Sequence[Check]) -> str:
    """Return a line for each artefact, its notes, and the sum."""
    rows = [[one.status, _shown(one.file), one.target or "-", one.reason] for one in checks]
    lines = [format_table(rows, header=("status", "file", "target", "why"))]
    lines += [f"note: {_shown(one.file)}: {note}" for one in checks for note in one.notes]
    good = sum(one.good for one in checks)
    blind = sum(one.status == "logic-only" for one in checks)
    told = f"{good} of {len(checks)} passed"
    return "\n".join([*lines, "", f"{told}, {blind} of them without a speed" if blind else told])


def _shown(file: str) -> str:
    path, here = Path(file), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()


def github_annotations(checks: Sequence[Check], root: Path | None = None) -> str:
    """Return workflow commands: an error for what failed, a notice for what was only half checked.

    ``root`` is the folder that files are named relative to (the checkout; ``GITHUB_WORKSPACE`` on a runner).
    """
    base = root or Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    lines = []
    for one in checks:
        if one.status == "passed" and not one.notes:
            continue
        kind = "notice" if one.good else "error"
        path = Path(one.file).resolve()
        file = path.relative_to(base.resolve()).as_posix() if path.is_relative_to(base.resolve()) else one.file
        text = "\n".join([f"{one.target}: {one.status}: {one.reason}" if one.target else one.reason, *one.notes])
        lines.append(
            f"::{kind} file={_property(file)},line={one.line},title={_property('drk check')}::{_message(text)}"
        )
    good = sum(one.good for one in checks)
    return "\n".join([*lines, f"drk check: {good} of {len(checks)} passed"])


def _message(text: str) -> str:
    escaped = "\n".join(escape_controls(line) for line in text.split("\n"))
    return escaped.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def junit_xml(checks: Sequence[Check]) -> str:
    """Return JUnit XML: one suite, one test case for each artefact."""
    from junitparser import Failure, JUnitXml, TestCase, TestSuite

    suite = TestSuite("drk check")
    for one in checks:
        case = TestCase(escape_controls(one.target or Path(one.file).name), escape_controls(_shown(one.file)))
        if not one.good:
            failure = Failure(escape_controls(one.reason), one.status)
            failure.text = escape_controls("\n".join([f"{one.file}:{one.line}", one.reason, *one.notes]))
            case.result = [failure]
        told = [one.status, one.reason, *one.notes]
        case.system_out = escape_controls("\n".join(told))
        if one.verdict is not None:
            case.time = round(sum(one.verdict.timings_s.values()), 3)
        suite.add_testcase(case)
    document: Any = JUnitXml()  # its methods have no types
    document.add_testsuite(suite)
    document.update_statistics()
    text = document.tostring()
    return text.decode() if isinstance(text, bytes) else str(text)
