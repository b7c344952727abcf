"""Landlock by ctypes: which files, TCP ports, abstract sockets and signals a Runner can reach.

Three system calls, no library. The rules are an allow-list: read and execute below the system's, Python's and the
policy's read-only roots, everything below scratch, a few device nodes, a few files of ``/proc`` and ``/sys``. Rights
that the running ABI does not know are left out: ABI 3 adds truncate, 4 TCP, 5 device ioctl, 6 the scope of signals and
abstract sockets. ABI 1 cannot rename across directories, which Triton's cache does, so it counts as absent.

Not covered by Landlock: UDP and pathname Unix sockets (seccomp refuses ``socket``), ``stat`` of foreign paths (names,
sizes and times can be probed where directory permissions allow it), ``chmod``/``chown``/``utime`` of own files.
Source: ``Documentation/userspace-api/landlock.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from drk.gym.sandbox.policy import Policy
from drk.gym.sandbox.syscalls import number, syscall

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
MAKE_CHAR = 1 << 6
MAKE_BLOCK = 1 << 11
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
_ALL_ABI_1 = (1 << 13) - 1
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_NET_ALL = 0b11  # bind TCP, connect TCP
_SCOPE_ALL = 0b11  # abstract Unix sockets, signals
_CREATE, _ADD_RULE, _RESTRICT = 0, 1, 2

MINIMUM_ABI = 2
READ = READ_FILE | READ_DIR
READ_EXECUTE = READ | EXECUTE

ETC = (
    "alternatives", "gai.conf", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "ld.so.preload", "locale.alias", "localtime", "nsswitch.conf", "nvidia", "os-release", "passwd", "timezone",
)  # fmt: skip
PROC = (
    "cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version",
    "sys/kernel/cap_last_cap", "sys/kernel/ngroups_max", "sys/kernel/osrelease", "sys/kernel/pid_max",
    "sys/kernel/threads-max", "sys/vm/max_map_count", "sys/vm/mmap_min_addr", "sys/vm/overcommit_memory",
)  # fmt: skip
SYS = ("devices/system", "fs/cgroup", "kernel/mm/transparent_hugepage")
SYS_GPU = ("bus", "class", "dev", "devices", "module")
PROC_GPU = ("devices", "driver", "modules", "sys/kernel/numa_balancing", "sys/vm/nr_hugepages")
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICES_GPU = ("nvidia*", "nvidia-caps", "dxg")


def abi() -> int:
    """The Landlock ABI of this kernel, 0 where there is none."""
    try:
        return syscall(number("landlock") + _CREATE, None, 0, 1, what="landlock_create_ruleset")
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def handled_rights(version: int) -> int:
    """The file rights that an ABI can restrict."""
    rights = _ALL_ABI_1
    for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)):
        rights |= right if version >= since else 0
    return rights


def _rules(policy: Policy, roots: Iterable[str], *, private_shm: bool) -> Iterator[tuple[Path, int]]:
    yield from ((Path(root), READ_EXECUTE) for root in roots)
    yield from ((root, READ_EXECUTE) for root in policy.readable)
    yield from ((Path("/etc") / name, READ) for name in ETC)
    yield from ((Path("/proc") / name, READ) for name in PROC)
    yield from ((Path("/sys") / name, READ) for name in SYS)
    yield from ((Path("/dev") / name, READ_FILE | WRITE_FILE | TRUNCATE) for name in DEVICES)
    yield Path("/proc/self"), READ
    everything = ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV)
    yield policy.scratch, everything
    if private_shm:
        yield Path("/dev/shm"), everything & ~EXECUTE  # a mount of its own
    if policy.gpu:
        # cuInit names its threads through /proc/self/task/TID/comm and fails with error 304 where it cannot
        yield Path("/proc/self/task"), READ | WRITE_FILE | TRUNCATE
        yield from ((Path("/proc") / name, READ) for name in PROC_GPU)
        yield from ((Path("/sys") / name, READ) for name in SYS_GPU)
        for pattern in DEVICES_GPU:
            for node in Path("/dev").glob(pattern):
                yield node, READ | WRITE_FILE | TRUNCATE | IOCTL_DEV


def _add(ruleset: int, path: Path, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # what is not there, or not reachable even without a sandbox, needs no rule
    try:
        mask = rights if stat.S_ISDIR(os.fstat(fd).st_mode) else rights & _FILE_RIGHTS
        attribute = ctypes.create_string_buffer(struct.pack("=Qi", mask, fd), 12)
        syscall(number("landlock") + _ADD_RULE, ruleset, 1, attribute, 0, what=f"landlock_add_rule {path}")
    finally:
        os.close(fd)


def restrict(rules: Iterable[tuple[Path, int]], version: int) -> None:
    """Confine this thread and all that it starts to ``rules``. Needs no_new_privs. Raises ``OSError``."""
    handled = handled_rights(version)
    words = [handled]
    words += [_NET_ALL] if version >= 4 else []
    words += [_SCOPE_ALL] if version >= 6 else []
    attribute = ctypes.create_string_buffer(struct.pack(f"={len(words)}Q", *words), 8 * len(words))
    base = number("landlock")
    ruleset = syscall(base + _CREATE, attribute, 8 * len(words), 0, what="landlock_create_ruleset")
    try:
        for path, rights in rules:
            _add(ruleset, path, rights & handled)
        syscall(base + _RESTRICT, ruleset, 0, what="landlock_restrict_self")
    finally:
        os.close(ruleset)


def confine(policy: Policy, roots: Iterable[str], version: int, *, private_shm: bool = False) -> None:
    """Apply a policy's rules and the read-only ``roots`` with ABI ``version``.

    ``/proc/self`` is resolved now, so call it after the last fork. Raises ``OSError``.
    """
    restrict(_rules(policy, roots, private_shm=private_shm), version)
