from __future__ import annotations

import pytest

from drk.assistant.profile_costs import call_cost
from drk.assistant.profile_tree import OpCall
from drk.assistant.profile_work import amdahl, classify, floor_us, peak_key, quantile, roof_of, row_work
from drk.gym.devices import device_facts

F = "float"


def call(name, dims, types=None, values=()):
    return OpCall(name, tuple(dims), (), tuple(types or [F] * len(dims)), tuple(values))


@pytest.mark.parametrize(
    ("made", "size_bytes", "flops"),
    [
        (call("aten::mm", [[8, 4], [4, 16]]), 4 * (32 + 64 + 128), 2 * 8 * 16 * 4),
        (call("aten::addmm", [[16], [8, 4], [4, 16]]), 4 * (16 + 32 + 64 + 128), 2 * 8 * 16 * 4),
        (call("aten::linear", [[2, 8, 4], [16, 4], [16]]), 4 * (64 + 64 + 256), 2 * 256 * 4),
        (call("aten::bmm", [[3, 8, 4], [3, 4, 16]]), 4 * (96 + 192 + 384), 2 * 384 * 4),
        (call("aten::gelu", [[100]]), 800, 100),
        (call("aten::add", [[10, 10], [10]]), 4 * (100 + 10 + 100), 100),
        (call("aten::view", [[100]]), 0, 0),
        (call("aten::sum", [[100]]), 400, 100),
        (call("aten::embedding", [[50_000, 8], [2, 3]], [F, "long int"]), 2 * 6 * 8 * 4 + 6 * 8, 0),
        (call("aten::_softmax", [[4, 4]], ["c10::BFloat16"]), 2 * 16 * 2, 16),
        (
            call("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], values=["", "", "", "[1, 1]", "[0, 0]", "[1, 1]"]),
            4 * (192 + 108 + 4 * 36),
            2 * 4 * 36 * 27,
        ),
        (
            call("aten::_scaled_dot_product_flash_attention", [[1, 2, 16, 8]] * 3, ["c10::Half"] * 3),
            4 * 256 * 2,
            4 * 256 * 16,
        ),
        (
            call(
                "aten::_scaled_dot_product_flash_attention",
                [[1, 2, 16, 8]] * 3 + [[], []],
                ["c10::Half"] * 3 + ["", ""],
                ["", "", "", "0.", "True"],
            ),
            4 * 256 * 2,
            2 * 256 * 16,
        ),
        (  # six ids of three bags, rows of 32 bytes
            call("aten::_embedding_bag", [[50_000, 8], [6], [3]], [F, "long int", "long int"]),
            (6 + 3) * 32 + 6 * 8,
            6 * 8,
        ),
        (
            call("aten::embedding_dense_backward", [[6, 8], [6], []], [F, "long int", "Scalar"], ["", "", "1000"]),
            6 * 32 + 6 * 8 + 1000 * 32,
            6 * 8,
        ),
        (call("aten::copy_", [[100], [100]]), 800, 0),
        (call("aten::mm", [[8, 4], [4, 16], [8, 16]]), 4 * (32 + 64 + 128), 2 * 8 * 16 * 4),  # compiled: mm(..., out=)
        (call("aten::nll_loss_forward", [[64, 1000], [64]], [F, "long int"]), 64 * 8 + 2 * 64 * 4, 64),
        (call("aten::gather", [[100, 8], [], [5, 8]], [F, "Scalar", "long int"]), 40 * 8 + 2 * 40 * 4, 40),
        (call("triton_poi_fused_add_0", [[100], [100], []], [F, "c10::BFloat16", "Scalar"]), 600, 100),
        (  # every other row and column is read
            call("aten::convolution", [[1, 2, 8, 8], [4, 2, 1, 1]], values=["", "", "", "[2, 2]", "[0, 0]", "[1, 1]"]),
            4 * (128 // 4 + 8 + 4 * 16),
            2 * 4 * 16 * 2,
        ),
        (call("aten::zero_", [[100]]), 400, 0),
    ],
)
def test_costs_follow_from_shapes(made, size_bytes, flops) -> None:
    cost = call_cost(made)
    assert (cost.size_bytes, cost.flops) == (size_bytes, flops)


@pytest.mark.parametrize(
    ("name", "lists", "size_bytes"),
    [
        ("_foreach_add_", 2, 4 * 90),  # both are read, the first is written
        ("_foreach_norm", 1, 4 * 30),
        ("_fused_adamw_", 4, 4 * (120 + 90)),  # gradients are read only
    ],
)
def test_lists_of_tensors_count_one_by_one(name, lists, size_bytes) -> None:
    cost = call_cost(call(f"aten::{name}", [[[10], [20]]] * lists, ["TensorList"] * lists))
    assert cost.size_bytes == size_bytes


def test_a_call_without_shapes_is_not_guessed() -> None:
    assert call_cost(call("aten::mystery", [])) is None


def test_convolution_shapes_know_stride_padding_and_transposition() -> None:
    values = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "True", "[0, 0]", "1"]
    cost = call_cost(call("aten::convolution", [[1, 4, 8, 8], [4, 6, 4, 4]], values=values))
    assert cost.size_bytes == 4 * (256 + 4 * 6 * 16 + 6 * 16 * 16)


def test_the_arithmetic_roof_depends_on_type_and_flags() -> None:
    product = [(call("aten::mm", [[8, 4], [4, 16]]), 1.0)]
    assert peak_key(product, tf32=False) == "fp32"
    assert peak_key(product, tf32=True) == "tf32"
    convolution = [(call("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]]), 1.0)]
    assert peak_key(convolution, tf32=False, tf32_conv=True) == "tf32"
    assert peak_key(convolution, tf32=True, tf32_conv=False) == "fp32"
    shapes, types = [[1, 2, 16, 8]] * 3 + [[1, 2, 16, 1]], ["c10::BFloat16"] * 3 + [F]
    assert peak_key([(call("aten::_scaled_dot_product_cudnn_attention", shapes, types), 1.0)], tf32=False) == "bf16"
    half = [(call("aten::mm", [[8, 4], [4, 16]], ["c10::BFloat16"] * 2), 1.0)]
    assert peak_key(half, tf32=False) == "bf16"
    assert peak_key([(call("aten::gelu", [[8]], ["c10::Half"]), 1.0)], tf32=True) == "fp32"
    assert peak_key([(call("aten::mm", [[8, 4], [4, 16]], ["double"] * 2), 1.0)], tf32=True) == "fp64"


def test_the_ridge_point_says_which_roof_binds() -> None:
    roof = roof_of(device_facts("h200"), running=True)
    memory, binding = floor_us(4.8e9, 1.0, roof, "fp32")
    assert (memory, binding) == (pytest.approx(1000.0), "memory")
    compute, binding = floor_us(1.0, 67e9, roof, "fp32")
    assert (compute, binding) == (pytest.approx(1000.0), "compute")
    assert floor_us(0, 0, roof, "fp32") == (0.0, "unknown")
    assert "not in this machine" in roof_of(device_facts("a100"), running=False).name


@pytest.mark.parametrize(
    ("percent", "median", "waiting", "expected"),
    [
        (80.0, 100.0, 0.0, "memory"),
        (5.0, 4.0, 0.6, "launch"),
        (5.0, 4.0, 0.1, "latency"),
        (5.0, 400.0, 0.6, "latency"),
        (None, 4.0, 0.6, "unknown"),
    ],
)
def test_classes(percent, median, waiting, expected) -> None:
    assert classify("memory", percent, median, waiting) == expected


def test_amdahls_bound() -> None:
    assert amdahl(100.0, 50.0) == pytest.approx(2.0)
    assert amdahl(100.0, 0.0) == pytest.approx(1.0)
    assert amdahl(100.0, 100.0) is None
    assert amdahl(0.0, 0.0) is None


def test_times_of_another_machine_are_not_held_against_its_roof() -> None:
    facts = {"total_us": 100.0, "all_us": 200.0, "median_us": 100.0, "cost": (1e6, 1e6), "floor": (10.0, "memory")}
    here = row_work(**facts, comparable=True)
    assert (here.percent_of_roof, here.attainable_speedup) == (pytest.approx(10.0), pytest.approx(200 / 110))
    there = row_work(**facts, comparable=False)
    assert (there.percent_of_roof, there.attainable_speedup, there.bound) == (None, None, "memory")
    assert there.floor_us.how == here.size_bytes.how == "estimated"


def test_quantiles() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(list(range(1, 101)), 0.95) == 95
