"""Operators that are arithmetic on views, against float64 under the interpreter."""

import torch
from modules import Each, Function


def test_they_are_kernels_at_other_sizes_too(check):
    ways = [
        lambda _, x: x.take(torch.tensor([[0, -27], [7, 3]])) * 2,
        lambda _, x: torch.cross(x, x.flip(0), dim=1) + x[:1],
        lambda _, x: torch.linalg.cross(x.t().contiguous(), x.t().exp(), dim=0),
        lambda _, x: torch.trapezoid(x, dim=0, dx=0.5) * 3,
        lambda _, x: torch.trapezoid(x, dim=-1),
        lambda _, x: torch.trace(x) + 1,
        lambda _, x: x.kthvalue(2, dim=1)[0] - 1,
        lambda _, x: x.kthvalue(3, keepdim=True)[1] * x,
    ]
    args = [torch.rand(9, 3) for _ in ways]
    compiled = check(Each(ways), *args, calls=[[torch.rand(20, 3) for _ in ways]], factor=3.0)
    forward = compiled.source.split("def forward")[1]
    assert not [name for name in ("take(", "cross(", "trapezoid", "trace(", "kthvalue") if f".{name}" in forward]


def test_what_does_not_fit_stays_with_torch(check):
    ways = Function(lambda _, x: (torch.trapezoid(x, x.cumsum(-1)) + 1, x.kthvalue(2, dim=0)[0] + 1))
    check(ways, torch.randn(5, 7))
