from __future__ import annotations

from dataclasses import replace

import pytest
from report_pages import cpu_report, gpu_report, measured_verdict, run_page

from drk.assistant.compare import compare, comparison_json, independent_ratio
from drk.assistant.compare_command import comparison_text
from drk.assistant.errors import UsageError
from drk.assistant.report_page import Page
from drk.gym.schema import Latency

STEPS = (100.0, 101.0, 99.0, 100.5, 99.5, 100.2)


def profile(factor: float = 1.0, **changes):
    """The profile with every time scaled: total, modules, kernels, steps."""
    report = gpu_report(**changes)

    def scaled(row, samples=STEPS):
        base = row.times.total_us / report.method.steps / 100
        steps = tuple(factor * base * step for step in samples)
        return replace(row, times=replace(row.times, total_us=row.times.total_us * factor, per_step_us=steps))

    return replace(
        report,
        wall_us=report.wall_us * factor,
        total_us=report.total_us * factor,
        step_us=tuple(factor * step for step in STEPS),
        modules=tuple(scaled(row) for row in report.modules),
        kernels=tuple(scaled(row) for row in report.kernels),
    )


def test_equal_profiles_do_not_differ() -> None:
    found = compare(Page(profile()), Page(profile()))
    assert {row.change for row in found.rows} == {"same"}
    assert found.failing(0.97) == []
    assert found.warnings == ()


def test_a_slower_profile_fails_with_its_modules_and_not_its_kernels() -> None:
    found = compare(Page(profile()), Page(profile(1.25)))
    assert found.rows[0].kind == "whole"
    assert found.rows[0].ratio == pytest.approx(0.8, rel=1e-3)
    assert found.rows[0].change == "slower"
    assert {row.kind for row in found.failing(0.97)} == {"whole", "module"}
    assert found.failing(0.7) == []
    assert comparison_json(found, 0.97)["status"] == "slower"
    assert "below 0.97: the whole step" in comparison_text(found, 0.97)


def test_a_ratio_within_noise_does_not_fail() -> None:
    noisy = replace(profile(), step_us=(60.0, 140.0, 95.0, 150.0, 100.0, 104.0))
    row = compare(Page(profile()), Page(noisy)).rows[0]
    assert row.low is not None
    assert row.high is not None
    assert row.low < 1 < row.high
    assert not row.fails(0.97)


def test_without_steps_there_is_a_ratio_and_no_interval() -> None:
    bare = replace(profile(2.0), step_us=(), modules=(), kernels=())
    row, *others = compare(Page(profile()), Page(bare)).rows
    assert (row.ratio, row.low, row.change) == (pytest.approx(0.5), None, "unknown")
    assert row.fails(0.97)
    assert {other.change for other in others} == {"only-a"}
    assert not any(other.fails(0.97) for other in others)


def test_what_differs_is_told() -> None:
    a, b = profile(), profile()
    b = replace(b, environment=replace(b.environment, torch="2.14.0"))
    assert compare(Page(a), Page(b)).warnings == ("torch differs: 2.13.0 and 2.14.0",)


def test_gpu_and_cpu_times_and_runs_and_profiles_are_not_compared() -> None:
    with pytest.raises(UsageError, match="the other a CPU's"):
        compare(Page(profile()), Page(cpu_report()))
    with pytest.raises(UsageError, match="a run cannot be compared"):
        compare(Page(profile()), Page(run=run_page()))


def test_runs_are_compared_by_their_kernels_latency() -> None:
    faster = replace(run_page(), verdict=replace(measured_verdict(), latency_ms=Latency(0.206, 0.2, 0.21)))
    row = compare(Page(run=run_page()), Page(run=faster)).rows[0]
    assert row.ratio == pytest.approx(2.0)
    assert row.change == "faster"
    assert (row.low, row.high) == (pytest.approx(0.405 / 0.21), pytest.approx(0.42 / 0.2))
    unmeasured = replace(run_page(), verdict=None)
    found = compare(Page(run=run_page()), Page(run=unmeasured))
    assert found.warnings == ("the kernel of B was not measured",)
    assert not found.failing(0.97)


def test_the_interval_covers_the_true_ratio() -> None:
    import numpy as np

    generator = np.random.default_rng(5)
    inside = 0
    for seed in range(100):
        a = generator.normal(120, 6, 30)
        b = generator.normal(100, 5, 30)
        _, low, high = independent_ratio(a.tolist(), b.tolist(), seed=seed)
        inside += low <= 1.2 <= high
    assert inside >= 85
