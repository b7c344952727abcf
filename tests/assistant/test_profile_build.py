from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from profile_events import gpu_events, gpu_step, host, kernel, launch, op, recording, step

from drk.assistant.profile_build import Asked, build_report
from drk.assistant.profile_recording import RecordedModule
from drk.assistant.profile_trace import analyse
from drk.assistant.report import Method, from_json, to_json
from drk.assistant.report_text import render_text
from drk.assistant.report_verdict import verdict_sentence

METHOD = Method("command", "cpu", 0, command="python train.py")


def build(events, told=None, **asked):
    told = told or recording()
    return build_report(told, analyse(events, told.step_root), Asked("id", "net", Path("/project"), METHOD, **asked))


@pytest.fixture(scope="module")
def report():
    return build(gpu_events(4))


def test_rows_sum_to_the_device_time_of_the_steps_that_count(report) -> None:
    assert (report.method.steps, report.method.warmup, report.method.times_are) == (3, 1, "device")
    assert report.total_us == pytest.approx(300)
    assert sum(row.times.total_us for row in report.kernels) == pytest.approx(report.total_us)
    assert sum(row.times.share for row in report.kernels) == pytest.approx(1.0)
    assert all(sum(row.times.per_step_us) == pytest.approx(row.times.total_us) for row in report.kernels)


def test_everything_is_known_by_module_and_line(report) -> None:
    assert report.attribution.to_module == report.attribution.to_line == 1.0


def test_modules_are_inclusive_and_know_their_own_time(report) -> None:
    net, linear = report.module("Net"), report.module("Net.fc")
    assert (net.times.share, linear.times.share) == (pytest.approx(1.0), pytest.approx(0.7))
    assert (net.self_us, linear.self_us) == (pytest.approx(90), pytest.approx(210))
    assert (net.times.calls, net.times.median_us) == (3, pytest.approx(100))
    assert (net.parent, linear.parent, linear.depth) == (None, "Net", 1)
    assert linear.work.amdahl_bound == pytest.approx(1 / 0.3)
    assert net.work.amdahl_bound is None  # it is everything


def test_rows_of_the_running_gpu_have_roofs_and_classes(report) -> None:
    assert (report.roof.name, report.roof.how) == ("NVIDIA H200", "estimated")
    gemm = next(row for row in report.kernels if row.name == "gemm")
    assert gemm.work.flops.value == pytest.approx(3 * 2 * 1024 * 256 * 256)
    assert gemm.work.percent_of_roof == pytest.approx(100 * gemm.work.floor_us.value / 120)
    assert gemm.work.bound in ("compute", "latency")
    assert gemm.grid == (64, 1, 1)


def test_the_device_is_split_into_busy_launching_and_idle(report) -> None:
    split = report.idle
    assert split.busy_us == pytest.approx(300)
    assert split.busy_us + split.launch_us + split.idle_us == pytest.approx(split.wall_us)
    assert "waits" in report.attribution.explanation


def test_the_timeline_shows_one_step(report) -> None:
    device = [span for span in report.timeline if span.lane == "device"]
    assert [span.name for span in device] == ["gemm", "gelu_kernel", "mul_kernel", "gelu_grad", "gemm_grad"]
    assert {span.name for span in report.timeline if span.lane == "module"} == {"Net", "Net.fc"}
    assert min(span.start_us for span in report.timeline) >= 0


def test_the_chain_behind_the_product_is_a_fusion_candidate(report) -> None:
    (candidate,) = report.fusions
    assert candidate.ops == ("addmm", "gelu", "mul")
    assert (candidate.module, candidate.occurrences) == ("Net", 3)
    # two intermediate tensors of 1 MiB, neither written nor read again, at the H200's 4.8 TB/s
    assert candidate.saved_us.value == pytest.approx(3 * 2 * 2 * 2**20 / 4.8e6)
    assert candidate.saved_us.how == "estimated"


def test_the_verdict_names_share_and_bound(report) -> None:
    assert "70 %" in report.verdict
    assert "device time" in report.verdict
    assert "Linear" in report.verdict


def test_it_survives_the_wire(report) -> None:
    assert from_json(to_json(report)) == report


def test_one_step_is_taken_as_it_is_with_a_warning() -> None:
    report = build(gpu_events(1))
    assert (report.method.steps, report.method.warmup) == (1, 0)
    assert any("warming up" in text for text in report.warnings)


def test_two_steps_are_left_out_of_long_windows() -> None:
    assert build(gpu_events(6)).method.warmup == 2


def test_wall_time_is_of_steps_outside_of_the_window_where_there_are_any() -> None:
    told = recording(
        steps={"0": [0, *(1_000_000 + 100_000 * n for n in range(3)), *range(2_000_000, 2_800_000, 110_000)]}
    )
    report = build(gpu_events(4), told)
    assert report.wall_us == pytest.approx(3 * 110)
    assert set(report.step_us) == {110.0}
    assert any("without the profiler" in note for note in report.method.notes)


def test_time_that_belongs_to_nothing_is_a_row_of_its_own() -> None:
    events = [*gpu_events(3), kernel("stray", 999, 1400, 100)]
    report = build(events)
    stray = next(row for row in report.kernels if row.name == "stray")
    assert (stray.module, stray.place) == (None, None)
    assert report.attribution.to_module < 1
    assert sum(row.times.total_us for row in report.kernels) == pytest.approx(report.total_us)


def test_an_unknown_gpu_gets_times_and_no_roofs() -> None:
    told = recording(environment={"device": "Some GPU 9000"})
    report = build(gpu_events(3), told)
    assert report.roof is None
    assert any("no roofs" in text for text in report.warnings)
    assert all(row.work.percent_of_roof is None for row in report.kernels)


def test_cpu_times_are_called_so_and_the_named_gpu_only_estimates() -> None:
    events = [event for event in gpu_events(4) if event["cat"] == "cpu_op"]
    report = build(events, recording(environment={"device": "cpu"}), target="a100")
    assert report.method.times_are == "cpu"
    assert report.idle is None
    assert "not in this machine" in report.roof.name
    assert report.floor_us.how == "estimated"
    assert all(row.work.percent_of_roof is None and row.work.attainable_speedup is None for row in report.kernels)
    assert "CPU time" in report.verdict
    assert any("GPU" in text for text in report.not_covered)


def test_modules_of_one_name_stay_apart() -> None:
    modules = (
        *recording().modules,
        RecordedModule(2, 2, None, "", "Net", "/project/net.py", None, 1),
        RecordedModule(3, 0, 0, "fc", "Linear", "/lib/linear.py", 0, 1),
    )
    names = recording(modules=modules).module_names()
    assert list(names.values()) == ["Net", "Net.fc", "Net#2", "Net.fc#2"]


def test_no_step_is_told() -> None:
    report = build([event for event in gpu_step(0, 0, 0) if not event["name"].startswith("drk|s")])
    assert any("no step" in text for text in report.warnings)
    assert report.total_us == pytest.approx(100)


def test_an_empty_window_is_no_crash() -> None:
    report = build([step(0, 0)])
    assert report.total_us == 0
    assert report.verdict == "nothing was measured"


def test_what_runs_outside_of_modules_has_a_name() -> None:
    outside = [
        host("drk|l|1", 1, 9),
        op("aten::copy_", 2, 4, [[8]]),
        launch(900, 3),
        host("Optimizer.step#SGD.step", 110, 30, "user_annotation"),
        op("aten::_foreach_add_", 112, 5, [[[8]]]),
        launch(901, 113),
        launch(902, 150),
    ]
    late = [event | {"ts": event["ts"] + 1600} for event in outside]
    kernels = [kernel("copy", 900, 1610, 10), kernel("sgd", 901, 1730, 20), kernel("mystery", 902, 1760, 70)]
    report = build([*gpu_events(4), *late, *kernels])
    assert [(row.name, row.times.total_us) for row in report.parts] == [
        ("SGD.step", 20),
        ("net.py (top level)", 10),
    ]
    assert report.attribution.to_module == pytest.approx(300 / 400)
    assert report.attribution.to_part == pytest.approx(330 / 400)
    heavy = replace(report.parts[0], times=replace(report.parts[0].times, share=0.8))
    assert verdict_sentence(replace(report, parts=(heavy,))).startswith(
        "80 % of 133 us device time a step is in SGD.step, outside of modules; 52 % is in Linear, worth at most 2.1x"
    )


def test_a_kernel_of_a_module_without_a_line_has_that_of_the_call() -> None:
    graph = [step(0, 0), host("drk|m|1", 1, 9), launch(1, 2), kernel("replayed", 1, 5, 3)]
    (row,) = build(graph).kernels
    assert row.place.line == 10  # where Net calls the linear


def test_steps_outside_of_the_window_are_timed_by_the_devices_clock() -> None:
    report = build(gpu_events(4), recording(device_steps_us={"0": [110.0, 108.0, 112.0]}))
    assert report.wall_us == pytest.approx(3 * 110)
    assert report.step_us == (110.0, 108.0, 112.0)
    split = report.idle
    assert (split.wall_us, split.busy_us) == (pytest.approx(330), pytest.approx(300))
    assert split.launch_us + split.idle_us == pytest.approx(30)
    assert split.profiled_us == pytest.approx(2 * 150 + 115)  # first kernel to the end of the last


def test_a_gpu_whose_kernels_were_not_seen_is_told() -> None:
    report = build([step(0, 0), host("drk|m|0", 1, 9), op("aten::add", 2, 5, [[4], [4]])])
    assert "NVIDIA H200" in report.warnings[0]
    assert "saw no kernel" in report.warnings[0]
    assert "kernels could not be recorded" in render_text(report)


def test_classes_of_a_virtual_environment_inside_the_project_are_not_the_users_own(tmp_path) -> None:
    def place(folder):
        file = tmp_path / folder / "linear.py"
        file.parent.mkdir(parents=True)
        file.write_text("class Linear:\n    pass\n")
        linear = RecordedModule(1, 0, 0, "fc", "Linear", str(file), 0, 4)
        told = recording(modules=(recording().modules[0], linear))
        asked = Asked("id", "net", tmp_path, METHOD)
        return build_report(told, analyse(gpu_events(2), told.step_root), asked).module("Net.fc").place

    assert place("layers").line == 1
    assert place(".venv/lib/python3.11/site-packages/torch") is None


def test_a_part_that_is_called_again_in_the_backward_counts_for_what_it_is_in() -> None:
    again = [
        op("autograd::engine::evaluate_function: CheckpointBackward", 1700, 20, thread=2),
        host("drk|m|1", 1701, 18, thread=2),
        op("aten::addmm", 1702, 9, [[8], [8, 8], [8, 8]], thread=2),
        launch(900, 1703, thread=2),
        kernel("gemm again", 900, 1710, 50),
    ]
    report = build([*gpu_events(4), *again])
    assert report.module("Net").times.total_us == pytest.approx(350)
    assert report.module("Net").times.calls == 3
    assert report.module("Net.fc").times.calls == 4
