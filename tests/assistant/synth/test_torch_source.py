"""Torch code for operators that no kernel takes."""

import pytest
import torch

from drk.assistant.synth.torch_source import torch_call
from drk.gym.graph import Node, Ref, Symbol, TensorMeta

NAMES = {"x": "x", "w": "self.w"}


def call(op, *args, shape=(2,), before=(2,), **kwargs):
    meta = TensorMeta(shape, "float32", (1,) * len(shape))
    metas = {"x": TensorMeta(before, "float32", (1,) * len(before))}
    return torch_call(Node("n", op, args, kwargs, (meta,)), NAMES, metas, "x.device")


def test_readable_forms():
    assert call("aten.linear.default", Ref("x"), Ref("w")) == "F.linear(x, self.w)"
    assert call("aten.transpose.int", Ref("x"), 1, 2) == "x.transpose(1, 2)"
    assert call("getitem", Ref("x"), 1) == "x[1]"
    assert call("aten.cumsum.default", Ref("x"), -1) == "x.cumsum(-1)"
    assert call("aten.zeros_like.default", Ref("x"), pin_memory=False) == "torch.zeros_like(x)"
    assert call("aten.logcumsumexp.default", Ref("x"), -1) == "torch.ops.aten.logcumsumexp.default(x, -1)"


def test_slices():
    cut = "aten.slice.Tensor"
    assert call(cut, Ref("x"), 1, 2, 5, shape=(4, 3), before=(4, 8)) == "x[:, 2:5]"
    assert call(cut, Ref("x"), -1, 0, 2**63 - 1, 2, shape=(4, 4), before=(4, 8)) == "x[:, ::2]"
    assert call(cut, Ref("x"), 0, -3, None, shape=(3, 8), before=(4, 8)) == "x[-3:]"
    assert call(cut, Ref("x"), 0, shape=(4, 8), before=(4, 8)) == "x[:]"


def test_devices_and_constants():
    device, dtype = Symbol("device", "cuda:0"), Symbol("dtype", "float32")
    text = call("aten.full.default", (2, 3), float("-inf"), dtype=dtype, device=device, pin_memory=None)
    assert text == 'torch.full([2, 3], float("-inf"), dtype=torch.float32, device=x.device)'


def test_numbers_are_tensors_where_nothing_else_is_taken():
    metas = {"x": TensorMeta((3,), "float32", (1,)), "one": TensorMeta((), "float32", ())}
    node = Node("n", "aten.fill.Tensor", (Ref("x"), Ref("one")), {}, (metas["x"],))
    text = torch_call(node, {"x": "x", "one": "1.0"}, metas, "x.device")
    assert text == "torch.ops.aten.fill.Tensor(x, torch.full((), 1.0, dtype=torch.float32, device=x.device))"
    node = Node("n", "aten.add.Tensor", (Ref("x"), Ref("one")), {}, (metas["x"],))
    assert torch_call(node, {"x": "x", "one": "1.0"}, metas, "x.device") == "x.add(1.0)"


def test_sizes_follow_the_input():
    view = "aten.view.default"
    split = call(view, Ref("x"), (4, 8, 2, 16), before=(4, 8, 32), shape=(4, 8, 2, 16))
    assert split == "x.reshape([x.shape[0], x.shape[1], 2, 16])"
    assert (
        call(view, Ref("x"), (32, 7), before=(4, 8, 7), shape=(32, 7))
        == "x.reshape([x.shape[0] * x.shape[1], x.shape[2]])"
    )
    assert call(view, Ref("x"), (4, 8, 7), before=(32, 7), shape=(4, 8, 7)) == "x.reshape([-1, 8, x.shape[1]])"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((5, 3, 32), (5, 6, 16), "x.shape[0], -1, 16"),  # a batch with heads
        ((3, 4, 6, 6), (1, 12, 6, 6), "1, x.shape[0] * x.shape[1], x.shape[2], x.shape[3]"),  # images as groups
        ((1, 15, 6, 6), (3, 5, 6, 6), "-1, 5, x.shape[2], x.shape[3]"),
        ((12, 9, 4), (3, 4, 9, 4), "-1, 4, x.shape[1], x.shape[2]"),
        ((4, 7, 48), (4, 7, 3, 16), "x.shape[0], x.shape[1], 3, 16"),
        ((4, 1, 8), (4, 8), "x.shape[0], x.shape[2]"),
        ((0, 8), (0, 2, 4), "x.shape[0], 2, 4"),
    ],
)
def test_reshapes_leave_open_what_the_batch_is_part_of(before, after, text):
    assert call("aten.view.default", Ref("x"), after, before=before, shape=after) == f"x.reshape([{text}])"


def test_other_batches_run_through_heads_and_repeats(check):
    class Latents(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.latents = torch.nn.Parameter(torch.randn(5, 8))

        def forward(self, x):
            steps, batch, _ = x.shape
            heads = x.reshape(steps, batch * 2, 4).transpose(0, 1)
            return heads.transpose(0, 1).reshape(steps, batch, 8) * 2, self.latents.unsqueeze(1).repeat(1, batch, 1) + x

    check(Latents(), torch.randn(5, 3, 8), calls=[[torch.randn(5, 4, 8)]])
