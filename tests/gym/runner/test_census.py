from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
import triton

from drk.gym.runner.census import launch_census
from drk.gym.runner.remap import device_remap
from drk.gym.runner.stub_driver import compile_for

SOURCE = """
import torch
import triton
import triton.language as tl

@triton.jit
def helper(x):
    return x + 1

@triton.jit
def add(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, helper(tl.load(x + i, mask=i < n)), mask=i < n)

@triton.jit
def decoy(x):
    tl.store(x, 0.0)

def forward(x):
    add[(triton.cdiv(x.numel(), 64),)](x, x.numel(), BLOCK=64)
    return x
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))

    def load_source(name, source=SOURCE):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module, str(path)

    with device_remap(), compile_for("sm_90"):
        yield load_source


def test_same_names_are_told_apart_by_source(load):
    mine, mine_path = load("mine")
    other, _ = load("other")
    x = torch.ones(200)
    with launch_census([mine_path]) as census:
        mine.forward(x)
        other.forward(x)
        other.forward(x)
    rows = census.rows()
    assert json.loads(json.dumps(rows)) == rows
    assert [(row["name"], row["owned"], row["launches"]) for row in rows] == [("add", False, 2), ("add", True, 1)]
    assert rows[0]["handle"] != rows[1]["handle"]
    assert rows[1]["grid"] == [4]
    assert rows[1]["registers"] > 0
    assert rows[1]["num_warps"] == 4
    assert census.owned_launches() == 1


def test_kernels_compiled_before_the_census_are_still_attributed(load):
    module, path = load("warm")
    module.forward(torch.ones(10))
    with launch_census({path}) as census:
        module.forward(torch.ones(10))
    (row,) = census.rows()
    assert (row["owned"], row["launches"], census.compiles) == (True, 1, 0)


def test_compiles_are_counted_so_that_warm_up_can_end(load):
    module, path = load("fresh")
    with launch_census({path}) as census:
        module.forward(torch.ones(10))
        first = census.compiles
        module.forward(torch.ones(10))
    assert (first, census.compiles, census.launches) == (1, 1, 2)


def test_decoys_are_declared_but_never_launched(load):
    module, path = load("decoys")
    with launch_census({path}) as census:
        module.forward(torch.ones(10))
    assert [row["name"] for row in census.decoys()] == ["decoy"]


def test_nothing_launched_makes_every_kernel_a_decoy(load):
    _, path = load("idle")
    with launch_census({path}) as census:
        pass
    assert census.rows() == []
    assert {row["name"] for row in census.decoys()} == {"helper", "add", "decoy"}


def test_hooks_are_removed(load):
    module, path = load("after")
    chain = triton.knobs.runtime.launch_enter_hook
    before = list(chain.calls)
    with launch_census({path}) as census:
        assert len(chain.calls) == len(before) + 1
    assert chain.calls == before
    module.forward(torch.ones(10))
    assert census.launches == 0


def test_hooks_are_removed_after_an_error(load):
    before = (list(triton.knobs.runtime.launch_enter_hook.calls), triton.knobs.runtime.jit_post_compile_hook)
    with pytest.raises(ValueError, match="inner"), launch_census([]):
        raise ValueError("inner")
    assert before == (list(triton.knobs.runtime.launch_enter_hook.calls), triton.knobs.runtime.jit_post_compile_hook)


def test_launches_of_handles_without_a_known_kernel_are_kept_and_not_owned(load):
    _, path = load("foreign")
    with launch_census({path}) as census:
        triton.knobs.runtime.launch_enter_hook(
            type("Metadata", (), {"data": {"name": "triton_poi_x", "function": 7}})()
        )
    (row,) = census.rows()
    assert (row["name"], row["owned"], row["registers"], row["grid"]) == ("triton_poi_x", False, None, None)
