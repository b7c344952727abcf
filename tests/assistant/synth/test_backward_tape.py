"""The tape: what is computed again, how gradients that do not vary are summed, divided and viewed."""

import pytest

from drk.assistant.synth.backward_tape import Tape
from drk.assistant.synth.draft import contiguous_meta
from drk.gym.graph import Node, Ref


def make(forward=(), given=(), **shapes):
    metas = {name: contiguous_meta(shape, "float32") for name, shape in shapes.items()}
    metas |= {node.name: node.meta for node in forward}
    return Tape({node.name: node for node in forward}, metas, {name: name for name in metas}, frozenset(given))


def ops(tape):
    return [node.bare_op for node in tape.draft.nodes]


def node(name, op, *args, shape, dtype="float32"):
    return Node(name, f"aten.{op}", args, metas=(contiguous_meta(shape, dtype),))


def test_elementwise_values_are_computed_again_once_and_others_read():
    forward = [
        node("y", "exp.default", Ref("x"), shape=(4, 6)),
        node("z", "mul.Tensor", Ref("y"), 2.0, shape=(4, 6)),
        node("total", "sum.dim_IntList", Ref("z"), (-1,), True, shape=(4, 1)),
    ]
    tape = make(forward, given=["x"], x=(4, 6))
    assert tape.value(Ref("z")) == tape.value(Ref("z")) == Ref("z")
    assert tape.value(Ref("total")) == Ref("total")
    assert tape.value(3.0) == 3.0
    assert ops(tape) == ["exp", "mul"]


def test_half_precision_is_widened_once_and_rounded_without_detour():
    tape = Tape({}, {"x": contiguous_meta((4,), "bfloat16")}, {"x": "x"}, frozenset(["x"]))
    wide = tape.value(Ref("x"))
    assert tape.draft.metas[wide.name].dtype == "float32"
    assert tape.value(Ref("x")) == wide
    assert tape.narrow(wide, "bfloat16") == Ref("x")
    assert tape.widen(Ref("x")) == wide


@pytest.mark.parametrize(
    ("own", "seen", "wanted", "expected"),
    [
        ((4, 6), (4, 6), (6,), ["sum"]),
        ((4, 6), (4, 6), (4, 1), ["sum"]),
        ((2, 4, 6), (2, 4, 6), (1, 6), ["sum", "reshape"]),
        ((), (4, 6), (6,), ["mul"]),
        ((6,), (4, 6), (6,), ["mul"]),
        ((4, 1), (4, 6), (6,), ["sum"]),
        ((4, 6), (4, 6), (4, 6), []),
        ((4, 6), (4, 6), (), ["sum"]),
    ],
)
def test_sums_over_what_was_repeated(own, seen, wanted, expected):
    tape = make(g=own)
    result = tape.summed(Ref("g"), seen, wanted)
    assert ops(tape) == expected
    shape = tape.shape(result)
    assert len(shape) <= len(wanted)
    assert all(size in (1, full) for size, full in zip(shape[::-1], wanted[::-1], strict=False))


def test_a_sum_that_is_divided_by_its_count_is_a_mean():
    tape = make(g=(4, 6), x=(4, 6))
    total = tape.emit("sum.dim_IntList", Ref("g"), (-1,), True)
    scaled = tape.emit("mul.Tensor", tape.emit("neg.default", total), 0.5)
    result = tape.divided(scaled, (4, 6), (1,))
    made = tape.maker(result)
    assert made is not None
    assert made.bare_op == "mul"
    assert ops(tape)[-3:] == ["mean", "neg", "mul"]
    tape.divided(scaled, (4, 6), (0,))
    assert ops(tape)[-1] == "share"


def test_views_are_taken_of_what_is_read():
    tape = make(g=(4,), mask=(4,))
    chain = tape.emit("mul.Tensor", tape.zeroed(Ref("g"), tape.emit("eq.Scalar", Ref("mask"), 0.0)), 2.0)
    result = tape.spread(chain, (4, 1))
    assert tape.shape(result) == (4, 1)
    views = [item.args[0].name for item in tape.draft.nodes if item.bare_op == "reshape"]
    assert sorted(views) == ["g", "mask"]
