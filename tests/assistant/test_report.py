from __future__ import annotations

import json
from pathlib import Path

import pytest

from drk.assistant.errors import UsageError
from drk.assistant.report import (
    REPORT_SCHEMA_VERSION,
    Attribution,
    Environment,
    Figure,
    KernelRow,
    Method,
    ModuleRow,
    Place,
    Report,
    Times,
    Work,
    from_json,
    to_json,
)

PLACE = Place("net.py", 10, 20, 5, "Net.forward", "0123456789abcdef")


def small_report(**changes):
    times = Times(10.0, 0.5, 2, 5.0, 6.0, (4.0, 6.0))
    values = {
        "id": "20260101T000000Z-net",
        "created": "2026-01-01T00:00:00+00:00",
        "title": "net",
        "verdict": "half of it is in Net",
        "root": "/project",
        "total_us": 20.0,
        "wall_us": 25.0,
        "method": Method("call", "device", 2, notes=("a note",)),
        "environment": Environment("NVIDIA H200", "2.13.0", "3.7.0", "3.11.7", facts={"cores": "8"}),
        "attribution": Attribution(1.0, 0.9, 0.8),
        "kernels": (
            KernelRow(
                "k<1>", "aten::mm", times, Work("memory", Figure(1e6, "estimated")), "Net", PLACE, grid=(1, 2, 3)
            ),
        ),
        "modules": (ModuleRow("Net", "", "Net", times, 10.0, place=PLACE),),
    }
    return Report(**{**values, **changes})


def test_the_wire_form_reads_back_as_the_same_value() -> None:
    report = small_report()
    assert from_json(json.loads(json.dumps(to_json(report), allow_nan=False))) == report


def test_numbers_that_are_not_finite_become_null() -> None:
    work = Work(percent_of_roof=float("inf"), amdahl_bound=float("nan"))
    report = small_report(modules=(ModuleRow("Net", "", "Net", Times(1, 1, 1, 1, 1), 1.0, work),))
    data = to_json(report)["modules"][0]["work"]
    assert (data["percent_of_roof"], data["amdahl_bound"]) == (None, None)


def test_later_fields_are_ignored_and_other_versions_refused() -> None:
    data = to_json(small_report())
    assert from_json({**data, "novelty": 1}) == small_report()
    for version in (REPORT_SCHEMA_VERSION + 1, None, "1"):
        with pytest.raises(UsageError, match="not a report that this drk can read") as caught:
            from_json({**data, "schema_version": version})
        assert caught.value.kind == "report"
    for wrong in ([], None, "text"):
        with pytest.raises(UsageError):
            from_json(wrong)


def test_a_broken_report_names_the_field() -> None:
    data = to_json(small_report())
    data["kernels"][0]["times"]["calls"] = "many"
    with pytest.raises(UsageError, match="not a valid report") as caught:
        from_json(data)
    assert "kernels.0.times.calls" in caught.value.cause


def test_places_are_relative_to_the_root_or_absolute() -> None:
    report = small_report()
    assert report.path_of(PLACE) == Path("/project/net.py")
    assert report.path_of(Place("/elsewhere/x.py", 1, 1, 1)) == Path("/elsewhere/x.py")


def test_modules_are_found_by_name() -> None:
    assert small_report().module("Net").times.calls == 2
    assert small_report().module("None") is None
