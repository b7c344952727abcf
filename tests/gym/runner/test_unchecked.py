"""What is captured in place of functions that look at values computes the same."""

import pytest
import torch
import torch.nn.functional as F

from drk.gym.runner.capture import capture
from drk.gym.runner.unchecked import gaussian_nll_loss, without_looks


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("full", [False, True])
def test_likelihoods_are_those_of_torch(reduction, full):
    x, target, var = torch.randn(5, 4), torch.randn(5, 4), torch.rand(5, 4) * 1e-5
    for own in (var, var[:, :1], var[:, 0]):
        args = (x, target, own, full, 3e-6, reduction)
        torch.testing.assert_close(gaussian_nll_loss(*args), F.gaussian_nll_loss(*args))


def test_shapes_are_still_refused():
    with pytest.raises(ValueError, match="incorrect size"):
        gaussian_nll_loss(torch.randn(5, 4), torch.randn(5, 4), torch.rand(5, 3))
    with pytest.raises(ValueError, match="not valid"):
        gaussian_nll_loss(torch.randn(5, 4), torch.randn(5, 4), torch.rand(5, 4), reduction="none at all")


def test_the_original_comes_back():
    original = F.gaussian_nll_loss
    with pytest.raises(KeyError), without_looks():
        assert F.gaussian_nll_loss is gaussian_nll_loss
        raise KeyError
    assert F.gaussian_nll_loss is original


def test_distributions_are_captured_and_check_again_afterwards(monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # whatever other tests left

    class Likelihood(torch.nn.Module):
        def forward(self, x, mean, spread):
            return torch.distributions.Normal(mean, spread.exp()).log_prob(x).sum(-1)

    found = capture(Likelihood(), [torch.randn(3, 4) for _ in range(3)])
    assert found["method"] == "export"
    assert {"aten.log.default", "aten.sum.dim_IntList"} <= {node["op"] for node in found["nodes"]}
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))
