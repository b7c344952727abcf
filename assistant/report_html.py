"""One self-contained HTML page from a :class:`~drk.assistant.report_page.Page`: a pure function, no file or network.

Everything from outside (names of kernels, files, notes of models) goes through jinja2's autoescape or the escaping of
:mod:`drk.assistant.charts`. The page's own security policy forbids everything but its one style sheet and its one
script, both by hash: a name that got through would still not run. The data stands in the page as JSON, so that
:func:`~drk.assistant.report_page.page_from_html` reads it back.

Each table shows at most :data:`~drk.assistant.report_page.MAX_ROWS` rows and says how many there are; long names are
cut in the middle.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from drk.assistant import charts
from drk.assistant.charts import Bar, CurvePoint
from drk.assistant.report import Figure, Place, Report
from drk.assistant.report_page import MAX_ROWS, Page, RunReport, embedded
from drk.assistant.report_verdict import duration_text, known_text
from drk.assistant.verdict_rows import Baseline, baselines, cells_text, honesty_text, used, worst_cells
from drk.gym.schema import Interval

_TEMPLATES = Path(__file__).parent / "templates"
_NAME_CHARACTERS = 72


def report_html(page: Page) -> str:
    """Return the page as HTML text."""
    style, script = _asset("report_style.css.j2"), _asset("report_script.js.j2")
    report, run = page.report, page.run
    values: dict[str, Any] = {
        "page": page,
        "report": report,
        "run": run,
        "style": Markup(style),
        "script": Markup(script),
        "style_hash": _digest(style),
        "script_hash": _digest(script),
        "data": Markup(embedded(page)),
        "on_device": report is not None and report.method.times_are == "device",
        "facts": _facts(report) if report is not None else [],
        "roofline": Markup(charts.roofline(report) if report is not None else ""),
        "timeline": Markup(charts.timeline(report) if report is not None else ""),
        "rows": MAX_ROWS,
        "next": _next(report) if report is not None and run is None else "",
        **_run_values(run),
    }
    return _environment().get_template("report.html.j2").render(values)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "duration": duration_text,
        "percent": lambda share: f"{100 * share:.1f} %",
        "times": _times,
        "amount": _amount,
        "place": _place,
        "short": _short,
        "interval": _interval,
        "used": used,
        "bar": lambda share: f"n bar s{round(20 * min(max(share, 0.0), 1.0))}",
        "key": lambda value: f"{value:.4g}",
    }
    made.filters.update(filters)
    return made


def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _times(value: float | None) -> str:
    if value is None:
        return "all"
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _amount(figure: Figure | None, calls: int, unit: str) -> str:
    if figure is None:
        return "-"
    value = figure.value / max(calls, 1)
    mark = "" if figure.how == "measured" else "*"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}{mark}"
    return f"{value:.3g} {unit}{mark}"


def _place(place: Place | None) -> str:
    return f"{place.file}:{place.line}" if place is not None else "-"


def _short(name: str, limit: int = _NAME_CHARACTERS) -> str:
    if len(name) <= limit:
        return name
    half = (limit - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def _interval(value: Interval | None) -> str:
    return "-" if value is None else f"{value.value:.2f}x [{value.low:.2f}, {value.high:.2f}]"


def _next(report: Report) -> str:
    """Return the command that goes on from a profile, or nothing."""
    if any(kind.task for row in report.modules for kind in row.inputs):
        return f"drk optimize {report.id} --from-profile"
    target = next((row.target for row in report.modules if row.target), "")
    return f"drk optimize {target}" if target else ""


def _facts(report: Report) -> list[tuple[str, str]]:
    """Return method and environment as names and texts; what is not known is left out."""
    method, machine = report.method, report.environment
    steps = max(report.method.steps, 1)
    whose = f"times of {machine.device}" if method.times_are == "device" else "CPU times (nothing ran on a GPU)"
    ended = "" if method.ended == "finished" else f"{method.ended}, exit code {method.exit_code}"
    rows = [
        ("what", method.command or method.target),
        ("program", ended),
        ("inputs", method.inputs),
        ("mode", method.mode or ""),
        ("times", f"{whose}; {method.steps} steps after {method.warmup} of warm-up"),
        (
            "a step",
            f"{duration_text(report.total_us / steps)} in rows below, {duration_text(report.wall_us / steps)} wall",
        ),
        ("seed", "" if method.seed is None else str(method.seed)),
        ("processes", "" if method.processes == 1 else str(method.processes)),
        ("device", machine.device if machine.device != "cpu" else machine.cpu or "cpu"),
        ("versions", _versions(report)),
        *sorted(machine.facts.items()),
        ("roofs", "" if report.roof is None else _roof_text(report)),
        (
            "least",
            ""
            if report.floor_us is None
            else f"{duration_text(report.floor_us.value / steps)} a step by the roofs ({report.floor_us.how})",
        ),
        ("known", known_text(report.attribution)),
        ("sum", report.attribution.explanation),
        ("made", f"{report.created}, {report.id}"),
    ]
    return [(name, text) for name, text in rows if text]


def _versions(report: Report) -> str:
    machine = report.environment
    named = {
        "torch": machine.torch,
        "triton": machine.triton,
        "CUDA": machine.cuda,
        "Python": machine.python,
        "drk": machine.drk,
    }
    return ", ".join(f"{name} {version}" for name, version in named.items() if version)


def _roof_text(report: Report) -> str:
    assert report.roof is not None
    roof = report.roof
    return f"{roof.name}, {roof.bandwidth_gb_s:g} GB/s, {'measured here' if roof.how == 'measured' else 'data sheet'}"


def _run_values(run: RunReport | None) -> dict[str, Any]:
    if run is None:
        return {"timed": [], "before_after": "", "curve": "", "cells": [], "correctness": "", "honesty": ""}
    verdict = run.verdict
    timed = baselines(verdict) if verdict is not None else []
    return {
        "timed": timed,
        "before_after": Markup(_bars(timed)),
        "curve": Markup(charts.curve(_points(run))),
        "cells": worst_cells(verdict) if verdict is not None else [],
        "correctness": cells_text(verdict) if verdict is not None else "",
        "honesty": honesty_text(verdict) if verdict is not None else "",
    }


def _bars(timed: Sequence[Baseline]) -> str:
    rows = [
        Bar(row.label, row.latency.median, f"{row.latency.median:.4g} ms", row.latency.low, row.latency.high, row.own)
        for row in timed
        if row.latency is not None
    ]
    return charts.bars(rows, "milliseconds a call, before and after; whiskers are 95 % intervals")


def _points(run: RunReport) -> list[CurvePoint]:
    return [
        CurvePoint(
            turn.index,
            turn.speedup.value if turn.accepted and turn.speedup is not None else None,
            f"{turn.index}.{turn.sample + 1}: {turn.status}, {_interval(turn.speedup)} {turn.note or turn.error}",
        )
        for turn in run.turns
    ]
