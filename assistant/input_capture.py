"""Inputs from the user's own command: ``--capture "python train.py"``.

The command runs as the user would run it, outside of any sandbox, since it needs the user's data and devices; it is
the user's own and typed on purpose. A recorder (:mod:`drk.assistant.capture_recorder`) in its process notes the calls
of the target. From each kind of call comes one Task with its share of the calls as weight, the most frequent first:
shapes, dtypes, strides, mode, autocast and gradients as seen; integer, boolean and masked tensors with their values.

Left out: targets that are functions or factories, arguments that are no tensors, numbers, text, lists, tuples or dicts,
and the weights (use ``--state-dict``).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from drk.assistant.capture_launch import command_words, prepare, run_watched
from drk.assistant.errors import Interrupted, TargetError, UsageError
from drk.assistant.intake import constructor_inputs, locate_target
from drk.assistant.state_file import build_blob, merge_blobs, read_state
from drk.assistant.target import Located
from drk.gym.schema import (
    Argument,
    Call,
    CapturedTensor,
    Inputs,
    Mode,
    Nested,
    Precision,
    Scalar,
    Task,
    TensorSpec,
    Tolerance,
)

MAX_JSON_BYTES = 16 * 2**20
FORMS = ("list", "tuple", "dict")


@dataclass(frozen=True)
class CapturedCall:
    """One kind of call: its arguments, how often it occurred, and the tensors whose values travel (a blob)."""

    call: Call
    count: int
    mode: Mode
    grad: bool
    autocast: str | None
    tensors: bytes | None = None


@dataclass(frozen=True)
class Capture:
    """Everything recorded; ``init`` is None when the constructor's arguments have no form in the schema."""

    calls: tuple[CapturedCall, ...]
    init: Call | None
    exit_code: int


class UnsupportedArgument(Exception):
    """An argument has no form in the schema; the text names its type."""


class ArgumentReader:
    """Turns recorded JSON into arguments, gathering the tensors that travel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[tuple[str, str, Sequence[int], bytes]] = []

    def argument(self, data: dict[str, Any]) -> Argument:
        """Return one argument.

        Raises:
            UnsupportedArgument: it has no form.
        """
        kind = data["kind"]
        if kind == "scalar":
            return Scalar(data["value"])
        if kind == "nested" and data["form"] in FORMS:
            items = tuple(self.argument(item) for item in data["items"])
            return Nested(data["form"], items, tuple(data.get("keys", ())))
        if kind == "tensor":
            return self.tensor(data)
        raise UnsupportedArgument(str(data.get("type", kind)))

    def tensor(self, data: dict[str, Any]) -> Argument:
        """Return a tensor: with its values where they were recorded, else how to draw it."""
        if "file" in data:
            name = str(len(self.rows))
            content = (self.folder / Path(data["file"]).name).read_bytes()
            self.rows.append((f"input.{name}", data["dtype"], data["shape"], content))
            return CapturedTensor(name, bool(data["requires_grad"]))
        plain: Literal["bernoulli", "normal"] = "bernoulli" if data["dtype"] == "bool" else "normal"
        return TensorSpec(
            shape=tuple(data["shape"]),
            dtype=data["dtype"],
            strides=tuple(data["strides"]) if data["strides"] is not None else None,
            low=data.get("low"),
            high=data.get("high"),
            fill="integers" if data.get("fill") == "integers" else plain,
            requires_grad=bool(data["requires_grad"]),
        )

    def call(self, data: dict[str, Any]) -> Call:
        """Return all arguments of one call."""
        args = tuple(self.argument(value) for value in data["args"])
        return Call(args, {name: self.argument(value) for name, value in data["kwargs"].items()})


def read_capture(folder: Path, exit_code: int = 0) -> Capture:
    """Read what the recorder left in ``folder``; processes of one command are summed.

    Raises:
        TargetError: kind ``capture``: malformed, or a call's argument has no form.
    """
    kinds: dict[str, tuple[dict[str, Any], int]] = {}
    init: Call | None = None
    try:
        for path in sorted(folder.glob("calls-*.json")):
            if path.stat().st_size > MAX_JSON_BYTES:
                raise TargetError("the capture is too large", kind="capture")
            data = json.loads(path.read_text())
            init = init or _init_call(data["init"], folder)
            for call in data["calls"]:
                key = json.dumps({name: _plain(call[name]) for name in call if name != "count"}, sort_keys=True)
                known = kinds.get(key)
                kinds[key] = (call, call["count"]) if known is None else (known[0], known[1] + call["count"])
        calls = [_captured(call, count, folder) for call, count in kinds.values()]
    except UnsupportedArgument as error:
        raise TargetError(f"the call takes a {error}, which has no form as an input", kind="capture") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(f"the capture cannot be read: {error}", kind="capture") from error
    return Capture(tuple(sorted(calls, key=lambda call: -call.count)), init, exit_code)


def _plain(data: Any) -> Any:
    """Return recorded JSON without the names of data files, which differ between processes."""
    if isinstance(data, dict):
        return {name: _plain(value) for name, value in data.items() if name != "file"}
    return [_plain(item) for item in data] if isinstance(data, list) else data


def _init_call(data: dict[str, Any] | None, folder: Path) -> Call | None:
    try:
        return ArgumentReader(folder).call(data) if data is not None else None
    except UnsupportedArgument:
        return None


def _captured(data: dict[str, Any], count: int, folder: Path) -> CapturedCall:
    reader = ArgumentReader(folder)
    call = reader.call(data)
    training = bool(data["training"])
    return CapturedCall(
        call,
        count,
        "train" if training else "eval",
        grad=training and bool(data["grad"]),
        autocast=data["autocast"],
        tensors=build_blob(reader.rows) if reader.rows else None,
    )


def run_command(command: str, located: Located, *, cwd: Path | None, timeout_s: float) -> Capture:
    """Run the user's command with the recorder in it; its output goes to our standard error.

    Raises:
        UsageError: the command is empty or cannot be found.
        TargetError: kind ``capture``: nothing was recorded, or it took too long.
    """
    words = command_words(command)
    closure, target = located.project.closure, located.target
    with tempfile.TemporaryDirectory(prefix="drk-capture-") as name:
        folder = Path(name)
        variables = {
            "DRK_CAPTURE_FILE": os.path.realpath(closure.root / closure.entry),
            "DRK_CAPTURE_NAME": target.name,
            "DRK_CAPTURE_SUBMODULE": target.submodule,
        }
        environment = prepare(folder, "capture_recorder", variables)
        end = run_watched(words, environment, cwd=cwd, max_time_s=timeout_s, stdout=sys.stderr)
        if end.ended == "time-limit":
            told = f"--capture: {command} took longer than {timeout_s:g} s"
            raise TargetError(told, kind="capture", file=located.file)
        if end.ended == "interrupted":
            raise Interrupted("interrupted")
        capture = read_capture(folder, end.exit_code)
    if not capture.calls:
        ended = f" and ended with exit code {capture.exit_code}" if capture.exit_code else ""
        raise TargetError(
            f"--capture: the command never called {target.label} of {located.file}{ended}",
            kind="capture",
            file=located.file,
            help="check that it runs this very file and this class, or give --input",
        )
    return capture


def capture_tasks(
    target: str,
    command: str,
    *,
    init: Sequence[str] = (),
    precision: Precision = "match",
    tolerance: Tolerance = "float64",
    state_dict: Path | None = None,
    cwd: Path | None = None,
    timeout_s: float = 600.0,
) -> list[Task]:
    """Run the user's command and return one Task for each kind of call of the target, the most frequent first.

    Args:
        target: ``FILE[:NAME]`` as in :func:`drk.assistant.intake.resolve_target`; a class, or a part of one.
        command: the user's own command line, run by words without a shell.
        init: texts of ``--init``; else what the constructor was called with, else the file's ``get_init_inputs``.
        precision: see :class:`drk.gym.schema.Task`.
        tolerance: see there.
        state_dict: weights.
        cwd: where the command runs and relative paths start.
        timeout_s: limit for the command.

    Raises:
        TargetError: the target cannot be used, or nothing could be captured.
        UsageError: an option is wrong.
    """
    located = locate_target(target, cwd=cwd)
    if located.target.kind != "module" or located.target.entry is None:
        raise UsageError(
            f"--capture watches classes; {located.target.name} is none", file=located.file, help="give --input instead"
        )
    capture = run_command(command, located, cwd=cwd, timeout_s=timeout_s)
    built: Inputs = constructor_inputs(located, init) if init or capture.init is None else capture.init
    weights = read_state(state_dict, cwd) if state_dict is not None else None
    total = sum(call.count for call in capture.calls)
    return [
        replace(
            located.task(built, call.call),
            mode=call.mode,
            grad=call.grad,
            autocast=call.autocast,
            precision=precision,
            tolerance=tolerance,
            tensors=merge_blobs(weights, call.tensors),
            weight=call.count / total,
        )
        for call in capture.calls
    ]
