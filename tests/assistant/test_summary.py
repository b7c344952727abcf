from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drk.assistant.episode import Episode, Turn
from drk.assistant.events import make_event
from drk.assistant.hotspots import Hotspot, Hotspots, hotspots_event
from drk.assistant.outcome import decide, estimate, result_json
from drk.assistant.search import Found
from drk.assistant.summary import event_line, progress_text, summary, worst_cell
from drk.gym.devices import device_facts
from drk.gym.graph import graph_from_json
from drk.gym.schema import Candidate, Cell, KernelRow, Latency, Task


def text_of(task: Task, *verdicts: Any, interrupted: bool = False, **more: Any) -> str:
    turns = tuple(Turn(n, Candidate(f"# {n}", note=f"way {n}"), one) for n, one in enumerate(verdicts, 1))
    outcome = decide(Found(Episode("t", turns), "ended", interrupted))
    result = result_json(outcome, task, run_dir="/w/.drk/runs/r1", **more)
    return summary(outcome, result, where=Path("/w"))


def test_measured_speeds_stand_with_interval_and_baseline(silu_task: Task, verdicts: Any) -> None:
    best = verdicts.accepted(
        1.5,
        latency_ms=Latency(0.5, 0.49, 0.51),
        baselines_ms={"eager": Latency(1.0, 0.9, 1.1)},
        kernels=(KernelRow("silu_kernel", True), KernelRow("at::add", False)),
    )
    text = text_of(silu_task, verdicts.refused(), best, artefact={"module": "/w/.drk/runs/r1/model_kernels.py"})
    assert text.startswith("ScaledSilu: optimised")
    assert "2.50x over eager [2.40, 2.60], 1.60x over compile [1.50, 1.70]" in text
    assert "latency:   0.5 ms (eager 1 ms)" in text
    assert "1e-07 relative to float64 (rms, worst cell), the original's own is 1e-07" in text
    assert "kernels:   silu_kernel\n" in text
    assert "files:     .drk/runs/r1/model_kernels.py" in text
    assert "drk apply r1" in text
    assert "way 2" in text


def test_without_a_gpu_no_speed_is_claimed(silu_task: Task, silu_graph: Any, verdicts: Any) -> None:
    best = Turn(1, Candidate("# 1"), verdicts.accepted())
    estimated = estimate(best, graph_from_json(silu_graph), device_facts("sm_90"))
    text = text_of(silu_task, best.verdict, estimated=estimated, measure_command="drk verify a b --device cuda:0")
    assert "speed:     not measured: no GPU" in text
    assert "estimate:  own kernels do about 90% of the work; eager moves about" in text
    assert "drk verify a b --device cuda:0   (on a machine with a GPU: measures it)" in text
    for word in ("faster", "x over", "speedup"):
        assert word not in text


def test_no_win_failed_and_interrupted_say_so(silu_task: Task, verdicts: Any) -> None:
    assert "no significant difference" in text_of(silu_task, verdicts.accepted(0.95))
    failed = text_of(silu_task, verdicts.refused(), interrupted=True)
    assert "failed: no candidate was accepted" in failed
    assert "drk optimize --resume r1" in failed
    assert "best:" not in failed


def test_the_worst_cell_is_relative_to_the_original(verdicts: Any) -> None:
    near = Cell("near", True, rms=1e-3, reference_rms=1e-3)
    far = Cell("far", True, rms=1e-6, reference_rms=1e-7)
    assert worst_cell(verdicts.accepted(cells=(near, far, Cell("x", True)))) is far
    assert worst_cell(verdicts.accepted(cells=())) is None


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (make_event("note", text="hello"), "hello"),
        (make_event("captured", nodes=3, reason=None), "captured 3 operations"),
        (make_event("captured", nodes=None, reason="it branches"), "graph not captured: it branches"),
        (hotspots_event(Hotspots()), ""),
        (
            hotspots_event(Hotspots(reason="no CUPTI")),
            "the reference's kernels were not measured, only estimated: no CUPTI",
        ),
        (
            hotspots_event(Hotspots("H200", (Hotspot("a", 1, 2.5, 1.0),), 1, 1, 2.5)),
            "measured 1 kernel of the reference, 2.5 us a call",
        ),
        (make_event("finished", status="failed"), ""),
        (make_event("unknown-kind"), ""),
    ],
)
def test_event_lines(event: dict[str, Any], line: str) -> None:
    assert event_line(event) == line


def test_progress_tells_the_time_left() -> None:
    event = make_event("judging", turn=2, number=5, id="x", eta_s=42.4)
    assert progress_text(event) == "turn 2: judging candidate 5, at most 42 s to go"
    assert progress_text({**event, "eta_s": None}) == "turn 2: judging candidate 5"
