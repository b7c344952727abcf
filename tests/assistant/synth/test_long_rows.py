"""Rows walked in blocks by one program each, against float64; infinities and NaN as PyTorch has them."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function

from drk.assistant.synth import long_rows
from drk.assistant.synth.propose import compile_graph, variants

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


def rows_with_infinities(columns):
    x = torch.randn(11, columns) * 20
    x[0] = -INFINITE
    x[1, : columns - 1] = -INFINITE
    x[2, 1:] = -INFINITE
    x[3, columns // 2] = INFINITE
    x[4, columns - 1] = NAN
    x[5, 0] = NAN
    x[6] = -INFINITE
    x[6, 1] = NAN
    x[7, 0], x[7, columns - 1] = INFINITE, -INFINITE
    x[8] = INFINITE
    x[9, 2], x[9, columns - 2] = NAN, INFINITE
    return x


@pytest.mark.parametrize("columns", [4096, 5001])
@pytest.mark.usefixtures("looped")
def test_infinities_and_nan_are_those_of_pytorch(interpreter, graph_of, columns):
    module = Function(
        lambda _, x: (
            torch.logsumexp(x, -1),
            F.softmax(x, -1)[:, ::97] * 1.0,
            F.log_softmax(x, -1).amax(-1),
            x.amax(-1, keepdim=True),
            torch.exp(x - x.amax(-1, keepdim=True)).mean(-1),
        )
    )
    x = rows_with_infinities(columns)
    compiled = compile_graph(graph := graph_of(module, x), variants(graph)[0])
    (outputs,) = interpreter.run(compiled.source, {}, [[x]])
    for got, expected in zip(outputs, module(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_logsumexp_of_infinities_in_registers_and_in_pieces(interpreter, graph_of):
    for rows, kind in ((rows_with_infinities(70), "row"), (rows_with_infinities(9000), "split")):
        module = Function(lambda _, x: torch.logsumexp(x, -1))
        compiled = compile_graph(graph := graph_of(module, rows), variants(graph)[0])
        assert [region.kind for region in compiled.regions] == [kind]
        ((got,),) = interpreter.run(compiled.source, {}, [[rows]])
        torch.testing.assert_close(got, module(rows), equal_nan=True)
