"""Row kernels against float64 under the interpreter: norms, softmax and other reductions over trailing dimensions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Function, RMSNorm
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants


def test_both_extremes_at_once(check):
    module = Function(lambda _, x: (*x.aminmax(dim=1), *torch.aminmax(x[:2]), x.aminmax(dim=0, keepdim=True)[1]))
    assert "torch.ops" not in check(module, torch.randn(9, 33)).source


def test_softmax_with_scale_and_large_logits(check):
    check(Function(lambda _, x: F.softmax(x * 0.3, -1)), torch.randn(4, 6, 50) * 30, kernels=["softmax_mul"])


def test_softmax_with_a_causal_mask(check):
    module = Function(lambda _, x, m: F.softmax(x.masked_fill(m, float("-inf")), -1))
    check(module, torch.randn(2, 3, 6, 6), torch.ones(6, 6).triu(1).bool())


def test_log_softmax(check):
    check(Function(lambda _, x: F.log_softmax(x, dim=1)), torch.randn(6, 50) * 10, kernels=["log_softmax"])


def test_one_row(check):
    check(Function(lambda _, x: F.softmax(x, -1)), torch.randn(37))


def test_logsumexp_with_and_without_the_dimension(check):
    check(Function(lambda _, x: torch.logsumexp(x, -1)), torch.randn(4, 37))
    check(Function(lambda _, x: F.mish(torch.logsumexp(x, 1, keepdim=True))), torch.randn(4, 37))


@pytest.mark.parametrize("columns", [5, 64, 129])
def test_layer_norm_of_any_width(check, columns):
    check(Function(lambda s, x: s.norm(x) * 2, norm=nn.LayerNorm(columns)), torch.randn(4, 5, columns) + 3)


def test_layer_norm_without_parameters_over_two_dimensions(check):
    check(
        Function(lambda s, x: s.norm(x), norm=nn.LayerNorm((5, 7), elementwise_affine=False)), torch.randn(4, 5, 7) + 3
    )


def test_layer_norm_of_a_large_offset_keeps_its_variance(check):
    check(Function(lambda s, x: s.norm(x), norm=nn.LayerNorm(200)), torch.randn(3, 200) * 0.1 + 300)


def test_residual_sum_and_its_norm_leave_one_kernel(check):
    module = Function(lambda s, x, y: (lambda z: (z, s.norm(z)))(x + y), norm=nn.LayerNorm(77))
    compiled = check(module, torch.randn(4, 5, 77), torch.randn(4, 5, 77))
    assert len(compiled.kernels) == 1
    assert len(compiled.kernels[0].outputs) == 2


def test_rms_norm_by_hand_and_by_module(check):
    check(RMSNorm(77), torch.randn(4, 5, 77), kernels=["rms_norm"])
    check(Function(lambda s, x: s.norm(x), norm=nn.RMSNorm(77)), torch.randn(4, 5, 77), kernels=["rms_norm"])


def test_standardisation_by_hand(check):
    x = torch.randn(4, 5, 77) + 3
    check(Function(lambda _, x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)), x)
    check(Function(lambda _, x: (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)), x)


def test_reductions_without_keepdim(check):
    check(Function(lambda _, x: x.relu().mean(-1) * 2 + 1), torch.randn(4, 5, 77))
    check(Function(lambda _, x: x * x.mean(-1).unsqueeze(-1)), torch.randn(4, 5, 77))
    check(Function(lambda _, x: (x * 2).amax((-1, -2))), torch.randn(4, 3, 7, 9))
    check(Function(lambda _, x: x.mean((2, 3)).tanh()), torch.randn(4, 3, 7, 9), kernels=["mean_tanh"])


def test_global_average_pool_and_gate(check):
    compiled = check(Function(lambda _, x: x * torch.sigmoid(x.mean((2, 3), keepdim=True))), torch.randn(4, 3, 7, 9))
    assert len(compiled.kernels) == 1


def test_group_norm_takes_its_followers_along(check):
    parts = {"norm": nn.GroupNorm(2, 6), "scale": torch.randn(6, 1, 1)}
    module = Function(lambda s, x: F.silu(s.norm(x)) * s.scale + x, **parts)
    compiled = check(module, torch.randn(4, 6, 5, 7) + 2, calls=[[torch.randn(1, 6, 5, 7)]])
    assert len(compiled.kernels) == 1
    check(Function(lambda s, x: s.norm(x), norm=nn.GroupNorm(3, 6)), torch.randn(4, 6))


def test_instance_norm(check):
    norm = nn.InstanceNorm2d(3, affine=True)
    compiled = check(Function(lambda s, x: s.norm(x).relu(), norm=norm), torch.randn(4, 3, 5, 7) + 2)
    assert len(compiled.kernels) == 1


def test_normalize(check):
    assert len(check(Function(lambda _, x: F.normalize(x, dim=-1)), torch.randn(4, 77)).kernels) == 1


def test_narrow_inputs_are_reduced_in_float32(check):
    module = Function(lambda s, x: s.norm(x) * 2, norm=nn.LayerNorm(77).half())
    check(module, (torch.randn(4, 5, 77) + 3).half())


def test_strided_rows(check):
    check(Function(lambda _, x: F.softmax(x, -1)), torch.randn(9, 14).t())
    check(Function(lambda _, x: F.softmax(x, -1)), torch.randn(6, 40)[:, ::2])


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=0, max_size=3), st.integers(2, 70), st.booleans())
def test_any_shape(check, outer, columns, broadcast):
    module = Function(lambda _, x, y: F.softmax(x * 2 + y, -1) * y)
    check(module, torch.randn(*outer, columns), torch.randn(1 if broadcast else columns), factor=3.0)


def test_reductions_of_a_single_row(check):
    check(Function(lambda _, x: x.sum(-1) * 2), torch.randn(50))
    check(Function(lambda _, x: (x * x).mean((0, 1), keepdim=True).sqrt()), torch.randn(9, 7))
    check(Function(lambda _, x: x.exp().sum((0, 1, 2))), torch.randn(3, 4, 5))


def test_reductions_over_leading_and_middle_dimensions(check):
    x = torch.randn(6, 5, 7)
    check(Function(lambda _, x: (x - x.mean(0, keepdim=True)).relu()), x, calls=[[torch.randn(3, 5, 7)]])
    check(Function(lambda _, x: x.softmax(1) + 1), x)
    check(Function(lambda _, x: x.amax((0, 2)) * 3), x)
    check(Function(lambda _, x: (x + 1).var((0, 1), correction=0)), x.transpose(0, 2))


def test_largest_and_smallest_of_a_row_with_nan_are_nan(interpreter, graph_of):
    module = Function(lambda _, x: (x.amax(-1) * 2, x.amin(-1, keepdim=True) + 1, x.softmax(-1)))
    x = torch.randn(4, 9)
    x[1, 3], x[2, 8] = float("nan"), float("-inf")
    graph = graph_of(module, x)
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    for got, expected in zip(outputs, module(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


class ScaledChannels(nn.Module):
    """A maximum over channels of what is scaled by image and channel, channels-last as a convolution leaves it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3)

    def forward(self, x, scale, shift):
        return torch.amax(self.conv(x) * scale + shift, 1, keepdim=True)


def test_tiles_stay_inside_images_where_scales_are_an_images_own(check):
    def arguments(images, height, width):
        return torch.randn(images, 3, height, width), torch.rand(images, 12, 1, 1), torch.randn(images, 12, 1, 1)

    module, smaller = ScaledChannels(), (arguments(2, 9, 8), arguments(1, 3, 4))
    compiled = check(module, *arguments(3, 27, 25), calls=smaller)
    assert "row_0 = outer_row\n" in compiled.source
