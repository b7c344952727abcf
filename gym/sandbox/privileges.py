"""Giving up privileges: a uid of its own where the caller is root, and no capabilities in every case.

Root drops to a uid that no other process has (``FIRST_UID`` + process id, above the ranges that distributions and
systemd hand out), so that RLIMIT_NPROC counts this Runner alone, signals and ptrace stop at the uid, and scratch
directories of two Runners are closed to each other. Where that range is not mapped (rootless containers) it is
``nobody``. The drop is left out where the new uid could not read Python or reach scratch (for example Python below a
0700 ``/root``); then capabilities and the bounding set are still emptied, and uid 0 keeps only its file ownership.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

FIRST_UID = 0x70000000
NOBODY_UID = 65534


def mapped(uid: int) -> bool:
    """Whether ``uid`` exists in this user namespace."""
    for line in Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= uid < first + count:
            return True
    return False


def runner_uid() -> int:
    """A uid for this process alone, or ``nobody`` where the range is not mapped."""
    unique = FIRST_UID + os.getpid()
    return unique if mapped(unique) else NOBODY_UID


def closed_to_others(paths: Iterable[Path]) -> Path | None:
    """The first path that a stranger (neither owner nor group) cannot reach and read; ``None`` when all are open.

    Every parent needs the search bit, the path itself the read bit (and search, for a directory). ACLs are not read.
    Paths that do not exist are passed over.
    """
    for path in paths:
        try:
            resolved = path.resolve(strict=True)
            parents = [parent.stat().st_mode & stat.S_IXOTH for parent in resolved.parents]
            mode = resolved.stat().st_mode
        except FileNotFoundError:
            continue
        wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
        if not all(parents) or mode & wanted != wanted:
            return path
    return None


def unreachable_scratch(scratch: Path) -> bool:
    """Whether a stranger cannot even walk to ``scratch`` (the directory itself will be given to the Runner)."""
    return not all(parent.stat().st_mode & stat.S_IXOTH for parent in scratch.resolve().parents)


def give(scratch: Path, uid: int, gid: int) -> None:
    """Make ``uid`` the owner of scratch and everything below it; symbolic links are not followed."""
    for folder, folders, files in os.walk(scratch):
        for name in (*folders, *files):
            os.chown(Path(folder) / name, uid, gid, follow_symlinks=False)
    os.chown(scratch, uid, gid)


def device_groups() -> list[int]:
    """Groups that own GPU device nodes which are not open to all."""
    groups = set()
    for node in Path("/dev").glob("nvidia*"):
        status = node.stat()
        if stat.S_ISCHR(status.st_mode) and status.st_mode & 0o006 != 0o006:
            groups.add(status.st_gid)
    return sorted(groups)


def drop_uid(uid: int, groups: list[int]) -> None:
    """Become ``uid`` (and the group of the same number) for good. Raises ``OSError``."""
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
