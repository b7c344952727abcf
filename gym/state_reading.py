"""Turns a pickled state dict file into safetensors rows, without unpickling it in a trusted process.

The file is read by a Runner (:mod:`drk.gym.runner.state_conversion`) in the gym's sandbox; its tensors come back as raw
bytes through shared memory whose layout is checked. What the file's code could do, any candidate's could.

Left out: files larger than the scratch folder's limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from drk.gym.arena import Arena, read_exactly
from drk.gym.errors import TaskError
from drk.gym.runner import transfer
from drk.gym.runner_handle import RunnerHandle
from drk.gym.settings import GymSettings

StateRow = tuple[str, str, list[int], bytes]
"""Key, torch dtype name, shape, row-major bytes."""


class RunnerStarter(Protocol):
    """The part of :class:`drk.gym.Gym` that is needed here."""

    settings: GymSettings

    async def start_runner(
        self, role: str, files: dict[str, bytes], *, mode: str | None = None, threads: int = 1
    ) -> RunnerHandle:
        """Fork a Runner in its own scratch folder."""
        ...


async def read_pickled(gym: RunnerStarter, path: Path) -> list[StateRow]:
    """Return the tensors of the state dict in ``path``.

    Raises:
        TaskError: kind ``state-dict``: the file cannot be read so.
        HostError: the host failed.
    """
    limits = gym.settings.limits
    if path.stat().st_size > limits.scratch_bytes:
        raise TaskError(f"{path.name} is larger than {limits.scratch_bytes} bytes", kind="state-dict", file=path.name)
    runner = await gym.start_runner("reference", {path.name: path.read_bytes()})
    arena = Arena("drk-state")
    try:
        answer = await _ask(runner, "read_state", limits.load_s, path, name=path.name)
        size_bytes = transfer.check_layout(answer.get("layout"), limits.memory_bytes)
        arena.reserve(size_bytes)
        await _ask(runner, "write", limits.load_s, path, fds=(arena.fd,))
        return [
            (row["name"], row["dtype"], list(row["shape"]), bytes(read_exactly(arena.fd, row["offset"], row["bytes"])))
            for row in answer["layout"]
        ]
    finally:
        arena.close()
        await runner.close()


async def _ask(
    runner: RunnerHandle, command: str, timeout_s: float, path: Path, *, fds: tuple[int, ...] = (), **message: Any
) -> dict[str, Any]:
    answer = await runner.call(command, timeout_s, fds=fds, **message)
    if not answer["ok"]:
        error = answer["error"]
        raise TaskError(error["message"], kind="state-dict", file=path.name, help=error.get("help", ""))
    return answer
