from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from drk.gym import triton_adapter, triton_driver
from drk.gym.devices import device_facts
from drk.gym.runner.cuda_stand_in import CudaFeatureUnsupported
from drk.gym.runner.stub_driver import compile_for

SOURCE = """
import triton
import triton.language as tl

@triton.jit
def leaf(x):
    return x * 2

@triton.jit
def middle(x):
    return leaf(x)

@triton.autotune(configs=[triton.Config({"BLOCK": 16})], key=[])
@triton.heuristics({"EVEN": lambda args: True})
@triton.jit
def top(
    x,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, middle(tl.load(x + i)))

@triton.jit
def alone(x):
    tl.store(x, 1.0)
"""


@pytest.fixture
def candidate(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    path = tmp_path / "adapter_candidate.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("adapter_candidate", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapter_candidate"] = module
    spec.loader.exec_module(module)
    return module, str(path)


@pytest.fixture
def driver():
    driver = triton_driver.TargetDriver(device_facts("sm_90"), torch.cuda)
    with triton_driver.active_driver(driver):
        yield driver


def test_importing_the_adapter_asks_for_no_driver():
    assert triton_driver.driver_slot._active is None or isinstance(
        triton_driver.driver_slot._active, triton_driver.TargetDriver
    )
    assert not torch.cuda.is_initialized()
    assert triton_adapter.interpreting() is False
    assert triton_adapter.triton_version() == triton.__version__


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1.0),
        ({"quantiles": [0.5, 0.2, 0.8]}, [1.0, 1.0, 1.0]),
        ({"quantiles": [0.5]}, 1.0),
        ({"return_mode": "all", "warmup": 1, "rep": 2}, [1.0]),
        ({"return_mode": "median"}, 1.0),
    ],
)
def test_benchmarks_run_once_and_answer_in_the_form_asked(options, expected):
    calls = []
    assert triton_driver.run_once(lambda: calls.append(1), **options) == expected
    assert calls == [1]


def test_driver_answers_for_its_target(driver):
    active = triton.runtime.driver.active
    assert active is driver
    assert (active.get_current_target().backend, active.get_current_target().arch) == ("cuda", 90)
    assert active.utils.get_device_properties(0)["max_shared_mem"] == 227 * 1024
    assert active.get_device_capability() == (9, 0)
    assert active.get_active_torch_device() == torch.device("cuda", 0)
    assert triton.testing.do_bench is triton_driver.run_once


def test_handles_are_never_reused(driver):
    first, second = (driver.utils.load_binary("k", b"no cubin", 0, 0) for _ in range(2))
    assert len({*first[:2], *second[:2]}) == 4
    assert first[2:4] == (0, 0)


def test_the_shared_memory_limit_follows_the_active_driver():
    limit = triton.compiler.compiler.max_shared_mem
    for target in ("sm_90", "sm_80", "sm_120"):
        with triton_driver.active_driver(triton_driver.TargetDriver(device_facts(target), torch.cuda)):
            assert limit(0) == device_facts(target).shared_bytes


def test_resources_of_something_that_is_no_cubin_are_unknown():
    assert triton_driver.kernel_resources(b"not an ELF file") is None


def test_spills_are_read_from_a_real_cubin(candidate):
    source = (
        SOURCE
        + """
@triton.jit
def heavy(a, b, c, K: tl.constexpr):
    i, j, k = tl.arange(0, 128), tl.arange(0, 128), tl.arange(0, 64)
    acc = tl.zeros((128, 128), tl.float32)
    for _ in range(0, K, 64):
        acc += tl.dot(tl.load(a + i[:, None] * 64 + k[None, :]), tl.load(b + k[:, None] * 128 + j[None, :]))
    tl.store(c + i[:, None] * 128 + j[None, :], acc)
"""
    )
    path = candidate[1].replace("adapter_candidate", "heavy")
    with open(path, "w") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location("heavy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with compile_for("sm_80") as log:
        x = torch.zeros(16384, dtype=torch.float16)
        module.heavy[(1,)](x, x, torch.zeros(16384), 64, num_warps=2)
        (row,) = log.rows()
    assert row["registers"] == 255
    assert row["spill_bytes"] > 0


def test_functions_are_found_by_file_and_followed_by_calls(candidate):
    module, path = candidate
    functions = {f.__name__: f for f in triton_adapter.jit_functions(frozenset({path}))}
    assert set(functions) == {"leaf", "middle", "top", "alone"}
    assert triton_adapter.jit_functions(frozenset({"/nowhere.py"})) == []
    used = triton_adapter.reachable([triton_adapter.unwrap(module.top)])
    assert used == {id(functions[name]) for name in ("top", "middle", "leaf")}
    assert triton_adapter.unwrap(module.top) is functions["top"]
    file, name, _ = triton_adapter.source_of(module.top)
    assert (file, name) == (path, "top")
    line = triton_adapter.first_body_line(functions["top"])
    assert SOURCE.splitlines()[line - 1] == "def top("


def test_a_name_that_the_compiler_gives_too_is_nobodys_own(candidate, tmp_path):
    _, path = candidate
    assert triton_adapter.names_of_their_own(frozenset({path})) == {"leaf", "middle", "top", "alone"}
    generated = tmp_path / "c1.py"
    generated.write_text("import triton\n\n@triton.jit\ndef leaf(x):\n    return x\n")
    spec = importlib.util.spec_from_file_location("torch._inductor.runtime.compile_tasks.c1", generated)
    compiled = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiled)
    assert compiled.leaf is not None
    assert triton_adapter.names_of_their_own(frozenset({path})) == {"middle", "top", "alone"}


def test_compile_hook_keeps_one_that_was_there(candidate, driver, monkeypatch):
    module, _ = candidate
    seen, outer = [], []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: outer.append(facts["fn"].name))
    with triton_adapter.watch_compiles(lambda function, kernel: seen.append((function.__name__, kernel.name))):
        module.alone[(1,)](torch.zeros(1))
    assert seen == [("alone", "alone")]
    assert outer == ["alone"]


def test_launch_and_grid_watchers_fire_once_per_launch(candidate, driver):
    module, _ = candidate
    launches, grids = [], []
    with (
        triton_adapter.watch_launches(lambda handle, name: launches.append((handle, name))),
        triton_adapter.watch_grids(lambda kernel, grid: grids.append((kernel.name, grid))),
    ):
        for _ in range(2):
            module.alone[(3, 2)](torch.zeros(1))
    assert [name for _, name in launches] == ["alone", "alone"]
    assert launches[0][0] == launches[1][0] > 0
    assert grids == [("alone", (3, 2))] * 2


def test_errors_are_classified_through_their_wrappers():
    describe = triton_adapter.describe_error
    assert describe(triton.runtime.errors.OutOfResources(300, 200, "shared memory")).kind == "out_of_resources"
    assert describe(triton.runtime.errors.PTXASError("bad")).kind == "ptxas"
    assert describe(RuntimeError("PassManager::run failed")).kind == "compile"
    assert describe(CudaFeatureUnsupported("a graph")).kind == "unsupported"
    assert describe(ValueError("x")) == triton_adapter.ErrorFacts("ValueError", "x", None)
    wrapped = triton.runtime.errors.InterpreterError("outer")
    wrapped.__cause__ = IndexError("inner")
    assert describe(wrapped) == triton_adapter.ErrorFacts("IndexError", "inner", None)
    circular = ValueError("a")
    circular.__cause__ = circular
    assert describe(circular).kind == "ValueError"


def test_ptxas_complaints_are_kept_without_the_program(candidate):
    source = (
        SOURCE
        + """
@triton.jit
def refused(x):
    i = tl.arange(0, 128)
    tl.store(x + i, tl.load(x + i, eviction_policy="evict_last", cache_modifier=".cg"))
"""
    )
    path = candidate[1].replace("adapter_candidate", "refused")
    with open(path, "w") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location("refused", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with compile_for("sm_90") as log, pytest.raises(triton.runtime.errors.PTXASError) as caught:
        module.refused[(1,)](torch.zeros(128))
    facts = log.describe(caught.value, frozenset({path}))
    assert facts.kind == "ptxas"
    assert "cannot be combined" in facts.message
    assert len(facts.message) < 400


def test_the_line_is_the_innermost_in_the_files_asked_about(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("def inner():\n    return 1 / 0\n\ndef outer():\n    return inner()\n")
    scope: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with pytest.raises(ZeroDivisionError) as caught:
        scope["outer"]()
    assert triton_adapter.describe_error(caught.value, frozenset({str(path)})).line == 2
    assert triton_adapter.describe_error(caught.value).line is None


CACHED_DRIVER = """
import os, sys
from pathlib import Path
from drk.gym.runner.files import write_files
from drk.gym.triton_adapter import driver_cache_files
from triton.backends.nvidia.driver import CudaUtils

files = driver_cache_files()
assert any("cuda_utils" in name for name in files), files
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
os.environ["CC"] = "/bin/false"
write_files(Path(sys.argv[1]), files)
CudaUtils()
"""


def test_the_drivers_helper_is_compiled_once_for_all_caches(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = (Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c").read_text()
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\(", source)))
    (tmp_path / "stub.c").write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
    build = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "stub.c")]
    subprocess.run(build, check=True)
    libraries = {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", CACHED_DRIVER, str(tmp_path / "cache")]
    subprocess.run(command, check=True, env={**os.environ, **libraries}, timeout=120)
