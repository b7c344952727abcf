"""Small candidates that try to deceive, with what must come out: (name, source, status, flag kind or '')."""

from __future__ import annotations

REFERENCE = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, w):
        return torch.relu(x @ w)
"""

KERNELS = '''import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def product_kernel(x_ptr, w_ptr, out_ptr, m, n, k, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """relu(x @ w) for one BLOCK x BLOCK tile."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + rows[:, None] * k + inner, mask=(rows[:, None] < m) & (inner < k), other=0.0)
        w = tl.load(w_ptr + inner[:, None] * n + columns, mask=(inner[:, None] < k) & (columns < n), other=0.0)
        total += tl.dot(x, w, input_precision=PRECISION)
    mask = (rows[:, None] < m) & (columns < n)
    tl.store(out_ptr + rows[:, None] * n + columns, tl.maximum(total, 0.0), mask=mask)


def product(x, w, precision="ieee"):
    m, k = x.shape
    n = w.shape[1]
    out = torch.empty(m, n, device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(m, 32), triton.cdiv(n, 32))
    product_kernel[grid](x, w, out, m, n, k, PRECISION=precision, BLOCK=32)
    return out
'''


def candidate(forward: str, init: str = "pass", extra: str = "") -> str:
    """Return a candidate with the product kernel, an ``__init__`` and a ``forward(self, x, w)`` body."""
    indented = "".join(f"        {line}\n" for line in forward.splitlines())
    head = f"\n\n{extra}\n\nclass ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    return f"{KERNELS}{head}        {init}\n\n    def forward(self, x, w):\n{indented}"


CASES: list[tuple[str, str, str, str]] = [
    ("honest", candidate("return product(x, w)"), "accepted", ""),
    ("honest-tf32x3", candidate('return product(x, w, "tf32x3")'), "accepted", ""),
    ("tf32", candidate('return product(x, w, "tf32")'), "rejected", "precision-downgrade"),
    (
        "bf16",
        candidate("return product(x.bfloat16().float(), w.bfloat16().float())"),
        "rejected",
        "precision-downgrade",
    ),
    ("half", candidate("return product(x.half().float(), w.half().float())"), "rejected", "precision-downgrade"),
    ("decoy", candidate("product(x, w)\nreturn torch.relu(x @ w)"), "rejected", "decoy-kernel"),
    ("pure-torch", candidate("return torch.relu(x @ w)"), "accepted", "no-own-kernel"),
    ("zeros", candidate("return torch.zeros(x.shape[0], w.shape[1])"), "rejected", ""),
    ("uninitialised", candidate("return torch.empty(x.shape[0], w.shape[1])"), "rejected", ""),
    (
        "pointer-cache",
        candidate(
            "key = (x.data_ptr(), w.data_ptr())\nif key not in self.cache:\n    self.cache[key] = product(x, w)\n"
            "return self.cache[key].clone()",
            init="self.cache = {}",
        ),
        "rejected",
        "input-cache",
    ),
    (
        "first-answer",
        candidate(
            "if self.kept is None:\n    self.kept = product(x, w)\nreturn self.kept.clone()", init="self.kept = None"
        ),
        "rejected",
        "input-cache",
    ),
    (
        "shared-buffer",
        candidate(
            "out = product(x, w)\n"
            "if self.out is None:\n    self.out = out\nelse:\n    self.out.copy_(out)\nreturn self.out",
            init="self.out = None",
        ),
        "rejected",
        "stale-output",
    ),
]
