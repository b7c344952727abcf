"""Finding out which layers this machine grants, by trying each one in a throw-away fork.

Nothing is inferred from version numbers or files where it can be tried; the one exception is
``kernel.pid_max`` (see :mod:`drk.gym.sandbox.namespaces`). Call it once, from a process with one thread, and hand the
result on as JSON. It costs about a dozen forks.

Limit: what is tried here may still fail later (another scratch, memory pressure); ``enter`` then raises.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from drk.gym.sandbox import landlock, namespaces, privileges, seccomp, syscalls
from drk.gym.sandbox.layers import Layer, Layers
from drk.gym.sandbox.policy import read_only_roots

_FAILED_OTHERWISE = 255
_CONTAINER = "run outside of the container, or with --security-opt seccomp=unconfined --cap-add SYS_ADMIN"
_KERNEL = "use Linux 6.12 or newer with landlock in the lsm= list"


def attempt(action: Callable[[], object]) -> str:
    """Run ``action`` in a throw-away fork; an empty string when it worked, else the reason."""
    child = os.fork()
    if child == 0:
        code = _FAILED_OTHERWISE
        try:
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # as in enter(): else /proc/self/uid_map belongs to root
            action()
            code = 0
        except OSError as error:
            code = error.errno or _FAILED_OTHERWISE
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    return "failed" if code == _FAILED_OTHERWISE else errno.errorcode.get(code, str(code)) + ": " + os.strerror(code)


def _layer(reason: str, detail: str, exposes: str, remedy: str) -> Layer:
    return Layer(True, detail) if not reason else Layer(False, reason, exposes, remedy)


def _try_limits() -> None:
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try_landlock(version: int) -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict([(Path("/usr"), landlock.READ_EXECUTE)], version)
    try:
        next(Path("/").iterdir())
    except PermissionError:
        return
    raise OSError(errno.EINVAL, "landlock does not restrict")


def _try_seccomp() -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install()
    try:
        syscalls.unshare(syscalls.CLONE_NEWUTS)
    except PermissionError:
        return
    raise OSError(errno.EINVAL, "seccomp does not restrict")


def _try_pid_namespace(user: bool) -> None:
    """Exit 0 from the Runner inside means that forks, mounts and the mirror of the status work."""
    namespaces.enter_flags(namespaces.flags_for(pid=True, net=False, ipc=False, user=user))
    namespaces.fork_inside()
    namespaces.own_mounts()


def _try_namespace(flag: str, user: bool) -> None:
    namespaces.enter_flags(namespaces.flags_for(pid=False, net=flag == "net", ipc=flag == "ipc", user=user))


def _probe_landlock() -> tuple[Layer, int]:
    version = landlock.abi()
    exposes = "every file of the user can be read and written, TCP connections can be opened, processes signalled"
    if version < landlock.MINIMUM_ABI:
        detail = f"Landlock ABI {version}" if version else "no Landlock"
        return Layer(False, detail, exposes, _KERNEL), 0
    reason = attempt(lambda: _try_landlock(version))
    if reason:
        return Layer(False, reason, exposes, _KERNEL), 0
    gaps = ""
    if version < 6:
        gaps = "signals to processes of the same user and abstract sockets are open unless another layer closes them"
    return Layer(True, f"Landlock ABI {version}", gaps, _KERNEL if gaps else ""), version


def _probe_namespaces(user: bool) -> dict[str, Layer]:
    apart = "with a user namespace" if user else "with CAP_SYS_ADMIN"
    exposed = {
        "pidns": "descendants are found by walking /proc; processes of the same user can be seen",
        "netns": "only seccomp keeps the Runner off the network",
        "ipcns": "only seccomp keeps the Runner off System V IPC",
    }
    reasons = {
        "pidns": attempt(lambda: _try_pid_namespace(user)),
        "netns": attempt(lambda: _try_namespace("net", user)),
        "ipcns": attempt(lambda: _try_namespace("ipc", user)),
    }
    return {name: _layer(reason, apart, exposed[name], _CONTAINER) for name, reason in reasons.items()}


def _probe_uid() -> tuple[Layer, int | None]:
    exposes = "the Runner keeps this user's id; Landlock, pid namespace and capabilities have to hold alone"
    if not syscalls.has_capability(syscalls.CAP_SETUID):
        return Layer(False, "needs CAP_SETUID", exposes, "run the gym as root, for example in a container"), None
    needed = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable), Path(__file__)]
    needed += [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    closed = privileges.closed_to_others(needed)
    if closed is not None:
        remedy = "install Python where every user can read it, for example below /opt or /usr"
        return Layer(False, f"{closed} is not readable by another uid", exposes, remedy), None
    uid = privileges.FIRST_UID if privileges.mapped(privileges.FIRST_UID) else privileges.NOBODY_UID
    reason = attempt(lambda: privileges.drop_uid(uid, []))
    detail = f"uid {uid} + process id" if uid == privileges.FIRST_UID else "shared uid of nobody"
    return _layer(reason, detail, exposes, "map more uids into this user namespace"), None if reason else uid


def _probe_process_limit(pidns: Layer, uid: int | None, user: bool) -> Layer:
    """What bounds a fork storm: pid_max of the namespace, or RLIMIT_NPROC where the uid counts this Runner only."""
    unique = uid == privileges.FIRST_UID
    if pidns.ok and namespaces.pid_max_is_per_namespace():
        return Layer(True, "kernel.pid_max of the pid namespace")
    if unique or (pidns.ok and user):
        return Layer(True, "RLIMIT_NPROC, counted for this Runner alone")
    exposes = "a fork storm is only seen and killed by the Judge's watch"
    return Layer(False, "RLIMIT_NPROC would count all processes of the user", exposes, "allow user namespaces")


def probe(gpu: bool = False) -> Layers:
    """Try every layer once. ``gpu`` also checks that the device nodes stay usable after a change of uid."""
    privileged = syscalls.has_capability(syscalls.CAP_SYS_ADMIN)
    user = not privileged
    spaces = _probe_namespaces(user)
    landlock_layer, version = _probe_landlock()
    uid_layer, uid = _probe_uid()
    if gpu and uid is not None and any(node.stat().st_mode & 0o066 == 0 for node in Path("/dev").glob("nvidia[0-9]*")):
        reason = "GPU device nodes are closed to group and others"
        uid_layer, uid = Layer(False, reason, "the Runner keeps uid 0", "chmod 0666 /dev/nvidia*"), None
    watch = "" if Path("/proc/self/smaps_rollup").exists() else "no /proc/self/smaps_rollup"
    no_privs = attempt(lambda: syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1))
    death = attempt(lambda: syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL))
    return Layers(
        rlimits=_layer(attempt(_try_limits), "core, file size, descriptors, data, CPU", "floods are not bounded", ""),
        no_new_privs=_layer(no_privs, "prctl", "set-uid programs give privileges back", ""),
        pdeathsig=_layer(death, "SIGKILL", "Runners outlive the gym", ""),
        landlock=landlock_layer,
        seccomp=_layer(
            attempt(_try_seccomp),
            f"filter of {len(seccomp.program(syscalls.machine()))} instructions",
            "UDP, Unix sockets, ptrace, io_uring and more stay open",
            "use a kernel with CONFIG_SECCOMP_FILTER on x86-64 or aarch64",
        ),
        uid_drop=uid_layer,
        capability_drop=_layer(attempt(syscalls.drop_capabilities), "all sets", "root keeps its privileges", ""),
        process_limit=_probe_process_limit(spaces["pidns"], uid, user),
        memory_watch=_layer(watch, "proportional set size of the tree", "memory of a tree is not bounded", ""),
        landlock_abi=version,
        user_namespace=user and any(layer.ok for layer in spaces.values()),
        runner_uid=uid,
        roots=read_only_roots(os.environ),
        **spaces,
    )
