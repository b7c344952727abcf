"""What is captured in place of functions that look at values computes the same."""

import pytest
import torch
import torch.nn.functional as F

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
