"""What a Runner may use: the policy, and the environment that follows from it.

A :class:`Policy` is made by the Judge for each Runner and holds limits and places only; which kernel features enforce
it is found out once by :func:`drk.gym.sandbox.probe`. The environment is an allow-list: a variable that is not named
here does not pass, and one whose name sounds like a secret never does, whatever its prefix.

Limit: an environment is also visible in ``/proc/self/environ`` and in Python's heap, so the zygote itself has to be
started with :func:`scrub`; a fork cannot take back what its parent has read.
"""

from __future__ import annotations

import os.path
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["strict", "standard", "basic"]

_KEPT = frozenset(
    """
    PATH LANG LANGUAGE TZ TERM LD_LIBRARY_PATH LIBRARY_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CC CXX
    CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_MODULE_LOADING CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_LAUNCH_BLOCKING NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE CUBLAS_WORKSPACE_CONFIG
    PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_NVML_BASED_CUDA_CHECK TORCH_CUDA_ARCH_LIST
    PYTHONHASHSEED PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED PYTHONNOUSERSITE PYTHONFAULTHANDLER PYTHONHOME
    VIRTUAL_ENV CONDA_PREFIX
    """.split()  # noqa: SIM905 - reads better than fifty quoted words
)
_PATH = "/usr/local/bin:/usr/bin:/bin"
_KEPT_PREFIXES = ("LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TRITON_", "TORCHINDUCTOR_", "TORCHDYNAMO_")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/opt/cuda", "/opt/nvidia")
_COMPILERS = ("cc", "gcc", "g++", "clang", "nvcc")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL", "AUTH", "PROXY", "COOKIE", "SESSION")


@dataclass(frozen=True)
class Policy:
    """Limits and places of one Runner.

    ``scratch`` is the only writable place; it exists and belongs to the caller. ``readable`` are extra read-only roots.
    ``memory_bytes`` is for the whole tree (RLIMIT_DATA per process without a GPU, the Judge's ``MemoryWatch`` always);
    ``processes`` counts processes and threads of the tree; ``file_bytes`` is the size of one file; ``cpu_seconds`` is
    per process, ``None`` for no limit. ``gpu`` opens the device nodes. ``keep_fds`` stay open, all others are closed
    (0, 1, 2 become ``/dev/null`` where they are not kept).
    """

    scratch: Path
    level: Level = "standard"
    readable: tuple[Path, ...] = ()
    memory_bytes: int = 8 << 30
    cpu_seconds: int | None = None
    processes: int = 512
    file_bytes: int = 4 << 30
    open_files: int = 1024
    gpu: bool = False
    keep_fds: tuple[int, ...] = ()


def _passes(name: str) -> bool:
    if any(word in name.upper() for word in _SECRET_WORDS):
        return False
    return name in _KEPT or name.startswith(_KEPT_PREFIXES)


def places(policy: Policy) -> dict[str, Path]:
    """The variables that name a directory, all below ``policy.scratch``."""
    scratch = policy.scratch
    home = scratch / "home"
    return {
        "HOME": home,
        "TMPDIR": scratch / "tmp",
        "XDG_CACHE_HOME": home / ".cache",
        "XDG_CONFIG_HOME": home / ".config",
        "XDG_DATA_HOME": home / ".local" / "share",
        "XDG_STATE_HOME": home / ".local" / "state",
        "XDG_RUNTIME_DIR": scratch / "run",
        "TRITON_HOME": home,
        "TRITON_CACHE_DIR": scratch / "triton",
        "TRITON_DUMP_DIR": scratch / "triton-dump",
        "TRITON_OVERRIDE_DIR": scratch / "triton-override",
        "TORCHINDUCTOR_CACHE_DIR": scratch / "inductor",
        "TORCH_EXTENSIONS_DIR": scratch / "extensions",
        "TORCH_HOME": home / ".cache" / "torch",
        "HF_HOME": home / ".cache" / "huggingface",
        "CUDA_CACHE_PATH": scratch / "nv",
    }


def _python_roots() -> Iterator[Path]:
    """Python, its packages and drk itself; never the working directory or a PYTHONPATH entry."""
    yield from (Path(sys.prefix), Path(sys.base_prefix), Path(sys.exec_prefix))
    yield from (Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages"))
    yield Path(__file__).resolve().parents[1]


def _opens_too_much(root: Path) -> bool:
    """Whether ``root`` is, or lies above, a home directory."""
    homes = {Path("/home"), Path("/root"), Path.home()}
    return any(home.is_relative_to(root) for home in homes)


def _toolchain_roots(base: Mapping[str, str]) -> Iterator[Path]:
    """LD_LIBRARY_PATH, and the prefixes of compilers on PATH, unless one would open a home directory."""
    libraries = [Path(entry) for entry in base.get("LD_LIBRARY_PATH", "").split(":") if entry.startswith("/")]
    tools = [shutil.which(name, path=base.get("PATH")) for name in (base.get("CC") or "cc", *_COMPILERS)]
    prefixes = [Path(tool).resolve().parents[1] for tool in tools if tool]
    yield from (root for root in (*libraries, *prefixes) if not _opens_too_much(root.resolve()))


def read_only_roots(base: Mapping[str, str]) -> tuple[str, ...]:
    """What every Runner may read and execute below, resolved, each path once: system, Python, compilers, libraries.

    Takes milliseconds; :func:`drk.gym.sandbox.probe` keeps the answer in ``Layers.roots``.
    """
    roots = [*(Path(entry) for entry in _SYSTEM), *_python_roots(), *_toolchain_roots(base)]
    return tuple(dict.fromkeys(str(root.resolve()) for root in roots if root.exists()))


def _open_path(path: str, roots: Iterable[str]) -> str:
    """PATH less what cannot be entered: a closed directory turns "no such program" into "permission denied"."""
    prefixes = tuple(root.rstrip("/") + "/" for root in roots)
    entries = [entry for entry in path.split(":") if entry.startswith("/")]
    return ":".join(entry for entry in entries if (os.path.realpath(entry) + "/").startswith(prefixes)) or _PATH


def scrub(base: Mapping[str, str]) -> dict[str, str]:
    """What the allow-list passes of ``base``, with home and module path: the environment for the zygote itself."""
    return {name: value for name, value in base.items() if _passes(name) or name in ("HOME", "PYTHONPATH")}


def environment(policy: Policy, base: Mapping[str, str], roots: tuple[str, ...] | None = None) -> dict[str, str]:
    """The environment of a Runner: what the allow-list passes of ``base``, and every place below scratch.

    PATH keeps the entries below ``roots`` (:func:`read_only_roots` when ``None``) and ``policy.readable``. Inductor
    compiles in-process (its worker pool needs semaphores in ``/dev/shm``, and starts slower than it helps).
    """
    kept = {name: value for name, value in base.items() if _passes(name)}
    opened = (*(read_only_roots(base) if roots is None else roots), *(str(root) for root in policy.readable))
    kept["PATH"] = _open_path(base.get("PATH", _PATH), opened)
    kept.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    kept.update({name: str(path) for name, path in places(policy).items()})
    # getpass.getuser() has no password entry for the Runner's uid; hubs cannot be reached and should say so at once
    kept.update({"USER": "drk", "LOGNAME": "drk", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    return kept
