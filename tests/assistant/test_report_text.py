from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from profile_events import gpu_events, recording

from drk.assistant.profile_build import Asked, build_report
from drk.assistant.profile_trace import analyse
from drk.assistant.report import InputKind, Method
from drk.assistant.report_export import to_perfetto
from drk.assistant.report_text import render_text
from drk.assistant.report_verdict import duration_text, verdict_sentence


def build(events, told, target=None):
    method = Method("command", "cpu", 0, command="python train.py")
    return build_report(told, analyse(events, 0), Asked("id-net", "net", Path("/project"), method, target))


@pytest.fixture(scope="module")
def gpu():
    return build(gpu_events(4), recording())


@pytest.fixture(scope="module")
def cpu():
    events = [event for event in gpu_events(4) if event["cat"] == "cpu_op"]
    return build(events, recording(environment={"device": "cpu"}), "h100")


def test_the_table_shows_shares_lines_and_roofs(gpu) -> None:
    lines = render_text(gpu).splitlines()
    assert lines[0] == gpu.verdict
    gemm = next(line for line in lines if line.startswith("gemm "))
    assert "40.0 %" in gemm
    assert "####......" in gemm
    assert gemm.rstrip().endswith("net.py:10  Net.fc")
    assert any(line.startswith("device") and "busy" in line for line in lines)
    assert any("busy" not in line and line.startswith("roofs") and "estimated" in line for line in lines)


def test_cpu_times_and_estimates_are_called_so(cpu) -> None:
    text = render_text(cpu)
    assert "CPU times (nothing ran on a GPU)" in text
    assert "class and least: estimated for NVIDIA H100" in text
    assert "not in this machine" in text
    assert "not covered: GPU times" in text


def test_tables_have_at_most_so_many_rows(gpu) -> None:
    text = render_text(gpu, rows=1)
    assert "gemm " in text
    assert "mul_kernel" not in text


def test_how_a_program_ended_is_told(gpu) -> None:
    method = replace(gpu.method, ended="crashed", exit_code=3)
    assert "crashed, exit code 3" in render_text(replace(gpu, method=method))


def test_the_next_command_is_named(gpu) -> None:
    kinds = (InputKind("f32[8]", 3, "eval", False, task="000"),)
    modules = tuple(replace(row, inputs=kinds, target="net.py:Net") for row in gpu.modules)
    assert "next: drk optimize --from-profile" in render_text(replace(gpu, modules=modules))
    plain = tuple(replace(row, target="net.py:Net") for row in gpu.modules)
    assert "next: drk optimize net.py:Net" in render_text(replace(gpu, modules=plain))


def test_the_export_is_a_chrome_trace(gpu) -> None:
    data = to_perfetto(gpu)
    spans = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(gpu.timeline)
    lanes = {event["args"]["name"]: event["tid"] for event in data["traceEvents"] if event["name"] == "thread_name"}
    assert {span["tid"] for span in spans} == {lanes["modules"], lanes["device kernels"]}
    assert all(span["dur"] > 0 and span["ts"] >= 0 for span in spans)
    assert data["otherData"]["report"] == "id-net"


def test_the_verdict_falls_back_to_kernels_where_no_module_stands_out(gpu) -> None:
    alone = replace(gpu, modules=tuple(row for row in gpu.modules if row.parent is None), fusions=())
    assert "kinds of kernel" in verdict_sentence(alone)


@pytest.mark.parametrize(
    ("time_us", "text"), [(0.5, "0.5 us"), (12.345, "12.3 us"), (4200, "4.2 ms"), (2_500_000, "2.5 s")]
)
def test_durations(time_us, text) -> None:
    assert duration_text(time_us) == text
