from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
import triton

from drk.gym.devices import device_facts
from drk.gym.errors import DeviceError
from drk.gym.runner.remap import device_remap
from drk.gym.runner.stub_driver import compile_for, install

HEAD = """
import torch
import triton
import triton.language as tl
"""
ADD = (
    HEAD
    + """
@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

def forward(x):
    y = torch.empty_like(x)
    add[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), BLOCK=256, num_warps=8)
    return y
"""
)
GEMM = (
    HEAD
    + """
@triton.autotune(
    configs=[
        triton.Config({"M": 32, "N": 32, "K": 32}, num_warps=4, num_stages=2),
        triton.Config({"M": 64, "N": 64, "K": 32}, num_warps=8, num_stages=3),
    ],
    key=["k"],
)
@triton.jit
def gemm(a, b, c, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, l = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        x = tl.load(a + i[:, None] * k + (start + l)[None, :])
        y = tl.load(b + (start + l)[:, None] * k + j[None, :])
        acc += tl.dot(x, y)
    tl.store(c + i[:, None] * k + j[None, :], acc)

def forward(a, b):
    c = torch.empty(a.shape, device="cuda")
    gemm[(1,)](a, b, c, a.shape[1])
    return c
"""
)
TOO_LARGE = GEMM.replace(
    'triton.Config({"M": 64, "N": 64, "K": 32}, num_warps=8, num_stages=3)',
    'triton.Config({"M": 256, "N": 256, "K": 128}, num_warps=8, num_stages=4)',
)


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    assert not triton.knobs.runtime.interpret

    def load_source(source, name="candidate"):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module, frozenset({str(path)})

    return load_source


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_a_launch_is_compiled_for_the_target(load, target):
    with device_remap(target), compile_for(target) as log:
        module, files = load(ADD)
        module.forward(torch.ones(1000, device="cuda"))
        (row,) = log.rows(files)
    assert json.loads(json.dumps(row)) == row
    assert row["name"] == "add"
    assert row["owned"] is True
    assert row["target"] == target
    assert (row["num_warps"], row["launches"], row["grid"]) == (8, 1, [4])
    assert row["constants"]["BLOCK"] == 256
    assert row["registers"] > 0
    assert row["spill_bytes"] == 0
    assert log.launches == 1


def test_a_second_launch_compiles_nothing(load):
    with device_remap(), compile_for() as log:
        module, files = load(ADD)
        for _ in range(3):
            module.forward(torch.ones(512))
        assert log.compiles == 1
        assert log.rows(files)[0]["launches"] == 3
        assert log.rows(frozenset())[0]["owned"] is False


def test_all_autotune_configurations_are_compiled(load):
    with device_remap(), compile_for("sm_90") as log:
        module, files = load(GEMM)
        a = torch.ones(64, 64, dtype=torch.float16)
        module.forward(a, a)
        rows = log.rows(files)
    assert [(row["constants"]["M"], row["num_warps"], row["num_stages"]) for row in rows] == [(32, 4, 2), (64, 8, 3)]
    assert all(row["shared_bytes"] > 0 and row["fits"] for row in rows)


def test_a_configuration_too_large_for_the_target_is_reported_and_not_chosen(load):
    with device_remap(), compile_for("sm_120") as log:
        module, files = load(TOO_LARGE)
        a = torch.ones(256, 256, dtype=torch.float16)
        module.forward(a, a)
        rows = {row["constants"]["M"]: row for row in log.rows(files)}
    assert rows[256]["fits"] is False
    assert rows[256]["launches"] == 0 or rows[256]["shared_bytes"] > device_facts("sm_120").shared_bytes
    assert rows[32]["fits"] is True
    assert module.gemm.best_config.kwargs["M"] == 32


def test_out_of_resources_is_raised_against_the_targets_limit(load):
    only_large = TOO_LARGE.replace('triton.Config({"M": 32, "N": 32, "K": 32}, num_warps=4, num_stages=2),', "")
    with device_remap(), compile_for("sm_120") as log:
        module, files = load(only_large)
        a = torch.ones(256, 256, dtype=torch.float16)
        with pytest.raises(triton.runtime.errors.OutOfResources) as caught:
            module.forward(a, a)
        facts = log.describe(caught.value, files)
    assert facts.kind == "out_of_resources"
    assert str(device_facts("sm_120").shared_bytes) in facts.message


def test_compile_errors_carry_the_candidates_line(load):
    broken = ADD.replace("tl.arange(0, BLOCK)", "tl.arange(0, 100)")
    line = next(i for i, text in enumerate(broken.splitlines(), 1) if "tl.arange(0, 100)" in text)
    with device_remap(), compile_for() as log:
        module, files = load(broken)
        with pytest.raises(triton.CompilationError) as caught:
            module.forward(torch.ones(100))
        facts = log.describe(caught.value, files)
    assert (facts.kind, facts.line) == ("compile", line)
    assert "power of 2" in facts.message


def test_the_line_is_that_of_the_inner_function(load):
    source = (
        HEAD
        + """
@triton.jit
def inner(x):
    return tl.load(x +
                   tl.arange(0, 3))

@triton.jit(do_not_specialize=["n"])
def outer(x, n):
    tl.store(x, tl.sum(inner(x), 0))

def forward(x):
    outer[(1,)](x, 3)
    return x
"""
    )
    with device_remap(), compile_for() as log:
        module, files = load(source)
        with pytest.raises(triton.CompilationError) as caught:
            module.forward(torch.ones(8))
        line = log.describe(caught.value, files).line
    assert source.splitlines()[line - 1].strip() in {"tl.arange(0, 3))", "return tl.load(x +"}


def test_host_errors_after_a_launch_that_did_nothing_prove_nothing(load):
    source = ADD.replace("    return y", "    return [y][int(y.flatten()[0] * 0) + 7]")
    with device_remap(), compile_for() as log:
        module, files = load(source)
        with pytest.raises(IndexError) as caught:
            module.forward(torch.ones(8))
        assert log.describe(caught.value, files).kind == "unknown"
    early = ADD.replace("    y = torch", "    [][7]\n    y = torch")
    with device_remap(), compile_for() as log:
        module, files = load(early)
        with pytest.raises(IndexError) as caught:
            module.forward(torch.ones(8))
        assert log.describe(caught.value, files).kind == "IndexError"


def test_host_code_may_ask_the_driver_and_the_compiled_kernel(load):
    source = ADD.replace(
        "    add[lambda",
        """    device = triton.runtime.driver.active.get_active_torch_device()
    sms = triton.runtime.driver.active.utils.get_device_properties(device.index)["multiprocessor_count"]
    arch = triton.runtime.driver.active.get_current_target().arch
    kernel = add.warmup(x, y, x.numel(), BLOCK=256, grid=(1,))
    kernel._init_handles()
    assert (sms, arch, kernel.n_regs > 0, kernel.metadata.shared) == (132, 90, True, 0)
    assert triton.testing.do_bench(lambda: None) == 1.0
    add[lambda""",
    )
    with device_remap("sm_90"), compile_for("sm_90") as log:
        module, _ = load(source)
        module.forward(torch.ones(8))
        assert log.launches == 1


def test_uninstalling_gives_triton_its_own_back():
    before = (triton.runtime.driver._active, triton.testing.do_bench, triton.compiler.CompiledKernel.launch_metadata)
    log = install("sm_80")
    assert triton.runtime.driver.active.get_current_target().arch == 80
    log.uninstall()
    after = (triton.runtime.driver._active, triton.testing.do_bench, triton.compiler.CompiledKernel.launch_metadata)
    assert before == after
    assert triton.knobs.runtime.jit_post_compile_hook is None


def test_unknown_target_is_refused():
    with pytest.raises(DeviceError):
        install("sm_7")
