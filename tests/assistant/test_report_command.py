from __future__ import annotations

import json
from dataclasses import replace

import pytest
from report_pages import full_page, gpu_report

from drk.assistant import profile_command
from drk.assistant.capture_launch import CommandEnd
from drk.assistant.cli import run
from drk.assistant.profile_run import Profiled
from drk.assistant.report_html import report_html
from drk.assistant.report_page import Page, page_from_html
from drk.assistant.report_store import save_report
from drk.assistant.runs import create_run
from drk.gym.schema import Candidate
from drk.gym.wire import candidate_to_json, verdict_to_json


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def profile(here):
    return save_report(here / ".drk" / "profiles", gpu_report())


@pytest.fixture
def finished(here, silu_task, verdicts):
    """A finished run with an artefact."""
    made = create_run(here / ".drk" / "runs", silu_task, {"target": "model.py:ScaledSilu"})
    verdict = verdicts.accepted(1.4)
    made.write("model_kernels.py", b"# the code\n")
    made.write("model.diff", b"--- a\n+++ b\n+from model_kernels import optimized\n")
    turn = {
        "index": 1,
        "sample": 0,
        "candidate_id": "0" * 16,
        "proposer": "builtin",
        "note": "one kernel",
        "status": "accepted",
        "accepted": True,
        "speedup": {"value": 1.5, "low": 1.4, "high": 1.6, "pairs": 20},
        "error": None,
        "seconds": 1.5,
    }
    made.record_result(
        {
            "status": "optimised",
            "reason": "1.50x over compile",
            "best": {"candidate": candidate_to_json(Candidate("x = 1")), "verdict": verdict_to_json(verdict)},
            "turns": [turn],
            "artefact": {"module": "/elsewhere/model_kernels.py", "diff": "/elsewhere/model.diff"},
            "explanation": {"reason": "memory-bound", "time": [], "advice": ["larger batches"]},
            "spending": {"calls": 0, "gpu_s": 3.25},
            "regions": [{"paths": ["a", "b"], "type": "Mlp", "share": 0.6, "status": "won"}],
        }
    )
    return made


def test_a_profile_is_shown_as_text_json_and_page(profile, capsys) -> None:
    assert run(["report"]) == 0
    assert "kernels" in capsys.readouterr().out
    assert run(["report", "net", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["id"] == profile.stem
    assert run(["report", str(profile), "-o", "page.html"]) == 0
    assert page_from_html((profile.parents[2] / "page.html").read_text()).report.id == profile.stem


def test_a_run_is_shown_with_its_change(finished, capsys) -> None:
    assert run(["report", finished.name]) == 0
    out = capsys.readouterr().out
    assert "model.py:ScaledSilu: optimised" in out
    assert "1 of 1 cells passed" in out
    assert "larger batches" in out
    assert "part a, b (Mlp, 60% of the time): won" in out
    assert run(["report", "-o", "page.html", "--no-source"]) == 0
    bare = (finished.folder.parents[2] / "page.html").read_text()
    assert "import optimized" not in bare
    assert run(["report", "-o", "page.html"]) == 0
    whole = page_from_html((finished.folder.parents[2] / "page.html").read_text())
    assert whole.run.diff.endswith("import optimized\n")
    assert whole.run.code == "x = 1"
    assert whole.run.turns[0].speedup.low == 1.4
    assert whole.run.spending == "3.2 s of GPU time"


def test_an_unfinished_run_says_so(here, silu_task, capsys) -> None:
    made = create_run(here / ".drk" / "runs", silu_task, {"target": "model.py"})
    assert run(["report", made.name]) == 0
    assert "unfinished" in capsys.readouterr().out


def test_open_writes_the_page_and_says_where_it_is_when_no_browser_starts(profile, capsys, monkeypatch) -> None:
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert run(["report", "--open"]) == 0
    page = profile.with_suffix(".html")
    assert page.is_file()
    assert opened == [page.as_uri()]
    assert str(page) in capsys.readouterr().err
    assert run(["report", "--open", "--format", "json"]) == 2


def test_nothing_to_show_is_an_error_with_a_next_step(here, capsys) -> None:
    assert run(["report"]) == 2
    assert "drk profile model.py" in capsys.readouterr().err
    (here / "bad.html").write_text("<html>")
    assert run(["report", "bad.html"]) == 2
    assert run(["report", "-o", "missing/page.html"]) == 2


def test_compare_exits_1_below_the_limit(here, capsys) -> None:
    report = gpu_report(step_us=(100.0, 101.0, 102.0, 99.0, 100.5))
    slower = replace(report, id="slow", wall_us=report.wall_us * 2, step_us=tuple(2 * step for step in report.step_us))
    (here / "a.html").write_text(report_html(Page(report)))
    (here / "b.html").write_text(report_html(Page(slower)))
    assert run(["compare", "a.html", "b.html", "--fail-below", "0.97"]) == 1
    told = capsys.readouterr()
    assert "below 0.97: the whole step" in told.out
    assert "no interval" not in told.err
    assert run(["compare", "a.html", "b.html"]) == 0
    assert run(["compare", "b.html", "a.html", "--fail-below", "0.97", "--format", "json"]) == 0
    capsys.readouterr()
    assert run(["compare", "a.html", "b.html", "--fail-below", "0.97", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "slower"
    assert run(["compare", "a.html", "b.html", "--fail-below", "0"]) == 2
    (here / "few.html").write_text(report_html(Page(replace(slower, step_us=()))))
    capsys.readouterr()
    assert run(["compare", "a.html", "few.html", "--fail-below", "0.97"]) == 1
    assert "no interval, and may be noise" in capsys.readouterr().err


def test_excerpts_are_shown_only_while_the_function_is_the_same(here, capsys) -> None:
    from drk.assistant.report_source import SourcePlaces
    from drk.assistant.report_sources import source_excerpts

    file = here / "net.py"
    file.write_text("def forward(x):\n    y = x.relu()\n    return y + 1\n")
    base = gpu_report()
    place = SourcePlaces(here).at(str(file), 2)
    row = replace(base.functions[0], place=place, work=replace(base.functions[0].work, bound="memory"))
    fusion = replace(base.fusions[0], place=place, ops=("relu", "add"))
    report = replace(base, root=str(here), functions=(row,), fusions=(fusion,))
    (excerpt,) = source_excerpts(report)
    assert (excerpt.first_line, excerpt.hot_line, len(excerpt.lines)) == (1, 2, 3)
    assert excerpt.note.startswith("limited by memory traffic")
    assert "fusing relu + add could save" in excerpt.note
    file.write_text("import torch\n\n\n" + file.read_text())
    (moved,) = source_excerpts(report)
    assert (moved.hot_line, moved.lines) == (5, excerpt.lines)
    file.write_text("def forward(x):\n    y = x.tanh()\n    return y + 1\n")
    assert source_excerpts(report) == ()


def test_a_page_with_everything_reads_back_through_the_command(here, capsys) -> None:
    (here / "full.html").write_text(report_html(full_page()))
    assert run(["report", "full.html"]) == 0
    out = capsys.readouterr().out
    assert "before and after" in out
    assert "torch.compile" in out


def test_drk_profile_writes_the_page_by_name_and_opens_it(here, capsys, monkeypatch) -> None:
    """What follows a measurement; measurements themselves are in test_profile_command."""
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    path = save_report(here / ".drk" / "profiles", gpu_report())
    measured = Profiled(gpu_report(), path, CommandEnd(0, "finished"))
    monkeypatch.setattr(profile_command, "profile_command", lambda *_, **__: measured)
    assert run(["profile", "--capture", "python train.py", "-o", "page.html", "--open"]) == 0
    assert page_from_html((here / "page.html").read_text()).report.id == path.stem
    assert opened == [(here / "page.html").as_uri()]
    assert run(["profile", "--capture", "python train.py", "--open", "-o", "report.json"]) == 0
    assert json.loads((here / "report.json").read_text())["schema_version"] == 1
    assert opened[1:] == [path.with_suffix(".html").as_uri()]
