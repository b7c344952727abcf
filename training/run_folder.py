"""A training run on disk: its configuration, checkpoints, metrics and journal, and what resuming needs of them.

::

    OUTPUT/config.toml            the resolved configuration; a resumed run must agree with it
    OUTPUT/metrics.jsonl          one line a step
    OUTPUT/turns.<rank>.jsonl     one line a turn
    OUTPUT/validation.jsonl       one line a validation; reports below validation/
    OUTPUT/checkpoints/checkpoint-N/   plain Hugging Face folders, with optimizer and generators
    OUTPUT/final/                 the last weights alone (adapters merged)

A checkpoint counts when its ``complete`` mark is there, which is written last: one that a full disk or a kill cut short
is not resumed from. Lines of metrics and journal beyond the checkpoint are cut when a run resumes.

One process at a time holds a run (flock). Honest limit: over network file systems that lock may not hold.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from drk.training.config import TrainConfig, config_to_toml, load_config
from drk.training.errors import TrainingError

FREE_TO_CHANGE = frozenset(
    (
        "run.steps",
        "run.save_every",
        "run.keep_checkpoints",
        "run.validate_every",
        "run.min_free_gb",
        "run.output_dir",
        "run.tensorboard",
        "gym.url",
        "gym.patience_s",
        "gym.parallel",
        "gym.max_fault_share",
        "rollout.concurrency",
        "rollout.url",
        "rollout.batch_rows",
        "rollout.trajectory_timeout_s",
    )
)
"""Settings that a resumed run may have otherwise: they do not change what is computed."""


class RunFolderError(TrainingError):
    """The folder is in use, holds another run, or cannot be written."""


class RunFolder:
    """One run's folder; made when missing. ``main``: this process writes what is shared."""

    def __init__(self, path: Path, *, main: bool = True, rank: int = 0) -> None:
        self.path = path
        self.main = main
        self.metrics = path / "metrics.jsonl"
        self.journal = path / f"turns.{rank}.jsonl"
        self.validation = path / "validation.jsonl"
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None

    def open(self, config: TrainConfig) -> None:
        """Take the folder for this run.

        Raises:
            RunFolderError: see the class.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            if not self.main:
                return
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise RunFolderError(
                f"another process trains in {self.path}", help="run.output_dir = another folder"
            ) from error
        except OSError as error:
            raise RunFolderError(f"cannot write to {self.path}: {error.strerror}") from error
        saved = self.path / "config.toml"
        if saved.is_file():
            changed = differences(load_config(str(saved)), config)
            if changed and self.last_checkpoint() is not None:
                self.close()
                raise RunFolderError(
                    f"{self.path} holds a run with other settings: {', '.join(changed[:5])}",
                    help="run.output_dir = another folder, or the settings of that run",
                )
        saved.write_text(config_to_toml(config), encoding="utf-8")

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def last_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint."""
        found = [path for path in self.checkpoints.glob("checkpoint-*") if (path / "complete").is_file()]
        return max(found, key=step_of, default=None)

    def remove_incomplete(self) -> list[str]:
        """Remove checkpoints that were cut short, and return their names."""
        gone = [path for path in self.checkpoints.glob("checkpoint-*") if not (path / "complete").is_file()]
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
        return sorted(path.name for path in gone)

    def mark_complete(self, step: int, config: TrainConfig) -> None:
        """Declare the checkpoint of ``step`` whole."""
        folder = self.checkpoints / f"checkpoint-{step}"
        (folder / "drk_train.toml").write_text(config_to_toml(config), encoding="utf-8")
        (folder / "complete").write_text(f"{step}\n")

    def forget_old(self, keep: int) -> None:
        """Remove complete checkpoints but the newest ``keep``."""
        found = sorted((path for path in self.checkpoints.glob("checkpoint-*")), key=step_of)
        for path in found[: max(len(found) - max(keep, 1), 0)]:
            shutil.rmtree(path, ignore_errors=True)

    def cut_after(self, step: int) -> None:
        """Cut lines that belong to steps after ``step``: the resumed run writes them anew."""
        for path in (self.metrics, self.validation, self.journal):
            if path.is_file() and (self.main or path == self.journal):
                kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_in(line) <= step]
                path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def need_space(self, size_bytes: int, min_free_gb: float) -> None:
        """Check that a checkpoint of ``size_bytes`` fits.

        Raises:
            RunFolderError: the disk is too full.
        """
        free = shutil.disk_usage(self.checkpoints).free
        needed = size_bytes + int(min_free_gb * 1e9)
        if free < needed:
            raise disk_full(self.checkpoints, f"{free / 1e9:.1f} GB are free and {needed / 1e9:.1f} GB are needed")


def disk_full(path: Path, cause: str) -> RunFolderError:
    """Return the error for a disk without room."""
    return RunFolderError(
        f"no room for a checkpoint in {path}: {cause}",
        help="make room and start the same command again: it resumes at the last whole checkpoint",
    )


def is_disk_full(error: BaseException) -> bool:
    """Say whether an error means that the disk, or a quota, is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # safetensors has the number in its text, torch's zip writer only says where it failed
    return bool(re.search(r"No space left|os error (28|27|122)|File too large|inline_container\.cc", str(error)))


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what writers raise on a full disk into one clear error.

    Raises:
        RunFolderError: the disk is full.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_disk_full(error):
            raise disk_full(path, str(error)[:200]) from error
        raise


def differences(saved: TrainConfig, wanted: TrainConfig) -> list[str]:
    """Return the names of settings that differ and may not."""
    left, right = asdict(saved), asdict(wanted)
    names = [f"{section}.{key}" for section, values in left.items() for key in values]
    return [
        name
        for name in names
        if name not in FREE_TO_CHANGE and left[name.split(".")[0]][name.split(".")[1]] != _value(right, name)
    ]


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name; -1 for another name."""
    number = path.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line, in one write."""
    line = (json.dumps(record) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _value(values: dict[str, Any], name: str) -> Any:
    section, key = name.split(".")
    return values[section][key]


def _step_in(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62  # half a line, from a kill: cut
