"""Entering the sandbox: what a freshly forked Runner does before any user code, and what trusted processes do.

:func:`enter` is irrevocable and strict: a layer that the probe called good and that fails now raises, it is never left
out silently. Order: descriptors and environment, namespaces (which fork), limits, ownership of scratch, uid and
capabilities, no_new_privs, PDEATHSIG, Landlock, seccomp. Landlock comes after the last fork because a rule on
``/proc/self`` names one process; seccomp comes last because it refuses what the others need.

Left out: the limits that the kernel has no rule for (memory of a tree, size of scratch), which the Judge watches with
:mod:`drk.gym.sandbox.watch`. What Python's heap inherited from the zygote stays readable: start the zygote with
:func:`drk.gym.sandbox.scrub`. With a GPU, CUDA works in the Runner itself but not in programs that it starts: their
``/proc/self`` is another process, which Landlock keeps closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from drk.gym.errors import SandboxUnavailable
from drk.gym.sandbox import landlock, namespaces, privileges, seccomp, syscalls
from drk.gym.sandbox.layers import Layers, require
from drk.gym.sandbox.policy import Policy, environment, places

# 1, not 0: the kernel pipes a dump to a core_pattern program whatever the limit, except for exactly 1
_CORE_BYTES = 1


def protect_process() -> None:
    """Make this process unreadable to others of its uid (``/proc`` memory, environment, descriptors; ptrace; core).

    For the CLI, the Judge and the zygote. Without privileges the process also loses access to its own
    ``/proc/self/{fd,environ,maps}``. :func:`enter` undoes it in the Runner, whose ``/proc/self`` CUDA needs.
    """
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the process to which orphaned descendants fall (PR_SET_CHILD_SUBREAPER). For the zygote."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)


def close_descriptors(keep: tuple[int, ...]) -> None:
    """Close everything but ``keep``; 0, 1 and 2 become ``/dev/null`` where they are not kept. Raises ``OSError``."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        if fd not in keep:
            os.dup2(null, fd)
    start = 3
    for fd in sorted(fd for fd in set(keep) if fd >= 3):
        syscalls.close_range(start, fd - 1)
        start = fd + 1
    syscalls.close_range(start, 2**31 - 1)


def _wipe_initial_environment(kept: Mapping[str, str]) -> None:
    """Zero what is not in ``kept`` of the block that the kernel shows as ``/proc/self/environ``.

    Kept entries stay in place, since libraries may hold pointers that ``getenv`` gave them.
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # fields 50 and 51 of proc(5): env_start, env_end
    allowed = {os.fsencode(f"{name}={value}") for name, value in kept.items()}
    offset = start
    for entry in ctypes.string_at(start, max(0, end - start)).split(b"\0"):
        if entry not in allowed:
            ctypes.memset(offset, 0, len(entry))
        offset += len(entry) + 1


def _replace_environment(policy: Policy, layers: Layers) -> None:
    wanted = environment(policy, os.environ, layers.roots)
    os.environ.clear()
    syscalls.clear_environ()
    _wipe_initial_environment(wanted)
    os.environ.update(wanted)
    tempfile.tempdir = None


def _make_places(policy: Policy) -> None:
    for path in places(policy).values():
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    policy.scratch.chmod(0o700)
    os.chdir(policy.scratch)
    os.umask(0o077)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (limit, limit))


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def apply_limits(policy: Policy) -> None:
    """Set the rlimits, soft and hard alike. RLIMIT_AS is never used: CUDA reserves huge virtual ranges."""
    _lower(resource.RLIMIT_CORE, _CORE_BYTES)
    _lower(resource.RLIMIT_FSIZE, policy.file_bytes)
    _lower(resource.RLIMIT_NOFILE, policy.open_files)
    _lower(resource.RLIMIT_MSGQUEUE, 0)
    if policy.cpu_seconds is not None:
        _lower(resource.RLIMIT_CPU, policy.cpu_seconds)
    if not policy.gpu:
        _lower(resource.RLIMIT_DATA, policy.memory_bytes + _data_bytes())


def _wants_uid(policy: Policy, layers: Layers) -> int | None:
    """The uid to drop to, or ``None`` where there is none that could read what the policy opens."""
    if not layers.uid_drop.ok or layers.user_namespace or not syscalls.has_capability(syscalls.CAP_SETUID):
        return None  # in a user namespace there is only the own uid
    if privileges.unreachable_scratch(policy.scratch) or privileges.closed_to_others(policy.readable):
        return None
    return privileges.runner_uid()


def _become_session_leader() -> None:
    if os.getsid(0) != os.getpid():
        os.setsid()


def _bind_to_parent() -> None:
    parent = os.getppid()
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died between the two calls


def _isolate(policy: Policy, layers: Layers) -> bool:
    """Enter what namespaces there are; True when there is a pid namespace (and so own mounts)."""
    pid, user = layers.pidns.ok, layers.user_namespace
    flags = namespaces.flags_for(pid=pid, net=layers.netns.ok, ipc=layers.ipcns.ok, user=user)
    if not flags:
        return False
    _step("namespaces", lambda: namespaces.enter_flags(flags))
    if pid:
        _step("pid namespace", namespaces.fork_inside)
        _step("mounts", namespaces.own_mounts)
        if namespaces.pid_max_is_per_namespace():
            _step("process limit", lambda: namespaces.limit_pids(policy.processes))
    return pid


def _give_up_privileges(policy: Policy, layers: Layers, uid: int | None) -> None:
    """Limits that count per uid, then the uid, then every capability."""
    if uid is not None:
        privileges.give(policy.scratch, uid, uid)
    if layers.process_limit.ok:
        _lower(resource.RLIMIT_NPROC, policy.processes)
    with contextlib.suppress(PermissionError):  # without CAP_SETPCAP there is nothing that execve could give back
        syscalls.drop_bounding_set()
    if uid is not None:
        privileges.drop_uid(uid, privileges.device_groups() if policy.gpu else [])
    syscalls.drop_capabilities()


def _check_alone(policy: Policy) -> None:
    if sum(1 for _ in Path("/proc/self/task").iterdir()) != 1:
        raise SandboxUnavailable("the sandbox can only be entered by a process with one thread")
    if not policy.scratch.is_absolute() or not policy.scratch.is_dir():
        raise SandboxUnavailable(f"scratch is not an absolute path of a directory: {policy.scratch}")


def _step(name: str, action: Callable[[], object]) -> None:
    try:
        action()
    except OSError as error:
        raise SandboxUnavailable(
            f"sandbox layer {name} failed in a Runner: {error}", help="run `drk doctor` to see what this machine grants"
        ) from error


def enter(policy: Policy, layers: Layers) -> None:
    """Confine this freshly forked, single-threaded process for good; with a pid namespace it returns in a descendant.

    The caller's own process then stays as supervisor and ends as the Runner ends, so ``waitpid`` and a pidfd of it work
    as before. ``policy.scratch`` must exist. Raises :class:`SandboxUnavailable` when the level cannot be had, or when
    a layer that the probe found fails; the process must then exit.
    """
    require(policy.level, layers)
    _check_alone(policy)
    confined = policy.level != "basic"
    _step("session", _become_session_leader)
    _step("pdeathsig", _bind_to_parent)
    _step("descriptors", lambda: close_descriptors(policy.keep_fds))
    _step("dumpable", lambda: syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1))
    _step("environment", lambda: _replace_environment(policy, layers))
    _step("scratch", lambda: _make_places(policy))
    own_mounts = False
    if confined:
        uid = _wants_uid(policy, layers)
        own_mounts = _isolate(policy, layers)
        _step("limits", lambda: apply_limits(policy))
        _step("privileges", lambda: _give_up_privileges(policy, layers, uid))
    else:
        _step("limits", lambda: apply_limits(policy))
    _seal(policy, layers, own_mounts=own_mounts)


def _seal(policy: Policy, layers: Layers, *, own_mounts: bool) -> None:
    """The last layers, in the process that will run user code."""
    _step("session", _become_session_leader)
    _step("subreaper", lambda: syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1))
    _step("dumpable", lambda: syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1))  # a change of uid clears it
    _step("no_new_privs", lambda: syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1))
    if own_mounts:
        _step("pdeathsig", lambda: syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL))
    else:
        _step("pdeathsig", _bind_to_parent)
    if policy.level == "basic":
        return
    if layers.landlock.ok:
        _step("landlock", lambda: landlock.confine(policy, layers.roots, layers.landlock_abi, private_shm=own_mounts))
    if layers.seccomp.ok:
        _step("seccomp", lambda: seccomp.install(gpu=policy.gpu))
