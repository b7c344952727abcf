from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drk.assistant.episode import (
    Episode,
    Turn,
    append_all,
    best_of_history,
    best_window,
    best_window_indices,
    describe_gain,
    digest,
    headline_interval,
    is_usable,
    top_w,
    top_w_indices,
    turn_score,
)
from drk.gym.schema import Candidate, Cell, Flag, KernelRow

CANDIDATE = Candidate("line one\nline two\n    bad = tl.dot(a, b)\n")


def turns_of(*verdicts: Any) -> tuple[Turn, ...]:
    return tuple(Turn(i + 1, Candidate(f"# {i}"), verdict) for i, verdict in enumerate(verdicts))


def test_golden_windows(repository: Path) -> None:
    golden = json.loads((repository / "tests/golden/paper-algorithms.json").read_text())
    rows = golden["cases"]["stts_best_window"]["rows"]
    assert len(rows) >= 7
    for row in rows:
        assert best_window_indices(row["turn_rewards"], row["keep"]) == row["selected_turns"]


def test_top_w_keeps_the_order_and_the_earlier_of_equals() -> None:
    assert top_w_indices([1, 3, 2, 3, 3], 3) == [1, 3, 4]
    assert top_w_indices([1, 1, 1], 2) == [0, 1]
    with pytest.raises(ValueError, match="at least 1"):
        top_w_indices([1.0], 0)


@given(st.lists(st.floats(-5, 5), max_size=12), st.integers(1, 6))
def test_policies_select_positions(scores: list[float], w: int) -> None:
    top, window = top_w_indices(scores, w), best_window_indices(scores, w)
    assert len(top) == len(window) == min(w, len(scores))
    assert sorted(set(top)) == top
    assert window == list(range(window[0], window[-1] + 1)) if window else True
    assert sum(scores[i] for i in top) >= sum(scores[i] for i in window) - 1e-9


def test_policies_on_turns(verdicts: Any) -> None:
    turns = turns_of(verdicts.accepted(1.2), verdicts.refused(), verdicts.accepted(1.5))
    assert append_all(turns) == turns
    assert top_w(turns, 2) == (turns[0], turns[2])
    assert best_window(turns, 2) == turns[1:] or best_window(turns, 2) == turns[:2]
    assert best_window(turns, 2) == turns[1:]  # 1.5 beats 1.2


def test_best_of_history_prefers_the_lower_bound_of_what_was_measured(verdicts: Any) -> None:
    slow, fast = verdicts.accepted(1.1), verdicts.accepted(1.4)
    turns = turns_of(verdicts.refused(), verdicts.accepted(coverage=1.0), slow, fast, fast)
    assert best_of_history(Episode("t", turns)) is turns[3]
    assert best_of_history(Episode("t", turns[:2])) is turns[1]
    assert best_of_history(Episode("t", turns[:1])) is None
    covered = turns_of(*(verdicts.accepted(coverage=share) for share in (0.5, 0.8, 0.8)))
    assert best_of_history(Episode("t", covered)) is covered[1]


def test_what_was_only_compiled_proves_nothing(verdicts: Any) -> None:
    verdict = replace(verdicts.accepted(), evidence="compile-only")
    assert not is_usable(verdict)
    assert best_of_history(Episode("t", turns_of(verdict))) is None


def test_headline_is_the_fastest_baseline(verdicts: Any) -> None:
    verdict = verdicts.accepted(1.3)
    interval = headline_interval(verdict)
    assert interval is not None
    assert interval.low == 1.3
    assert headline_interval(verdicts.accepted()) is None
    assert "1.40x over compile" in describe_gain(verdict)
    assert "not measured" in describe_gain(verdicts.accepted())


def test_score_rises_with_the_rung_then_with_speed(verdicts: Any) -> None:
    ladder = [verdicts.refused(reached=rung) for rung in ("parsed", "loaded", "compiled", "ran")]
    scores = [turn_score(turn) for turn in turns_of(*ladder, verdicts.accepted(), verdicts.accepted(1.5))]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


def test_digest_tells_the_error_with_its_line(verdicts: Any) -> None:
    cells = tuple(Cell(f"seed {i}", False, "values differ", 0.1, 0.2, 1e-7, 1e-7, 3e-7, 8e-7) for i in range(5))
    verdict = verdicts.refused(cells=cells, kernels=(KernelRow("dot_kernel", True, share=0.75, registers=255),))
    text = digest(verdict, 2000, candidate=CANDIDATE, best=turns_of(verdicts.accepted(1.2))[0])
    lines = text.splitlines()
    assert lines[0] == "status: rejected; reached: ran; evidence: interpreter"
    assert lines[1].startswith("error in check at line 3: mismatch: the outputs differ")
    assert "  3 | bad = tl.dot(a, b)" in lines
    assert "failing cell seed 0: values differ; rms error 0.1 (limit 3e-07)" in text
    assert "and 2 more failing cells of 5" in text
    assert "best so far: turn 1, 1.30x over compile" in text
    assert "kernel dot_kernel: own, 75% of the time, 255 registers" in text
    assert "reward" not in text


def test_digest_names_fraud_and_the_change(verdicts: Any) -> None:
    flag = Flag("output-cache", "caching", "fraud", "fresh values in the same storage")
    text = digest(verdicts.refused(flags=(flag,)), previous=verdicts.refused(reached="loaded"))
    assert "dishonest: output-cache (caching), proven by fresh values in the same storage" in text
    assert "reached loaded -> ran" in text
    assert "1.30x -> 1.60x" in digest(verdicts.accepted(1.5), previous=verdicts.accepted(1.2))


@given(st.integers(1, 400))
def test_digest_never_exceeds_its_budget(budget: int) -> None:
    from drk.gym.schema import Failure, Verdict

    error = Failure("compile", "syntax", "x" * 300 + "\n" + "y" * 300, 2)
    verdict = Verdict("failed", "interpreter", "parsed", False, None, error=error)
    text = digest(verdict, budget, candidate=CANDIDATE)
    assert 0 < len(text) <= budget
