"""``drk profile`` as functions: run something under the recorder, then read, build, save.

Two ways in: :func:`profile_target` calls the user's target in a sandboxed process of its own
(:mod:`drk.assistant.profile_driver`); :func:`profile_command` runs the user's own program, unchanged and unsandboxed,
with the recorder in it. Both end in :func:`finish`, which makes and stores the Report with its Tasks.

The command, the language server and notebooks call these; none of them prints.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from drk.assistant.capture_launch import CommandEnd, command_words, prepare, run_watched
from drk.assistant.errors import EnvironmentFault, Interrupted, TargetError, UsageError
from drk.assistant.intake import locate, split_target
from drk.assistant.profile_build import Asked, build_report, own_prefixes
from drk.assistant.profile_recording import Recording, moved, read_faults, read_recordings
from drk.assistant.profile_request import Request, write_request
from drk.assistant.profile_tasks import SavedTask, describe, with_tasks
from drk.assistant.profile_trace import Trace, analyse, read_events
from drk.assistant.report import Method, Report
from drk.assistant.report_store import free_profile_id, save_report
from drk.assistant.settings import Settings
from drk.gym.devices import Gpu, list_gpus
from drk.gym.schema import Precision, Task
from drk.gym.wire import task_to_json
from drk.gym.zygote_client import zygote_environment

STEPS = 5
WINDOW_S = 60.0
CLEAN_S = 30.0
MEMORY_BYTES = 16 << 30


@dataclass(frozen=True)
class Profiled:
    """A stored report, and how the program ended."""

    report: Report
    path: Path
    end: CommandEnd


@dataclass(frozen=True)
class Wanted:
    """What the caller asks of either way: ``target`` names a GPU for estimates (null: none), ``keep`` a folder for the
    recorder's own files (null: they are deleted)."""

    profiles_dir: Path
    steps: int = STEPS
    target: str | None = None
    max_time_s: float = 600.0
    precision: Precision = "match"
    save_tasks: bool = True
    keep: Path | None = None


# --- the user's own program --------------------------------------------------------------------------------------


def profile_command(
    command: str, wanted: Wanted, *, cwd: Path | None = None, stdout: IO[Any] | int | None = None
) -> Profiled:
    """Run a program under the recorder and store what it tells.

    Args:
        command: the user's command line; ``-m pkg`` and ``train.py`` are run by this Python.
        wanted: how much to record and where to store it.
        cwd: where it runs.
        stdout: where its standard output goes, its own when null.

    Raises:
        UsageError: the command is wrong.
        CaptureFailed: nothing could be recorded; it holds the program's own end.
    """
    words = command_words(command)
    with tempfile.TemporaryDirectory(prefix="drk-profile-") as name:
        folder = Path(name)
        variables = {"DRK_PROFILE_STEPS": str(wanted.steps + 2), "DRK_PROFILE_WINDOW_S": str(WINDOW_S)}
        environment = prepare(folder, "profile_hooks", variables)
        end = run_watched(words, environment, cwd=cwd, max_time_s=wanted.max_time_s, stdout=stdout)
        _keep(folder, wanted.keep)
        recordings = read_recordings(folder)
        usable = [one for one in recordings if one.window.state == "closed" and one.modules]
        if not usable:
            raise CaptureFailed(command, end, recordings, read_faults(folder))
        root = (cwd or Path.cwd()).absolute()
        method = Method(
            source="command",
            times_are="cpu",
            steps=0,
            command=command,
            processes=len(recordings),
            exit_code=end.exit_code,
            ended=end.ended,
            notes=_process_notes(recordings, end),
        )
        title = Path(usable[0].argv[0]).stem if usable[0].argv and usable[0].argv[0] else words[0]
        report, path = finish(usable[0], folder, Asked("", title, root, method, wanted.target), wanted)
    return Profiled(report, path, end)


class CaptureFailed(TargetError):
    """The program ran and nothing was recorded; ``end`` is how it ended."""

    def __init__(self, command: str, end: CommandEnd, recordings: list[Recording], faults: list[str]) -> None:
        self.end = end
        causes = {
            "crashed": f"the program ended with exit code {end.exit_code} before a module was called",
            "killed": f"the program was killed by {end.signal_name}",
            "time-limit": "the program was ended at the time limit before it could tell",
            "interrupted": "it was interrupted",
            "finished": "the program never called a torch.nn.Module in this Python",
        }
        reasons = [one.window.reason for one in recordings if one.window.reason]
        cause = (faults or reasons or [causes[end.ended]])[0]
        help_text = "check that the command is the Python program itself (not a launcher that clears its environment)"
        if end.ended == "time-limit":
            help_text = "give it more time with --max-time, or fewer steps of its own"
        elif end.ended == "crashed":
            help_text = "run it without drk profile first; its own message stands above" + _other_python(command)
        super().__init__(f"nothing was recorded of: {command}", kind="capture", cause=cause, help=help_text)


def _other_python(command: str) -> str:
    """Return a sentence when the command's Python is not this one, which is often why torch is missing."""
    word = command_words(command)[0]
    found = shutil.which(word)
    own = Path(sys.executable)
    if not Path(word).name.startswith("python") or found is None:
        return ""
    if Path(found).parent == own.parent and Path(found).samefile(own):  # python and python3.11 of one environment
        return ""
    return f"\n{word} is {found}; drk runs on {sys.executable}, which --capture train.py would use"


def _process_notes(recordings: list[Recording], end: CommandEnd) -> tuple[str, ...]:
    notes = []
    if len(recordings) > 1:
        notes.append(f"{len(recordings)} processes called modules; the one with most steps is shown")
    if end.ended != "finished":
        notes.append(f"the program {end.ended}" + (f" by {end.signal_name}" if end.signal_name else ""))
    return tuple(notes)


# --- a target of the user's --------------------------------------------------------------------------------------


def profile_target(task: Task, target: str, settings: Settings, wanted: Wanted) -> Profiled:
    """Call a task's module in a sandboxed process and store what was seen.

    Args:
        task: from :func:`drk.assistant.intake.resolve_target`.
        target: as the user typed it.
        settings: device and sandbox level.
        wanted: see :class:`Wanted`.

    Raises:
        TargetError: the user's code failed; it names its line.
        EnvironmentFault: the sandbox or the device cannot be had.
    """
    gpu = _gpu(settings.device)
    source = locate(split_target(target)[0], None)
    root = source.parents[len(Path(task.entry).parts) - 1]
    with tempfile.TemporaryDirectory(prefix="drk-profile-") as name:
        folder = Path(name).resolve()
        _write_task(folder, task)
        request = Request(
            meta=_meta(task),
            device="cpu" if gpu is None else "cuda:0",
            gpu="" if gpu is None else gpu.uuid,
            level=settings.sandbox,
            target=settings.target,
            steps=wanted.steps,
            window_s=WINDOW_S,
            clean_s=CLEAN_S,
            memory_bytes=MEMORY_BYTES,
            threads=_threads(),
        )
        write_request(folder, request)
        environment = zygote_environment("gpu")
        words = [sys.executable, "-m", "drk.assistant.profile_driver", str(folder)]
        end = run_watched(words, environment, max_time_s=wanted.max_time_s, stdout=sys.stderr, option="drk profile")
        _keep(folder, wanted.keep)
        recordings = _told(folder, end, root, target)
        recording = moved(recordings[0], str(folder / "src"), str(root))
        method = Method(
            source="call",
            times_are="cpu",
            steps=0,
            mode=task.mode,
            target=target,
            inputs=_inputs_text(recording),
            notes=("user code ran in the sandbox",) if settings.sandbox != "basic" else (),
        )
        asked = Asked("", task.name, Path.cwd(), method, wanted.target, own_prefixes(root, ()))
        report, path = finish(recording, folder, asked, wanted, task)
    return Profiled(report, path, end)


def _gpu(device: str) -> Gpu | None:
    """Return the GPU that ``--device`` means, or null for the CPU.

    Raises:
        EnvironmentFault: it names one that is not there.
    """
    gpus = list_gpus() if device != "interpret" else []
    if device in ("auto", "interpret"):
        return gpus[0] if gpus else None
    found = [gpu for gpu in gpus if f"cuda:{gpu.index}" == device]
    if not found:
        told = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus) or "none"
        raise EnvironmentFault(f"there is no {device}", kind="device", cause=f"GPUs of this machine: {told}")
    return found[0]


def _threads() -> int:
    """Return the number of threads that torch would take by itself."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) else os.cpu_count() or 1


def _meta(task: Task) -> dict[str, Any]:
    """Return the task as a Runner takes it: its JSON without sources and tensors, which lie beside it."""
    data = task_to_json(replace(task, tensors=None))
    return {name: value for name, value in data.items() if name not in ("files", "tensors")}


def _write_task(folder: Path, task: Task) -> None:
    for name, text in task.files.items():
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
    if task.tensors is not None:
        (folder / "tensors.safetensors").write_bytes(task.tensors)


def _told(folder: Path, end: CommandEnd, root: Path, target: str) -> list[Recording]:
    """Return the driver's recordings, or raise what it told instead."""
    failure = folder / "failure.json"
    if failure.exists():
        facts = json.loads(failure.read_text(encoding="utf-8"))
        if facts.get("kind") == "sandbox":
            raise EnvironmentFault(str(facts.get("message")), kind="sandbox", help=str(facts.get("help") or ""))
        file = str(facts.get("file") or "").removeprefix("src/")
        raise TargetError(
            str(facts.get("message")),
            kind=str(facts.get("kind")),
            file=_shown(root / file) if file else "",
            line=facts.get("line"),
            help=str(facts.get("help") or ""),
        )
    if end.ended == "interrupted":
        raise Interrupted("interrupted")
    if end.ended == "time-limit":
        raise TargetError(f"{target} took too long", kind="timeout", help="give it more with --max-time")
    recordings = [one for one in read_recordings(folder) if one.window.state == "closed"]
    if end.ended != "finished":
        how = f"was killed by {end.signal_name}" if end.signal_name else f"ended with exit code {end.exit_code}"
        raise EnvironmentFault(f"the process that ran {target} {how}", kind="profile", help="-v shows what it printed")
    if not recordings:
        raise TargetError(f"{target} was called and nothing was seen", kind="profile")
    return recordings


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _inputs_text(recording: Recording) -> str:
    kinds = recording.modules[0].kinds if recording.modules else ()
    return describe(kinds[0]) if kinds else ""


# --- a block of code in this process -----------------------------------------------------------------------------


def finish_block(folder: Path, wanted: Wanted, title: str, *, crashed: bool) -> tuple[Report, Path]:
    """Report what a recorder of this process left in ``folder``.

    Raises:
        TargetError: torch.profiler could not run; the cause is its own message.
    """
    recording = read_recordings(folder)[0]
    if recording.window.state != "closed":
        raise TargetError("the block could not be profiled", kind="capture", cause=recording.window.reason)
    method = Method(source="notebook", times_are="cpu", steps=0, ended="crashed" if crashed else "finished")
    return finish(recording, folder, Asked("", title, Path.cwd(), method, wanted.target), wanted)


def _keep(folder: Path, place: Path | None) -> None:
    """Copy what the recorder wrote into ``place``.

    Raises:
        UsageError: it cannot be written to.
    """
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        for pattern in ("recording-*.json", "trace-*.json", "fault-*.txt", "failure.json"):
            for path in folder.glob(pattern):
                shutil.copyfile(path, place / path.name)
    except OSError as error:
        raise UsageError(f"cannot write to {place}", cause=error.strerror or str(error)) from error


# --- the end of both ---------------------------------------------------------------------------------------------


def finish(
    recording: Recording, folder: Path, asked: Asked, wanted: Wanted, task: Task | None = None
) -> tuple[Report, Path]:
    """Read the trace, build the report, store it with its tasks; ``task`` is the whole target's, where there is one."""
    trace = read_trace(folder, recording)
    identifier = free_profile_id(wanted.profiles_dir, asked.title)
    prefixes = asked.own_prefixes or own_prefixes(asked.root, [file for file, _ in recording.lines])
    report = build_report(recording, trace, replace(asked, id=identifier, own_prefixes=prefixes))
    saved: list[SavedTask] = []
    if wanted.save_tasks:
        report, saved = with_tasks(report, recording, folder, precision=wanted.precision)
        if task is not None:
            report, saved = _with_whole(report, saved, asked.method.target, task)
    path = save_report(wanted.profiles_dir, report, [(one.name, one.task) for one in saved])
    return report, path


def read_trace(folder: Path, recording: Recording) -> Trace:
    """Return the trace of a recording's process."""
    return analyse(read_events(folder / Path(recording.window.trace).name), recording.step_root)


def _with_whole(report: Report, saved: list[SavedTask], target: str, task: Task) -> tuple[Report, list[SavedTask]]:
    """Let the outermost module's row carry the Task that was profiled: it has the user's own inputs and weights."""
    rows = list(report.modules)
    index = next((i for i, row in enumerate(rows) if row.parent is None), None)
    if index is None or not rows[index].inputs:
        return report, saved
    name = f"{len(saved):03d}"
    kinds = (replace(rows[index].inputs[0], task=name, reason=""), *rows[index].inputs[1:])
    rows[index] = replace(rows[index], inputs=kinds, target=target)
    return replace(report, modules=tuple(rows)), [*saved, SavedTask(name, task)]
