"""Autograd functions run both passes without autograd, and only while asked."""

import contextlib

import torch

from drk.gym.runner.function_passes import run_both_passes

SEEN = []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(x)
        return x * 2, x.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        SEEN.append((x.shape, first.shape, second.shape, ctx.needs_input_grad))
        return first * 2, None


class Split(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, gradient):
        SEEN.append(len(ctx.saved_tensors))
        return gradient


def test_backward_runs_right_after_forward():
    x = torch.ones(3)
    with contextlib.ExitStack() as stack, torch.no_grad():
        run_both_passes(stack)
        first, _ = Doubled.apply(x, 2)
        Split.apply(x)
    assert torch.equal(first, x * 2)
    expected = [((3,), (3,), (), (True, False)), 2]
    assert expected == SEEN
    Split.apply(x)
    assert expected == SEEN
