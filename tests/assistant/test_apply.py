from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.apply import (
    applied_run,
    apply_artefact,
    forget_apply,
    plan_apply,
    plan_restore,
    record_apply,
    restore_file,
)
from drk.assistant.artefact import SourceFile
from drk.assistant.errors import TargetError, UsageError
from drk.assistant.optimize import Plan, begin_run, optimize
from drk.assistant.replay import ReplayProposer
from drk.assistant.runs import Run
from drk.gym.schema import Candidate, Task


@pytest.fixture
def finished(
    project: Path, silu_task: Task, silu_candidate: Candidate, make_gym: Any, verdicts: Any, tmp_path: Path
) -> Run:
    """A run that ended with an artefact for the project's model.py."""
    data = (project / "model.py").read_bytes().replace(b"\n", b"\r\n")
    (project / "model.py").write_bytes(b"\xef\xbb\xbf" + data)
    plan = Plan(silu_task, SourceFile(project, "model.py", (project / "model.py").read_bytes()))
    run = begin_run(plan, tmp_path / "runs", {})
    (tmp_path / "c.py").write_text(silu_candidate.source)
    gym = make_gym({silu_candidate.source: verdicts.accepted(1.5)})
    asyncio.run(optimize(plan, run, gym, ReplayProposer(tmp_path / "c.py"), emit=lambda _: None))
    return run


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_apply_and_restore_leave_every_byte(finished: Run, project: Path) -> None:
    before = state_of(project)
    (project / "model.py").chmod(0o640)
    applied = apply_artefact(finished)
    assert applied.file == project / "model.py"
    assert sorted(path.name for path in applied.written) == ["model_kernels.py", "test_model_kernels.py"]
    text = (project / "model.py").read_bytes()
    assert text.startswith(b"\xef\xbb\xbf")
    assert b"@optimized\r\nclass ScaledSilu" in text
    restored = restore_file(project / "model.py")
    assert restored.exact
    after = state_of(project)
    after.pop(".drk/.gitignore")
    assert after == before
    assert (project / "model.py").stat().st_mode & 0o777 == 0o640


def test_later_edits_stay_when_restored(finished: Run, project: Path) -> None:
    file = project / "model.py"
    original = file.read_bytes()
    apply_artefact(finished)
    file.write_bytes(file.read_bytes() + b"# mine\r\n")
    (project / "model_kernels.py").write_text("# mine too")
    restored = restore_file(file)
    assert not restored.exact
    assert file.read_bytes() == original + b"# mine\r\n"
    assert [path.name for path in restored.kept] == ["model_kernels.py"]
    assert [path.name for path in restored.removed] == ["test_model_kernels.py"]


def test_a_file_that_changed_is_refused(finished: Run, project: Path) -> None:
    file = project / "model.py"
    file.write_bytes(file.read_bytes() + b"\r\n")
    before = state_of(project)
    with pytest.raises(TargetError, match="changed since it was optimised"):
        apply_artefact(finished)
    assert state_of(project) == before


def test_restore_refuses_when_its_lines_are_gone(finished: Run, project: Path) -> None:
    file = project / "model.py"
    apply_artefact(finished)
    file.write_bytes(file.read_bytes().replace(b"@optimized", b"@optimized # x"))
    before = state_of(project)
    with pytest.raises(TargetError, match="not as they were written") as caught:
        restore_file(file)
    assert "@optimized" in caught.value.help
    assert state_of(project) == before


def test_foreign_files_are_not_overwritten(finished: Run, project: Path) -> None:
    (project / "model_kernels.py").write_text("x = 1\n")
    before = state_of(project)
    with pytest.raises(TargetError, match="was not written by drk"):
        apply_artefact(finished)
    assert state_of(project) == before


def test_twice_and_never(finished: Run, project: Path, tmp_path: Path, silu_task: Task) -> None:
    with pytest.raises(UsageError, match="nothing was applied"):
        restore_file(project / "model.py")
    apply_artefact(finished)
    with pytest.raises(UsageError, match="is applied already"):
        apply_artefact(finished)
    bare = begin_run(Plan(silu_task, None), tmp_path / "runs", {})
    with pytest.raises(UsageError, match="has no artefact"):
        apply_artefact(bare)


def test_a_moved_file_can_be_named(finished: Run, project: Path) -> None:
    moved = project / "sub" / "model.py"
    moved.parent.mkdir()
    (project / "model.py").rename(moved)
    with pytest.raises(TargetError, match="cannot read"):
        apply_artefact(finished)
    assert apply_artefact(finished, moved).file == moved
    assert restore_file(moved).exact


def test_an_apply_that_was_cut_before_the_edit_can_be_restored(finished: Run, project: Path) -> None:
    file = project / "model.py"
    original = file.read_bytes()
    apply_artefact(finished)
    file.write_bytes(original)  # what is there when the process dies before the edit, its last step
    assert restore_file(file).exact
    assert file.read_bytes() == original
    assert not (project / "model_kernels.py").exists()


def test_an_editors_text_is_followed_while_the_target_is_as_verified(finished: Run, project: Path) -> None:
    before = state_of(project)
    text = (project / "model.py").read_bytes()
    plan = plan_apply(finished, now=text.replace(b"import torch\r\n", b"import torch\r\n# mine\r\n", 1))
    assert b"# mine" in plan.edited
    assert b"@optimized\r\nclass ScaledSilu" in plan.edited
    assert state_of(project) == before
    with pytest.raises(TargetError, match="changed since"):
        plan_apply(finished, now=text.replace(b"* self.gain", b"* 3"))
    record_apply(plan)
    assert applied_run(plan.file) == finished.name
    assert plan_restore(plan.file, now=plan.edited).restored == plan.before
    later = plan_restore(plan.file, now=plan.edited + b"# later\r\n")
    assert (later.restored, later.exact) == (plan.before + b"# later\r\n", False)
    forget_apply(plan.file)
    assert applied_run(plan.file) is None
