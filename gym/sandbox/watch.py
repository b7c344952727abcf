"""Watching and ending a Runner's process tree from outside: memory, scratch size, process count, kill.

All by ``/proc``, for the cases in which no cgroup is delegated. :class:`MemoryWatch` first adds cheap figures
(anonymous pages, swap, distinct shared-memory files that the tree holds open); only when they exceed the limit it reads
the exact proportional set size, since forks share pages. :func:`terminate` stops every descendant first, so that
nothing can fork away, then kills; with a pid namespace the kernel does it.

Limits: GPU memory is not seen here, nor the 64 MiB of a private ``/dev/shm``. Files that were unlinked, mapped and
closed are not counted on disk. A process tree that
lost its root falls to the nearest subreaper (see ``adopt_orphans``), whose :func:`strays` ends it.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_STOP_ROUNDS = 50
_ENTRY_BYTES = 1024  # an inode and its directory entry: a flood of empty files has a size, too


@dataclass(frozen=True)
class Process:
    """One process as ``/proc/PID/stat`` tells it; ``started`` (clock ticks since boot) makes the id unambiguous.

    ``cpu_ticks`` is the processor time that it has used, all its threads together.
    """

    pid: int
    parent: int
    state: str
    started: int
    threads: int
    cpu_ticks: int = 0


def _read_process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:  # noqa: PTH123 - hot path
            fields = handle.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid, int(fields[1]), fields[0], int(fields[19]), int(fields[17]), int(fields[11]) + int(fields[12]))


def _processes() -> dict[int, Process]:
    names = os.listdir("/proc")  # noqa: PTH208 - hot path
    found = (_read_process(int(name)) for name in names if name.isdigit())
    return {process.pid: process for process in found if process is not None}


class ProcessTable:
    """All processes of the machine as they were at most ``max_age_s`` ago, for many watches at once.

    Reading ``/proc`` costs some 10 us a process, much of it under the interpreter's lock: fourteen watches that each
    read it for themselves kept a Judge busier than its own work.
    """

    def __init__(self, max_age_s: float = 0.05) -> None:
        self.max_age_s = max_age_s
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._table: dict[int, Process] = {}

    def recent(self) -> dict[int, Process]:
        """Return the table, read anew where it is too old."""
        with self._lock:
            if time.monotonic() - self._read_at > self.max_age_s:
                self._read_at = time.monotonic()
                self._table = _processes()
            return self._table


def _below(root: int, table: dict[int, Process]) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time that ``pid`` and its descendants have used; 0 when they are gone."""
    table = _processes()
    tree = [*_below(pid, table), *([table[pid]] if pid in table else [])]
    return sum(process.cpu_ticks for process in tree) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int, table: dict[int, Process] | None = None) -> tuple[Process, ...]:
    """Every living or zombie descendant of ``pid``, whatever its session or namespace; ``pid`` itself not included.

    ``table`` is what :meth:`ProcessTable.recent` returned, for who asks for several trees.
    """
    return tuple(_below(pid, _processes() if table is None else table))


def _signal(process: Process, number: int) -> bool:
    """Signal exactly this process, not a later one with the same id; False when it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return False
        raise
    try:
        current = _read_process(process.pid)
        if current is None or current.started != process.started:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _owns_pid_namespace(pid: int) -> bool:
    """Whether children of ``pid`` live in a pid namespace of their own, so that killing it kills all of them."""
    try:
        spaces = Path(f"/proc/{pid}/ns")
        return (spaces / "pid_for_children").readlink() != (spaces / "pid").readlink()
    except OSError:
        return False  # gone, or not readable: the walk works in any case


def _freeze(pid: int) -> list[Process]:
    """Stop every descendant until a whole round finds no new one; returns all that were seen."""
    seen: dict[tuple[int, int], Process] = {}
    for _ in range(_STOP_ROUNDS):
        fresh = [p for p in descendants(pid) if p.state != "Z" and (p.pid, p.started) not in seen]
        if not fresh:
            break
        for process in fresh:
            seen[process.pid, process.started] = process
            _signal(process, signal.SIGSTOP)
    return list(seen.values())


def _gone(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def terminate(pid: int, pidfd: int, grace_s: float = 5.0) -> bool:
    """Kill ``pid`` (whose pidfd is ``pidfd``) and every descendant, also ``setsid``'ed and double-forked ones.

    Does not reap ``pid``: its parent does. Returns whether it was gone within ``grace_s`` seconds; a process in
    uninterruptible sleep (a hung driver) may take longer, and its GPU is then unhealthy.
    """
    tree: list[Process] = []
    try:
        if not _owns_pid_namespace(pid):
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            tree = _freeze(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # already gone; its orphans, if any, are strays of the subreaper
    for process in tree:
        _signal(process, signal.SIGKILL)
    deadline = time.monotonic() + grace_s
    gone = _gone(pidfd, grace_s)
    while any(_alive(process) for process in tree):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return gone


def _alive(process: Process) -> bool:
    current = _read_process(process.pid)
    return current is not None and current.started == process.started and current.state not in "ZX"


def strays(known: Collection[int], grace_s: float = 5.0) -> int:
    """Kill and reap children of this process that are not in ``known``, with all that is below them.

    For the subreaper (the zygote): orphans of a Runner that died fall to it. All are killed before any is waited for:
    the first process of a pid namespace does not end until the zombies of that namespace, strays too, are reaped.
    Returns how many there were.
    """
    found = {p.pid for p in _processes().values() if p.parent == os.getpid() and p.pid not in known}
    for pid in found:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            terminate(pid, handle, grace_s=0.0)
        finally:
            os.close(handle)
    waiting, deadline = set(found), time.monotonic() + grace_s
    while waiting and time.monotonic() < deadline:
        waiting = {pid for pid in waiting if not _reaped(pid)}
        if waiting:
            time.sleep(0.001)
    return len(found)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


@dataclass(frozen=True)
class Usage:
    """What a tree uses now. ``exact`` tells that ``memory_bytes`` is the proportional set size, not the upper bound."""

    memory_bytes: int
    processes: int
    unlinked_bytes: int
    exact: bool


def _status_bytes(pid: int, path: str, names: frozenset[str]) -> int:
    total = 0
    try:
        with open(f"/proc/{pid}/{path}", encoding="utf-8", errors="replace") as handle:  # noqa: PTH123 - hot path
            for line in handle:
                name, _, value = line.partition(":")
                if name in names:
                    total += int(value.split()[0]) * 1024
    except OSError:
        return total  # it ended, or is a zombie
    return total


_ANONYMOUS = frozenset({"RssAnon", "VmSwap"})
_SHARED = frozenset({"RssShmem"})
_PROPORTIONAL = frozenset({"Pss_Anon", "SwapPss"})
_PROPORTIONAL_SHARED = frozenset({"Pss_Shmem"})


def _open_files(pid: int, seen: dict[tuple[int, int], tuple[int, bool]]) -> None:
    """Note every unlinked file that ``pid`` holds open: bytes, and whether it is in memory."""
    try:
        entries = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - hot path
    except OSError:
        return
    for entry in entries:
        try:
            status = os.stat(f"/proc/{pid}/fd/{entry}")  # noqa: PTH116 - hot path
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            in_memory = os.major(status.st_dev) == 0
            seen[status.st_dev, status.st_ino] = (status.st_blocks * 512, in_memory)


class MemoryWatch:
    """Memory, processes and unlinked files of the tree below (and with) ``pid``.

    ``limit_bytes`` decides when the exact figure is worth its cost; ``baseline_bytes`` (for example the arena that the
    Judge owns) is taken off. Construct it once for each Runner, call :meth:`usage` as often as needed (about 0.1 ms
    for each process of the tree plus a scan of ``/proc``, which watches with the same ``table`` share).
    """

    def __init__(self, pid: int, limit_bytes: int, baseline_bytes: int = 0, table: ProcessTable | None = None) -> None:
        self.pid = pid
        self.limit_bytes = limit_bytes
        self.baseline_bytes = baseline_bytes
        self.table = table or ProcessTable(max_age_s=0.0)

    def usage(self) -> Usage:
        """The tree's use now; zero when it is gone."""
        table = self.table.recent()
        tree = _below(self.pid, table)
        if self.pid in table:
            tree.append(table[self.pid])
        files: dict[tuple[int, int], tuple[int, bool]] = {}
        for process in tree:
            _open_files(process.pid, files)
        shared_files = sum(size for size, in_memory in files.values() if in_memory)
        unlinked = sum(size for size, in_memory in files.values() if not in_memory)
        threads = sum(process.threads for process in tree)
        anonymous = sum(_status_bytes(p.pid, "status", _ANONYMOUS) for p in tree)
        mapped = sum(_status_bytes(p.pid, "status", _SHARED) for p in tree)
        upper = anonymous + shared_files + mapped
        if upper - self.baseline_bytes <= self.limit_bytes:
            return Usage(max(0, upper - self.baseline_bytes), threads, unlinked, exact=False)
        private = sum(_status_bytes(p.pid, "smaps_rollup", _PROPORTIONAL) for p in tree)
        shared = sum(_status_bytes(p.pid, "smaps_rollup", _PROPORTIONAL_SHARED) for p in tree)
        exact = private + max(shared, shared_files)  # mapped or not, a shared file counts once
        return Usage(max(0, exact - self.baseline_bytes), threads, unlinked, exact=True)

    def exceeded(self) -> bool:
        """Whether the tree uses more memory than its limit."""
        return self.usage().memory_bytes > self.limit_bytes


def scratch_bytes(path: Path) -> int:
    """Bytes on disk below ``path``; symbolic links are not followed, hard links are counted once."""
    total = 0
    seen: set[tuple[int, int]] = set()
    queue = [os.fspath(path)]
    while queue:
        try:
            entries = list(os.scandir(queue.pop()))
        except OSError:
            continue  # removed meanwhile, or closed to us: what is in it was counted when it was open, or not at all
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            total += _ENTRY_BYTES
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
            if stat.S_ISDIR(status.st_mode):
                queue.append(entry.path)
    return total
