"""Rows walked in blocks by one program each, against float64; infinities and NaN as PyTorch has them."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each

from drk.assistant.synth import long_rows

INFINITE, NAN = float("inf"), float("nan")


@pytest.fixture
def looped(monkeypatch):
    """Rows of every length are walked, so that small tensors test it."""
    monkeypatch.setattr(long_rows, "MAX_REGISTERS", 0)


def loops(compiled):
    """How many walks each kernel takes."""
    return [kernel.kernel.count("for start in range") for kernel in compiled.kernels]


REDUCTIONS = [
    lambda _, x: x.sum(-1) * 2,
    lambda _, x: x.mean(-1, keepdim=True),
    lambda _, x: x.amax(-1) + x.amin(-1),
    lambda _, x: x.var(-1),
    lambda _, x: (x * 0.01 + 1).prod(1),
    lambda _, x: x.norm(dim=1),
    lambda _, x: x / x.abs().sum(1, keepdim=True),
    lambda _, x: F.softmax(x * 3, -1),
    lambda _, x: F.log_softmax(x, -1),
    lambda _, x: torch.logsumexp(x, -1),
    lambda _, x: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-5),
    lambda _, x: torch.exp(x - x.amax(-1, keepdim=True)).mean(-1),
    lambda _, x: -(F.softmax(x, -1) * F.log_softmax(x, -1)).sum(-1),
]
WALKS = [1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 2, 1, 2]


@pytest.mark.usefixtures("looped")
def test_reductions_agree_with_float64_and_take_few_walks(check):
    def rows(*shape):
        return [torch.randn(shape) + 1 for _ in REDUCTIONS]

    calls = [rows(3, 4096), rows(70, 37), rows(1, 1), rows(2, 2049)]
    compiled = check(Each(REDUCTIONS), *rows(2, 5000), calls=calls[:2], factor=4.0)
    assert loops(compiled) == WALKS
