"""Cases that need a process in which triton was imported under TRITON_INTERPRET=1; run by test_interpreter.py."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime.errors import InterpreterError

from drk.gym.runner.interpreter import ProgramBudgetExceeded, interpret
from drk.gym.runner.remap import device_remap


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def log():
    with device_remap("sm_90"), interpret("sm_90") as log:
        yield log


@pytest.fixture
def load(tmp_path):
    def load_source(source, name="candidate"):
        path = tmp_path / f"{name}.py"
        path.write_text("import torch\nimport triton\nimport triton.language as tl\n" + source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module, frozenset({str(path)})

    return load_source


# --- dots ---


@triton.jit
def gemm(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.program_id(0) * M + tl.arange(0, M)
    j = tl.program_id(1) * N + tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        x = tl.load(a + i[:, None] * k + inner[None, :])
        y = tl.load(b + inner[:, None] * n + j[None, :])
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    tl.store(c + i[:, None] * n + j[None, :], acc.to(c.dtype.element_ty))


def run_gemm(a, b, out_dtype=torch.float32, precision="ieee"):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=out_dtype)
    gemm[(m // 16, n // 16)](a, b, c, m, n, k, 16, 16, 32, precision)
    return c


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_dots_are_right_for_every_operand_type(log, dtype):
    a, b = torch.randn(32, 64).to(dtype), torch.randn(64, 32).to(dtype)
    torch.testing.assert_close(run_gemm(a, b), a.float() @ b.float(), rtol=1e-5, atol=1e-4)


def test_dot_result_is_rounded_to_the_output_type(log):
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    out = run_gemm(a, b, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    truth = (a.double() @ b.double()).bfloat16()
    # Sums in another order may fall on the other side of a rounding boundary, by one step at most.
    assert (out.view(torch.int16).int() - truth.view(torch.int16).int()).abs().max() <= 1


def test_dot_of_int8_accumulates_in_int32(log, load):
    module, _ = load(
        """
@triton.jit
def k(a, b, c):
    i = tl.arange(0, 16)
    p = i[:, None] * 16 + i[None, :]
    tl.store(c + p, tl.dot(tl.load(a + p), tl.load(b + p), out_dtype=tl.int32))
"""
    )
    a, b = (torch.randint(-128, 128, (16, 16), dtype=torch.int8) for _ in range(2))
    c = torch.empty((16, 16), dtype=torch.int32)
    module.k[(1,)](a, b, c)
    assert torch.equal(c, a.int() @ b.int())


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16x3", "bf16x6", "ieee"])
def test_precisions_are_accepted_and_recorded(log, precision):
    run_gemm(torch.randn(16, 32), torch.randn(32, 16), precision=precision)
    (row,) = log.dot_rows()
    assert (row["operand"], row["precision"].lower(), row["count"]) == ("fp32", precision, 1)


def test_tf32_can_be_emulated():
    a, b = torch.randn(16, 64), torch.randn(64, 16)
    truth = a.double() @ b.double()
    error = {}
    for emulate in (False, True):
        with interpret(emulate_tf32=emulate):
            error[emulate] = (run_gemm(a, b, precision="tf32") - truth).norm() / truth.norm()
            assert (run_gemm(a, b, precision="ieee") - truth).norm() / truth.norm() < 1e-6
    assert error[False] < 1e-6
    assert 1e-5 < error[True] < 2e-3


def test_dot_scaled_is_unsupported_not_wrong(log, load):
    module, files = load(
        """
@triton.jit
def k(a, s, c):
    i = tl.arange(0, 32)
    p = i[:, None] * 32 + i[None, :]
    x = tl.load(a + p)
    y = tl.load(s + i)[:, None]
    tl.store(c + p, tl.dot_scaled(x, y, "e4m3", x, y, "e4m3"))
"""
    )
    a = torch.zeros(32, 32, dtype=torch.uint8)
    with pytest.raises(InterpreterError) as caught:
        module.k[(1,)](a, a, torch.zeros(32, 32))
    assert log.describe(caught.value, files).kind == "unsupported"


# --- bfloat16 ---


@triton.jit
def bf16_ops(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a * b)
    tl.store(out + n + i, a + b)
    tl.store(out + 2 * n + i, -a)
    tl.store(out + 3 * n + i, tl.where(a < b, a, b))
    tl.store(out + 4 * n + i, tl.maximum(a, b))
    tl.store(out + 5 * n + i, tl.where((a > 0) & (b > 0), a - b, 0.5))
    tl.store(out + 6 * n + i, (a.to(tl.float32) * 1.001).to(tl.bfloat16))
    tl.store(out + 7 * n + i, i.to(tl.bfloat16))
    tl.store(out + 8 * n + i, tl.abs(a))
    tl.store(out + 9 * n + i, tl.fma(a, b, a))
    tl.store(out + 10 * n + i, tl.full((BLOCK,), 1.5, tl.bfloat16) + tl.sum(a, 0) * 0)


def test_bfloat16_arithmetic_is_done_on_values(log):
    n = 512
    a, b = torch.randn(n).bfloat16(), torch.randn(n).bfloat16()
    out = torch.empty(11, n, dtype=torch.bfloat16)
    bf16_ops[(1,)](a, b, out, n, n)
    expected = [
        a * b,
        a + b,
        -a,
        torch.minimum(a, b),
        torch.maximum(a, b),
        torch.where((a > 0) & (b > 0), a - b, 0.5),
        (a.float() * 1.001).bfloat16(),
        torch.arange(n).bfloat16(),
        a.abs(),
        (a.double() * b.double() + a.double()).bfloat16(),
        torch.full((n,), 1.5).bfloat16(),
    ]
    for row, want in zip(out, expected, strict=True):
        assert torch.equal(row, want)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def bf16_reductions(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    tl.store(out, tl.sum(a, 0))
    tl.store(out + 1, tl.max(a, 0))
    tl.store(out + 2, tl.min(a, 0))
    tl.store(out + 3, tl.argmax(a, 0).to(tl.bfloat16))
    tl.store(out + 4, tl.reduce(a, 0, _larger))
    tl.store(out + 5, tl.reduce(a, 0, tl.standard._elementwise_min))
    tl.store(out + 8 + i, tl.cumsum(a, 0))
    tl.store(out + 8 + BLOCK + i, tl.sort(a))
    two = tl.join(a, a)
    tl.store(out + 8 + 2 * BLOCK + i, tl.sum(two, 1))
    tl.store(out + 8 + 3 * BLOCK + i, tl.reduce(two, 1, tl.standard._elementwise_max))


def test_bfloat16_reductions_are_done_on_values(log):
    x = torch.randint(-8, 8, (64,)).bfloat16()  # sums that are exact in bfloat16
    out = torch.zeros(8 + 4 * 64, dtype=torch.bfloat16)
    bf16_reductions[(1,)](x, out, 64)
    expected = torch.stack([x.sum(), x.max(), x.min(), x.float().argmax().bfloat16(), x.max(), x.min()])
    assert torch.equal(out[:6], expected)
    rows = out[8:].view(4, 64)
    assert torch.equal(rows[0], x.float().cumsum(0).bfloat16())
    assert torch.equal(rows[1], x.sort().values)
    assert torch.equal(rows[2], x + x)
    assert torch.equal(rows[3], x)


def test_bfloat16_special_values_survive(log):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3.38e38, 1e-40, 0.0, 1.0])
    out = torch.empty(8, dtype=torch.bfloat16)

    convert[(1,)](x, out, 8)
    assert torch.equal(out.view(torch.int16)[1:], x.bfloat16().view(torch.int16)[1:])
    assert torch.isnan(out[0])


@triton.jit
def convert(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_conversions_round_to_even_and_saturate(log, dtype):
    x = torch.cat([torch.randn(510) * 8, torch.tensor([1e6, -1e6])])
    out = torch.empty(512, dtype=dtype)
    convert[(1,)](x, out, 512)
    limit = torch.finfo(dtype).max
    assert torch.equal(out.view(torch.uint8), x.clamp(-limit, limit).to(dtype).view(torch.uint8))
    back = torch.empty(512)
    convert[(1,)](out, back, 512)
    assert torch.equal(back, out.float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float16, torch.float64])
def test_bfloat16_converts_to_and_from_other_types(log, dtype):
    x = torch.randint(-100, 100, (64,)).bfloat16()
    out = torch.empty(64, dtype=dtype)
    convert[(1,)](x, out, 64)
    assert torch.equal(out, x.to(dtype))
    back = torch.empty(64, dtype=torch.bfloat16)
    convert[(1,)](out, back, 64)
    assert torch.equal(back, x)


# --- libdevice ---


@triton.jit
def libdevice_unary(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    tl.store(out + i, libdevice.tanh(a))
    tl.store(out + n + i, cuda_libdevice.log1p(a))
    tl.store(out + 2 * n + i, tl.extra.cuda.libdevice.rsqrt(a))
    tl.store(out + 3 * n + i, libdevice.pow(a, a))
    tl.store(out + 4 * n + i, libdevice.erf(a))
    tl.store(out + 5 * n + i, libdevice.exp(a))
    tl.store(out + 6 * n + i, libdevice.expm1(a))
    tl.store(out + 7 * n + i, tl.erf(a))
    tl.store(out + 8 * n + i, libdevice.round(a))
    tl.store(out + 9 * n + i, libdevice.isnan(a).to(a.dtype))
    tl.store(out + 10 * n + i, libdevice.fast_expf(a) if a.dtype == tl.float32 else tl.exp(a))
    tl.store(out + 11 * n + i, libdevice.atan2(a, a + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_libdevice_gives_torchs_values(log, dtype):
    n = 256
    x = torch.rand(n, dtype=dtype) * 3 + 0.01
    out = torch.empty(12, n, dtype=dtype)
    libdevice_unary[(1,)](x, out, n, n)
    expected = [x.tanh(), x.log1p(), x.rsqrt(), x**x, x.erf(), x.exp(), x.expm1(), x.erf(), x.round(), x * 0, x.exp()]
    expected.append(torch.atan2(x, x + 1))
    for row, want in zip(out, expected, strict=True):
        torch.testing.assert_close(row, want, rtol=1e-6, atol=1e-6)


def test_unknown_libdevice_functions_are_unsupported(log, load):
    module, files = load(
        """
from triton.language.extra import libdevice

@triton.jit
def k(x):
    tl.store(x, libdevice.mul_rd(tl.load(x), 2.0))
"""
    )
    with pytest.raises(InterpreterError) as caught:
        module.k[(1,)](torch.ones(1))
    facts = log.describe(caught.value, files)
    assert (facts.kind, facts.line) == ("unsupported", 9)
    assert "__nv_fmul_rd" in facts.message


def test_inline_assembly_is_unsupported(log, load):
    module, files = load(
        """
@triton.jit
def k(x):
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x)], tl.float32, True, 1)
    tl.store(x, y)
"""
    )
    with pytest.raises(InterpreterError) as caught:
        module.k[(1,)](torch.ones(1))
    facts = log.describe(caught.value, files)
    assert (facts.kind, facts.line) == ("unsupported", 7)


def test_errors_name_the_line_in_the_candidate(log, load):
    module, files = load(
        """
@triton.jit
def inner(x):
    return tl.arange(0, 3) + x

@triton.jit
def k(x):
    tl.store(x + inner(0), 1)
"""
    )
    with pytest.raises(InterpreterError) as caught:
        module.k[(1,)](torch.ones(4))
    facts = log.describe(caught.value, files)
    assert facts.line == 7
    assert "power of 2" in facts.message


# --- language ---


def test_constants_derived_from_constexprs_stay_constants(log, load):
    module, _ = load(
        """
FACTOR: tl.constexpr = tl.constexpr(2)

@triton.jit
def k(x, n, BLOCK: tl.constexpr):
    HALF = BLOCK // FACTOR
    QUARTER = HALF // 2 if BLOCK > 4 else 1
    count = 0
    for start in range(0, n, QUARTER):
        i = start + tl.arange(0, QUARTER)
        count += 1
        tl.store(x + i, tl.zeros((QUARTER,), tl.float32) + count)
"""
    )
    x = torch.zeros(8)
    module.k[(1,)](x, 8, BLOCK=16)
    assert x.tolist() == [1.0] * 4 + [2.0] * 4


def test_constexprs_are_known_by_string_annotations(log, tmp_path):
    path = tmp_path / "future.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import triton\n"
        "import triton.language as L\n"
        "@triton.jit\n"
        "def k(x, B: L.constexpr):\n"
        "    HALF = B // 2\n"
        "    L.store(x + L.arange(0, HALF), 1.0)\n"
    )
    spec = importlib.util.spec_from_file_location("future", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.zeros(8)
    module.k[(1,)](x, 8)
    assert x.tolist() == [1.0] * 4 + [0.0] * 4


def test_the_interpreters_imports_do_not_leak_into_the_candidate(log, load):
    module, _ = load(
        """
@triton.jit
def k(x):
    tl.store(x, 1.0)

def forward(x):
    k[(1,)](x)
    return np.asarray(x)
"""
    )
    with pytest.raises(NameError, match="np"):
        module.forward(torch.zeros(1))


def test_language_is_found_without_its_usual_alias(log, tmp_path):
    path = tmp_path / "alias.py"
    path.write_text("import triton\n@triton.jit\ndef k(x):\n    triton.language.store(x, 2.0)\n")
    spec = importlib.util.spec_from_file_location("alias", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.zeros(1)
    module.k[(1,)](x)
    assert x.item() == 2.0


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _first_then_second(a, b):
    return b + a * 0


@triton.jit
def _welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    delta = mean_b - mean_a
    return mean_a + delta * n_b / n, m2_a + m2_b + delta * delta * n_a * n_b / n, n


@triton.jit
def reduce_kernel(x, out, R: tl.constexpr, C: tl.constexpr):
    p = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    a = tl.load(x + p)
    tl.store(out + tl.arange(0, R), tl.reduce(a, 1, _product))
    tl.store(out + R + tl.arange(0, R), tl.reduce(a, 1, _first_then_second))
    mean, m2, n = tl.reduce((a, a * 0, a * 0 + 1), 1, _welford)
    tl.store(out + 2 * R + tl.arange(0, R), mean)
    tl.store(out + 3 * R + tl.arange(0, R), m2 / n)
    tl.store(out + 4 * R, tl.reduce(a, None, _product))
    tl.store(x + p, tl.associative_scan(a, 1, _product))


def test_reductions_and_scans_by_own_functions(log):
    x = torch.rand(4, 32) + 0.5
    given, out = x.clone(), torch.zeros(17)
    reduce_kernel[(1,)](x, out, 4, 32)
    torch.testing.assert_close(out[0:4], given.prod(1))
    torch.testing.assert_close(out[4:8], given[:, -1])  # not commutative: order must be kept
    torch.testing.assert_close(out[8:12], given.mean(1))
    torch.testing.assert_close(out[12:16], given.var(1, unbiased=False))
    torch.testing.assert_close(out[16], given.prod())
    torch.testing.assert_close(x, given.cumprod(1))


@triton.jit
def softmax(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    a = tl.load(x + row * n + i, mask=i < n, other=-float("inf"))
    e = tl.exp(a - tl.max(a, 0))
    tl.store(y + row * n + i, e / tl.sum(e, 0), mask=i < n)


def test_the_language_is_restored_after_each_launch(log):
    before = {name: getattr(owner, name) for owner in (tl, tl.core, tl.math) for name in vars(owner) if name[0] != "_"}
    methods = dict(vars(tl.tensor))
    x = torch.randn(4, 10)
    y = torch.empty_like(x)
    softmax[(4,)](x, y, 10, 16)
    torch.testing.assert_close(y, x.softmax(1))
    after = {name: getattr(owner, name) for owner in (tl, tl.core, tl.math) for name in vars(owner) if name[0] != "_"}
    assert before == after
    assert methods == dict(vars(tl.tensor))


# --- autotune, budget, census ---


AUTOTUNED = """
RUNS = []

@triton.autotune(
    configs=[triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((64, 2), (128, 8))],
    key=["n"],
    prune_configs_by={"early_config_prune": lambda configs, args, **kwargs: configs[1:]},
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def k(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

def forward(x):
    k[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel())
    return x
"""


def test_autotune_runs_the_first_config_that_the_author_left_once(log, load):
    module, files = load(AUTOTUNED)
    x = module.forward(torch.zeros(300, device="cuda"))
    assert x.tolist() == [1.0] * 300
    (row,) = log.rows(files)
    assert (row["grid"], row["programs"], row["launches"]) == ([3, 1, 1], 3, 1)
    assert (row["num_warps"], row["meta"]["BLOCK"], row["meta"]["EVEN"], row["owned"]) == (8, 128, False, True)
    assert json.loads(json.dumps(row)) == row


def test_benchmarks_and_driver_queries_are_harmless(log):
    calls = []
    assert triton.testing.do_bench(lambda: calls.append(1)) == 1.0
    assert triton.testing.do_bench(lambda: calls.append(1), quantiles=[0.5, 0.2]) == [1.0, 1.0]
    assert len(calls) == 2
    driver = triton.runtime.driver.active
    assert driver.get_active_torch_device() == torch.device("cuda", 0)
    assert driver.utils.get_device_properties(0)["max_shared_mem"] == 232448
    assert driver.get_current_target().arch == 90


def test_warm_up_gives_a_kernel_that_can_be_asked_and_launched(log):
    x = torch.zeros(8)
    y = torch.empty(8, dtype=torch.bfloat16)
    kernel = convert.warmup(x, y, BLOCK=8, num_warps=2, grid=(1,))
    kernel._init_handles()
    assert (kernel.n_regs, kernel.metadata.num_warps, log.launches) == (0, 2, 0)
    kernel[(1, 1, 1)](x, y, 8)
    assert y.tolist() == [0.0] * 8


def test_a_launch_beyond_the_budget_does_not_start(load):
    with device_remap(), interpret(program_budget=10) as log:
        module, files = load(AUTOTUNED)
        module.forward(torch.zeros(128 * 6))
        x = torch.zeros(128 * 5)
        with pytest.raises(ProgramBudgetExceeded, match=r"5 programs.*4 of this trial's 10") as caught:
            module.forward(x)
        assert x.sum() == 0
        assert log.describe(caught.value, files).kind == "program_budget"
        assert log.exceeded is caught.value
        assert (caught.value.programs, caught.value.left, caught.value.budget) == (5, 4, 10)
        log.start_trial()
        module.forward(x)
        assert x.sum() == 128 * 5
        assert log.exceeded is None


def test_kernels_are_told_apart_by_function_not_name(log, load):
    one, one_files = load("@triton.jit\ndef k(x):\n    tl.store(x, 1.0)\n", "one")
    two, _ = load("@triton.jit\ndef k(x):\n    tl.store(x, 2.0)\n", "two")
    x = torch.zeros(1)
    one.k[(1,)](x)
    two.k[(2, 3)](x)
    rows = log.rows(one_files)
    assert [(row["name"], row["owned"], row["programs"], row["grid"]) for row in rows] == [
        ("k", True, 1, [1, 1, 1]),
        ("k", False, 6, [2, 3, 1]),
    ]


def test_infinities_are_silent_as_on_a_gpu(log, load):
    module, _ = load("@triton.jit\ndef k(x, y):\n    tl.store(y, tl.log(tl.load(x)) / tl.load(x))\n")
    y = torch.ones(1)
    module.k[(1,)](torch.zeros(1), y)
    assert torch.isinf(y).item()


def test_views_and_strides_reach_the_storage(log):
    base = torch.zeros(4, 8)
    x = torch.arange(8.0)
    convert[(1,)](x, base[2], 8)
    assert base[2].tolist() == x.tolist()
    assert base.sum() == x.sum()


def test_everything_is_restored():
    from triton.runtime import interpreter as ti

    before = (dict(vars(ti.InterpreterBuilder)), ti._patch_lang, ti.GridExecutor.__call__, ti.InterpretedFunction.run)
    functions = dict(vars(cuda_libdevice))
    options = ti.interpreter_builder.options
    with interpret():
        assert ti.interpreter_builder.options is not options
    after = (dict(vars(ti.InterpreterBuilder)), ti._patch_lang, ti.GridExecutor.__call__, ti.InterpretedFunction.run)
    assert before == after
    assert functions == dict(vars(cuda_libdevice))
    assert ti.interpreter_builder.options is options
    assert np.geterr()["divide"] == "warn"
