"""Compiling ahead with the real Inductor on a CPU: nothing runs, the real call finds what was compiled, faults wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import codecache, config

from drk.gym.runner.compile_ahead import compile_ahead, import_compiler


class Product(torch.nn.Module):
    """A product by the library: Inductor writes a wrapper for it, and nothing that a C++ compiler has to see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()


def test_what_every_cache_key_holds_is_computed_before_there_is_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import_compiler()  # both are there in the PyTorch at hand
    called: list[str] = []

    def no_device() -> None:
        called.append("system")
        raise RuntimeError("no device")

    monkeypatch.setattr(codecache, "torch_key", lambda: called.append("torch"))
    monkeypatch.setattr(codecache.CacheBase, "get_system", staticmethod(no_device))
    import_compiler()
    assert called == ["torch", "system"]


@pytest.mark.usefixtures("cache")
def test_the_real_call_finds_what_was_compiled_ahead() -> None:
    module, x = Product().eval(), torch.randn(4, 8)
    with torch.no_grad():
        assert compile_ahead(module, [x], {})
        assert counters["inductor"]["fxgraph_cache_hit"] == 0
        torch.testing.assert_close(torch.compile(module)(x), module(x))
    found = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    assert found >= 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 1


@pytest.mark.usefixtures("cache")
def test_what_cannot_be_compiled_is_left_to_the_real_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

    assert not compile_ahead(Failing(), [torch.ones(2)], {})
    assert not compile_ahead(lambda x: x, [torch.ones(2)], {})
    monkeypatch.setattr(config, "fx_graph_cache", False)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled for nothing")

    monkeypatch.setattr(torch, "compile", never)
    assert not compile_ahead(Product(), [torch.ones(4, 8)], {})
