"""The order of an answer: what stands where, what is numbered, and that nothing is computed differently."""

from __future__ import annotations

import ast
import re

from drk.training.answer_order import function_names, in_order

ANSWER = '''"""silu_norm: norm = mean(square(silu(x + bias)))"""

import torch
import triton
import triton.language as tl


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_norm_kernel(x_ptr, bias_ptr, out_norm_1_ptr, n_rows, n_cols, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK)
    col_mask = cols[None, :] < n_cols
    x = tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :], mask=col_mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols[None, :], mask=col_mask, other=0.0)
    gate = silu(x + bias)
    norm_1 = tl.sum(tl.where(col_mask, gate * gate, 0.0), axis=1)[:, None] / n_cols
    tl.store(out_norm_1_ptr + rows[:, None], 2.0 * norm_1 + float("inf"))


def silu_norm(x, bias):
    out_norm_1 = x.new_empty((x.shape[0], 1))
    silu_norm_kernel[(x.shape[0],)](x, bias, out_norm_1, x.shape[0], x.shape[1], INDEX=tl.int32, BLOCK=16)
    return out_norm_1


class ModelNew(torch.nn.Module):
    def __init__(self, silu_norm: int) -> None:
        super().__init__()
        self.silu_norm = silu_norm

    def forward(self, x, bias):
        shifted = x.add(self.silu_norm)
        norm_1 = silu_norm(shifted, bias)
        return norm_1
'''


def kernel_lines(text: str) -> list[str]:
    node = next(one for one in ast.parse(text).body if getattr(one, "name", "") == "fused_1_kernel")
    return [line.strip() for line in text.splitlines()[node.lineno : node.end_lineno]]


def test_what_can_be_copied_comes_first_and_device_functions_last() -> None:
    made = in_order(ANSWER)
    names = [node.name for node in ast.parse(made).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert names == ["ModelNew", "fused_1", "fused_1_kernel", "silu"]
    assert made.startswith("import torch\nimport triton\nimport triton.language as tl\n\n\nclass ModelNew")
    assert "square(silu" not in made, "no formula ahead"


def test_operations_stand_alone_in_the_order_of_evaluation() -> None:
    lines = kernel_lines(in_order(ANSWER))
    assert lines[-9:] == [
        "t1 = x + bias",
        "t2 = silu(t1)",
        "t3 = t2 * t2",
        "t4 = tl.where(col_mask, t3, 0.0)",
        "t5 = tl.sum(t4, axis=1)[:, None]",
        "t6 = t5 / n_cols",
        "t7 = 2.0 * t6",
        "t8 = t7 + float('inf')",
        "tl.store(out_v2_ptr + rows[:, None], t8)",
    ]
    assert lines[0].startswith("rows = tl.program_id(0).to(INDEX) * BLOCK"), "indices stay"


def test_functions_and_values_are_numbered_and_the_constructor_is_left_alone() -> None:
    made = in_order(ANSWER)
    assert function_names(ast.parse(ANSWER)) == {"silu_norm_kernel": "fused_1_kernel", "silu_norm": "fused_1"}
    assert "self.silu_norm = silu_norm" in made
    assert "v1 = x.add(self.silu_norm)\n        v2 = fused_1(v1, bias)\n        return v2" in made
    assert not re.search(r"norm_1|shifted", made)
    assert "fused_1_kernel[(x.shape[0],)](x, bias, out_v2" in made


def test_names_that_are_taken_are_not_given_again() -> None:
    source = ANSWER.replace("bias", "t1").replace("shifted", "v2")
    made = in_order(source)
    assert "t2 = x + t1" in kernel_lines(made)
    forward = made[made.index("def forward") : made.index("def fused_1")]
    assert len(set(re.findall(r"\bv\d+\b", forward))) == 2
