"""Inline SVG for report pages: roofline, timeline, bars with intervals, any-time curve. Pure text, no library.

Every function returns one ``<svg>`` element, or an empty string where there is nothing to draw. All text from outside
is escaped. Colours, fonts and line widths come from classes that the page's style sheet defines, so that light, dark
and print need no second drawing and the page's security policy can forbid ``style`` attributes.

Left out: zooming (``drk profile --export perfetto`` is for that). The timeline shows at most :data:`MAX_SPANS` spans of
one step; neighbours too narrow to see are drawn as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from drk.assistant.report import KernelRow, Report, Roof, TimelineSpan
from drk.assistant.report_verdict import duration_text

MAX_SPANS = 200
MAX_LABELS = 12
MAX_SPOTS = 100
_WIDTH, _HEIGHT = 680, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 24, 14, 40
_ROW = 18
_MAX_ROWS = 24


@dataclass(frozen=True)
class Bar:
    """One horizontal bar: ``value`` with its interval, in any unit; ``text`` is what is written behind it."""

    label: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None
    own: bool = False


@dataclass(frozen=True)
class CurvePoint:
    """One judged turn: ``value`` is its speed-up, null where it was refused or not measured."""

    turn: int
    value: float | None
    title: str


@dataclass(frozen=True)
class _LogAxes:
    """Maps (x, y) > 0 onto the drawing, both logarithmic; bounds are whole decades."""

    x_low: int
    x_high: int
    y_low: int
    y_high: int

    def x(self, value: float) -> float:
        span = _WIDTH - _LEFT - _RIGHT
        return round(_LEFT + span * (math.log10(value) - self.x_low) / (self.x_high - self.x_low), 1)

    def y(self, value: float) -> float:
        span = _HEIGHT - _TOP - _BOTTOM
        return round(_HEIGHT - _BOTTOM - span * (math.log10(value) - self.y_low) / (self.y_high - self.y_low), 1)


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(label)}">{"".join(body)}</svg>'
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    kinds = f' class="{kind}"' if kind else ""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:g}" y="{y:g}"{kinds}{anchored}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


# --- roofline ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spot:
    number: int
    row: KernelRow
    intensity: float
    tflops: float


def roofline(report: Report) -> str:
    """Return the roofline: FLOP per byte against TFLOP/s, both logarithmic; numbers are those of the kernel table.

    With CPU times there is no attained rate: spots stand on the roof of the GPU that was asked for, as estimates.
    """
    roof = report.roof
    spots = _spots(report)
    if roof is None or not spots or roof.bandwidth_gb_s <= 0 or not _peaks(roof):
        return ""
    axes = _axes(roof, spots)
    measured = report.method.times_are == "device"
    body = [*_grid(axes), *_roofs(roof, axes)]
    labels: dict[tuple[int, int], tuple[float, float, list[str]]] = {}
    for spot in spots:
        what = "attains" if measured else "could attain"
        title = f"{spot.number}: {spot.row.name[:40]}, {spot.intensity:.3g} FLOP/byte, {what} {spot.tflops:.3g} TFLOP/s"
        radius = 4 + 8 * math.sqrt(min(spot.row.times.share, 1.0))
        kind = "spot" if measured else "spot estimated"
        x, y = axes.x(spot.intensity), axes.y(spot.tflops)
        body.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:.1f}">')
        body.append(f"<title>{escape(title)}</title></circle>")
        if spot.number <= MAX_LABELS:  # spots in one place share a label
            place = labels.setdefault((round(x / 12), round(y / 12)), (x, round(y - radius - 3, 1), []))
            place[2].append(str(spot.number))
    body += [_text(x, y, ", ".join(numbers), "small", "middle") for x, y, numbers in labels.values()]
    return _svg(_WIDTH, _HEIGHT, f"roofline of {roof.name}", body)


def _peaks(roof: Roof) -> list[tuple[str, float]]:
    """Return at most three compute roofs worth drawing, the lowest first."""
    chosen = [(name, roof.peak_tflops[name]) for name in ("fp32", "tf32", "bf16") if roof.peak_tflops.get(name, 0) > 0]
    return chosen or [(name, peak) for name, peak in sorted(roof.peak_tflops.items()) if peak > 0][:3]


def _spots(report: Report) -> list[_Spot]:
    found = []
    for number, row in enumerate(report.kernels[:MAX_SPOTS], start=1):
        flops, size = row.work.flops, row.work.size_bytes
        if flops is None or size is None or flops.value <= 0 or size.value <= 0 or row.times.total_us <= 0:
            continue
        intensity = flops.value / size.value
        rate = flops.value / row.times.total_us / 1e6
        if report.method.times_are != "device":
            if report.roof is None or not _peaks(report.roof):
                continue
            rate = min(report.roof.bandwidth_gb_s * intensity / 1e3, _peaks(report.roof)[0][1])
        found.append(_Spot(number, row, intensity, max(rate, 1e-9)))
    return found


def _axes(roof: Roof, spots: Sequence[_Spot]) -> _LogAxes:
    top = max(peak for _, peak in _peaks(roof))
    ridge = top * 1e3 / roof.bandwidth_gb_s
    xs = [*(spot.intensity for spot in spots), ridge]
    ys = [*(spot.tflops for spot in spots), top]
    x_low, x_high = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)) + 0.3)
    y_low, y_high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 0.1)
    return _LogAxes(x_low, max(x_high, x_low + 1), y_low, max(y_high, y_low + 1))


def _grid(axes: _LogAxes) -> list[str]:
    body = []
    for power in range(axes.x_low, axes.x_high + 1):
        x = axes.x(10.0**power)
        body += [
            _line(x, _TOP, x, _HEIGHT - _BOTTOM, "grid"),
            _text(x, _HEIGHT - _BOTTOM + 16, _power(power), "small", "middle"),
        ]
    for power in range(axes.y_low, axes.y_high + 1):
        y = axes.y(10.0**power)
        body += [_line(_LEFT, y, _WIDTH - _RIGHT, y, "grid"), _text(_LEFT - 6, y + 4, _power(power), "small", "end")]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [
        *body,
        _text(middle, _HEIGHT - 6, "FLOP per byte", "small", "middle"),
        _text(_LEFT + 4, _TOP + 10, "TFLOP/s", "small"),
    ]


def _power(power: int) -> str:
    return f"{10**power:g}" if -3 <= power <= 4 else f"1e{power}"


def _roofs(roof: Roof, axes: _LogAxes) -> list[str]:
    body = []
    peaks = _peaks(roof)
    slope = roof.bandwidth_gb_s / 1e3  # TFLOP/s at one FLOP per byte
    ridge = max(peak for _, peak in peaks) / slope
    start = max(10.0**axes.x_low, 10.0**axes.y_low / slope)
    end = min(ridge, 10.0**axes.x_high)
    body.append(_line(axes.x(start), axes.y(start * slope), axes.x(end), axes.y(end * slope), "roof"))
    for name, peak in peaks:
        x, y = axes.x(max(min(peak / slope, 10.0**axes.x_high), 10.0**axes.x_low)), axes.y(peak)
        body.append(_line(x, y, _WIDTH - _RIGHT, y, "roof"))
        label = y - 4 if peak == max(known for _, known in peaks) else y + 12  # near ones stay apart
        body.append(_text(_WIDTH - _RIGHT - 2, label, f"{name} {peak:g}", "small", "end"))
    return body


# --- timeline ------------------------------------------------------------------------------------------------


def timeline(report: Report) -> str:
    """Return one step as bars: device kernels, CPU operators and modules in lanes, time to the right."""
    spans = [span for span in report.timeline if span.duration_us > 0]
    if not spans:
        return ""
    end = max(span.start_us + span.duration_us for span in spans)
    left = 64
    scale = (_WIDTH - left - _RIGHT) / end
    drawn = _merged(spans, 0.7 / scale)
    drawn = sorted(sorted(drawn, key=lambda span: -span.duration_us)[:MAX_SPANS], key=lambda span: span.start_us)
    order = {"device": 0, "cpu": 1, "module": 2}
    rows = sorted({(span.lane, span.depth) for span in drawn}, key=lambda row: (order[row[0]], row[1]))[:_MAX_ROWS]
    places = {row: number for number, row in enumerate(rows)}
    height = 8 + _ROW * len(rows) + 22
    body = _time_axis(end, left, scale, height)
    for lane in ("device", "cpu", "module"):
        first = next((places[row] for row in rows if row[0] == lane), None)
        if first is not None:
            body.append(_text(left - 6, 8 + _ROW * first + 13, lane, "small", "end"))
    for row in rows:
        body.append(f'<g class="lane-{row[0]}" transform="translate(0,{8 + _ROW * places[row]})">')
        body += [_span(span, left, scale) for span in drawn if (span.lane, span.depth) == row]
        body.append("</g>")
    return _svg(_WIDTH, height, f"timeline of one step, {duration_text(end)}", body)


def _merged(spans: Sequence[TimelineSpan], least_us: float) -> list[TimelineSpan]:
    """Join neighbours of a row that are too narrow to be seen, and too near each other to be told apart."""
    found: list[TimelineSpan] = []
    counts: list[int] = []
    last: dict[tuple[str, int], int] = {}
    for span in sorted(spans, key=lambda span: span.start_us):
        row = (span.lane, span.depth)
        index = last.get(row)
        if index is not None and span.duration_us < least_us:
            before = found[index]
            gap = span.start_us - (before.start_us + before.duration_us)
            if gap < least_us and (counts[index] > 1 or before.duration_us < least_us):
                counts[index] += 1
                joined = span.start_us + span.duration_us - before.start_us
                found[index] = replace(before, duration_us=joined, name=f"{counts[index]} short spans", module=None)
                continue
        last[row] = len(found)
        found.append(span)
        counts.append(1)
    return found


def _time_axis(end: float, left: int, scale: float, height: float) -> list[str]:
    step = 10 ** math.floor(math.log10(end / 3)) if end > 0 else 1
    step = next(size * step for size in (1, 2, 5, 10) if end / (size * step) <= 7)
    body = []
    for number in range(int(end / step) + 1):
        x = left + number * step * scale
        body.append(_line(round(x, 1), 4, round(x, 1), height - 20, "grid"))
        body.append(_text(round(x, 1), height - 6, duration_text(number * step) if number else "0", "small", "middle"))
    return body


def _span(span: TimelineSpan, left: int, scale: float) -> str:
    x, width = left + span.start_us * scale, max(span.duration_us * scale, 0.7)
    where = f" in {span.module}" if span.module else ""
    title = f"{span.name}{where}, {duration_text(span.duration_us)}"
    box = f'<rect x="{x:.1f}" width="{width:.1f}" height="{_ROW - 3}"><title>{escape(title[:120])}</title></rect>'
    room = int((width - 6) / 6.4)
    if room < 4:
        return box
    name = span.name if len(span.name) <= room else span.name[: room - 1] + "…"
    return box + _text(round(x + 3, 1), 11.5, name, "inside")


# --- before and after ----------------------------------------------------------------------------------------


def bars(rows: Sequence[Bar], label: str) -> str:
    """Return horizontal bars from zero, with whiskers where there is an interval."""
    top = max((max(row.value, row.high or 0.0) for row in rows), default=0.0)
    if top <= 0:
        return ""
    left, right, height = 120, 150, 26
    scale = (_WIDTH - left - right) / top
    body = []
    for number, row in enumerate(rows):
        y = 4 + number * height
        width = max(row.value * scale, 1.0)
        body.append(_text(left - 8, y + 14, row.label[:18], "", "end"))
        body.append(
            f'<rect class="{"own" if row.own else "other"}" x="{left}" y="{y}" width="{width:.1f}" height="18"/>'
        )
        end = width
        if row.low is not None and row.high is not None:
            low, high = left + row.low * scale, left + row.high * scale
            body += [_line(round(low, 1), y + 9, round(high, 1), y + 9, "whisker")]
            body += [_line(round(x, 1), y + 4, round(x, 1), y + 14, "whisker") for x in (low, high)]
            end = max(end, row.high * scale)
        body.append(_text(round(left + end + 6, 1), y + 14, row.text))
    return _svg(_WIDTH, 8 + height * len(rows), label, body)


def curve(points: Sequence[CurvePoint]) -> str:
    """Return the any-time curve: the best speed-up so far by turn as a step line, each judged turn as a spot."""
    known = [point.value for point in points if point.value is not None]
    if not known:
        return ""
    width, height, left, bottom = _WIDTH, 200, 48, 28
    first, last = min(point.turn for point in points), max(point.turn for point in points)
    top = max(*known, 1.0) * 1.1
    across, up = (width - left - 20) / max(last - first + 1, 1), (height - bottom - 10) / top

    def place(turn: int) -> float:
        return left + (turn - first + 0.5) * across

    body = [
        _line(left, height - bottom - up, width - 12, height - bottom - up, "even"),
        _text(left - 6, height - bottom - up + 4, "1x", "small", "end"),
    ]
    body += [
        _line(left, height - bottom, width - 12, height - bottom, "grid"),
        _text(left - 6, 16, f"{top:.2g}x", "small", "end"),
    ]
    body += [
        _text(round(place(turn), 1), height - 10, str(turn), "small", "middle")
        for turn in range(first, last + 1)
        if last - first < 30
    ]
    best = 0.0
    path: list[str] = []
    for turn in range(first, last + 1):
        here = [point.value for point in points if point.turn == turn and point.value is not None]
        best = max([best, *here])
        if best:
            y = height - bottom - best * up
            x = place(turn) - across / 2
            path.append(f"{'L' if path else 'M'}{x:.1f},{y:.1f} L{x + across:.1f},{y:.1f}")
    body.append(f'<path class="best" d="{" ".join(path)}"/>')
    for point in points:
        y = height - bottom - (point.value or 0.0) * up
        kind = "spot" if point.value is not None else "spot refused"
        body.append(f'<circle class="{kind}" cx="{place(point.turn):.1f}" cy="{y:.1f}" r="4">')
        body.append(f"<title>{escape(point.title[:300])}</title></circle>")
    return _svg(width, height, "best speed-up by turn", body)
