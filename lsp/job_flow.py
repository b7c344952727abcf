"""A job from click to end: command line, progress from events, the last word, and what is offered afterwards.

The request that starts a job is answered at once. Progress shows one text per turn; its end says what came of it, and
the same is told as a message when no bar was shown, when it failed, or when there is something to pick. What a job
found is in its run folder: the flow only refreshes what the editor shows.

Left out: output of the user's own program (``drk profile --capture``), which belongs in a terminal.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from drk.assistant.events import Event
from drk.assistant.gym_address import URL_VARIABLE
from drk.assistant.report_store import default_profiles_dir, find_profiles_dir
from drk.assistant.runs import Run
from drk.lsp.diagnostics import publish
from drk.lsp.jobs import OWN_COMMAND, Job, JobEnd, JobSpec
from drk.lsp.progress import JobProgress
from drk.lsp.suggestions import describe_result

if TYPE_CHECKING:
    from drk.lsp.session import DrkServer

TITLES = {"optimize": "drk: finding faster kernels", "profile": "drk: profiling", "report": "drk: making the report"}


def optimize_spec(server: DrkServer, path: Path, name: str, resume: Run | None = None) -> JobSpec:
    """Return the command line that searches for ``name`` in ``path`` (empty: what drk takes), or goes on with a run."""
    settings = server.settings_for(path)
    root = server.root_for(path)
    runs_dir = resume.folder.parent if resume is not None else server.own_runs_dir(root)
    what = [resume.name, "--resume"] if resume is not None else [f"{path}:{name}" if name else str(path)]
    arguments = ["optimize", *what, "--events", "jsonl", "--format", "json", "--runs-dir", str(runs_dir)]
    if resume is None and _is_saved(server, path, name):
        arguments.append("--from-profile")
    if settings.device:
        arguments += ["--device", settings.device]
    return JobSpec(
        kind="optimize",
        file=path,
        target=name,
        arguments=[*arguments, *settings.optimize_args],
        cwd=root,
        command=settings.command or OWN_COMMAND,
        environment={URL_VARIABLE: settings.gym_url} if settings.gym_url else {},
    )


def _is_saved(server: DrkServer, path: Path, name: str) -> bool:
    """Say whether the newest profile holds inputs for a target, and the file is as it was when that was made."""
    profile = server.profile_for(path)
    if profile is None or f"{path}:{name}" not in profile.saved_targets:
        return False
    try:
        return path.stat().st_mtime_ns <= profile.report_path.stat().st_mtime_ns
    except OSError:
        return False


def profile_spec(server: DrkServer, path: Path) -> JobSpec:
    """Return the command line that profiles a file, into the folder that is looked at for this file."""
    settings = server.settings_for(path)
    root = server.root_for(path)
    near = find_profiles_dir(path.parent)
    where = near if near is not None and near.is_relative_to(root) else default_profiles_dir(root)
    arguments = ["profile", str(path), "--format", "json", "--profiles-dir", str(where)]
    if settings.device:
        arguments += ["--device", settings.device]
    command = settings.command or OWN_COMMAND
    return JobSpec("profile", path, "", [*arguments, *settings.profile_args], root, command)


def report_spec(server: DrkServer, path: Path, report: Path) -> JobSpec:
    """Return the command line that makes the page of a stored profile, beside it."""
    command = server.settings_for(path).command or OWN_COMMAND
    page = str(report.with_suffix(".html"))
    arguments = ["report", str(report), "-o", page, "--format", "html"]
    return JobSpec("report", path, page, arguments, server.root_for(path), command)


async def begin_job(server: DrkServer, spec: JobSpec) -> str:
    """Start a job in the background, or join the one of the same file and target; return its id."""
    job, fresh = server.jobs.add(spec)
    if fresh:
        server.run_task(_run(server, job))
    else:
        server.say(f"drk: {spec.label} is being worked on already ({job.message})")
    return job.id


async def _run(server: DrkServer, job: Job) -> None:
    """Run a job to its end. When the server itself ends, nothing is told any more: the kernel stops the process."""
    progress = JobProgress(server)
    job.token = progress.token
    counter = _Counter(job, progress)
    try:
        await progress.begin(f"{TITLES[job.spec.kind]} ({job.spec.label})", job.message)
        refresh(server)
        end = await job.work(counter.on_event)
        text, kind = last_word(job, end)
    except OSError as error:
        end, kind = None, lsp.MessageType.Error
        text = f"cannot start {job.spec.command[0]}: {error.strerror or error}"
    finally:
        server.jobs.remove(job)
    progress.end(text)
    if not progress.shown or kind != lsp.MessageType.Log:
        server.say(f"drk: {job.spec.label}: {text}", kind if kind != lsp.MessageType.Log else lsp.MessageType.Info)
    if job.spec.kind == "report" and end is not None and end.state == "done":
        await server.show_document(Path(job.spec.target), external=True)
    refresh(server)


class _Counter:
    """Turns events into ``turn 2/4: best 1.31x over compile`` and a percentage."""

    def __init__(self, job: Job, progress: JobProgress) -> None:
        self._job = job
        self._progress = progress
        self._total = 0
        self._turns = 0
        self._judged = 0
        self._best = ""

    def on_event(self, event: Event) -> None:
        """Show one event."""
        kind = event["event"]
        message = ""
        if kind == "started":
            self._turns = int(event.get("turns") or 0)
            self._total = self._turns * int(event.get("samples") or 1)
            message = "running the reference"
        elif kind == "captured":
            message = "looking for kernels"
        elif kind == "judging":
            message = self._turn(event)
        elif kind == "judged":
            self._judged += 1
            if event.get("best") and event.get("gain"):
                gain = str(event["gain"]).split(" (", maxsplit=1)[0]
                self._best = "verified, not measured" if gain.startswith("speed not measured") else gain
            message = self._turn(event)
        if message:
            self._job.message = message
            share = round(100 * self._judged / self._total) if self._total else None
            self._progress.report(message, min(share, 99) if share is not None else None)

    def _turn(self, event: Event) -> str:
        best = f", best {self._best}" if self._best else ""
        return f"turn {event.get('turn')}/{self._turns}{best}"


def last_word(job: Job, end: JobEnd) -> tuple[str, lsp.MessageType]:
    """Return what to say at the end; ``Log`` where the progress bar's end says enough."""
    if end.state == "killed":
        again = f"; the search can go on where it stopped ({end.run})" if end.run else ""
        return f"the process was killed (exit {end.exit_code}){again}", lsp.MessageType.Warning
    if job.spec.kind == "optimize" and end.result is not None:
        return _optimize_word(end)
    if end.state == "cancelled":
        return "stopped", lsp.MessageType.Log
    if end.state == "done":
        return "done", lsp.MessageType.Log
    return f"failed: {_reason(end)}", lsp.MessageType.Error


def _optimize_word(end: JobEnd) -> tuple[str, lsp.MessageType]:
    result = end.result or {}
    stopped = "stopped; " if end.state == "cancelled" or result.get("interrupted") else ""
    if result.get("artefact"):
        best = "the best so far is kept: " if stopped else ""
        return f"{stopped}{best}{describe_result(result)}; apply it from the code actions", lsp.MessageType.Info
    why = result.get("artefact_reason") or result.get("reason") or "nothing was found"
    return f"{stopped}{result.get('status', 'failed')}: {why}", lsp.MessageType.Log if stopped else lsp.MessageType.Info


def _reason(end: JobEnd) -> str:
    """Return why a command refused: its own error, as an object or as text, else the last line that it wrote."""
    if end.error is not None:
        parts = [str(end.error.get(name) or "") for name in ("message", "cause", "help")]
        return ". ".join(part.splitlines()[0].rstrip(".") for part in parts if part)
    lines = [line.strip() for line in end.output.splitlines() if line.strip()]
    told = next((number for number, line in enumerate(lines) if line.startswith("error: ")), len(lines) - 1)
    text = ". ".join(re.sub(r"^(error: |cause: |help: |--> )", "", line).rstrip(".") for line in lines[max(told, 0) :])
    return text[:400] or f"exit {end.exit_code}"


def refresh(server: DrkServer) -> None:
    """Show anew what profiles, runs and jobs say: diagnostics of open files, lenses and hints where supported."""
    for uri in list(server.workspace.text_documents):
        publish(server, uri)
    workspace = server.client_capabilities.workspace
    if workspace is None:
        return
    if workspace.code_lens is not None and workspace.code_lens.refresh_support:
        server.run_task(_ask(server.workspace_code_lens_refresh_async(None)))
    if workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
        server.run_task(_ask(server.workspace_inlay_hint_refresh_async(None)))


async def _ask(request: object) -> None:
    """Wait for a refresh's answer; a client that refuses shows old lenses until it asks itself."""
    with contextlib.suppress(JsonRpcException):
        await request  # type: ignore[misc]
