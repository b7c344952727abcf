"""``drk check``: the record travels, the reference is free of the kernels, and each way to fail is told."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gym_service import GymService

from drk.assistant.artefact import SourceFile, build_artefact
from drk.assistant.check import Check, check_all, checks_json, decide, find_artefacts
from drk.assistant.check_output import checks_text, github_annotations, junit_xml
from drk.assistant.check_record import Record, committed_candidate, read_record, record_lines
from drk.assistant.check_task import committed_task, without_kernels
from drk.assistant.cli import run
from drk.assistant.episode import Turn
from drk.assistant.errors import TargetError, UsageError
from drk.gym.errors import TaskError
from drk.gym.graph import graph_from_json
from drk.gym.schema import (
    Call,
    Candidate,
    CapturedTensor,
    Flag,
    Interval,
    Nested,
    Speedups,
    Task,
    TensorSpec,
    Verdict,
)

HOSTILE = "::error::\x1b[31m]]><x>&%\r\nnext"


def apply(project: Path, task: Task, candidate: Candidate, graph: Any, verdict: Verdict) -> Path:
    """Put an artefact to use in the project, as ``drk apply`` does; return its module."""
    source = SourceFile(project, "model.py", (project / "model.py").read_bytes())
    built = build_artefact(task, Turn(1, candidate, verdict), graph_from_json(graph), source, project, [[33, 96]])
    (project / built.module_name).write_bytes(built.module)
    (project / built.test_name).write_bytes(built.test)
    (project / "model.py").write_bytes(built.edited)
    return project / built.module_name


@pytest.fixture
def committed(project, silu_task, silu_candidate, silu_graph, verdicts) -> Path:
    verdict = verdicts.accepted(1.4, environment={"gpu": "NVIDIA H200", "torch": "2.13.0", "path": "/home/me"})
    return apply(project, silu_task, silu_candidate, silu_graph, verdict)


def record_of(verdict: Verdict) -> Record:
    return Record(Task("n", {"m.py": ""}, "m.py", "M"), verdict, "0" * 16)


def measured(verdicts, low: float, gpu: str = "NVIDIA H200", **changes) -> Verdict:
    return verdicts.accepted(low, environment={"gpu": gpu}, **changes)


class Scripted:
    """A gym that gives one answer and keeps what it was asked."""

    def __init__(self, answer: Verdict | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[Task, Candidate]] = []

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        self.asked.append((task, candidate))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def checked(files: list[Path], answer: Verdict | Exception) -> list[Check]:
    return [one async for one in check_all(files, Scripted(answer))]


def test_the_record_holds_task_and_evidence_and_nothing_of_the_machines_user(
    committed, silu_task, silu_candidate
) -> None:
    text = committed.read_text()
    record = read_record(text)
    assert replace(record.task, files=silu_task.files) == silu_task
    assert record.speedup == Interval(1.5, 1.4, pytest.approx(1.6), 20)
    assert record.gpu == "NVIDIA H200"
    assert "/home/me" not in text
    assert committed_candidate(text).strip() == silu_candidate.source.strip()
    compile(text, "model_kernels.py", "exec")


@pytest.mark.parametrize(
    "damage", [("#: drk record", "#:"), ('{"version":1', '{"version":9'), ("#: end of the record", "")]
)
def test_a_damaged_record_is_told(committed, damage) -> None:
    with pytest.raises(TargetError) as caught:
        read_record(committed.read_text().replace(*damage))
    assert caught.value.kind == "record"


def test_the_reference_is_the_users_code_as_it_is_now_without_the_kernels(committed) -> None:
    assert "@optimized" in (committed.parent / "model.py").read_text()
    task = committed_task(committed, read_record(committed.read_text()))
    assert list(task.files) == ["model.py"]
    assert "optimized" not in task.files["model.py"]
    assert task.files["model.py"].count("\n") == (committed.parent / "model.py").read_text().count("\n")
    assert task.target == "ScaledSilu"
    (committed.parent / "model.py").unlink()
    with pytest.raises(TargetError, match=r"model\.py, which these kernels were made for"):
        committed_task(committed, read_record(committed.read_text()))


def test_a_part_is_judged_as_a_part_of_the_users_module(project, verdicts) -> None:
    (project / "model.py").write_text(
        "from torch import nn\nfrom model_kernels import optimized\n\n@optimized\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.act = nn.SiLU()\n"
        "    def forward(self, x):\n        return self.act(x)\n"
    )
    (project / "model_kernels.py").write_text("# Written and verified by drk for parts of Net in model.py\n")
    part = Task("part", {"model.py": ""}, "model.py", "Net", submodule="act", inputs=Call((TensorSpec((4, 8)),)))
    lines = record_lines(part, Turn(1, Candidate("x = 1"), verdicts.accepted()))
    file = project / "model_kernels_1.py"
    file.write_text("\n".join(["# Written and verified by drk for Net in model.py", *lines]))
    assert find_artefacts([project]) == [file]
    task = committed_task(file, read_record(file.read_text()))
    assert (task.target, task.submodule, task.inputs) == ("Net", "act", part.inputs)
    assert list(task.files) == ["model.py"]
    assert "optimized" not in task.files["model.py"]


def test_inputs_that_did_not_travel_are_told(verdicts) -> None:
    task = Task("n", {"m.py": ""}, "m.py", "M", inputs=Call((Nested("list", (CapturedTensor("x"),)),)))
    with pytest.raises(TargetError) as caught:
        read_record("\n".join(record_lines(task, Turn(1, Candidate("x = 1"), verdicts.accepted()))))
    assert caught.value.kind == "record-inputs"


def test_only_drks_own_lines_are_taken_out() -> None:
    text = (
        "from .m_kernels import optimized as drk_optimized\nimport other\n\n@other.wrap\n@drk_optimized\nclass A: ...\n"
        "from lib import B\nB = drk_optimized(B)\noptimized = 3\n"
    )
    assert without_kernels(text, "m_kernels") == (
        "\nimport other\n\n@other.wrap\n\nclass A: ...\nfrom lib import B\n\noptimized = 3\n"
    )
    assert without_kernels("m_kernels = (", "m_kernels") == "m_kernels = ("


def test_artefacts_are_found_and_other_files_are_not(committed, tmp_path) -> None:
    hidden = committed.parent / ".venv" / "x_kernels.py"
    hidden.parent.mkdir()
    hidden.write_bytes(committed.read_bytes())
    (committed.parent / "other_kernels.py").write_text("x = 1\n")
    assert find_artefacts([committed.parent]) == [committed]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="no committed kernels"):
        find_artefacts([empty])


def test_what_a_fresh_verdict_means(verdicts) -> None:
    record = record_of(measured(verdicts, 1.4))
    fraud = Flag("cached-output", "caching", "fraud", "replay")
    cases = [
        (measured(verdicts, 1.38), "passed"),
        (measured(verdicts, 1.1), "slower"),
        (measured(verdicts, 1.1, gpu="NVIDIA A100"), "passed"),
        (measured(verdicts, 0.95), "slower"),
        (verdicts.accepted(), "logic-only"),
        (verdicts.refused(), "wrong"),
        (verdicts.refused(status="failed"), "failed"),
        (verdicts.refused(flags=(fraud,), honest=False), "dishonest"),
        (verdicts.accepted(speedups=None, evidence="gpu"), "failed"),
        (verdicts.refused(status="error"), "failed"),
    ]
    assert [decide(record, verdict)[0] for verdict, _ in cases] == [status for _, status in cases]
    assert decide(record, measured(verdicts, 1.1), slack=0.5)[0] == "passed"
    assert decide(record, measured(verdicts, 1.4), timed=False)[0] == "logic-only"


def test_a_kernel_that_was_never_measured_must_only_not_be_slower(verdicts) -> None:
    record = record_of(verdicts.accepted())
    assert decide(record, measured(verdicts, 0.95))[0] == "passed"
    slow = measured(verdicts, 0.7, speedups=Speedups(Interval(0.8, 0.75, 0.85, 20), Interval(0.8, 0.7, 0.9, 20)))
    assert decide(record, slow)[0] == "slower"


async def test_a_reference_that_no_longer_runs_fails_and_a_missing_record_is_unreadable(committed) -> None:
    (one,) = await checked([committed], TaskError("the module raises"))
    assert (one.status, one.good) == ("failed", False)
    assert "the module raises" in one.reason
    committed.write_text("# Written and verified by drk\nx = 1\n")
    (one,) = await checked([committed], TaskError("not asked"))
    assert one.status == "unreadable"
    assert "no record" in one.reason


async def test_edited_and_unused_kernels_are_noted_and_faults_point_into_the_file(committed, verdicts) -> None:
    text = committed.read_text()
    committed.write_text(text.replace("tl.sigmoid(value)", "tl.sigmoid(value) * 1.0"))
    (committed.parent / "model.py").write_text(
        (committed.parent / "model.py").read_text().replace("from model_kernels", "# ")
    )
    (one,) = await checked([committed], verdicts.refused())
    assert one.notes == (
        "the kernels differ from those that were verified; they were judged as they are",
        "model.py does not import them",
    )
    line = text.splitlines().index("from __future__ import annotations") + 1
    assert one.line == line  # the verdict said line 3 of the candidate


def test_each_form_escapes_what_comes_from_files(verdicts) -> None:
    good = Check("a_kernels.py", "A", "passed", "1.5x", verdict=verdicts.accepted(1.4))
    bad = Check("b,:_kernels.py", "B", "wrong", HOSTILE, line=7, notes=("note",))
    half = Check("c_kernels.py", "C", "logic-only", "logic is right")
    all_three = [good, bad, half]
    lines = github_annotations(all_three, Path("/nowhere")).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("::error file=b%2C%3A_kernels.py,line=7,title=drk check::B: wrong: ::error::\\x1b[31m")
    assert "%0Anext" in lines[0]
    assert lines[1].startswith("::notice file=c_kernels.py")
    suite = ET.fromstring(junit_xml(all_three)).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("type") == "wrong"
    assert "]]><x>&%" in (failure.text or "")
    assert checks_json(all_three)["status"] == "failed"
    assert "2 of 3 passed, 1 of them without a speed" in checks_text(all_three)


def test_the_command_judges_for_real_and_a_broken_kernel_fails(committed, monkeypatch, capsys) -> None:
    broken = committed.parent / "broken"
    broken.mkdir()
    (broken / "model.py").write_bytes((committed.parent / "model.py").read_bytes())
    (broken / "model_kernels.py").write_text(committed.read_text().replace("* gain + offset", "* gain - offset"))
    monkeypatch.chdir(committed.parent)
    assert run(["check", "--device", "interpret", "--seeds", "1", "--format", "json"]) == 1
    wrong, right = json.loads(capsys.readouterr().out)["checks"]
    assert (right["status"], right["target"], right["notes"]) == ("logic-only", "ScaledSilu", [])
    assert right["stored_speedup"]["low"] == 1.4
    assert "not checked: no GPU" in right["reason"]
    assert (wrong["status"], wrong["file"]) == ("wrong", "broken/model_kernels.py")
    assert len(wrong["notes"]) == 1


@pytest.mark.skipif(importlib.util.find_spec("celery") is None, reason="needs the serve extra")
@pytest.mark.slow
def test_a_server_judges_what_is_committed(committed, monkeypatch, capsys) -> None:
    monkeypatch.chdir(committed.parent)
    (committed.parent / "model_kernels.py").write_text(
        committed.read_text().replace("* gain + offset", "* gain - offset")
    )
    with GymService("--insecure-local", "--seeds", "1") as service:
        assert run(["check", "--gym", service.url, "--seeds", "1", "--format", "json"]) == 1
        (wrong,) = json.loads(capsys.readouterr().out)["checks"]
        assert (wrong["status"], wrong["target"]) == ("wrong", "ScaledSilu")
    monkeypatch.setattr("drk.assistant.gym_address.PATIENCE_S", 0.1)
    assert run(["check", "--gym", "http://127.0.0.1:1", "--format", "json"]) == 2
    assert "does not answer" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_no_kernels_is_a_usage_error(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["check", "--format", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "no-kernels"
