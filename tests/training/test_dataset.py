from __future__ import annotations

from pathlib import Path

import pytest

from drk.assistant.episode import Turn
from drk.gym.schema import Candidate, Failure, Verdict
from drk.training.dataset import (
    DatasetError,
    Demonstration,
    leaks,
    read_demonstrations,
    read_tasks,
    shingles,
    write_demonstrations,
    write_tasks,
)
from drk.training.tasks import draw_tasks


def test_tasks_survive_the_disk(tmp_path: Path) -> None:
    tasks = draw_tasks(10)
    assert write_tasks(tmp_path / "deep" / "tasks.jsonl", tasks) == 10
    assert read_tasks(tmp_path / "deep" / "tasks.jsonl") == tasks


def test_demonstrations_survive_the_disk(tmp_path: Path) -> None:
    wrong = Verdict("failed", "interpreter", None, correct=False, honest=None, error=Failure("parse", "x", "y", 3))
    right = Verdict("accepted", "interpreter", "correct", correct=True, honest=None)
    turns = (Turn(1, Candidate("a", "fault", "n"), wrong), Turn(2, Candidate("b", "builtin"), right))
    one = Demonstration(draw_tasks(1)[0], turns)
    write_demonstrations(tmp_path / "d.jsonl", [one])
    assert read_demonstrations(tmp_path / "d.jsonl") == [one]


@pytest.mark.parametrize("line", ["{", "[]", '{"task": {}}', '{"task": 3, "family": "a", "signature": "b", "seed": 0}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    write_tasks(path, draw_tasks(1))
    with path.open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(DatasetError, match=r"t\.jsonl:3: "):
        read_tasks(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        read_tasks(tmp_path / "none.jsonl")
    assert "drk data tasks" in caught.value.help


def test_a_renamed_copy_is_a_leak_and_an_unlike_file_is_none(tmp_path: Path) -> None:
    task = next(one for one in draw_tasks(40, families=["pointwise"]) if one.signature.count(" ") >= 4)
    source = task.task.files["model.py"]
    renamed = "# mine\n" + source.replace("Model", "Block").replace("self, x", "self, activation")
    (tmp_path / "copy.py").write_text(renamed)
    (tmp_path / "other.py").write_text(
        "def area(r):\n    for i in range(3):\n        r += i ** 2\n    return [r, 3.14]\n"
    )
    found = leaks([task], tmp_path)
    assert [leak.file for leak in found] == [str(tmp_path / "copy.py")]
    assert found[0].overlap > 0.9
    assert shingles(source) == shingles(source + "\n# a comment\n")


def test_a_folder_without_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no Python files"):
        leaks(draw_tasks(1), tmp_path)
