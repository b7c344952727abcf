"""Cheaper forms: where they are taken and where not, and that results stay as accurate as torch's."""

import re

import pytest
import torch
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants


class Weights(nn.Module):
    """Softmax and logsumexp over channels, scaled."""

    def forward(self, x):
        return torch.softmax(x * 3.0, 1), torch.logsumexp(x * 3.0, 1, keepdim=True)


class Gate(nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x) * torch.sigmoid(x), torch.exp(x) * 0.5


class DepthMean(nn.Module):
    """A mean over depth of what lies channels-last, with operands of each channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 40, (1, 1, 2))

    def forward(self, x):
        return torch.nn.functional.hardtanh(self.conv(x)).mean(2), self.conv(x).amax(2, keepdim=True)


def test_weights_take_the_short_exponential_and_one_division_for_a_row(check):
    compiled = check(Weights(), torch.randn(3, 37, 5, 7) * 4)
    assert "short_exp(" in compiled.source and "def exp(" not in compiled.source
    assert "* tl.div_rn(1.0, " in compiled.source


def test_weights_of_infinities_and_nan_are_those_of_torch(interpreter, graph_of):
    x = torch.randn(6, 5)
    x[0, 1], x[1, 1], x[3, 0], x[4, 2] = float("inf"), float("-inf"), float("nan"), 3e4
    x[2] = float("-inf")
    graph = graph_of(Weights(), x)
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    for got, expected in zip(outputs, Weights()(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_16_bits_take_short_forms(check, dtype):
    compiled = check(Gate(), torch.linspace(-11, 11, 512).to(dtype), factor=3.0)
    assert "short_silu(" in compiled.source and "short_sigmoid(" in compiled.source


def test_float32_and_exponentials_that_are_no_weights_keep_the_long_forms(check):
    compiled = check(Gate(), torch.linspace(-80, 80, 512))
    assert "short_" not in compiled.source


def test_exp_is_accurate_and_ends_where_floats_do(interpreter, graph_of):
    x = torch.cat([torch.linspace(-87, 88.7, 4001), torch.tensor([float("inf"), float("-inf"), float("nan"), 89.0])])
    graph = graph_of(Gate(), x)
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    truth = torch.exp(x.double()) * 0.5
    assert torch.equal(outputs[1][-4:].isnan(), x[-4:].isnan())
    assert outputs[1][-4:-2].tolist() == [float("inf"), 0.0]
    assert ((outputs[1].double() - truth) / truth)[:4001].abs().max() < 4 * 2.0**-24


def test_rows_beside_channels_follow_memory(check):
    compiled = check(DepthMean(), torch.randn(2, 3, 5, 3, 4))
    assert re.search(r"n_rows = .*shape\[1\]$", compiled.source, re.MULTILINE)
    check(DepthMean(), torch.randn(1, 3, 4, 1, 2))


class Gates(nn.Module):
    """Functions that share exp(-|x|), and those of 16-bit results."""

    def forward(self, x):
        soft, tanh = torch.nn.functional, torch.tanh
        return soft.logsigmoid(x), torch.sigmoid(x), soft.softplus(x), tanh(x), soft.gelu(x, approximate="tanh")


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 12.0), (torch.float16, 0.51)])
def test_gates_keep_their_relative_accuracy(interpreter, graph_of, dtype, units):
    """Each result, however small, to some units of round-off.

    What is below float16's range is not looked at, nor where GELU's own formula cancels in float64.
    """
    x = torch.cat([torch.linspace(-60, 60, 3001), torch.linspace(-2, 2, 3001), torch.logspace(-7, 0, 500)]).to(dtype)
    (outputs,) = interpreter.run(compile_graph(g := graph_of(Gates(), x), variants(g)[0]).source, {}, [[x]])
    smallest = [1e-30] * 4 + [0.3] if dtype == torch.float32 else [2.0**-14] * 5
    for got, truth, least in zip(outputs, Gates()(x.double()), smallest, strict=True):
        seen = truth.abs() > least
        error = ((got.double() - truth) / truth.abs())[seen].abs().max()
        assert error <= units * torch.finfo(dtype).eps


def test_gates_end_as_those_of_torch(interpreter, graph_of):
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 200.0, -200.0])
    (outputs,) = interpreter.run(compile_graph(g := graph_of(Gates(), x), variants(g)[0]).source, {}, [[x]])
    for got, expected in zip(outputs, Gates()(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_divisors_of_many_elements_and_constants_are_inverted(check):
    class Quotients(nn.Module):
        def forward(self, x, y):
            return x / 30.0 + x / (-2.0), x / (y.square().sum(-1, keepdim=True).sqrt() + 1e-6), x / y

    compiled = check(Quotients(), torch.randn(5, 37), torch.randn(5, 37))
    assert "x * (1.0 / 30.0)" in compiled.source
    assert compiled.source.count("* tl.div_rn(1.0, ") == 1
    zero = torch.zeros(2, 3)
    check(Quotients(), torch.randn(4, 9).half(), torch.rand(4, 9).half() + 0.5, calls=[[zero.half(), zero.half() + 1]])


class Divergence(nn.Module):
    """The divergence of two softmaxes."""

    def forward(self, x, y):
        logs = torch.log_softmax(x / 2.0, -1)
        return torch.nn.functional.kl_div(logs, torch.softmax(y / 2.0, -1), reduction="batchmean")


def test_the_logarithm_of_a_softmax_is_one_for_a_row(check, interpreter, graph_of):
    x, y = torch.randn(5, 70), torch.randn(5, 70) * 3
    compiled = check(Divergence(), x, y, calls=[[x * 9, y * 9]])
    assert "tl.log(probability)" not in compiled.source
    y[1, 3] = y[2, 6] = float("-inf")
    (outputs,) = interpreter.run(compiled.source, {}, [[x, y]])
    torch.testing.assert_close(outputs[0], Divergence()(x, y))


def test_rows_that_need_just_too_many_registers_are_bounded(graph_of):
    def limits(columns):
        graph = graph_of(Divergence(), torch.zeros(200, columns), torch.zeros(200, columns))
        return ["maxnreg=64" in compile_graph(graph, variant).source for variant in variants(graph)[:2]]

    assert limits(8192) == [True, False]
    assert limits(1024) == [False, False]
