"""The commands behind actions and lenses. Each takes one object (``uri``, and ``target``, ``run`` or ``job``).

Whatever cannot be done is told in a message with its cause and the next step, and changes nothing. A job's command
answers at once with the job's id; its progress, end and suggestion arrive later (:mod:`drk.lsp.job_flow`). Kernels are
never put into a buffer by themselves: the user picks ``apply``, when the text is as it was verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams

from drk.assistant.apply import plan_apply, plan_restore
from drk.assistant.errors import DrkError, TargetError, UsageError, from_gym
from drk.assistant.runs import Run
from drk.assistant.source_index import parse_source
from drk.gym.errors import GymError
from drk.lsp.documents import SourceView, check_writable, path_of, split_target, uri_of, view
from drk.lsp.job_flow import begin_job, optimize_spec, profile_spec, report_spec
from drk.lsp.offers import file_offers
from drk.lsp.settings import describe
from drk.lsp.suggestions import newest_runs
from drk.lsp.workspace_edits import Answer, make_apply, make_restore

if TYPE_CHECKING:
    from drk.lsp.session import DrkServer

Argument = Mapping[str, Any]
Command = Callable[["DrkServer", Argument], Awaitable[Any]]


def text_of(argument: Argument, name: str, *, needed: bool = False) -> str:
    """Return a text of a command's argument, empty when absent.

    Raises:
        JsonRpcInvalidParams: it is no text, or needed and absent.
    """
    value = argument.get(name)
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value):
        raise JsonRpcInvalidParams(f"the argument needs a text {name!r}")
    return value


async def guarded(server: DrkServer, command: Command, argument: Any) -> Any:
    """Run a command; errors that people can act on become messages, and the answer is null then.

    Raises:
        JsonRpcInvalidParams: the argument is no object, or lacks what the command needs.
    """
    if not isinstance(argument, dict):
        raise JsonRpcInvalidParams("the command takes one object, such as {'uri': ...}")
    try:
        return await command(server, argument)
    except GymError as error:
        server.say_error(from_gym(error))
    except DrkError as error:
        server.say_error(error)
    return None


async def optimize(server: DrkServer, argument: Argument) -> str | None:
    """Start a search for faster kernels, or join the one under way; returns the job's id."""
    shown = await _ready_to_run(server, argument)
    file, name = split_target(text_of(argument, "target"))
    if file and Path(file) != shown.path:
        shown = view(server, uri_of(Path(file)))
    _check_saved(shown)
    _check_not_running_elsewhere(server, shown.path, name)
    return await begin_job(server, optimize_spec(server, shown.path, name))


async def resume(server: DrkServer, argument: Argument) -> str | None:
    """Go on with an interrupted run; returns the job's id."""
    shown = await _ready_to_run(server, argument)
    run = _run_named(server, shown.path, text_of(argument, "run"))
    _, name = split_target(text_of(argument, "target"))
    return await begin_job(server, optimize_spec(server, shown.path, name, resume=run))


async def profile(server: DrkServer, argument: Argument) -> str | None:
    """Profile the file; returns the job's id."""
    shown = await _ready_to_run(server, argument)
    _check_saved(shown)
    return await begin_job(server, profile_spec(server, shown.path))


async def cancel(server: DrkServer, argument: Argument) -> bool:
    """Stop a job by id, or the jobs of a file; the best so far is kept. Returns whether there was one."""
    word = text_of(argument, "job")
    path = path_of(text_of(argument, "uri"))
    jobs = [job for job in [server.jobs.find(word)] if job is not None] if word else []
    if not word and path is not None:
        jobs = server.jobs.of_file(path)
    for job in jobs:
        job.cancel()
    return bool(jobs)


async def apply(server: DrkServer, argument: Argument) -> bool:
    """Put a run's kernels to use in the editor's text; returns whether the editor did it."""
    _check_trusted(server)
    shown = view(server, text_of(argument, "uri", needed=True))
    run = _run_named(server, shown.path, text_of(argument, "run"))
    check_writable(shown.path)
    _check_not_behind(shown, "reload it from disk")
    plan = plan_apply(run, shown.path, now=shown.data)
    answer = await make_apply(server, shown, plan)
    names = ", ".join(path.name for path in plan.contents)
    _tell_edit(server, answer, shown, f"kernels of {run.name} applied to {shown.path.name}; {names} beside it")
    return answer.applied


async def restore(server: DrkServer, argument: Argument) -> bool:
    """Take drk's edit out of the editor's text; returns whether the editor did it."""
    _check_trusted(server)
    shown = view(server, text_of(argument, "uri", needed=True))
    check_writable(shown.path)
    _check_not_behind(shown, "reload it from disk, or save it if you took the kernels out yourself")
    plan = plan_restore(shown.path, now=shown.data)
    answer = await make_restore(server, shown, plan)
    how = "as it was" if plan.exact else "without drk's lines; your later edits stay"
    kept = "".join(f"; {path.name} stays, since it was changed" for path in plan.kept)
    _tell_edit(server, answer, shown, f"{shown.path.name} is {how}{kept}")
    return answer.applied


async def diff(server: DrkServer, argument: Argument) -> str | None:
    """Open the unified diff of a run; returns its path."""
    path = _local(text_of(argument, "uri", needed=True))
    run = _run_named(server, path, text_of(argument, "run"))
    artefact = (run.result or {}).get("artefact")
    if not artefact:
        raise UsageError(f"run {run.name} has no change to show")
    await server.show_document(Path(artefact["diff"]), external=False)
    return str(artefact["diff"])


async def open_report(server: DrkServer, argument: Argument) -> str | None:
    """Make the page of the newest profile and open it outside; returns the job's id."""
    path = _local(text_of(argument, "uri", needed=True))
    _check_trusted(server)
    found = server.profile_for(path)
    if found is None:
        raise UsageError("there is no stored profile for this file", help="profile it first")
    return await begin_job(server, report_spec(server, path, found.report_path))


async def status(server: DrkServer, argument: Argument) -> dict[str, Any]:
    """Return what the server does and with which settings; for people (a log entry) and for tests."""
    path = path_of(text_of(argument, "uri"))
    return {
        "version": server.version,
        "trusted": server.trusted,
        "folders": [str(folder) for folder in server.folders()],
        "jobs": [
            {"id": job.id, "kind": job.spec.kind, "target": job.spec.label, "message": job.message, "run": job.run}
            for job in server.jobs.all()
        ],
        "settings": describe(server.resolved_for(path)) if path is not None else [],
        "torch_imported": "torch" in sys.modules,
        "offers": _offers_json(server, text_of(argument, "uri")) if path is not None else [],
    }


HANDLERS: Mapping[str, Command] = {
    "drk.optimize": optimize,
    "drk.resume": resume,
    "drk.profile": profile,
    "drk.cancel": cancel,
    "drk.apply": apply,
    "drk.restore": restore,
    "drk.diff": diff,
    "drk.openReport": open_report,
    "drk.status": status,
}


def _offers_json(server: DrkServer, uri: str) -> list[dict[str, Any]]:
    offers = file_offers(server, uri)
    if offers is None:
        return []
    return [
        {
            "qualname": offer.qualname,
            "line": offer.head_line,
            "target": offer.target,
            "share": offer.hotspot.share if offer.hotspot is not None else None,
            "stale": offer.stale,
            "run": offer.suggestion.name if offer.suggestion is not None else None,
            "state": offer.suggestion.state if offer.suggestion is not None else None,
            "applied": offers.applied,
            "work": asdict(offer.hotspot.work) if offer.hotspot is not None else None,
        }
        for offer in offers.offers
    ]


def _local(uri: str) -> Path:
    path = path_of(uri)
    if path is None:
        raise TargetError("not a file of this machine", kind="not-found", file=uri, help="save it to disk first")
    return path


def _check_trusted(server: DrkServer) -> None:
    if not server.trusted:
        raise UsageError(
            "this workspace is not trusted, so nothing is run or written here",
            kind="untrusted",
            help="trust it in the editor, if you know where its code is from",
        )


async def _ready_to_run(server: DrkServer, argument: Argument) -> SourceView:
    """Return the file to work on, once the editor's settings are known.

    Raises:
        UsageError: the workspace is not trusted.
        TargetError: it is no file of this machine.
    """
    _check_trusted(server)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(server.settings_known.wait(), 6.0)
    return view(server, text_of(argument, "uri", needed=True))


def _check_saved(shown: SourceView) -> None:
    """Refuse a text that is not what a job would read, or that cannot be read at all."""
    if shown.unsaved:
        raise TargetError(
            f"{shown.path.name} has changes that are not saved",
            kind="unsaved",
            file=str(shown.path),
            cause="drk works on the file on disk",
            help="save it (or reload it, if it changed on disk) and try again",
        )
    parse_source(shown.text, str(shown.path))


def _check_not_running_elsewhere(server: DrkServer, path: Path, name: str) -> None:
    """Refuse to start what another editor or a terminal is working on."""
    ours = {job.run for job in server.jobs.all()}
    for one in server.suggestions_for(path):
        same = not name or one.target in ("", path.stem, name)
        if one.state == "running" and same and one.name not in ours:
            raise UsageError(
                f"another process is working on {path.name} (run {one.name})",
                kind="running",
                help="its result will be offered here when it ends",
            )


def _check_not_behind(shown: SourceView, advice: str) -> None:
    """Refuse when the disk holds the kernels already and the editor's text does not know of it.

    Applying would be done twice; restoring would remove the files that the text on disk imports.
    """
    module = f"{shown.path.stem}_kernels import".encode()
    if shown.unsaved and shown.on_disk is not None and module in shown.on_disk and module not in shown.data:
        raise TargetError(
            f"{shown.path.name} on disk has kernels applied already, and this text is older",
            kind="behind",
            file=str(shown.path),
            help=advice,
        )


def _run_named(server: DrkServer, path: Path, name: str) -> Run:
    runs = newest_runs(server.runs_dirs(path))
    if not name:
        ready = [one for one in server.suggestions_for(path) if one.state == "ready"]
        if not ready:
            raise UsageError(f"there are no kernels for {path.name} yet", help="find some first")
        return ready[0].run
    found = next((run for run in runs if run.name == name), None)
    if found is None:
        raise UsageError(f"there is no run {name!r} any more", help="find kernels again")
    return found


def _tell_edit(server: DrkServer, answer: Answer, shown: SourceView, done: str) -> None:
    if answer.applied:
        server.say(f"drk: {done}. One undo takes the edit back; save all files to keep it.")
        return
    why = f" ({answer.reason})" if answer.reason else ""
    server.say(
        f"drk: the editor did not make the edit of {shown.path.name}{why}; nothing was changed. Try again.",
        lsp.MessageType.Warning,
    )
