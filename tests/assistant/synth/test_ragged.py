"""Bags of rows of different lengths, against float64 under the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants

OFFSETS = torch.tensor([0, 5, 5, 8, 45])
"""Ends of bags; one is empty, one longer than what a program loads at a time."""


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
def test_combined_rows(check, mode, padding):
    def forward(s, ids, offsets):
        open_end = F.embedding_bag(ids, s.table, offsets, mode=mode, padding_idx=padding)
        whole = {"mode": mode, "padding_idx": padding, "include_last_offset": True}
        return open_end * 2, F.embedding_bag(ids, s.table, offsets, **whole)

    module = Function(forward, table=torch.randn(6, 21))
    ids = torch.randint(0, 6, (45,))
    ids[5:8] = 1
    compiled = check(module, ids, OFFSETS, calls=[[ids[:5], OFFSETS[:3]]])
    assert "torch.ops.aten.embedding_bag" not in compiled.source


def test_weights_narrow_types_and_short_integers(check):
    module = Function(
        lambda s, i, o, w: F.embedding_bag(i, s.table, o, mode="sum", per_sample_weights=w), table=torch.randn(6, 40)
    )
    check(module, torch.randint(0, 6, (45,)), OFFSETS, torch.randn(45))
    ids = torch.randint(0, 6, (45,), dtype=torch.int32)
    check(module.half(), ids, OFFSETS.int(), torch.randn(45).half())


def test_rows_outside_count_as_zeros_and_special_values_come_through(interpreter, graph_of):
    module = Function(lambda s, i, o: F.embedding_bag(i, s.table, o, mode="sum"), table=torch.ones(6, 3))
    with torch.no_grad():
        module.table[2, 0], module.table[3, 1] = float("nan"), float("inf")
    ids = torch.tensor([0, 2, 3, 5, 1])
    graph = graph_of(module, ids, OFFSETS[:2])
    source = compile_graph(graph, variants(graph)[0]).source
    bad = torch.tensor([0, 6, -1, 2**40, 1])
    calls = [[ids, torch.tensor([0, 3])], [bad, torch.tensor([0, 2])], [ids[:0], torch.zeros(1, dtype=torch.int64)]]
    (special,), (outside,), (none,) = interpreter.run(source, module.state_dict(), calls)
    torch.testing.assert_close(special, module(*calls[0]), equal_nan=True)
    torch.testing.assert_close(outside, torch.ones(2, 3))
    assert none.eq(0).all()


def test_bags_compile_for_hopper(graph_of, offline_compile):
    def forward(s, ids):
        return F.embedding_bag(ids.reshape(-1) + 0, s.table, ids[:, 0], mode="mean")

    graph = graph_of(Function(forward, table=torch.randn(50, 300)), torch.zeros(4, 9, dtype=torch.int64))
    source = compile_graph(graph, variants(graph)[0]).source
    kernels = [item for item in offline_compile(source, [4, 9], "int64") if "bag" in item["name"]]
    assert [kernel["spill_bytes"] for kernel in kernels] == [0]
