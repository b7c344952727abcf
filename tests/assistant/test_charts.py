from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from report_pages import HOSTILE, cpu_report, gpu_report, wide_report

from drk.assistant.charts import MAX_SPANS, Bar, CurvePoint, bars, curve, roofline, timeline
from drk.assistant.report import Figure, Roof, TimelineSpan


def parsed(text: str) -> ET.Element:
    """Parse a chart; that it is well-formed is half of the test."""
    return ET.fromstring(text)


def texts(text: str) -> list[str]:
    return ["".join(one.itertext()) for one in parsed(text).iter() if one.tag in ("text", "title")]


def test_the_roofline_puts_kernels_where_their_rates_are() -> None:
    report = gpu_report()
    first = report.kernels[0]
    roof = Roof("test", 1000.0, {"fp32": 10.0}, "measured")
    work = replace(first.work, flops=Figure(1e9, "measured"), size_bytes=Figure(1e8, "measured"))
    fast = replace(first, work=work, times=replace(first.times, total_us=1000.0))
    slow = replace(fast, times=replace(first.times, total_us=10_000.0))
    circles = list(parsed(roofline(replace(report, roof=roof, kernels=(fast, slow)))).iter("circle"))
    assert len(circles) == 2
    assert circles[0].get("cx") == circles[1].get("cx")
    height = float(circles[1].get("cy")) - float(circles[0].get("cy"))
    slower = replace(fast, times=replace(first.times, total_us=100_000.0))
    three = list(parsed(roofline(replace(report, roof=roof, kernels=(fast, slow, slower)))).iter("circle"))
    steps = [float(one.get("cy")) for one in three]
    assert steps[1] - steps[0] == pytest.approx(steps[2] - steps[1], abs=0.2)  # a decade is a decade
    assert height > 0
    assert "1 TFLOP/s" in circles[0][0].text


def test_estimates_are_hollow_and_stand_on_the_roof() -> None:
    text = roofline(cpu_report())
    kinds = {one.get("class") for one in parsed(text).iter("circle")}
    assert kinds == {"spot estimated"}
    assert "could attain" in text


def test_spots_in_one_place_share_a_label() -> None:
    report = gpu_report()
    twins = replace(report, kernels=(report.kernels[0], report.kernels[0]))
    assert "1, 2" in texts(roofline(twins))


def test_nothing_to_draw_is_nothing() -> None:
    report = gpu_report()
    assert roofline(replace(report, roof=None)) == ""
    assert roofline(replace(report, kernels=())) == ""
    assert timeline(replace(report, timeline=())) == ""
    assert bars([], "none") == ""
    assert curve([CurvePoint(1, None, "refused")]) == ""


def test_the_timeline_keeps_the_longest_spans_and_joins_the_invisible() -> None:
    spans = [TimelineSpan("device", f"k{n}", n * 0.001, 0.0005) for n in range(1000)]
    spans += [TimelineSpan("cpu", f"op{n}", 2.0 * n, 1.0) for n in range(500)]
    text = timeline(replace(gpu_report(), timeline=tuple(spans)))
    assert len(list(parsed(text).iter("rect"))) <= MAX_SPANS
    assert any("1000 short spans" in one for one in texts(text))
    assert {"device", "cpu"} <= set(texts(text))


def test_every_name_is_escaped() -> None:
    report = wide_report(4, name=HOSTILE)
    joined = roofline(report) + timeline(report)
    joined += bars([Bar(HOSTILE, 1.0, HOSTILE)], HOSTILE) + curve([CurvePoint(1, 1.5, HOSTILE)])
    assert "<img" not in joined
    assert not re.search(r"</script", joined)
    for svg in re.findall(r"<svg.*?</svg>", joined, re.DOTALL):
        parsed(svg)


def test_bars_are_in_proportion_and_have_whiskers_only_with_an_interval() -> None:
    text = bars([Bar("eager", 2.0, "2 ms", 1.9, 2.2), Bar("ours", 1.0, "1 ms", own=True)], "times")
    rects = [float(one.get("width")) for one in parsed(text).iter("rect")]
    assert rects[0] == pytest.approx(2 * rects[1], rel=0.01)
    assert sum(one.get("class") == "whisker" for one in parsed(text).iter("line")) == 3


def test_the_any_time_curve_never_falls() -> None:
    points = [CurvePoint(1, 1.2, "a"), CurvePoint(2, None, "refused"), CurvePoint(3, 1.1, "b"), CurvePoint(4, 2.0, "c")]
    root = parsed(curve(points))
    (path,) = root.iter("path")
    heights = [float(y) for y in re.findall(r",([\d.]+)", path.get("d"))]
    assert heights == sorted(heights, reverse=True)  # downwards is larger
    assert sum("refused" in one.get("class") for one in root.iter("circle")) == 1
