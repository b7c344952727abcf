"""Facts about GPUs by name or by compile target, and which GPUs this machine has, without touching CUDA.

Three things live here: a small table of data-sheet figures (:func:`device_facts`), the list of local GPUs
(:func:`list_gpus`, through ``nvidia-smi`` in a process of its own), and the zygote's guard
(:func:`is_driver_initialised`). Nothing here imports torch or triton, and nothing here calls ``cuInit``.

Figures are vendor peaks for dense (not sparse) math at boost clocks: roofs for a bound, not promises. The same chip is
sold with other memories and power limits; where the running device reports its own SM count or L2 size, trust that.
Tensor figures are with fp32 accumulation. ``fp32`` is the CUDA-core rate. Left out: clocks, NVLink, MIG slices.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, field
from typing import Any

from drk.gym.errors import DeviceError

NVIDIA_SMI_TIMEOUT_S = 10.0
CUDA_SUCCESS = 0
CUDA_ERROR_NOT_INITIALIZED = 3


@dataclass(frozen=True)
class DeviceFacts:
    """Data-sheet figures of one GPU.

    ``capability`` is (major, minor); ``shared_bytes`` the opt-in shared memory limit of one block (CUDA C Programming
    Guide, table "Technical Specifications per Compute Capability"); ``bandwidth_gb_s`` is 1e9 bytes per second;
    ``peak_tflops`` maps ``fp64|fp32|tf32|bf16|fp16|fp8`` to 1e12 dense FLOPs per second (absent: no such unit).
    """

    key: str
    name: str
    capability: tuple[int, int]
    sm_count: int
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth_gb_s: float
    peak_tflops: dict[str, float] = field(default_factory=dict)
    source: str = ""

    @property
    def target(self) -> str:
        """The compile target, for example ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON-able values."""
        values: dict[str, Any] = {**self.__dict__, "target": self.target}
        return {**values, "capability": list(self.capability), "peak_tflops": dict(self.peak_tflops)}


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine; ``index`` is ``nvidia-smi``'s (PCI bus order)."""

    uuid: str
    name: str
    index: int


_KIB = 1024
_MIB = 1024 * 1024
_GB = 10**9
_SHARED_90 = 227 * _KIB  # 9.0 and 10.0
_SHARED_80 = 163 * _KIB  # 8.0
_SHARED_89 = 99 * _KIB  # 8.6, 8.9 and 12.0


def _peaks(fp64: float, fp32: float, tf32: float, half: float, fp8: float | None = None) -> dict[str, float]:
    peaks = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}
    return peaks if fp8 is None else {**peaks, "fp8": fp8}


_FACTS: tuple[DeviceFacts, ...] = (
    DeviceFacts(
        "h200",
        "NVIDIA H200",
        (9, 0),
        132,
        _SHARED_90,
        60 * _MIB,
        143_155 * _MIB,
        4800.0,
        _peaks(67.0, 67.0, 494.7, 989.4, 1978.9),
        "NVIDIA H200 Tensor Core GPU data sheet (SXM; sparse figures halved); L2 and memory as the device reports",
    ),
    DeviceFacts(
        "h100",
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        132,
        _SHARED_90,
        50 * _MIB,
        80 * _GB,
        3350.0,
        _peaks(66.9, 66.9, 494.7, 989.4, 1978.9),
        "NVIDIA H100 Tensor Core GPU architecture white paper, table 2 (SXM5)",
    ),
    DeviceFacts(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        (9, 0),
        114,
        _SHARED_90,
        50 * _MIB,
        80 * _GB,
        2039.0,
        _peaks(51.2, 51.2, 378.0, 756.0, 1513.0),
        "NVIDIA H100 PCIe product brief and data sheet (sparse figures halved)",
    ),
    DeviceFacts(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        _SHARED_80,
        40 * _MIB,
        80 * _GB,
        2039.0,
        _peaks(19.5, 19.5, 156.0, 312.0),
        "NVIDIA A100 80GB data sheet (SXM)",
    ),
    DeviceFacts(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        (8, 0),
        108,
        _SHARED_80,
        40 * _MIB,
        40 * _GB,
        1555.0,
        _peaks(19.5, 19.5, 156.0, 312.0),
        "NVIDIA A100 Tensor Core GPU architecture white paper, table 1",
    ),
    DeviceFacts(
        "l4",
        "NVIDIA L4",
        (8, 9),
        58,
        _SHARED_89,
        48 * _MIB,
        24 * _GB,
        300.0,
        _peaks(0.49, 30.3, 60.0, 121.0, 242.5),
        "NVIDIA L4 data sheet (sparse figures halved)",
    ),
    DeviceFacts(
        "l40s",
        "NVIDIA L40S",
        (8, 9),
        142,
        _SHARED_89,
        96 * _MIB,
        48 * _GB,
        864.0,
        _peaks(1.4, 91.6, 183.0, 362.0, 733.0),
        "NVIDIA L40S data sheet (sparse figures halved)",
    ),
    DeviceFacts(
        "4090",
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        128,
        _SHARED_89,
        72 * _MIB,
        24 * _GB,
        1008.0,
        _peaks(1.29, 82.6, 82.6, 165.2, 330.3),
        "NVIDIA Ada GPU architecture white paper, appendix A (fp32 accumulate)",
    ),
    DeviceFacts(
        "3090",
        "NVIDIA GeForce RTX 3090",
        (8, 6),
        82,
        _SHARED_89,
        6 * _MIB,
        24 * _GB,
        936.0,
        _peaks(0.56, 35.6, 35.6, 71.0),
        "NVIDIA Ampere GA102 GPU architecture white paper, appendix A (fp32 accumulate)",
    ),
    DeviceFacts(
        "b200",
        "NVIDIA B200",
        (10, 0),
        148,
        _SHARED_90,
        126 * _MIB,
        180 * _GB,
        7700.0,
        _peaks(37.0, 75.0, 1100.0, 2250.0, 4500.0),
        "NVIDIA HGX B200 data sheet, one of eight GPUs (sparse figures halved)",
    ),
    DeviceFacts(
        "5090",
        "NVIDIA GeForce RTX 5090",
        (12, 0),
        170,
        _SHARED_89,
        96 * _MIB,
        32 * _GB,
        1792.0,
        _peaks(1.64, 104.8, 104.8, 209.5, 419.0),
        "NVIDIA RTX Blackwell GPU architecture white paper, appendix A (fp32 accumulate)",
    ),
)
_BY_KEY = {facts.key: facts for facts in _FACTS}
_BY_TARGET = {"sm_80": "a100", "sm_86": "3090", "sm_89": "l4", "sm_90": "h100", "sm_100": "b200", "sm_120": "5090"}


def known_devices() -> tuple[str, ...]:
    """Return the keys of the table (``h200``, ``a100``, ...)."""
    return tuple(_BY_KEY)


def known_targets() -> tuple[str, ...]:
    """Return the compile targets of the table (``sm_80``, ...)."""
    return tuple(_BY_TARGET)


def target_arch(target: str) -> int:
    """Return Triton's number for a target: ``sm_90`` and ``sm_90a`` give 90, ``h200`` gives 90.

    Raises:
        DeviceError: the name is not in the table.
    """
    major, minor = device_facts(target).capability
    return major * 10 + minor


def device_facts(target: str) -> DeviceFacts:
    """Return the figures of a table key (``h200``), a compile target (``sm_90``) or a device's reported name.

    A compile target stands for one common device of that kind (``sm_90``: H100 SXM). A reported name such as
    ``NVIDIA H100 80GB HBM3`` matches when it equals a name of the table, or has a key as one of its words.

    Raises:
        DeviceError: nothing in the table fits; the message lists what would.
    """
    wanted = target.strip().lower()
    key = _BY_TARGET.get(wanted.rstrip("af"), wanted)
    if key in _BY_KEY:
        return _BY_KEY[key]
    named = [facts for facts in _FACTS if facts.name.lower() == wanted]
    words = set(wanted.replace("-", " ").split())
    named += [facts for facts in _FACTS if facts.key in words]
    if named:
        return named[0]
    raise DeviceError(
        f"no figures for {target!r}", help=f"targets: {', '.join(_BY_TARGET)}; devices: {', '.join(_BY_KEY)}"
    )


def is_driver_initialised() -> bool | None:
    """Say whether ``cuInit`` has run in this process; ``None`` when there is no CUDA driver library.

    ``cuDeviceGetCount`` answers CUDA_ERROR_NOT_INITIALIZED exactly while ``cuInit`` has not run, and does not
    initialise anything itself. ``torch.cuda.is_initialized()`` misses initialisation that bypassed torch.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return _answers_as_initialised(library)


def _answers_as_initialised(library: Any) -> bool:
    count = ctypes.c_int(0)
    status = int(library.cuDeviceGetCount(ctypes.byref(count)))
    # Any other answer, errors included, means that the driver has been woken: a guard must not wave it through.
    return status != CUDA_ERROR_NOT_INITIALIZED


def resolve_device(device: str, gpus: list[Gpu]) -> tuple[str, Gpu | None]:
    """Return ``interpret`` or ``cuda:N`` and the GPU that this names.

    Raises:
        DeviceError: there is no such device.
    """
    if device == "interpret" or (device == "auto" and not gpus):
        return "interpret", None
    name = "cuda:0" if device in ("auto", "cuda") else device
    index = name.removeprefix("cuda:")
    if not name.startswith("cuda:") or not index.isdigit():
        raise DeviceError(f"unknown device {device!r}", help="use auto, interpret, or cuda:0")
    found = next((gpu for gpu in gpus if gpu.index == int(index)), None)
    if found is None:
        seen = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus) or "none"
        raise DeviceError(f"{device} is not there; GPUs found: {seen}", help="use --device auto or --device interpret")
    return name, found


def list_gpus(command: str = "nvidia-smi") -> list[Gpu]:
    """Return this machine's GPUs in ``nvidia-smi``'s order; an empty list when there are none or no driver.

    The query runs in a process of its own, so that CUDA and NVML stay unloaded here.
    """
    try:
        answer = subprocess.run(
            [command, "--query-gpu=uuid,name,index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return _parse_gpus(answer.stdout)


def _parse_gpus(text: str) -> list[Gpu]:
    gpus = []
    for line in text.splitlines():
        uuid, _, rest = line.partition(",")
        name, _, index = rest.rpartition(",")
        if uuid.strip() and index.strip().isdigit():
            gpus.append(Gpu(uuid=uuid.strip(), name=name.strip(), index=int(index)))
    return gpus
