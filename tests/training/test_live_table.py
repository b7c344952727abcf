from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from drk.assistant.console import Console
from drk.training.live_table import ROWS, StepTable, plain_line, step_reporter

STEP = {"loss": 0.5, "reward/mean": 1.25, "correct/turn_1": 0.75, "grad_norm": float("nan"), "step_time": 3.0}


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")


def plain(text: str) -> str:
    """Return ``text`` without escape codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_step_is_one_plain_line_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with step_reporter(Console(stderr=stream), 6) as tell:
        tell(1, STEP)
        tell(1, {"validation/correct/best": 0.5})
    assert stream.getvalue().splitlines() == [
        "step 1/6  loss 0.5  reward/mean 1.25  correct/turn_1 0.75  grad_norm nan  step_time 3",
        "step 1/6  validation/correct/best 0.5",
    ]
    assert plain_line(7, 0, {"loss": 1.0, "other": 2.0}) == "step 7  loss 1"


def test_quiet_runs_and_other_processes_say_nothing() -> None:
    quiet, other = Terminal(), Terminal()
    with step_reporter(Console(stderr=quiet, verbosity=-1), 6) as tell:
        tell(1, STEP)
    with step_reporter(Console(stderr=other), 6, main=False) as tell:
        tell(1, STEP)
    assert (quiet.getvalue(), other.getvalue()) == ("", "")


@pytest.mark.usefixtures("wide")
def test_a_terminal_shows_a_table_that_stays_when_the_run_is_over() -> None:
    stream = Terminal()
    with step_reporter(Console(stderr=stream, color="never"), 3) as tell:
        assert "the first step is under way" in stream.getvalue()
        tell(1, STEP)
        tell(2, {**STEP, "loss": 0.25})
        tell(2, {"validation/correct/best": 0.5})
    assert "\x1b[" in stream.getvalue()  # redrawn in place
    last = plain(stream.getvalue()).rpartition("step 2 of 3")[2]
    rows = [line.split() for line in last.splitlines() if line.strip()[:2] in ("1 ", "2 ")]
    assert rows == [
        ["1", "1.25", "0.75", "0.5", "not", "finite", "3"],
        ["2", "1.25", "0.75", "0.25", "not", "finite", "3", "0.5"],
    ]
    assert "right, turn 1" in last and "held out: right" in last
    assert not re.search(r"\x1b\[[0-9;]*m", stream.getvalue())  # nothing is told by colour


@pytest.mark.usefixtures("wide")
def test_the_terminal_is_given_back_after_an_error() -> None:
    stream = Terminal()
    with pytest.raises(ValueError, match="broke"), step_reporter(Console(stderr=stream), 3) as tell:
        tell(1, STEP)
        raise ValueError("broke")
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_the_time_left_follows_the_pace_since_the_first_step_of_this_start() -> None:
    now = [100.0]
    table = StepTable(300, clock=lambda: now[0])
    assert table.title() == "0 s, the first step is under way"
    now[0] = 190.0  # loading, and the first step
    table.add(101, STEP)
    assert table.title() == "step 101 of 300, 1 min 30 s"
    now[0] = 250.0
    table.add(104, STEP)
    assert table.title() == "step 104 of 300, 2 min 30 s, about 1 h 05 min left"
    table.add(300, STEP)
    assert table.title().endswith("done")
    unknown = StepTable(0, clock=lambda: 5.0)
    unknown.add(3, STEP)
    unknown.add(4, STEP)
    assert unknown.title() == "step 4, 0 s"


def test_only_the_last_steps_and_what_fits_are_shown() -> None:
    table = StepTable(0)
    for step in range(1, 31):
        table.add(step, STEP)
    (first, *others) = table.columns(200)
    assert first == ["step", *map(str, range(31 - ROWS, 31))]
    assert [column[0] for column in others] == ["reward", "right, turn 1", "loss", "gradient", "s a step"]
    assert [column[0] for column in table.columns(40)] == ["step", "reward", "right, turn 1", "loss"]
    assert table.columns(1) == [first]


def test_the_command_line_loads_neither_rich_nor_torch_for_it(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, drk.training.live_table; print(sorted({'rich', 'torch', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"
