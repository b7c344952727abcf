"""Network, IPC, mount and process-id namespaces for one Runner.

:func:`isolate` forks twice and returns only in the Runner. The caller's process becomes a *supervisor* outside of the
new pid namespace: it waits for the Runner, ends exactly as the Runner did (status or signal), and takes the whole
namespace with it when it dies; the Runner dies with the supervisor by PDEATHSIG. A tiny *init* is pid 1 inside, so that
the Runner is an ordinary process (pid 1 ignores its own SIGABRT) and orphans are reaped. The Runner gets its own
``/proc`` (without it ``/proc/<getpid()>`` would name a stranger) and an empty 64 MiB ``/dev/shm``.

Root uses its own privilege; others need a user namespace, in which they keep their uid. Where a container hides parts
of ``/proc`` the kernel refuses a fresh one, and the pid namespace is then left out. Fork storms: ``kernel.pid_max`` of
the namespace (per namespace since Linux 6.14) is a hard limit; else RLIMIT_NPROC, which counts per user namespace.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import NoReturn

from drk.gym.sandbox import syscalls

SHM_BYTES = 64 << 20
# idr allocation wraps to 300, the kernel's RESERVED_PIDS, so that many ids never come back
_RESERVED_PIDS = 300
_PID_MAX_PER_NAMESPACE = (6, 14)


def flags_for(*, pid: bool, net: bool, ipc: bool, user: bool) -> int:
    """The ``unshare`` flags; a pid namespace brings its own mounts (for ``/proc``)."""
    flags = syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNS if pid else 0
    flags |= syscalls.CLONE_NEWNET if net else 0
    flags |= syscalls.CLONE_NEWIPC if ipc else 0
    return flags | syscalls.CLONE_NEWUSER if user and flags else flags


def enter_flags(flags: int) -> None:
    """Unshare, map the own uid and gid in a new user namespace, make mounts private. Raises ``OSError``."""
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(flags)
    if flags & syscalls.CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="utf-8")
    if flags & syscalls.CLONE_NEWNS:
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


def own_mounts() -> None:
    """A ``/proc`` of this pid namespace and a ``/dev/shm`` of its own. Raises ``OSError``."""
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("proc", "/proc", "proc", flags)
    syscalls.mount("tmpfs", "/dev/shm", "tmpfs", flags, f"size={SHM_BYTES},mode=1777")


def pid_max_is_per_namespace() -> bool:
    """Whether ``kernel.pid_max`` belongs to the pid namespace; on older kernels it is the whole machine's."""
    words = os.uname().release.split("-", 1)[0].split(".")
    try:
        return (int(words[0]), int(words[1])) >= _PID_MAX_PER_NAMESPACE
    except (ValueError, IndexError):
        return False


def limit_pids(processes: int) -> None:
    """Bound the namespace's processes and threads, by the kernel's rule to 301 or more. Raises ``OSError``."""
    if not pid_max_is_per_namespace():
        raise OSError("kernel.pid_max is not per namespace before Linux 6.14")
    Path("/proc/sys/kernel/pid_max").write_text(str(_RESERVED_PIDS + max(processes, 1)), encoding="utf-8")


def _reset_signals() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)


def _run_init(keeper: int) -> NoReturn:
    """Pid 1: reaps orphans (by ignoring SIGCHLD) and does nothing else until it is killed."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _reset_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _leave_if_gone(keeper)
    syscalls.close_range(0, 2**31 - 1)
    while True:
        signal.pause()


def _leave_if_gone(keeper: int) -> None:
    """Exit when the supervisor died before PDEATHSIG was set: its end of the pipe is then closed."""
    watch = select.poll()
    watch.register(keeper, select.POLLIN)
    if watch.poll(0):
        os._exit(1)


def _mirror(status: int) -> NoReturn:
    """End this process the way ``status`` (of ``waitpid``) says."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF if os.WIFEXITED(status) else 1)


def _supervise(runner: int, init: int, keeper: int) -> NoReturn:
    """Wait for the Runner, end its namespace, end alike. Holds no descriptor but its end of the pipe."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _reset_signals()
    syscalls.close_range(0, keeper - 1)
    syscalls.close_range(keeper + 1, 2**31 - 1)
    _, status = os.waitpid(runner, 0)
    os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)
    _mirror(status)


def fork_inside() -> None:
    """After ``unshare(CLONE_NEWPID)``: fork init and the Runner; returns in the Runner only. Raises ``OSError``."""
    reader, keeper = os.pipe()
    init = os.fork()
    if init == 0:
        try:
            os.close(keeper)
            _run_init(reader)
        finally:
            os._exit(1)  # whatever fails here, this process must never go on as a Runner
    runner = os.fork()
    if runner != 0:
        try:
            _supervise(runner, init, keeper)
        finally:
            os._exit(1)
    os.close(keeper)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    _leave_if_gone(reader)
    os.close(reader)
