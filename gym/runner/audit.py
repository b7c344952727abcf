"""What user code tried to do outside its sandbox, noted by a Python audit hook (PEP 578).

The sandbox stops these acts; this says that they were tried. An audit hook cannot be removed from within the process.
It sees Python's own calls only: raw system calls by ctypes or machine code are stopped by the kernel without a note
here. Starting compilers is ordinary work (Triton and Inductor do it) and is not noted; processes that are left behind
are counted by the Judge.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_NOTES = 20
_NETWORK = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"}
_SIGNALS = {"os.kill", "os.killpg", "signal.pthread_kill"}
_SYMBOLS = {
    "kill",
    "tgkill",
    "ptrace",
    "process_vm_writev",
    "process_vm_readv",
    "connect",
    "sendto",
    "syscall",
    "mount",
}
_FILES = {"open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.chmod", "os.link", "os.symlink"}
_SYSTEM_ROOTS = ("/usr", "/lib", "/lib64", "/bin", "/opt", "/dev", "/sys", "/proc/self", "/etc/ld.so", "/proc/cpuinfo")
_QUIET = ("/etc/localtime", "/etc/mime.types", "/etc/nsswitch.conf", "/etc/passwd", "/etc/os-release", "/proc/meminfo")
_PROC_QUIET = ("/proc/sys", "/proc/driver", "/proc/stat", "/proc/version", "/proc/filesystems", "/proc/mounts")


class Audit:
    """Notes attempts once :meth:`watch` was called."""

    def __init__(self, scratch: Path) -> None:
        self.notes: list[str] = []
        self._watching = False
        # This package's sources too (a checkout is outside the prefix): torch formats stacks that run through them.
        here = str(Path(__file__).resolve().parents[1])
        prefixes = {sys.prefix, sys.base_prefix, sysconfig.get_paths()["purelib"], *sys.path, str(scratch), here}
        roots = {os.path.realpath(path) for path in prefixes if path} | prefixes
        self._roots = tuple(root for root in roots if root) + _SYSTEM_ROOTS + _QUIET + _PROC_QUIET
        sys.addaudithook(self._hook())

    def watch(self) -> None:
        """Begin: the next thing that runs is the candidate."""
        self._watching = True

    def _hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        kinds: dict[str, Callable[[str, tuple[Any, ...]], str]] = {
            **dict.fromkeys(_NETWORK, lambda event, _args: f"network ({event})"),
            **dict.fromkeys(_SIGNALS, self._signal),
            **dict.fromkeys(_FILES, self._file),
            "ctypes.dlsym": self._symbol,
        }

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if self._watching and event in kinds and len(self.notes) < MAX_NOTES:
                note = kinds[event](event, args)
                if note and note not in self.notes:
                    self.notes.append(note)

        return hook

    @staticmethod
    def _signal(event: str, args: tuple[Any, ...]) -> str:
        own = bool(args) and args[0] in (0, os.getpid())
        harmless = len(args) > 1 and args[1] == 0
        return "" if own or harmless or event == "signal.pthread_kill" else f"a signal to process {args[0]}"

    @staticmethod
    def _symbol(_event: str, args: tuple[Any, ...]) -> str:
        name = str(args[1]) if len(args) > 1 else ""
        return f"the C function {name}" if name in _SYMBOLS else ""

    def _file(self, _event: str, args: tuple[Any, ...]) -> str:
        path = args[0] if args else None
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str | os.PathLike):
            return ""
        full = os.path.realpath(os.fspath(path))
        return "" if full.startswith(self._roots) or full == "/" else f"the file {full[:200]}"
