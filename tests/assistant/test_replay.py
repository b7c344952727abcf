from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from drk.assistant.errors import UsageError
from drk.assistant.proposers import ProposeContext
from drk.assistant.replay import ReplayProposer, read_recording
from drk.gym.devices import device_facts
from drk.gym.schema import Task


def answered(text: str, **changes: object) -> str:
    return json.dumps({"event": "answered", "text": text, "model": "m", **changes})


def test_recorded_answers_go_through_the_parser(tmp_path: Path) -> None:
    rows = [
        json.dumps({"event": "asked", "turn": 1}),
        answered("```python\nclass ModelNew: a = 1\n```"),
        answered("```python\nclass ModelNew:\n  def", cut=True),
        json.dumps({"source": "class ModelNew: b = 1\n"}),
    ]
    (tmp_path / "calls.jsonl").write_text("\n".join(rows))
    first, second, third = read_recording(tmp_path)
    assert first.source == "class ModelNew: a = 1\n"
    assert "cut off" in second.note
    assert third.source == "class ModelNew: b = 1\n"


async def test_one_folder_serves_many_tasks(tmp_path: Path, silu_task: Task) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"source": "# a"}))
    (tmp_path / "b.py").write_text("# b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.py").write_text("# c")
    proposer = ReplayProposer(tmp_path)

    def context(name: str) -> ProposeContext:
        return ProposeContext(replace(silu_task, name=name), None, device_facts("sm_90"))

    for name in "abc":
        assert [one.source for one in await proposer.propose(context(name))] == [f"# {name}"]
    with pytest.raises(UsageError, match="holds no recording for d"):
        await proposer.propose(context("d"))
    for name in ("../a", "/etc/passwd", "..", ""):
        with pytest.raises(UsageError, match="cannot name a recording"):
            await proposer.propose(context(name))


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"event": "answered"}', '{"event": "answered", "text": 3}', '{"source": 1}']
)
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"source": "# a"}) + "\n" + line + "\n")
    with pytest.raises(UsageError) as caught:
        read_recording(file)
    assert (caught.value.file, caught.value.line) == (str(file), 2)
