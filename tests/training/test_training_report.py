from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from drk.assistant.cli import run
from drk.training.errors import TrainingError
from drk.training.training_report import read_metrics, render_report, write_report


def rows(count: int = 5) -> list[dict[str, float | None]]:
    return [
        {"step": i, "loss": 0.1 * i, "reward/mean": float(i), "reward/turn_1": None if i == 3 else float(i)}
        for i in range(1, count + 1)
    ]


def test_curves_are_drawn_for_what_there_is() -> None:
    page = render_report("run <1>", rows(), "[run]\nsteps = '<b>'\n")
    assert "<script" not in page
    assert "run &lt;1&gt;" in page
    assert "&lt;b&gt;" in page
    assert "Reward by turn" in page
    assert "Hack rate" not in page
    assert len(page) < 100_000
    drawing = page[page.index("<svg") : page.index("</svg>") + 6]
    paths = [element.get("d", "") for element in ET.fromstring(drawing).iter("path")]
    assert len(paths) == 3
    # the null at step 3 breaks one curve in two
    assert sorted(path.count("M") for path in paths[1:]) == [1, 2]


def test_one_step_is_enough() -> None:
    assert "<svg" in render_report("one", rows(1))


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    assert run(["train", "report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert "5 steps" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_folder_without_metrics_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(TrainingError):
        read_metrics(tmp_path)


def test_validations_have_curves_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
    lines = [
        {"step": 20, "correct/turn_1": 0.25, "correct/best": 0.5, "hack_rate/best": 0.0},
        {"step": 30, "not_done": "the gym is down"},
        {"step": 40, "correct/turn_1": 0.5, "correct/best": 0.75, "hack_rate/best": 0.0},
    ]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(tmp_path).read_text()
    assert "Held out: correct" in page and "Held out: hack rate" in page
    assert "Held out: Fast@1" not in page and "Held out: loss" not in page
    figure = page[page.index("Held out: correct") :]
    drawing = figure[figure.index("<svg") : figure.index("</svg>") + 6]
    texts = [element.text for element in ET.fromstring(drawing).iter("text")]
    assert texts == ["0.75", "0", "step 20", "40"]
    (tmp_path / "validation.jsonl").write_text("{")
    with pytest.raises(TrainingError, match="validation"):
        write_report(tmp_path)


def test_a_held_out_loss_among_the_metrics_is_drawn_apart(tmp_path: Path) -> None:
    measured = [row | ({"loss/held_out": 0.3} if row["step"] in (2, 4) else {}) for row in rows()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured))
    assert "Held out: loss" in write_report(tmp_path).read_text()
