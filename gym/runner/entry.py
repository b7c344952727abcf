"""A forked child becomes a sandboxed Runner here and answers the Judge until told to stop.

Order matters: descriptors first, then the sandbox, then commands; user code is imported only by a ``load`` command,
inside. What user code prints goes to the Judge's log pipe. An exception becomes a short failure with the user's own
line; a signal, an early exit or a hang is for the Judge to classify from outside.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drk.gym.draft import UNJUDGED_KINDS
from drk.gym.errors import GymError, ProtocolError
from drk.gym.protocol import Channel
from drk.gym.runner import interpreter, profile, remap, stub_driver, timing
from drk.gym.runner.files import write_files
from drk.gym.runner.loading import LoadFailure
from drk.gym.runner.session import Session
from drk.gym.runner.state_conversion import read_pickled_state
from drk.gym.sandbox import Layers, Policy, enter
from drk.gym.triton_adapter import describe_error

MAX_MESSAGE = 4000


def run(
    mode: str,
    request: dict[str, Any],
    layers: Layers,
    cache_files: dict[str, bytes],
    *,
    sock_fd: int,
    arena_fd: int,
    log_fd: int,
) -> int:
    """Turn this process into a Runner; return its exit code when the Judge says ``exit``.

    ``cache_files`` are what its Triton cache, which is its own, begins with.
    """
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    policy = Policy(**_policy(request["policy"], (sock_fd, arena_fd)))
    channel = Channel(socket.socket(fileno=sock_fd))
    try:
        enter(policy, layers)
        os.chdir(policy.scratch)
        write_files(Path(os.environ["TRITON_CACHE_DIR"]), cache_files)
        session = Session(mode, request["role"], policy.scratch, arena_fd)
        prepare_mode(mode, session, request)
    except (GymError, OSError, RuntimeError) as error:
        channel.send({"ok": False, "error": {"kind": "start", "message": f"{type(error).__name__}: {error}"}})
        return 1
    channel.send({"ok": True, "pid": os.getpid()})
    serve(channel, session)
    return 0


def _policy(data: dict[str, Any], keep: tuple[int, ...]) -> dict[str, Any]:
    fields = dict(data)
    fields["scratch"] = Path(fields["scratch"])
    fields["readable"] = tuple(Path(path) for path in fields.get("readable", ()))
    fields["keep_fds"] = (1, 2, *keep)
    return fields


def prepare_mode(mode: str, session: Session, request: dict[str, Any]) -> None:
    """Set up the interpreter or the stub driver, or name the GPU."""
    torch.set_num_threads(max(int(request.get("threads", 1)), 1))
    if mode == "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = request["gpu"]
        return
    remapped = session.stack.enter_context(remap.device_remap(request["target"]))
    if session.role == "candidate":
        session.remap = remapped
    if mode == "interpret":
        log = interpreter.install(request["target"], program_budget=int(request["programs"]), emulate_tf32=True)
        session.extra["interpreter"] = log
        session.before_run = log.start_trial
    else:
        session.extra["compile_log"] = stub_driver.install(request["target"])


def handlers(session: Session) -> dict[str, Callable[[dict[str, Any], list[int]], dict[str, Any]]]:
    """Return the commands that this Runner answers."""
    timer = timing.Timer(session)
    return {
        "load": session.load,
        "state_out": session.state_out,
        "state_in": session.state_in,
        "run": session.run,
        "held": session.held_outputs,
        "seen": session.seen,
        "write": session.write,
        "plan_reduction": session.plan_reduction,
        "set_reduction": session.set_reduction,
        "import_compiler": timer.import_compiler,
        "compile": timer.compile,
        "warm": timer.warm,
        "prepare": timer.prepare,
        "go": timer.go,
        "outputs": timer.outputs,
        "rest": timer.rest,
        "capture": session.capture,
        "parts": session.parts,
        "read_state": lambda message, _fds: session.offer(read_pickled_state(session.scratch / message["name"])),
        "profile": lambda message, _fds: profile.profile(session, message),
        "kernels": lambda _message, _fds: {"kernels": kernel_rows(session)},
    }


def kernel_rows(session: Session) -> list[dict[str, Any]]:
    """Return what interpreter or stub driver saw of kernels so far."""
    source = session.extra.get("interpreter") or session.extra.get("compile_log")
    owned = frozenset({str(session.scratch / "candidate.py")})
    return source.rows(owned) if source is not None else []


def serve(channel: Channel, session: Session) -> None:
    """Answer commands until ``exit`` or until the Judge has gone."""
    table = handlers(session)
    while True:
        try:
            message, fds = channel.receive()
        except EOFError:
            return
        if message["command"] == "exit":
            channel.send({"ok": True})
            return
        answer = answer_command(table, session, message, fds)
        for fd in fds:
            os.close(fd)
        try:
            channel.send(answer)
        except ProtocolError:
            told = "its outputs or its state have more parts than can be told"
            channel.send({"ok": False, "error": {"kind": "too-many", "message": told, "file": "", "line": None}})


def answer_command(
    table: dict[str, Callable[[dict[str, Any], list[int]], dict[str, Any]]],
    session: Session,
    message: dict[str, Any],
    fds: list[int],
) -> dict[str, Any]:
    """Run one command; whatever user code raises becomes a failure."""
    try:
        answer = {"ok": True, **table[message["command"]](message, fds)}
        log = session.extra.get("interpreter")
        if log is not None and log.exceeded is not None:
            raise log.exceeded  # user code may have caught it
        return answer
    except LoadFailure as failure:
        return {
            "ok": False,
            "error": {
                "kind": failure.kind if failure.kind not in UNJUDGED_KINDS else "raised",
                "message": failure.message[:MAX_MESSAGE],
                "file": failure.file,
                "line": failure.line,
                "help": failure.help,
            },
        }
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
        return {"ok": False, "error": described(error, session.scratch)}


def described(error: BaseException, scratch: Path) -> dict[str, Any]:
    """Return :func:`describe_exception`, or the class alone where the exception's own code fails while it is asked."""
    try:
        return describe_exception(error, scratch)
    except BaseException:  # noqa: BLE001 - its text, cause or attributes are the author's code
        message = f"{type(error).__name__}, which cannot be described"
        return {"kind": "exception", "message": message[:MAX_MESSAGE], "file": "", "line": None}


def describe_exception(error: BaseException, scratch: Path) -> dict[str, Any]:
    """Describe an exception from user code: stable kind, message, and the innermost line below the scratch folder."""
    candidate = str(scratch / "candidate.py")
    facts = describe_error(error, frozenset({candidate}))
    file, line = ("candidate.py", facts.line) if facts.line is not None else user_line(error, scratch)
    kind = classify(error, facts.kind)
    message = facts.message if kind in ("compile-error", "out-of-resources") else f"{type(error).__name__}: {error}"
    return {"kind": kind, "message": message[:MAX_MESSAGE], "file": file, "line": line}


def user_line(error: BaseException, scratch: Path) -> tuple[str, int | None]:
    """Return the innermost frame below the scratch folder as a relative path and a line."""
    found: tuple[str, int | None] = ("", None)
    # Not extract_tb: it reads the sources of all frames, which would be noted as the candidate's own attempt.
    for frame, line in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        if filename.startswith(str(scratch)):
            found = (str(Path(filename).relative_to(scratch)), line)
    return found


_TRITON_KINDS = {
    "compile": "compile-error",
    "ptxas": "compile-error",
    "out_of_resources": "out-of-resources",
    "unsupported": "interpreter-unsupported",
    "program_budget": "program-budget",
}
_KINDS: dict[type[BaseException], str] = {
    torch.OutOfMemoryError: "out-of-memory",
    MemoryError: "out-of-memory",
    SystemExit: "exit",
    KeyboardInterrupt: "exit",
    RecursionError: "recursion",
}


def classify(error: BaseException, triton_kind: str) -> str:
    """Return the stable kind of an exception."""
    if triton_kind in _TRITON_KINDS:
        return _TRITON_KINDS[triton_kind]
    for kind, word in _KINDS.items():
        if isinstance(error, kind):
            return word
    text = str(error)
    if "can't allocate memory" in text:  # the CPU allocator raises a plain RuntimeError
        return "out-of-memory"
    return "cuda-error" if "CUDA error" in text else "exception"
