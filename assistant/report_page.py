"""What a report page holds: a profile's Report, what a run adds to it, source excerpts; and its JSON inside the page.

A page can be read back (``drk compare``, ``drk report page.html``), so the JSON of what it shows stands in it, made
small: fields that have their default are left out, numbers have five significant digits, a row keeps at most
:data:`MAX_SAMPLES` per-step times, and the timeline (which is drawn) is not repeated; nor are syntax hashes, which only
an editor needs, beside the sources. Long JSON is packed.

Pages may come from elsewhere: what is read is validated, limited in size, and never run.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drk.assistant.errors import UsageError
from drk.assistant.report import REPORT_SCHEMA_VERSION, Report
from drk.gym.schema import Interval, Verdict

PAGE_KIND = "drk-report"
MAX_SAMPLES = 10
MAX_ROWS = 100
MAX_PLAIN_CHARACTERS = 24_000
"""JSON longer than this is packed (zlib, base64 in the field ``zlib``), so that pages stay small."""
MAX_PAGE_BYTES = 64 * 2**20
_EMBEDDED = re.compile(r'<script type="application/json" id="drk-report">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True)
class Excerpt:
    """Lines of the user's file around a hot line; ``first_line`` and ``hot_line`` are 1-based.

    ``note`` says what limits the function and what there is to gain.
    """

    title: str
    file: str
    first_line: int
    hot_line: int
    lines: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class TurnRow:
    """One judged candidate of a run; ``speedup`` is over the fastest baseline, null where not measured."""

    index: int
    sample: int
    status: str
    accepted: bool
    proposer: str
    note: str = ""
    speedup: Interval | None = None
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class RunReport:
    """What an optimisation says: the answer, the best candidate's evidence, each turn, the change and the code.

    ``verdict`` is the best accepted candidate's, null where there is none. ``code`` is its source, ``diff`` the edit
    of the user's file; both are empty where there is none, or where sources were left out.
    """

    name: str
    target: str
    status: str
    reason: str
    verdict: Verdict | None = None
    turns: tuple[TurnRow, ...] = ()
    diff: str = ""
    code: str = ""
    explanation: tuple[str, ...] = ()
    spending: str = ""


@dataclass(frozen=True)
class Page:
    """Everything that one page shows; at least one of ``report`` and ``run`` is there."""

    report: Report | None = None
    run: RunReport | None = None
    excerpts: tuple[Excerpt, ...] = ()

    @property
    def title(self) -> str:
        """What the page is about."""
        if self.run is not None:
            return self.run.target
        return self.report.title if self.report is not None else ""

    def without_sources(self) -> Page:
        """Return the page without any text of source files."""
        run = self.run and replace(self.run, diff="", code="")
        return replace(self, run=run, excerpts=())


def page_json(page: Page) -> dict[str, Any]:
    """Return the JSON form; it is what stands in an HTML page."""
    small = replace(page, report=page.report and _shortened(page.report))
    data: dict[str, Any] = compact(small)
    return {"kind": PAGE_KIND, "schema_version": REPORT_SCHEMA_VERSION, **data}


def page_from_json(data: Any) -> Page:
    """Parse and check the JSON form.

    Raises:
        UsageError: kind ``report``: not a page, or of a schema version that this drk does not know.
    """
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(data, dict) or data.get("kind") != PAGE_KIND:
        raise UsageError("not a report page", kind="report", help="`drk report` makes one")
    if data.get("schema_version") != REPORT_SCHEMA_VERSION:
        told = f"its schema version is {data.get('schema_version')!r}, this drk reads {REPORT_SCHEMA_VERSION}"
        raise UsageError("not a report that this drk can read", kind="report", cause=told)
    try:
        page: Page = TypeAdapter(Page).validate_python({key: data[key] for key in data if key != "kind"})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError("not a valid report", kind="report", cause=f"{where}: {first['msg']}") from error
    if page.report is None and page.run is None:
        raise UsageError("the report is empty", kind="report")
    return page


def embedded(page: Page) -> str:
    """Return the JSON as it may stand inside a ``script`` element: no ``<``, ``>``, ``&`` or line separators."""
    data = page_json(page)
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    if len(text) > MAX_PLAIN_CHARACTERS:
        packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        text = json.dumps({"kind": PAGE_KIND, "schema_version": data["schema_version"], "zlib": packed})
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_from_html(text: str) -> Page:
    """Read a page that :func:`drk.assistant.report_html.report_html` wrote.

    Raises:
        UsageError: kind ``report``: it is another kind of page, or its data is malformed.
    """
    found = _EMBEDDED.search(text)
    if found is None:
        raise UsageError("the page holds no report of drk", kind="report")
    try:
        data = json.loads(found[1])
        if isinstance(data, dict) and "zlib" in data:
            data = json.loads(_unpacked(data["zlib"]))
    except (ValueError, TypeError, zlib.error, RecursionError) as error:
        raise UsageError("the page's data cannot be read", kind="report", cause=str(error)) from error
    return page_from_json(data)


def _unpacked(packed: str) -> bytes:
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(packed, validate=True), MAX_PAGE_BYTES)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError("the packed data is too large, or torn")
    return data


def read_text(path: Path) -> str:
    """Return the text of a report file.

    Raises:
        UsageError: it cannot be read, is no text, or is too large.
    """
    try:
        if path.stat().st_size > MAX_PAGE_BYTES:
            raise UsageError("the report is too large", file=str(path))
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the report cannot be read", file=str(path), cause=str(error)) from error


def _shortened(report: Report) -> Report:
    def trim(row: Any) -> Any:
        place = row.place and replace(row.place, qualname="", ast_hash="")
        return replace(row, times=replace(row.times, per_step_us=row.times.per_step_us[:MAX_SAMPLES]), place=place)

    return replace(
        report,
        kernels=tuple(trim(row) for row in report.kernels[:MAX_ROWS]),
        modules=tuple(replace(trim(row), called_at=None) for row in report.modules[:MAX_ROWS]),
        functions=tuple(trim(row) for row in report.functions[:MAX_ROWS]),
        step_us=report.step_us[:MAX_SAMPLES],
        timeline=(),
    )


def compact(value: Any) -> Any:
    """Return plain JSON values: fields of dataclasses that have their default are left out, numbers are rounded to five
    digits, those that are not finite become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {}
        for item in dataclasses.fields(value):
            field_value = getattr(value, item.name)
            default = item.default
            if item.default_factory is not dataclasses.MISSING:
                default = item.default_factory()
            if item.name == "schema_version" or default is dataclasses.MISSING or field_value != default:
                kept[item.name] = compact(field_value)
        return kept
    if isinstance(value, dict):
        return {str(key): compact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [compact(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
