"""The pytest file that stands beside every artefact, as a :class:`string.Template`.

It needs torch, pytest, the user's file and the artefact; drk is not imported. Without a CUDA device it sets
``TRITON_INTERPRET=1`` before triton is imported and shrinks free dimensions. Errors are held against the original's
own error in float64, so that a kernel more accurate than the original passes.

Left out: modules that draw random numbers in the call are compared with equal seeds only.
"""

from __future__ import annotations

from string import Template

SETTING = """\
from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

HERE = Path(__file__).resolve().parent
BESIDE = (HERE / "$entry_name").is_file()  # applied, or still in drk's run folder
ROOT = (HERE / "$root_when_beside" if BESIDE else HERE / "$root_when_not").resolve()
sys.path[:0] = [str(ROOT), str(HERE)]
kernels = importlib.import_module("$kernels_when_beside" if BESIDE else "$kernels")
user = importlib.import_module("$user_module")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""
"""How every emitted test file begins, below its docstring: what it imports, the modules under test, the device."""

TEST = Template(
    '''\
"""Holds $kernels.py against $entry_name: same results, safe fallback, unchanged state, clean removal.

Runs on a CUDA device where there is one, else under Triton's interpreter at small sizes. Written by drk.
"""

'''
    + SETTING
    + '''\
SIZES = {
    size: size if DEVICE == "cuda" else small if small < size else min(size, $small)
    for size, small in kernels._FREE_SIZES.items()
}
SEEDS = [1, 2, 3] if DEVICE == "cuda" else [1]  # the interpreter is slow
INTERPRETER_ELEMENTS = 2**22


def build():
    """The original, on the device, in the verified mode."""
    torch.manual_seed(0)
$build
    return kernels.restore(model)


def optimize(model):
    """The same model with kernels."""
    return kernels.optimize(model$build_argument)


def part(model):
    """What was verified: the model, or a part of it."""
    return model.get_submodule(kernels._SUBMODULE) if isinstance(model, torch.nn.Module) else model


def draw(seed):
    """Positional and keyword arguments of one call."""
    torch.manual_seed(seed)
$draw
    args, kwargs = place(list(args)), place(kwargs)
    if DEVICE == "cpu" and sum(one.numel() for one in leaves([args, kwargs])) > INTERPRETER_ELEMENTS:
        pytest.skip("too large for the interpreter; run this on a CUDA device")
    return args, kwargs


def place(value):
    """Move tensors to the device, with small free dimensions under the interpreter."""
    if isinstance(value, torch.Tensor):
        for _, _, shape, layout, free in records(kernels._ARGUMENTS):
            if tuple(value.shape) == shape:
                for dim in free:
                    value = value.narrow(dim, 0, SIZES[shape[dim]])
                value = value.contiguous(memory_format=layout) if free else value
                break
        return value.detach().to(DEVICE)
    if isinstance(value, dict):
        return {key: place(item) for key, item in value.items()}
    return type(value)(map(place, value)) if isinstance(value, (list, tuple)) else value


def records(value):
    """All records of tensors among the artefact's recorded arguments."""
    if isinstance(value, tuple) and value[:1] == ("tensor",):
        return [value]
    return [one for item in value for one in records(item)] if isinstance(value, (list, tuple)) else []


def leaves(value):
    """All tensors of a nested value."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [leaf for item in items for leaf in leaves(item)]


def double(value):
    """The same in float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: double(item) for key, item in value.items()}
    return type(value)(map(double, value)) if isinstance(value, (list, tuple)) else value


def call(function, args, kwargs, compiled=None):
    """One call without gradients, from equal random states, on inputs of its own."""
    args, kwargs = copy.deepcopy((args, kwargs))
    torch.manual_seed(0)
    with torch.no_grad(), torch.autocast(DEVICE, $autocast_dtype, enabled=$autocast):
        return (part(function) if compiled is None else compiled)(*args, **kwargs)


def assert_close(actual, expected, args, kwargs):
    """As good as the original at the same inputs."""
    exact = $exact_now
    assert_as_good(actual, expected, call(exact, double(args), double(kwargs)))


def error(value, truth):
    """Root mean square error relative to the truth's own size."""
    scale = truth.double().square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return ((value.double() - truth.double()).square().mean().sqrt() / scale).item()


def assert_as_good(actual, expected, truth):
    """The kernels' error may be a small multiple of the original's own."""
    assert len(leaves(actual)) == len(leaves(expected))
    for ours, theirs, exact in zip(leaves(actual), leaves(expected), leaves(truth), strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        assert error(ours, exact) <= max(4 * error(theirs, exact), 4 * torch.finfo(theirs.dtype).eps)


@pytest.mark.parametrize("seed", SEEDS)
def test_results_are_as_good_as_the_original(seed):
    original = build()
    args, kwargs = draw(seed)
    expected = call(copy.deepcopy(original), args, kwargs)
    exact = $exact
    truth = call(exact, double(args), double(kwargs))
    model = optimize(copy.deepcopy(original))
    assert_as_good(call(model, args, kwargs), expected, truth)
    assert kernels.stats(model)["kernel_calls"] == 1, kernels.stats(model)


def test_what_was_not_verified_falls_back():
    original = build()
    args, kwargs = draw(1)
    model = optimize(copy.deepcopy(original))
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=not $autocast):
        torch.manual_seed(0)
        expected = part(copy.deepcopy(original))(*args, **kwargs)
        torch.manual_seed(0)
        actual = part(model)(*args, **kwargs)
    assert kernels.stats(model)["fallback_calls"] == 1
    assert kernels.stats(model)["kernel_calls"] == 0
    for ours, theirs in zip(leaves(actual), leaves(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_and_exported_code_uses_the_kernels():
    args, kwargs = draw(1)
    expected = call(build(), args, kwargs)
    model = optimize(build())
    if not kernels._OPERATOR.ready:
        pytest.skip("these kernels have no registered operator: the original is compiled")
    before = kernels.stats(model)["operator_calls"]
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(part(model), backend=backend, fullgraph=True)
    assert_close(call(model, args, kwargs, compiled), expected, args, kwargs)
    assert kernels.stats(model)["operator_calls"] == before + 1
    if isinstance(model, torch.nn.Module):
        model = optimize(build())
        with torch.no_grad(), torch.autocast(DEVICE, $autocast_dtype, enabled=$autocast):
            program = torch.export.export(part(model), tuple(copy.deepcopy(args)), copy.deepcopy(kwargs))
        assert_close(call(model, args, kwargs, program.module()), expected, args, kwargs)
        assert kernels.stats(model)["operator_calls"] == before + 2


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_a_cuda_graph_replays_the_kernels():
    args, kwargs = draw(1)
    expected = call(build(), args, kwargs)
    model = optimize(build())
    fresh = copy.deepcopy(model.state_dict()) if isinstance(model, torch.nn.Module) else None
    call(model, args, kwargs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.autocast(DEVICE, $autocast_dtype, enabled=$autocast), torch.cuda.graph(graph):
        result = part(model)(*args, **kwargs)
    if fresh is not None:
        model.load_state_dict(fresh)
    graph.replay()
    assert_close(result, expected, args, kwargs)


def test_restore_brings_the_original_back():
    original = build()
    args, kwargs = draw(1)
    model = kernels.restore(optimize(copy.deepcopy(original)))
    assert not kernels.stats(model)["optimized"]
    actual, expected = call(model, args, kwargs), call(copy.deepcopy(original), args, kwargs)
    for ours, theirs in zip(leaves(actual), leaves(expected), strict=True):
        assert torch.equal(ours, theirs)
'''
)
"""Common part; every target."""

STATE_TESTS = """

def test_state_is_the_models_own():
    original = build()
    model = copy.deepcopy(original)
    before = model.state_dict(keep_vars=True)
    after = optimize(model).state_dict(keep_vars=True)
    assert list(before) == list(after)
    assert all(before[key] is after[key] for key in before)


def test_loaded_weights_are_used():
    original = build()
    if not original.state_dict():
        pytest.skip("no state")
    args, kwargs = draw(1)
    model = optimize(copy.deepcopy(original))
    state = {key: one * 0.5 if one.is_floating_point() else one for key, one in original.state_dict().items()}
    model.load_state_dict(state)
    original.load_state_dict(state)
    expected = call(copy.deepcopy(original), args, kwargs)
    truth = call(copy.deepcopy(original).double(), double(args), double(kwargs))
    assert_as_good(call(model, args, kwargs), expected, truth)
    assert kernels.stats(model)["kernel_calls"] == 1, kernels.stats(model)
"""
"""Further tests where the target is a module."""
