"""Matrix products with epilogues under the interpreter, and compiled for a Hopper GPU without one."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function, GatedMLP
from torch import nn

from drk.assistant.synth import alignment
from drk.assistant.synth.propose import compile_graph, variants


def test_linear_with_bias_and_activation(check):
    module = Function(lambda s, x: F.gelu(s.linear(x)), linear=nn.Linear(50, 70))
    compiled = check(module, torch.randn(4, 9, 50), kernels=["linear_gelu"])
    assert 'PRECISION="tf32x3"' in compiled.source


def test_half_precision_uses_tensor_cores_natively(check):
    module = Function(lambda s, x: F.gelu(s.linear(x)), linear=nn.Linear(50, 70).half())
    compiled = check(module, torch.randn(4, 9, 50).half(), variant=1, kernels=["linear_gelu"])
    assert "tf32x3" not in compiled.source


def test_residual_scale_and_row_operands_in_the_epilogue(check):
    module = Function(lambda s, x, r: x + s.linear(x) * s.scale * r, linear=nn.Linear(50, 50), scale=torch.randn(50))
    check(module, torch.randn(4, 9, 50), torch.randn(4, 9, 1), kernels=["linear_mul_add"])


def test_inner_size_multiple_of_the_block(check):
    check(Function(lambda s, x: s.linear(x).relu(), linear=nn.Linear(64, 128)), torch.randn(130, 64))


def test_products_of_two_inputs(check):
    module = Function(lambda _, x, y: torch.relu(x @ y) + 1)
    check(module, torch.randn(30, 40), torch.randn(40, 20), kernels=["matmul_relu_add"])
    check(Function(lambda _, x, y: torch.relu(x.t() @ y) + 1), torch.randn(40, 30), torch.randn(40, 20))
    check(Function(lambda _, x, y: torch.relu(x @ y.t()) + 1), torch.randn(30, 40), torch.randn(20, 40))


def test_addmm(check):
    module = Function(lambda s, x: torch.addmm(s.b, x, s.w.t()).tanh(), b=torch.randn(20), w=torch.randn(20, 40))
    check(module, torch.randn(30, 40), kernels=["linear_tanh"])


def test_gated_pair_shares_one_kernel(check):
    compiled = check(GatedMLP(), torch.randn(3, 11, 48), kernels=["rms_norm", "linear_silu_mul", "linear_add"])
    assert len(compiled.regions) == 3
    assert max(len(region.products) for region in compiled.regions) == 2


def test_gated_pair_with_biases(check):
    module = Function(lambda s, x: F.silu(s.g(x)) * s.u(x), g=nn.Linear(40, 70), u=nn.Linear(40, 70))
    check(module, torch.randn(9, 40), kernels=["linear_silu_mul"])


def test_separate_products_when_asked(check):
    compiled = check(GatedMLP(), torch.randn(3, 11, 48), variant=1)
    assert all(len(region.products) <= 1 for region in compiled.regions)


def test_products_left_to_the_library(check):
    compiled = check(GatedMLP(), torch.randn(3, 11, 48), variant=2)
    assert all(not region.products for region in compiled.regions)
    assert "F.linear(" in compiled.source


def test_other_batch_sizes_than_captured(check):
    check(GatedMLP(), torch.randn(4, 11, 48), calls=[[torch.randn(1, 11, 48)], [torch.randn(2, 3, 48)]])


def test_chain_of_layers(check):
    module = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10), nn.Tanh())
    check(module, torch.randn(9, 20), kernels=["linear_relu", "linear_tanh"])


def test_one_output_column(check):
    module = Function(lambda s, x: s.linear(x).tanh().squeeze(-1) * 2, linear=nn.Linear(20, 1))
    check(module, torch.randn(9, 20), calls=[[torch.randn(70, 20)], [torch.randn(1, 20)]], factor=4.0)
    check(
        Function(lambda s, x, y: s.linear(x) + y, linear=nn.Linear(20, 1)),
        torch.randn(9, 20),
        torch.randn(9, 1),
        factor=4.0,
    )


def test_strided_left_operand(check):
    check(Function(lambda s, x: s.linear(x[:, ::2]).relu(), linear=nn.Linear(20, 30)), torch.randn(9, 40))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "pair"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
@pytest.mark.long
def test_default_tiles_compile_for_hopper_without_spills(offline_compile, graph_of, dtype, pair):
    from drk.assistant.synth.regions import Rules

    single = Function(lambda s, x: F.gelu(s.g(x)), g=nn.Linear(1024, 2816))
    both = Function(lambda s, x: F.silu(s.g(x)) * s.u(x), g=nn.Linear(1024, 2816), u=nn.Linear(1024, 2816))
    module = (both if pair else single).to(dtype)
    graph = graph_of(module, torch.randn(2048, 1024, dtype=dtype))
    variant = next(item for item in variants(graph) if item.rules == Rules() and item.tile_rank == 0)
    rows = offline_compile(compile_graph(graph, variant).source, [2048, 1024], str(dtype).removeprefix("torch."))
    assert [row["name"] for row in rows] == ["linear_silu_mul_kernel" if pair else "linear_gelu_kernel"]
    assert rows[0]["spill_bytes"] == 0
    assert rows[0]["shared_bytes"] <= 227 * 1024


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 20, 33), (3, 33, 17)),
        ((2, 3, 20, 33), (2, 3, 33, 17)),
        ((2, 1, 20, 33), (2, 3, 33, 17)),
        ((20, 33), (3, 33, 17)),
    ],
)
def test_batched_products_with_their_epilogue(check, left, right):
    module = Function(lambda s, x, y: torch.relu((x @ y) * 0.3 + s.bias), bias=torch.randn(17))
    assert len(check(module, torch.randn(left), torch.randn(right)).kernels) == 1


def test_batched_products_of_views_take_their_strides(check):
    module = Function(lambda _, x, y: (x.transpose(1, 2) @ y.mT) / 4 + x.mean())
    compiled = check(module, torch.randn(2, 9, 3, 16), torch.randn(2, 3, 21, 16), factor=3.0)
    assert "contiguous" not in compiled.source.split("class ModelNew")[1]


def test_vectors_single_columns_and_diagonals_need_no_tiles(check):
    for module, args in (
        (Function(lambda _, x, y: (x @ y).tanh()), (torch.randn(9, 70), torch.randn(70))),
        (Function(lambda s, x: s.head(x) * 2, head=torch.nn.Linear(70, 1)), (torch.randn(9, 70),)),
        (Function(lambda _, x, y: torch.diag(x) @ y + 1), (torch.randn(9), torch.randn(9, 40))),
    ):
        assert "tl.dot(" not in check(module, *args, factor=3.0).source


@pytest.mark.parametrize(
    ("left", "right", "turned"),
    [
        ((30, 70), (70, 20), False),
        ((30, 70), (70, 80), True),
        ((70, 30), (70, 20), False),
        ((30, 70), (20, 70), False),
        ((70, 30), (20, 70), False),
        ((3, 30, 70), (3, 70, 66), True),
    ],
)
def test_every_order_of_operands(check, left, right, turned):
    """A right factor whose rows are contiguous has the transposed product's tiles computed."""
    module = Function(
        lambda s, x, y: torch.relu((x.mT if x.shape[-2] == 70 else x) @ (y if y.shape[-2] == 70 else y.mT) - s.bias),
        bias=torch.randn(right[-1] if right[-2] == 70 else right[-2]),
    )
    compiled = check(module, torch.randn(left), torch.randn(right), factor=3.0)
    assert ("tl.trans(" in compiled.source) == turned


@pytest.fixture
def copying(monkeypatch):
    """Copies of factors are worth it for small products too."""
    monkeypatch.setattr(alignment, "COPY_FROM", 16)
    monkeypatch.setattr(alignment, "COPY_FLOPS", 1)


@pytest.mark.parametrize(("rows", "copy"), [(20, "matmul_relu_copy(t)"), (40, "matmul_relu_copy(args_1.mT).mT")])
def test_where_neither_operand_has_the_inner_dimension_innermost_the_smaller_is_copied(check, copying, rows, copy):
    module = Function(lambda _, x, y: torch.relu(x.t() @ y))
    compiled = check(module, torch.randn(70, rows), torch.randn(70, 32), factor=3.0)
    assert copy in compiled.source
    assert ("tl.trans(" in compiled.source) == (rows == 20)


@pytest.mark.parametrize(
    ("left", "right", "copies"),
    [
        ((30, 67), (67, 20), ["args_0"]),  # only the left one has its odd dimension innermost
        ((30, 67), (67, 21), ["args_0", "args_1.mT"]),
        ((2, 3, 30, 67), (2, 3, 67, 21), ["args_0", "args_1.mT"]),
        ((3, 30, 67), (67, 21), ["args_0_2d", "args_1.mT"]),
        ((30, 68), (68, 20), []),
    ],
)
def test_factors_with_rows_of_odd_length_are_padded_first(check, copying, left, right, copies):
    module = Function(lambda s, x, y: x.mean() - x @ y * s.scale, scale=torch.randn(right[-1]))
    compiled = check(module, torch.randn(left), torch.randn(right), factor=3.0)
    assert all(f"_copy({item})" in compiled.source for item in copies)
    assert compiled.source.count("_copy(") == len(copies) + bool(copies)


def test_padded_factors_in_half_precision_and_in_the_epilogue(check, copying):
    module = Function(lambda s, x: x + s.linear(x).relu() * x, linear=nn.Linear(35, 35).half())
    compiled = check(module, torch.randn(17, 35).half(), variant=1, calls=[[torch.randn(3, 35).half()]])
    assert "_copy(" in compiled.source


def test_infinities_and_nan_stay_in_their_rows_when_padded(graph_of, interpreter, copying):
    module, x, y = Function(lambda _, x, y: (x @ y) * 0.5), torch.randn(20, 37), torch.randn(37, 19)
    x[3, 36], y[36, 5] = torch.inf, torch.nan
    source = compile_graph(graph := graph_of(module, x, y), variants(graph)[0]).source
    assert "_copy(" in source
    [[outputs]] = interpreter.run(source, {}, [[x, y]])
    torch.testing.assert_close(outputs, module(x, y), equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inner", "columns"), [(40, 24), (24, 36), (36, 44)])
def test_sizes_that_are_multiples_of_four_are_told_to_the_compiler(check, inner, columns):
    module = Function(lambda _, x, y: x @ y - y.mean())
    others = [[torch.randn(9, 33), torch.randn(33, 7)], [torch.randn(9, 40), torch.randn(40, 10)]]
    compiled = check(module, torch.randn(20, inner), torch.randn(inner, columns), factor=3.0, calls=others)
    assert "INNER_UNIT=4 if (n_inner | args_0.stride(-2)) % 4 == 0 else 1" in compiled.source
    assert "COLS_UNIT=4 if (n_cols | args_1.stride(-2)) % 4 == 0 else 1" in compiled.source


@pytest.mark.parametrize("shape", [(33, 33), (2, 20, 20)])
def test_a_matrix_times_itself(check, shape):
    check(Function(lambda _, x: (x @ x).relu() + x), torch.randn(shape), factor=3.0)


def test_an_odd_matrix_times_itself(check, copying):
    assert check(Function(lambda _, x: (x @ x).relu() + x), torch.randn(33, 33), factor=3.0).source.count("_copy(") == 3
