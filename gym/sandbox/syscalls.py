"""Thin ctypes access to the Linux system calls that the sandbox needs and Python does not offer.

Each function raises :class:`OSError` with the kernel's errno. Numbers are given for x86-64 and aarch64; on any other
machine :func:`number` raises ``OSError(ENOSYS)``, which the probe reports as a missing layer. Sources: the kernel's
``include/uapi`` headers (``prctl.h``, ``sched.h``, ``mount.h``, ``capability.h``) and its syscall tables.

Left out: anything that Python's ``os`` and ``resource`` modules already do. Nothing here allocates threads or keeps
state, so that every function may be called in a freshly forked child.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_MM = 35
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REC = 16384
MS_PRIVATE = 1 << 18

CAP_SETUID = 7
CAP_SYS_ADMIN = 21
_CAPABILITY_VERSION_3 = 0x20080522

_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {"close_range": 436, "seccomp": 317, "capset": 126, "landlock": 444},
    "aarch64": {"close_range": 436, "seccomp": 277, "capset": 91, "landlock": 444},
}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


def machine() -> str:
    """The machine's name as the syscall tables spell it (``x86_64``, ``aarch64``, ...)."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())


def number(name: str) -> int:
    """The system call's number here. Raises ``OSError(ENOSYS)`` where it is not known."""
    table = _NUMBERS.get(machine(), {})
    if name not in table:
        raise OSError(errno.ENOSYS, f"{name} is not known on {machine()}")
    return table[name]


def _check(result: int, what: str) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def syscall(nr: int, *args: int | ctypes.Array[ctypes.c_char] | ctypes.c_void_p | None, what: str = "syscall") -> int:
    """Call by number; every integer is passed as a 64-bit word. Raises ``OSError``."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in args]
    ctypes.set_errno(0)
    return _check(int(_LIBC.syscall(ctypes.c_long(nr), *words)), what)


def prctl(option: int, first: int = 0, second: int = 0, third: int = 0, fourth: int = 0) -> int:
    """``prctl(2)``. Raises ``OSError``."""
    words = [ctypes.c_ulong(word) for word in (first, second, third, fourth)]
    ctypes.set_errno(0)
    return _check(int(_LIBC.prctl(ctypes.c_int(option), *words)), f"prctl({option})")


def unshare(flags: int) -> None:
    """``unshare(2)``. Raises ``OSError``."""
    ctypes.set_errno(0)
    _check(int(_LIBC.unshare(ctypes.c_int(flags))), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """``mount(2)``. Raises ``OSError``."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    ctypes.set_errno(0)
    result = _LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(int(result), f"mount {target}")


def clear_environ() -> None:
    """Empty libc's environment, so that nothing in it points at the block that the kernel shows in ``/proc``."""
    _LIBC.clearenv()


def close_range(first: int, last: int) -> None:
    """Close the descriptors ``first..last`` (inclusive)."""
    if first > last:
        return
    try:
        syscall(number("close_range"), first, last, 0, what="close_range")
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        os.closerange(first, min(last, os.sysconf("SC_OPEN_MAX")) + 1)  # kernels before 5.9, old container runtimes


def last_capability() -> int:
    """The highest capability that this kernel knows."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="utf-8") as handle:  # noqa: PTH123 - hot path after a fork
        return int(handle.read())


def effective_capabilities() -> int:
    """This thread's effective capability mask."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as handle:  # noqa: PTH123
        for line in handle:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def has_capability(capability: int) -> bool:
    """Whether the effective set holds ``capability``."""
    return bool(effective_capabilities() >> capability & 1)


def drop_bounding_set() -> None:
    """Empty the capability bounding set, so that no ``execve`` as uid 0 gives anything back. Needs CAP_SETPCAP."""
    for capability in range(last_capability() + 1):
        prctl(PR_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    """Empty the ambient, effective, permitted and inheritable sets. Always allowed."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    syscall(
        number("capset"),
        ctypes.cast(header, ctypes.c_void_p),
        ctypes.cast(data, ctypes.c_void_p),
        what="capset",
    )
