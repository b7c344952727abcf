"""Candidates for the whole module, put together from regions' sources."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drk.assistant.regions_source import RegionSource, compose, rename

DOUBLE = '''"""Doubles."""
from __future__ import annotations
import torch
SCALE = 2.0

def apply(x, scale=SCALE):
    return x * scale

class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4))

    @classmethod
    def from_reference(cls, model) -> "ModelNew":
        return cls()

    def forward(self, x):
        return apply(x, scale=SCALE) * self.weight
'''
NEGATE = DOUBLE.replace("SCALE = 2.0", "SCALE = -1.0").replace("self.weight", "self.other").replace("other", "weight")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part(), Part()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_parts_run_on_the_originals_own_parameters() -> None:
    source = compose([RegionSource(("parts.0", "parts.2"), DOUBLE), RegionSource(("parts.1",), NEGATE)])
    scope: dict[str, object] = {"__name__": "candidate"}
    exec(compile(source, "candidate.py", "exec"), scope)
    net = Net()
    keys = list(net.state_dict())
    x = torch.randn(3, 4)
    expected = net(x) * 2.0 * -1.0 * 2.0
    patched = scope["ModelNew"].from_reference(net)
    assert torch.allclose(patched(x), expected)
    assert list(patched.state_dict()) == keys
    with torch.no_grad():
        net.parts[0].weight.mul_(3)
    assert torch.allclose(patched(x), expected * 3)


def test_names_are_told_apart() -> None:
    text = rename('def f(x):\n    return x.f(f=f)\n\n\ndef g() -> "f":\n    return "f"\n', {"f": "f_1"})
    assert text == 'def f_1(x):\n    return x.f(f_1=f_1)\n\n\ndef g() -> "f_1":\n    return "f"\n'
    source = compose([RegionSource(("a",), DOUBLE), RegionSource(("b",), NEGATE)])
    assert "SCALE_1 = 2.0" in source and "SCALE_2 = -1.0" in source
    assert source.count("from __future__") == 1


def test_nothing_to_put_together() -> None:
    with pytest.raises(ValueError, match="no regions"):
        compose([])
    with pytest.raises(ValueError, match="no Python"):
        compose([RegionSource(("a",), "def")])
