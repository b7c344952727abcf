"""What a Runner may use: the policy, and the environment that follows from it.

A :class:`Policy` is made by the Judge for each Runner and holds limits and places only; which kernel features enforce
it is found out once by :func:`drk.gym.sandbox.probe`. The environment is an allow-list: a variable that is not named
here does not pass, and one whose name sounds like a secret never does, whatever its prefix.

Limit: an environment is also visible in ``/proc/self/environ`` and in Python's heap, so the zygote itself has to be
started with :func:`environment`; a fork cannot take back what its parent has read.
"""

from __future__ import annotations

from collections.abc import Mapping
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
_KEPT_PREFIXES = ("LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TRITON_", "TORCHINDUCTOR_", "TORCHDYNAMO_")
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


def environment(policy: Policy, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Runner: what the allow-list passes of ``base``, and every place below scratch.

    Inductor compiles in-process (its worker pool needs semaphores in ``/dev/shm``, and starts slower than it helps).
    """
    kept = {name: value for name, value in base.items() if _passes(name)}
    kept.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    kept.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    kept.update({name: str(path) for name, path in places(policy).items()})
    # getpass.getuser() has no password entry for the Runner's uid; hubs cannot be reached and should say so at once
    kept.update({"USER": "drk", "LOGNAME": "drk", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    return kept
