from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from policy_parts import MadeUp

pytest.importorskip("trl", reason="needs the train extra")

from drk.training.evaluate_policy import choice_figures, file_tasks, summarise


def test_shares_are_of_what_was_judged() -> None:
    found, _ = MadeUp(turns=1)([SimpleNamespace(prompt=i, sample=i) for i in range(3)], seed=0)
    gone = replace(found[0], turns=tuple(replace(row, aborted=True) for row in found[0].turns), ending="fault")
    wrong = replace(found[1].turns[0], score=replace(found[1].turns[0].score, correct=False, reward=0.0))
    fast = replace(found[2].turns[0], score=replace(found[2].turns[0].score, speedup=1.3, reward=2.0))
    facts = summarise([gone, replace(found[1], turns=(wrong,)), replace(found[2], turns=(fast,))], 2)
    assert (facts["tasks"], facts["left_out"], facts["correct/turn_1"], facts["reward/turn_1"]) == (3, 1, 0.5, 1.0)
    assert (facts["fast@1.2/best"], facts["fast@1.5/best"]) == (0.5, 0.0)
    assert "correct/turn_2" not in facts
    assert summarise([gone], 2) == {"tasks": 1, "left_out": 1}


def test_lazy_answers_are_a_share_of_right_ones_whose_coverage_was_measured() -> None:
    found, _ = MadeUp(turns=1)([SimpleNamespace(prompt=i, sample=i) for i in range(4)], seed=0)

    def with_score(place: int, **changes: float) -> object:
        row = found[place].turns[0]
        return replace(found[place], turns=(replace(row, score=replace(row.score, **changes), source=str(place % 2)),))

    nan = float("nan")
    rows = [
        with_score(0, coverage=0.1),
        with_score(1, coverage=0.9),
        with_score(2, coverage=nan),
        with_score(3, correct=False),
    ]
    assert choice_figures(rows) == {"lazy_share": 0.5, "distinct_share": 0.5, "cut_share": 0.0}  # type: ignore[arg-type]
    assert choice_figures([])["lazy_share"] is None


def test_files_become_tasks_by_their_last_class(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(
        "class A(nn.Module):\n    pass\n\n\nclass Model(nn.Module):\n    pass\n\n\nclass Options:\n    pass\n"
    )
    (one,) = file_tasks(tmp_path)
    assert (one.name, one.target, one.entry) == ("b", "Model", "model.py")
