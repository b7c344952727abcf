from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from policy_parts import MadeUp, make_tasks

pytest.importorskip("trl", reason="needs the train extra")

from dataclasses import replace

from drk.training.config import load_config
from drk.training.run_folder import RunFolder
from drk.training.validation import Validation, summarise


def test_a_line_is_written_when_it_is_due_with_equal_draws(tmp_path: Path) -> None:
    config = load_config("nano-cpu", ["run.validate_every=2", "tasks.held_out=3"])
    collect = MadeUp()
    callback = Validation(make_tasks(3), collect, config, RunFolder(tmp_path))
    for step in (1, 2, 3, 4):
        callback.on_step_end(None, SimpleNamespace(global_step=step), None)
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert {k: v for k, v in lines[0].items() if k != "step"} == {k: v for k, v in lines[1].items() if k != "step"}
    assert (lines[0]["tasks"], lines[0]["left_out"], lines[0]["correct/turn_1"]) == (3, 0, 1.0)


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
