"""Distances of all pairs against float64."""

import math

import torch
import torch.nn.functional as F
from modules import Each, Function


def test_differences_of_pairs(check):
    orders = [lambda _, x, y, p=p: torch.cdist(x, y, p=p) for p in (1.0, 2.0, 3.0, math.inf)]
    args = [item for _ in orders for item in (torch.randn(9, 40), torch.randn(7, 40))]
    compiled = check(Each(orders, 2), *args, factor=3.0)
    assert "cdist" not in compiled.source.split("class ModelNew")[1]
    batched = Function(lambda _, x, y: torch.exp(-torch.cdist(x, y)))
    check(batched, torch.randn(2, 5, 40), torch.randn(2, 7, 40), calls=[[torch.randn(1, 4, 24), torch.randn(1, 9, 24)]])


def test_pairs_of_the_same_rows(check):
    each = Each([lambda _, x, p=p: F.pdist(x, p) for p in (1.0, 2.0, 3.0)])
    compiled = check(each, *(torch.randn(9, 40) for _ in range(3)), factor=3.0)
    assert "pdist" not in compiled.source
    check(Function(lambda _, x: F.pdist(x).exp()), torch.randn(70, 5), calls=[[torch.randn(66, 5)]], factor=3.0)


def test_distances_by_products(check):
    module = Function(lambda _, x, y: torch.cdist(x, y))
    compiled = check(module, torch.randn(30, 48), torch.randn(40, 48), factor=3.0)
    assert "matmul" in [region.kind for region in compiled.regions]
    check(module, torch.randn(2, 30, 48), torch.randn(2, 40, 48), factor=3.0)
