from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from drk.training.config import load_config
from drk.training.run_folder import (
    RunFolder,
    RunFolderError,
    append_line,
    differences,
    is_disk_full,
    step_of,
)


def folder_at(path: Path, *overrides: str) -> RunFolder:
    folder = RunFolder(path)
    folder.open(load_config("nano-cpu", overrides))
    return folder


def checkpoint(folder: RunFolder, step: int, *, complete: bool = True) -> Path:
    path = folder.checkpoints / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if complete:
        folder.mark_complete(step, load_config("nano-cpu"))
    return path


def test_the_newest_whole_checkpoint_counts(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    assert folder.last_checkpoint() is None
    checkpoint(folder, 9)
    whole = checkpoint(folder, 10)
    checkpoint(folder, 11, complete=False)
    assert folder.last_checkpoint() == whole
    assert step_of(whole) == 10
    assert folder.remove_incomplete() == ["checkpoint-11"]
    assert load_config(str(whole / "drk_train.toml")) == load_config("nano-cpu")


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    first = folder_at(tmp_path)
    with pytest.raises(RunFolderError, match="another process trains"):
        folder_at(tmp_path)
    first.close()
    folder_at(tmp_path).close()


def test_a_run_with_checkpoints_keeps_its_settings(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    folder.close()
    folder_at(tmp_path, "optimizer.learning_rate=0.5").close()  # nothing was trained yet
    folder = folder_at(tmp_path, "optimizer.learning_rate=0.5")
    checkpoint(folder, 3)
    folder.close()
    folder_at(tmp_path, "optimizer.learning_rate=0.5", "run.steps=99", "gym.patience_s=1.0").close()
    with pytest.raises(RunFolderError, match=r"optimizer\.learning_rate"):
        folder_at(tmp_path)


def test_differences_name_what_changes_the_numbers() -> None:
    left, right = load_config("nano-cpu"), load_config("nano-cpu", ["run.seed=4", "run.steps=9", "reward.cap=2.0"])
    assert differences(left, right) == ["run.seed", "reward.cap"]


def test_lines_after_the_checkpoint_are_cut(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    for step in (1, 2, 3, 4):
        append_line(folder.metrics, {"step": step})
    with folder.metrics.open("a") as file:
        file.write('{"step": 5, "lo')
    folder.cut_after(2)
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]


def test_room_is_asked_for_before_a_checkpoint(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    folder.need_space(1000, 0.0)
    with pytest.raises(RunFolderError, match="no room for a checkpoint") as caught:
        folder.need_space(10**18, 0.0)
    assert "resumes at the last whole checkpoint" in caught.value.help


def test_a_full_disk_is_recognised_by_what_writers_really_raise(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the writers fail in the same place."""
    import signal

    import torch
    from safetensors.torch import save_file

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    errors: list[BaseException] = []
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        for write in (
            lambda: torch.save(torch.zeros(200_000), tmp_path / "a.pt"),
            lambda: save_file({"a": torch.zeros(200_000)}, tmp_path / "a.safetensors"),
            lambda: (tmp_path / "a.json").write_bytes(b"x" * 200_000),
        ):
            try:
                write()
            except Exception as error:  # noqa: BLE001 - the kinds differ; that is what is tested
                errors.append(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(errors) == 3
    assert [is_disk_full(error) for error in errors] == [True, True, True], errors
    assert not is_disk_full(RuntimeError("CUDA out of memory"))
