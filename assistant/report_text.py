"""The terminal form of a Report: a pure function from values to text, without colour.

At most ten rows of each kind; shares have a bar; numbers stand to the right; the last lines name the next commands.
CPU times and estimates are called so wherever they stand.
"""

from __future__ import annotations

from drk.assistant.console import format_table
from drk.assistant.report import Figure, KernelRow, ModuleRow, Place, Report
from drk.assistant.report_verdict import duration_text, known_text

ROWS = 10
BAR = 10
LEAST_SHARE = 0.005
"""What has less of the time is not worth a line of its own."""


def render_text(report: Report, *, rows: int = ROWS) -> str:
    """Return the report as lines of text; ``rows`` limits each table."""
    parts = [report.verdict, "", _header(report)]
    on_device = report.method.times_are == "device"
    note = "" if on_device or report.roof is None else f" (class and least: estimated for {report.roof.name})"
    parts += _section(f"modules{note}", _modules(report, rows))
    parts += _section(f"{'kernels' if on_device else 'operators'}{note}", _kernels(report, rows))
    parts += _section("outside of modules", _parts(report, rows))
    parts += _section("functions", _functions(report, rows))
    parts += _section("fusion candidates (estimated)", _fusions(report, rows))
    parts += ["", *_footer(report)]
    return "\n".join(parts)


def _section(title: str, table: str) -> list[str]:
    return ["", title, table] if table else []


def _header(report: Report) -> str:
    method, environment = report.method, report.environment
    whose = f"times of {environment.device}" if method.times_are == "device" else "CPU times (nothing ran on a GPU)"
    if method.times_are == "cpu" and environment.device != "cpu":
        whose = "CPU times (kernels could not be recorded)"
    rows = [
        ("profile", report.id),
        ("what", method.command or method.target),
        ("times", f"{whose}; {method.steps} steps after {method.warmup} of warm-up"),
        ("step", _step(report)),
        ("on", _machine(report)),
    ]
    if method.ended != "finished":
        rows.insert(2, ("program", f"{method.ended}, exit code {method.exit_code}"))
    if report.roof is not None:
        rows.append(
            ("roofs", f"{report.roof.name}: {report.roof.bandwidth_gb_s:g} GB/s, data sheet ({report.roof.how})")
        )
    if report.floor_us is not None:
        least = duration_text(report.floor_us.value / max(method.steps, 1))
        rows.append(("least", f"{least} a step by the roofs ({report.floor_us.how})"))
    if report.idle is not None and report.idle.wall_us:
        split = report.idle
        shares = [f"{100 * part / split.wall_us:.0f} %" for part in (split.busy_us, split.launch_us, split.idle_us)]
        rows.append(("device", f"busy {shares[0]}, between launches {shares[1]}, idle {shares[2]}"))
    return format_table([row for row in rows if row[1]])


def _step(report: Report) -> str:
    steps = max(report.method.steps, 1)
    text = f"{duration_text(report.total_us / steps)} in operators"
    if report.method.times_are == "device":
        text = f"{duration_text(report.total_us / steps)} on the device"
    if report.wall_us:
        text += f", {duration_text(report.wall_us / steps)} wall"
    return f"{text}; known: {known_text(report.attribution)}"


def _machine(report: Report) -> str:
    environment = report.environment
    chip = environment.cpu if environment.device == "cpu" else environment.device
    parts = [chip, f"torch {environment.torch}", f"{environment.threads} threads" if environment.threads else ""]
    return ", ".join(part for part in parts if part)


def _bar(share: float) -> str:
    filled = round(BAR * min(max(share, 0.0), 1.0))
    return "#" * filled + "." * (BAR - filled)


def where(place: Place | None) -> str:
    """Return ``file:line``, or a dash."""
    return f"{place.file}:{place.line}" if place is not None else "-"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _bound(row: KernelRow | ModuleRow) -> str:
    work = row.work
    if work.percent_of_roof is not None:
        return f"{work.bound} {work.percent_of_roof:.0f} %"
    return work.bound if work.bound != "unknown" else "-"


def _times(value: float | None) -> str:
    return "all" if value is None else f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _least(figure: Figure | None, calls: int) -> str:
    return duration_text(figure.value / max(calls, 1)) if figure is not None else "-"


def _modules(report: Report, limit: int) -> str:
    rows = [
        [
            "  " * min(row.depth, 4) + row.name,
            _share(row.times.share),
            _bar(row.times.share),
            str(row.times.calls),
            duration_text(row.times.median_us),
            duration_text(row.times.p95_us),
            _bound(row),
            _least(row.work.floor_us, row.times.calls),
            _times(row.work.amdahl_bound),
            where(row.place),
        ]
        for row in report.modules[:limit]
        if row.times.total_us
    ]
    header = ("module", "share", "", "calls", "median", "p95", "class", "least", "amdahl", "source")
    return format_table(rows, header=header, right=(1, 3, 4, 5, 7, 8)) if rows else ""


def _kernels(report: Report, limit: int) -> str:
    rows = [
        [
            row.name if len(row.name) <= 48 else row.name[:45] + "...",
            _share(row.times.share),
            _bar(row.times.share),
            str(row.times.calls),
            duration_text(row.times.median_us),
            _bound(row),
            _count(row.work.size_bytes, row.times.calls, "B"),
            _count(row.work.flops, row.times.calls, "FLOP"),
            where(row.place),
            row.module or "-",
        ]
        for row in report.kernels[:limit]
    ]
    header = ("name", "share", "", "calls", "median", "class", "bytes*", "flops*", "line", "module")
    return format_table(rows, header=header, right=(1, 3, 4, 6, 7)) if rows else ""


def _count(figure: Figure | None, calls: int, unit: str) -> str:
    if figure is None:
        return "-"
    value = figure.value / max(calls, 1)
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _functions(report: Report, limit: int) -> str:
    rows = [
        [row.name, _share(row.times.share), _bar(row.times.share), _times(row.work.amdahl_bound), where(row.place)]
        for row in report.functions[: min(limit, 5)]
    ]
    return format_table(rows, header=("function", "share", "", "amdahl", "hottest line"), right=(1, 3)) if rows else ""


def _parts(report: Report, limit: int) -> str:
    rows = [
        [row.name, _share(row.times.share), _bar(row.times.share), where(row.place)]
        for row in report.parts[: min(limit, 5)]
        if row.times.share >= LEAST_SHARE
    ]
    return format_table(rows, header=("part", "share", "", "hottest line"), right=(1,)) if rows else ""


def _fusions(report: Report, limit: int) -> str:
    steps = max(report.method.steps, 1)
    rows = [
        [
            " + ".join(one.ops),
            duration_text(one.saved_us.value / steps),
            _times(one.attainable_speedup),
            str(one.occurrences // steps),
            where(one.place),
        ]
        for one in report.fusions[: min(limit, 5)]
    ]
    return (
        format_table(rows, header=("operations", "saves", "whole", "a step", "line"), right=(1, 2, 3)) if rows else ""
    )


def _footer(report: Report) -> list[str]:
    lines = ["* per call, estimated from shapes"]
    if report.attribution.explanation:
        lines.append(report.attribution.explanation)
    lines += [f"warning: {text.strip().splitlines()[-1]}" for text in report.warnings if text.strip()]
    lines += [f"not covered: {text}" for text in report.not_covered]
    target = next((row.target for row in report.modules if row.target), "")
    if any(kind.task for row in report.modules for kind in row.inputs):
        lines.append("next: drk optimize --from-profile")
    elif target:
        lines.append(f"next: drk optimize {target}")
    return lines
