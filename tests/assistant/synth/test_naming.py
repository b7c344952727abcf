"""Names of values: unique, readable, and never what kernels and launchers call their own."""

import pytest
import torch
from modules import Function

from drk.assistant.synth.naming import NameTable


def test_names_of_kernels_are_not_handed_out():
    table = NameTable()
    assert [table.claim(name) for name in ("row", "row_1", "size", "k", "result_2", "mask", "x", "x")] == [
        "row_value", "row_1_value", "size_value", "k_value", "result_2_value", "mask_1", "x", "x_1",
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 5)])
def test_a_module_may_call_its_tensors_like_indices(check, shape):
    row, col = torch.randn(shape), torch.randn(shape[-1])
    check(Function(lambda _, row, col: torch.softmax(row * col + row.mean(-1, keepdim=True), -1)), row, col)
