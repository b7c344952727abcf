"""Forward and backward pass as one call: gradients are those of autograd, cotangents follow from the keys alone."""

import torch
from torch import nn

from drk.gym.runner.training_step import TrainingStep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x, *, scale):
        return {"y": self.fc(x) * scale, "index": x.argmax(-1)}


def leaves():
    return torch.randn(5, 3, requires_grad=True), torch.randn(4, requires_grad=True)


def test_gradients_are_autograds_and_nothing_is_left_behind():
    module, (x, scale) = Net(), leaves()
    step = TrainingStep(module, module)
    step(x, scale=scale)
    step.draw([7, 8])
    first, second, again = (step(x, scale=scale) for _ in range(3))
    names = ["grad:input[0][0]", "grad:input[1]['scale']", "grad:param.fc.weight", "grad:param.fc.bias"]
    assert [name for name, _ in first.gradients] == names
    assert not first.value["y"].requires_grad
    assert all(one.grad is None for one in (x, scale, *module.parameters()))
    cotangent = step.cotangents[0][0]
    expected = torch.autograd.grad(module(x, scale=scale)["y"], [x, scale, *module.fc.parameters()], cotangent)
    for (_, ours), theirs in zip(first.gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.equal(first.gradients[0][1], second.gradients[0][1])
    torch.testing.assert_close(first.gradients[0][1], again.gradients[0][1])


def test_equal_keys_give_equal_cotangents_in_two_processes():
    module, (x, scale) = Net(), leaves()
    steps = [TrainingStep(module, module) for _ in range(2)]
    for step in steps:
        step(x, scale=scale)
    steps[0].draw([3, 4, 5])
    steps[1].draw([5])
    assert torch.equal(steps[0].cotangents[2][0], steps[1].cotangents[0][0])


def test_a_call_without_gradients_has_none():
    module, (x, scale) = Net(), leaves()
    step = TrainingStep(module, module)
    with torch.no_grad():
        assert step(x, scale=scale).gradients == []
