from __future__ import annotations

import ctypes
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from drk.gym import devices
from drk.gym.errors import DeviceError


@pytest.mark.parametrize(
    ("target", "arch"), [("sm_80", 80), ("sm_90", 90), ("sm_90a", 90), ("sm_100", 100), ("sm_120", 120), ("h200", 90)]
)
def test_target_arch(target, arch):
    assert devices.target_arch(target) == arch


def test_every_target_names_a_device_of_that_target():
    for target in devices.known_targets():
        assert devices.device_facts(target).target == target


def test_reported_names_are_found():
    assert devices.device_facts("NVIDIA H100 80GB HBM3").key == "h100"
    assert devices.device_facts("NVIDIA H100 PCIe").key == "h100-pcie"
    assert devices.device_facts("NVIDIA A100-SXM4-40GB").key == "a100-40gb"
    assert devices.device_facts("NVIDIA GeForce RTX 4090").key == "4090"
    assert devices.device_facts("NVIDIA L4").key == "l4"


def test_unknown_name_lists_what_is_known():
    with pytest.raises(DeviceError) as caught:
        devices.device_facts("sm_42")
    assert "sm_90" in caught.value.help


def test_facts_are_json_and_plausible():
    for key in devices.known_devices():
        facts = devices.device_facts(key)
        assert json.loads(json.dumps(facts.to_dict()))["target"] == facts.target
        assert facts.source
        assert facts.peak_tflops["fp32"] <= facts.peak_tflops["tf32"] <= facts.peak_tflops["bf16"]
        assert facts.shared_bytes in {99 * 1024, 163 * 1024, 227 * 1024}


def _fake_smi(folder: Path, body: str) -> str:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_list_gpus_parses_a_real_process(tmp_path):
    command = _fake_smi(tmp_path, 'echo "GPU-aaa, NVIDIA H200, 0"; echo "GPU-bbb, NVIDIA X, with comma, 1"')
    assert devices.list_gpus(command) == [
        devices.Gpu("GPU-aaa", "NVIDIA H200", 0),
        devices.Gpu("GPU-bbb", "NVIDIA X, with comma", 1),
    ]


def test_list_gpus_is_empty_without_driver(tmp_path):
    assert devices.list_gpus(str(tmp_path / "absent")) == []
    assert devices.list_gpus(_fake_smi(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")) == []


def test_driver_probe_imports_nothing_heavy_and_agrees_with_the_library():
    code = (
        "import sys; from drk.gym import devices; state = devices.is_driver_initialised();"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules; print(state)"
    )
    state = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert state == "None"
    else:
        assert state == "False"


@pytest.mark.parametrize(("status", "expected"), [(3, False), (0, True), (100, True)])
def test_only_not_initialised_passes_the_guard(tmp_path, status, expected):
    source = tmp_path / "cuda.c"
    source.write_text(f"int cuDeviceGetCount(int *count) {{ *count = 0; return {status}; }}\n")
    library = tmp_path / "libfake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert devices._answers_as_initialised(ctypes.CDLL(str(library))) is expected
