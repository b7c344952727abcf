"""A verdict as text: what matters first, nothing claimed that was not measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drk.assistant.verdict_text import verdict_text
from drk.gym.schema import Cell, Failure, Flag, Interval, KernelRow, Latency, Speedups, Verdict

GOOD_CELL = Cell("seed 0, eval", True, rms=2e-7, reference_rms=1e-7, rms_limit=3e-7)
ACCEPTED = Verdict(
    status="accepted",
    evidence="gpu",
    reached="measured",
    correct=True,
    honest=True,
    cells=(GOOD_CELL, GOOD_CELL),
    speedups=Speedups(eager=Interval(1.842, 1.83, 1.86, 40), compile=Interval(1.01, 0.99, 1.03, 40)),
    headline="compile",
    latency_ms=Latency(0.41234, 0.41, 0.42),
    baselines_ms={"eager": Latency(0.7595, 0.75, 0.77)},
    coverage=0.934,
    kernels=(
        KernelRow("fast_kernel", True, launches=1, time_us=380.25, share=0.93, num_warps=8, registers=96),
        KernelRow("cublas_thing", False, launches=2, time_us=20.0, share=0.07),
    ),
    weights="copied",
    sandbox_level="standard",
    repro="drk verify model.py candidate.py",
)


def test_an_accepted_verdict_in_full() -> None:
    assert verdict_text(ACCEPTED) == (
        "accepted: correct, honest (checked on the GPU)\n"
        "  cells     2 of 2 passed; largest rms error 2e-07, reference's own 1e-07\n"
        "  speed     1.84x over eager [1.83, 1.86]; "
        "1.01x over compile [0.99, 1.03, fastest baseline, no significant difference] (40 pairs)\n"
        "  latency   0.4123 ms against eager 0.7595 ms\n"
        "  coverage  93% of device time in its own kernels\n"
        "  sandbox   standard\n"
        "\n"
        "  kernel        whose    launches     us  share  warps  regs  spill B  shared B\n"
        "  fast_kernel   own             1  380.2    93%      8    96        -         -\n"
        "  cublas_thing  library         2   20.0     7%      -     -        -         -\n"
        "  repeat: drk verify model.py candidate.py"
    )


def test_without_a_gpu_nothing_is_claimed_about_speed() -> None:
    verdict = Verdict("accepted", "interpreter", "correct", True, None, coverage_estimate=0.81)
    text = verdict_text(verdict)
    assert text.splitlines()[0] == "accepted: correct, honesty not judged (logic checked by the interpreter)"
    assert "  speed     not measured (no GPU)\n" in text + "\n"
    assert "  coverage  not measured; about 81% of the work, estimated from the graph" in text
    assert "x over" not in text
    assert "latency" not in text


def test_timing_switched_off_on_a_gpu_is_not_blamed_on_the_gpu() -> None:
    assert "  speed     not measured\n" in verdict_text(replace(ACCEPTED, speedups=None))


def test_a_wrong_result_names_the_cells_and_limits() -> None:
    bad = Cell("seed 1", False, rms=0.5, rms_limit=1e-6, reference_rms=3e-7, max=0.1, max_limit=0.2)
    odd = Cell("seed 2", False, reason="shape (2, 3), expected (2, 4)")
    nan = Cell("seed 3", False, rms=float("nan"), rms_limit=1e-6)
    verdict = Verdict(
        "rejected", "gpu", "ran", False, None, cells=(GOOD_CELL, bad, odd, nan, replace(odd, name="seed 4"))
    )
    assert verdict_text(verdict).splitlines() == [
        "rejected: wrong result (reached: ran on the GPU)",
        "  wrong in: seed 1: rms error 0.5 where 1e-06 is allowed (reference: 3e-07)",
        "  wrong in: seed 2: shape (2, 3), expected (2, 4)",
        "  wrong in: seed 3: rms error nan where 1e-06 is allowed",
        "            and 1 more of 5 cells",
    ]


def test_a_failure_shows_the_line_in_the_candidate() -> None:
    source = "import torch\n\ndef f(x):\n    return torch.nope(x)\n\n\nclass ModelNew: ...\n"
    error = Failure("run", "exception", "AttributeError: no nope", line=4)
    verdict = Verdict("failed", "interpreter", "loaded", False, None, error=error)
    assert verdict_text(verdict, source=source, path="c.py").splitlines() == [
        "failed: run stage, exception (reached: loaded)",
        "  AttributeError: no nope",
        "  --> c.py:4",
        "      2 |",
        "      3 | def f(x):",
        "    > 4 |     return torch.nope(x)",
        "      5 |",
        "      6 |",
    ]


@pytest.mark.parametrize("line", [0, 99, -1])
def test_a_line_that_is_not_there_shows_no_excerpt(line: int) -> None:
    verdict = Verdict("failed", "gpu", None, False, None, error=Failure("parse", "syntax", "bad", line=line))
    assert " | " not in verdict_text(verdict, source="a = 1\n")


def test_an_error_that_repeats_a_cell_is_said_once() -> None:
    cell = Cell("seed 0", False, reason="rms error is large")
    error = Failure("check", "wrong", "seed 0: rms error is large")
    text = verdict_text(Verdict("rejected", "gpu", "ran", False, None, cells=(cell,), error=error))
    assert text.count("rms error is large") == 1


def test_fraud_is_told_with_its_proof() -> None:
    flags = (
        Flag("constant output", "no-work", "fraud", "ablation over NaN-filled memory", {"kernels": 0}),
        Flag("library does it", "delegation", "label", "launch census"),
    )
    verdict = replace(ACCEPTED, status="rejected", honest=False, reached="correct", flags=flags)
    lines = verdict_text(verdict).splitlines()
    assert lines[0] == "rejected: not honest: constant output (reached: correct on the GPU)"
    start = lines.index("  fraud: constant output (no-work)")
    assert lines[start + 1 : start + 4] == [
        "    proof: ablation over NaN-filled memory",
        "    kernels: 0",
        "  label: library does it (delegation)",
    ]


def test_seeded_weights_notes_and_many_kernels() -> None:
    kernels = tuple(KernelRow(f"k{i}", True, time_us=float(i)) for i in range(12))
    text = verdict_text(replace(ACCEPTED, weights="seeded", notes=("module is insensitive",), kernels=kernels))
    assert "  weights   seeded: equal seeds for both, not copied" in text
    assert "  note: module is insensitive" in text
    assert "  k11 " in text
    assert "  k1 " not in text
    assert "  and 2 more" in text


def test_colour_is_the_callers() -> None:
    painted: list[tuple[str, tuple[Any, ...]]] = []

    def paint(text: str, *styles: Any) -> str:
        painted.append((text, styles))
        return f"<{text}>"

    assert verdict_text(ACCEPTED, paint=paint).startswith("<accepted>: ")
    assert painted[0] == ("accepted", ("bold", "green"))
