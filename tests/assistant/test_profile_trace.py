from __future__ import annotations

import json

import pytest
from profile_events import gpu_events, gpu_step, host, kernel, launch, op, step

from drk.assistant.errors import UsageError
from drk.assistant.profile_trace import analyse, read_events


def by_name(trace):
    return {piece.name: piece for piece in trace.slices if piece.step == 0}


def test_kernels_belong_to_the_module_and_line_that_launched_them() -> None:
    trace = analyse(gpu_events(1))
    found = by_name(trace)
    assert trace.on_device
    assert [(found[name].module, found[name].line, found[name].phase) for name in ("gemm", "gelu_kernel")] == [
        (1, 0, "forward"),
        (0, 1, "forward"),
    ]
    assert found["gemm"].op == "aten::addmm"
    assert [number for number, _ in found["gemm"].calls] == [0, 1]
    assert found["gemm"].launch.grid == (64, 1, 1)
    assert found["gemm"].launch.registers == 32


def test_backward_takes_module_and_line_of_its_forward_operator() -> None:
    found = by_name(analyse(gpu_events(1)))
    assert (found["gelu_grad"].module, found["gelu_grad"].line, found["gelu_grad"].phase) == (0, 1, "backward")
    assert (found["gemm_grad"].module, found["gemm_grad"].line) == (1, 0)


def test_backward_of_a_later_step_refers_to_that_step() -> None:
    # sequence numbers come again when a program resets its graph: the latest forward before counts
    events = [*gpu_step(0, 0, 0), *gpu_step(200, 0, 100)]
    pieces = [piece for piece in analyse(events).slices if piece.name == "gemm_grad"]
    assert len({piece.calls[0][1] for piece in pieces}) == 2


def test_steps_are_those_of_the_root_that_is_asked_for() -> None:
    events = [*gpu_events(3), host("drk|s|9|0", 1001, 0.1)]
    trace = analyse(events, root=0)
    assert [number for number, _ in trace.step_starts] == [0, 1, 2]
    assert {piece.step for piece in trace.slices} == {0, 1, 2}


def test_the_recorders_own_work_is_left_out() -> None:
    events = [
        step(0, 0),
        host("drk|own", 1, 10),
        op("aten::min", 2, 5, [[4]]),
        launch(1, 3),
        kernel("minimum", 1, 5, 3),
        op("aten::add", 20, 5, [[4], [4]]),
        launch(2, 21),
        kernel("add", 2, 30, 3),
    ]
    assert [(piece.name, piece.op) for piece in analyse(events).slices] == [("add", "aten::add")]


def test_a_kernel_whose_launch_was_not_seen_is_still_counted() -> None:
    trace = analyse([step(0, 0), kernel("replayed", 77, 5, 3)])
    assert [(piece.name, piece.line, piece.calls) for piece in trace.slices] == [("replayed", None, ())]


def test_a_triton_launch_without_an_operator_belongs_to_its_module() -> None:
    events = [step(0, 0), host("drk|m|0", 1, 10), host("drk|l|5", 2, 8), launch(1, 3), kernel("mine", 1, 8, 4)]
    (piece,) = analyse(events).slices
    assert (piece.module, piece.line, piece.op) == (0, 5, "kernel")
    assert piece.works == ()


def test_operators_on_the_cpu_sum_to_the_time_that_was_spent_in_them() -> None:
    events = [
        step(0, 0),
        host("drk|m|0", 1, 100),
        host("drk|l|3", 2, 60),
        op("aten::linear", 3, 50, [[8, 4], [4, 4], [4]]),
        op("aten::t", 4, 5, [[4, 4]]),
        op("aten::addmm", 10, 40, [[4], [8, 4], [4, 4]]),
        op("aten::expand", 11, 2, [[4]]),
        op("aten::copy_", 14, 4, [[8, 4], [8, 4]]),
        host("drk|l|4", 70, 20),
        op("aten::relu", 71, 18, [[8, 4]]),
    ]
    trace = analyse(events)
    assert not trace.on_device
    assert [(piece.name, piece.duration_us, piece.line) for piece in trace.slices] == [
        ("aten::linear", 50, 3),
        ("aten::relu", 18, 4),
    ]
    assert [call.name for call, _ in trace.slices[0].works] == ["aten::addmm"]  # views and its own copies are no work


def test_recomputed_forwards_inside_backward_belong_to_their_own_module() -> None:
    events = [
        step(0, 0),
        op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 10, 100, sequence=5),
        op("CheckpointFunctionBackward", 11, 98),
        host("drk|m|4", 20, 40),
        host("drk|l|7", 21, 30),
        op("aten::gelu", 22, 20, [[8]]),
    ]
    found = {piece.name: piece for piece in analyse(events).slices}
    assert (found["aten::gelu"].module, found["aten::gelu"].line) == (4, 7)
    assert found["aten::gelu"].duration_us == 20
    assert found["CheckpointFunctionBackward"].duration_us == pytest.approx(100 - 40)


def test_gradient_accumulation_belongs_to_the_operator_before_it() -> None:
    events = [
        step(0, 0),
        host("drk|m|0", 1, 10),
        op("aten::mul", 2, 5, [[4], [4]], sequence=3),
        op("autograd::engine::evaluate_function: MulBackward0", 20, 5, sequence=3),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 26, 5),
    ]
    found = {piece.name: piece for piece in analyse(events).slices}
    assert found["AccumulateGrad"].module == 0
    assert found["MulBackward0"].phase == "backward"


def test_convolutions_are_described_by_their_general_form() -> None:
    events = [
        step(0, 0),
        op("aten::conv2d", 1, 50, [[1, 3, 8, 8], [4, 3, 3, 3]]),
        op("aten::convolution", 2, 48, [[1, 3, 8, 8], [4, 3, 3, 3]], values=["", "", "", "[1, 1]", "[0, 0]", "[1, 1]"]),
        op("aten::_convolution", 3, 46, [[1, 3, 8, 8], [4, 3, 3, 3]]),
        op("aten::mkldnn_convolution", 4, 44, [[1, 3, 8, 8], [4, 3, 3, 3]]),
        op("aten::empty", 5, 1, []),
    ]
    (piece,) = analyse(events).slices
    assert [call.name for call, _ in piece.works] == ["aten::convolution"]


def test_malformed_files_are_told(tmp_path) -> None:
    path = tmp_path / "trace.json"
    for text in ("", "[]", "{}", '{"traceEvents": [1]}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="cannot be read"):
            read_events(path)
    path.write_text(json.dumps({"traceEvents": [{"ph": "M"}, *gpu_events(1)]}))
    assert len(read_events(path)) == len(gpu_events(1))
    with pytest.raises(UsageError, match="cannot be read"):
        read_events(tmp_path / "absent.json")


def test_a_kernel_without_a_launch_goes_by_its_operators_external_id() -> None:
    events = [step(0, 0), host("drk|m|3", 1, 10), op("aten::add", 2, 5, [[4], [4]], **{"External id": 8})]
    events.append(kernel("add", 5, 4, 3) | {"args": {"External id": 8}})
    (piece,) = analyse(events).slices
    assert (piece.op, piece.module) == ("aten::add", 3)


def test_of_several_gpus_the_busiest_is_shown() -> None:
    here, there = kernel("here", 1, 5, 3), kernel("there", 2, 5, 30)
    there["args"]["device"], here["args"]["device"] = 1, 0
    trace = analyse([step(0, 0), here, there])
    assert trace.devices == (1, 0)
    assert [piece.name for piece in trace.slices] == ["there"]


def test_backward_in_its_own_thread_without_a_forward_belongs_to_the_call_of_backward() -> None:
    events = [
        step(0, 0),
        host("drk|l|6", 10, 50),
        op("autograd::engine::evaluate_function: ReduceBackward", 20, 9, thread=2),
        op("aten::add", 21, 5, [[4], [4]], thread=2),
        launch(1, 22, thread=2),
        kernel("add", 1, 30, 3),
        op("autograd::engine::evaluate_function: LateBackward", 80, 9, thread=2),
        op("aten::mul", 81, 5, [[4], [4]], thread=2),
        launch(2, 82, thread=2),
        kernel("mul", 2, 90, 3),
    ]
    assert [(piece.name, piece.line) for piece in analyse(events).slices] == [("add", 6), ("mul", None)]


def test_an_optimizers_kernels_know_its_name() -> None:
    events = [
        step(0, 0),
        host("drk|l|2", 1, 50),
        host("Optimizer.step#AdamW.step", 2, 40, "user_annotation"),
        op("aten::_foreach_add_", 3, 5, [[[4], [4]]]),
        launch(1, 4),
        kernel("multi_tensor", 1, 9, 3),
    ]
    (piece,) = analyse(events).slices
    assert (piece.part, piece.phase, piece.line, piece.calls) == ("AdamW.step", "other", 2, ())


def test_attention_is_costed_by_the_operator_whose_shapes_have_a_known_order() -> None:
    heads, tokens = [[2, 12, 64, 32]] * 3, [[2, 64, 12, 32]] * 3
    events = [
        step(0, 0),
        op("aten::scaled_dot_product_attention", 1, 20, heads),
        op("aten::_scaled_dot_product_flash_attention", 2, 18, heads),
        op("aten::_flash_attention_forward", 3, 15, tokens),
        launch(1, 4),
        kernel("flash_fwd", 1, 9, 3),
    ]
    (piece,) = analyse(events).slices
    assert piece.works[0][0].name == "aten::_scaled_dot_product_flash_attention"
