"""Runs attacks inside sandboxes, as its own process, and prints their outcomes as JSON (see test_escape.py).

Usage: ``cage.py SPEC`` with ``{identity, level, without, attacks, policy}``. ``identity`` is ``as-is``, ``open-root``
(root for whom Python lies where every uid can read it, so that the uid drop works) or ``user`` (nobody).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import attacks

from drk.gym import sandbox
from drk.gym.sandbox import syscalls

SECRET = "s3cret-" + "value"
MS_BIND = 4096


def open_python():
    """In a mount namespace of our own, make Python's prefixes reachable for every uid."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    for prefix in {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()}:
        closed = [p for p in (prefix, *prefix.parents) if not p.stat().st_mode & 0o001]
        if closed:
            held = tempfile.mkdtemp(dir="/tmp")
            syscalls.mount(str(prefix), held, None, MS_BIND)
            syscalls.mount("tmpfs", str(closed[-1]), "tmpfs", 0, "mode=755")
            prefix.mkdir(parents=True)
            syscalls.mount(held, str(prefix), None, MS_BIND)
            ctypes.CDLL(None).umount2(held.encode(), 2)
            Path(held).rmdir()


def become(identity):
    if identity != "as-is" and os.geteuid() == 0:
        open_python()
    if identity == "user" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)


def targets(root):
    """What is to be protected: files, sockets, processes. Everything is open to every uid."""
    outside = root / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    for name in ("secret.txt", "movable"):
        (outside / name).write_text(SECRET)
        (outside / name).chmod(0o666)
    token = f"drk-test-{os.getpid()}"
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    named, packets, abstract = (
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX),
    )
    named.bind(str(outside / "unix.sock"))
    packets.bind(str(outside / "datagram.sock"))
    abstract.bind("\0" + token)
    named.listen(64)
    abstract.listen(64)
    for name in ("unix.sock", "datagram.sock"):
        (outside / name).chmod(0o777)
    leaked = os.open(outside / "secret.txt", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    sibling = subprocess.Popen(["sleep", "600"], env={**os.environ, "DRK_TEST_TOKEN": SECRET})
    context = {
        "outside": str(outside),
        "secret": SECRET,
        "token": token,
        "tcp": tcp.getsockname()[1],
        "udp": udp.getsockname()[1],
        "leaked_fd": leaked,
        "sibling": sibling.pid,
        "parent": os.getpid(),
    }
    return context, sibling, (tcp, udp, named, packets, abstract)


def outcome_inside(name, policy, layers, context, writer):
    started = time.perf_counter()
    try:
        sandbox.enter(policy, layers)
    except sandbox_error() as error:
        os.write(writer, json.dumps({"refused": str(error)}).encode())
        return
    entered = (time.perf_counter() - started) * 1e3
    try:
        value = getattr(attacks, name)(context)
        result = {"escaped": True, "value": value}
    except OSError as error:
        result = {"escaped": False, "error": type(error).__name__, "errno": error.errno, "text": str(error)}
    except Exception:  # noqa: BLE001 - reported to the test
        result = {"broken": traceback.format_exc()}
    os.write(writer, json.dumps({**result, "enter_ms": entered}).encode())


def sandbox_error():
    from drk.gym.errors import SandboxUnavailable

    return SandboxUnavailable


def run_one(name, spec, layers, context, root):
    scratch = Path(tempfile.mkdtemp(dir=root, prefix="scratch-"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            policy = sandbox.Policy(scratch=scratch, level=spec["level"], keep_fds=(writer,), **spec.get("policy", {}))
            outcome_inside(name, policy, layers, {**context, "basic": spec["level"] == "basic"}, writer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as handle:
        text = handle.read()
    status = os.waitpid(child, 0)[1]
    ended = {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.waitstatus_to_exitcode(status)}
    return {**(json.loads(text) if text else {}), **ended}


def main(spec):
    become(spec["identity"])
    os.environ["DRK_TEST_TOKEN"] = SECRET
    LIBC = ctypes.CDLL(None)
    LIBC.setenv(b"DRK_TEST_TOKEN", SECRET.encode(), 1)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        root = Path(folder)
        root.chmod(0o755)
        layers = sandbox.probe(gpu=spec.get("policy", {}).get("gpu", False))
        context, sibling, sockets = targets(root)
        used = layers.without(*spec["without"])
        outcomes = {name: run_one(name, spec, used, context, root) for name in spec["attacks"]}
        leftover = Path("/dev/shm", context["token"])
        outside = {"shm_leaked": leftover.exists(), "files": sorted(os.listdir(context["outside"]))}
        outside["secret_intact"] = all(
            (Path(context["outside"]) / name).read_text() == SECRET
            for name in ("secret.txt", "movable")
            if (Path(context["outside"]) / name).exists()
        )
        leftover.unlink(missing_ok=True)
        sibling.send_signal(signal.SIGKILL)
        sibling.wait()
        for entry in sockets:
            entry.close()
        subprocess.run(["chmod", "-R", "u+rwX", folder], check=False)
    print(json.dumps({"layers": layers.as_dict(), "outcomes": outcomes, "outside": outside, "uid": os.getuid()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
