"""Patches of images and images of patches, against float64 under the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants


def test_patches_of_an_image(check):
    module = Function(lambda _, x: F.unfold(x, 3, padding=1))
    x = torch.randn(2, 3, 8, 9)
    compiled = check(module, x, calls=[[torch.randn(1, 5, 4, 6)], [x.to(memory_format=torch.channels_last)]])
    assert (compiled.launches, len(compiled.kernels)) == (1, 1)
    check(Function(lambda _, x: F.unfold(x, (2, 3), stride=(1, 2), dilation=2).relu()), torch.randn(3, 7, 9).half())


def test_overlapping_patches_are_added_up(check):
    module = Function(lambda _, x: F.fold(x, (8, 9), (3, 2), padding=1, stride=(2, 1)))
    x = torch.randn(2, 12, 40)
    compiled = check(module, x, calls=[[torch.randn(1, 18, 40)], [x.transpose(1, 2).contiguous().transpose(1, 2)]])
    assert (compiled.launches, len(compiled.kernels)) == (1, 1)
    check(Function(lambda _, x: F.fold(x, 8, 4, stride=4)), torch.randn(32, 4).bfloat16())


def test_another_number_of_windows_is_refused(interpreter, graph_of):
    module = Function(lambda _, x: F.fold(x, (8, 8), 2, stride=2))
    graph = graph_of(module, torch.randn(2, 12, 16))
    source = compile_graph(graph, variants(graph)[0]).source
    with pytest.raises(AssertionError, match="more or fewer windows"):
        interpreter.run(source, {}, [[torch.randn(2, 12, 15)]])


def test_special_values_come_through(interpreter, graph_of):
    x = torch.randn(1, 2, 5, 5)
    x[0, 0, 0, 0], x[0, 1, 2, 2], x[0, 1, 4, 4] = float("nan"), float("inf"), float("-inf")
    module = Function(lambda _, x: (F.unfold(x, 3, padding=1), F.fold(F.unfold(x, 3, padding=1), (5, 5), 3, padding=1)))
    graph = graph_of(module, x)
    (got,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    for left, right in zip(got, module(x), strict=True):
        torch.testing.assert_close(left, right, equal_nan=True)


def test_patches_compile_for_hopper(graph_of, offline_compile):
    module = Function(lambda _, x: F.fold(F.unfold(x, 3, padding=1), (32, 32), 3, padding=1))
    graph = graph_of(module, torch.randn(2, 8, 32, 32))
    kernels = offline_compile(compile_graph(graph, variants(graph)[0]).source, [2, 8, 32, 32])
    assert [kernel["spill_bytes"] for kernel in kernels] == [0, 0]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_window(check, data):
    def pair(most, least=1):
        return tuple(data.draw(st.integers(least, most)) for _ in range(2))

    window = {"kernel_size": pair(3), "dilation": pair(2), "padding": pair(2, 0), "stride": pair(3)}
    size = tuple(5 + edge for edge in pair(4, 0))

    def forward(_, x):
        patches = F.unfold(x, **window)
        return patches * 2, F.fold(patches, size, **window)

    check(Function(forward), torch.randn(2, 3, *size))
