from __future__ import annotations

import pytest
import torch
from torch import nn

from drk.gym.runner import values
from drk.gym.runner.reduction import apply_plan, dense_strides, narrow, reduce_plan


def plan_for(module, *args, budget=10_000, **kwargs):
    aligned = kwargs.pop("aligned", False)
    return reduce_plan(module, list(args), kwargs, budget, aligned=aligned)


def test_rows_of_a_linear_shrink_and_features_stay():
    assert plan_for(nn.Linear(256, 8), torch.zeros(4096, 256)) == {"args[0]": {"0": 33}}


def test_batch_and_tokens_shrink_together():
    class Residual(nn.Module):
        def forward(self, x, y):
            return torch.nn.functional.layer_norm(x, (64,)) + y

    x = torch.zeros(16, 512, 64)
    plan = plan_for(Residual(), x, y=x.clone(), budget=20_000)
    assert plan == {"args[0]": {"0": 3, "1": 33}, "kwargs['y']": {"0": 3, "1": 33}}


def test_equal_sizes_of_other_meaning_are_told_apart():
    assert plan_for(nn.Linear(128, 8), torch.zeros(128, 128), budget=6000) == {"args[0]": {"0": 33}}


def test_images_shrink_where_convolutions_let_them():
    module = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1, stride=2), nn.ReLU())
    plan = plan_for(module, torch.zeros(8, 8, 64, 64))
    assert plan["args[0]"]["2"] == plan["args[0]"]["3"] == 33
    args, _ = apply_plan([torch.zeros(8, 8, 64, 64)], {}, plan)
    assert module(*args).shape[-1] == 17


def test_nothing_shrinks_where_nothing_may_or_must():
    flat = nn.Sequential(nn.Flatten(0), nn.Linear(4096, 2))
    assert plan_for(flat, torch.zeros(64, 64), budget=100) == {}
    assert plan_for(nn.ReLU(), torch.zeros(64, 64), budget=5000) == {}


def test_hard_coded_sizes_are_left_alone():
    class Hard(nn.Module):
        def forward(self, x):
            return x.view(32, 128, 16).sum(1)

    assert plan_for(Hard(), torch.zeros(32 * 128, 16), budget=100) == {}


def test_divisibility_is_found_by_trying():
    class Windows(nn.Module):
        def forward(self, x):
            return x.view(x.shape[0], -1, 16).mean(-1)

    plan = plan_for(Windows(), torch.zeros(2, 4096), budget=100)
    assert plan == {"args[0]": {"1": 32}}


def test_aligned_plans_keep_powers_of_two():
    plan = plan_for(nn.ReLU(), torch.zeros(96, 4096), budget=100, aligned=True)
    assert plan == {"args[0]": {"0": 32, "1": 128}}


def test_compiled_plans_keep_what_triton_specialises_on():
    plan = reduce_plan(nn.Linear(256, 8), [torch.zeros(4096, 256)], {}, 20_000, compiled=True)
    assert plan == {"args[0]": {"0": 33}}, "33 rows of 256 are a multiple of 16 and fill no last block"
    plan = reduce_plan(nn.ReLU(), [torch.zeros(64, 4096, 48)], {}, 40_000, compiled=True)
    assert plan == {"args[0]": {"0": 17, "1": 48}}
    plan = reduce_plan(nn.ReLU(), [torch.zeros(64, 4095)], {}, 40_000, compiled=True)
    assert plan == {"args[0]": {"1": 33}}, "a size that is no multiple of 16 needs no other kernel at an odd one"
    plan = reduce_plan(nn.Linear(256, 8), [torch.zeros(1001, 256)], {}, 20_000, compiled=True)
    assert plan == {"args[0]": {"0": 33}}, "a size that was no multiple needs no other kernel at an odd one"


def test_masks_follow_their_tokens():
    class Attention(nn.Module):
        def forward(self, q, k, v, mask):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q = torch.zeros(4, 8, 256, 64)
    plan = plan_for(Attention(), q, q.clone(), q.clone(), torch.zeros(256, 256), budget=30_000)
    assert plan["args[3]"] == {"0": 33, "1": 33}
    assert plan["args[0]"]["2"] == 33


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.randn(8, 3, 16, 16).contiguous(memory_format=torch.channels_last), (384, 1, 48, 3)),
        (torch.randn(4, 16).t(), (1, 8)),
        (torch.randn(1, 8).expand(16, 8), (0, 1)),
    ],
)
def test_narrowing_keeps_the_order_of_dimensions(tensor, strides):
    plan = {"0": 8, "2": 8} if tensor.dim() == 4 else {"0": 8}
    small = narrow(tensor, plan)
    assert torch.equal(small, tensor[:8, :, :8] if tensor.dim() == 4 else tensor[:8])
    assert small.stride() == strides


def test_narrowing_to_the_same_size_is_no_copy():
    tensor = torch.zeros(3, 4)
    assert narrow(tensor, {"0": 8}) is tensor


def test_dense_strides_of_a_scalar_and_of_size_one():
    assert dense_strides((), ()) == ()
    assert dense_strides((1, 5), (5, 1)) == (5, 1)


def test_drawn_and_narrowed_inputs_follow_the_plan():
    spec = {"kind": "call", "args": [{"kind": "tensor", "shape": [64, 8, 8, 8], "layout": "channels_last"}]}
    drawn = values.draw_inputs(spec, 1, "cpu", reduce={"args[0]": {"0": 3}})[0][0]
    assert drawn.shape == (3, 8, 8, 8)
    assert drawn.is_contiguous(memory_format=torch.channels_last)
    strided = {"kind": "call", "args": [{"kind": "tensor", "shape": [64, 8], "strides": [1, 64]}]}
    assert values.draw_inputs(strided, 1, "cpu", reduce={"args[0]": {"0": 3}})[0][0].stride() == (1, 3)
