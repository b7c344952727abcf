from __future__ import annotations

import json
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from drk.gym.runner import structure, values
from drk.gym.runner.failures import LoadFailure


def tensor(*shape, **more):
    return {"kind": "tensor", "shape": list(shape), **more}


def call(*args, **kwargs):
    return {"kind": "call", "args": list(args), "kwargs": kwargs}


def user(source, name="get_inputs", **more):
    namespace = SimpleNamespace(**{name: source})
    return {"kind": "function", "name": name, **more}, SimpleNamespace(
        namespace=namespace, source_root=".", entry="model.py"
    )


def draw(spec, key=1, **more):
    return values.draw_inputs(call(spec), key, "cpu", **more)[0][0]


MIXED = call(
    tensor(5, 7),
    tensor(3, dtype="int64", fill="integers", low=0, high=9),
    mask=tensor(4, 4, dtype="bool", fill="bernoulli"),
    half=tensor(6, dtype="bfloat16"),
)


def test_equal_keys_give_equal_bits_in_two_processes():
    script = (
        "import json, sys, hashlib\nfrom drk.gym.runner import structure, values\n"
        "drawn = values.draw_inputs(json.loads(sys.argv[1]), 11, 'cpu')\n"
        "print(json.dumps([t.float().flatten().tolist() for _, t in structure.tensors(drawn)]))"
    )
    runs = [subprocess.run([sys.executable, "-c", script, json.dumps(MIXED)], capture_output=True, check=True)]
    here = values.draw_inputs(MIXED, 11, "cpu")
    assert json.loads(runs[0].stdout) == [t.float().flatten().tolist() for _, t in structure.tensors(here)]


def test_keys_and_arguments_are_independent():
    first, second = values.draw_inputs(call(tensor(8), tensor(8)), 1, "cpu")[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, draw(tensor(8), key=2))
    assert torch.equal(first, draw(tensor(8), key=1))


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "uint8", "int16"],
)
def test_every_dtype_is_drawn_with_spread(dtype):
    drawn = draw(tensor(64, dtype=dtype, high=50.0))
    assert str(drawn.dtype) == f"torch.{dtype}"
    wide = drawn.to(torch.complex64) if drawn.is_complex() else drawn.to(torch.float32)
    assert len(wide.unique() if not wide.is_complex() else wide.real.unique()) > 4


@given(st.integers(-100, 100), st.integers(1, 50), st.integers(0, 2**63))
def test_integers_stay_in_their_range(low, width, key):
    drawn = draw(tensor(200, dtype="int64", fill="integers", low=low, high=low + width), key=key)
    assert drawn.min() >= low
    assert drawn.max() < low + width


def test_uniform_and_constant_fills():
    drawn = draw(tensor(1000, fill="uniform", low=2.0, high=3.0))
    assert 2 <= drawn.min() < 2.1 < 2.9 < drawn.max() < 3
    assert draw(tensor(3, fill="ones")).tolist() == [1, 1, 1]
    assert draw(tensor(2, fill="zeros", dtype="int64")).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("shape", "more", "strides"),
    [
        ((2, 3, 4, 5), {"layout": "channels_last"}, (60, 1, 15, 3)),
        ((2, 3, 2, 4, 5), {"layout": "channels_last_3d"}, (120, 1, 60, 15, 3)),
        ((4, 8), {"strides": [1, 4]}, (1, 4)),
        ((4, 8), {"strides": [100, 2]}, (100, 2)),
        ((4, 8), {"strides": [0, 1]}, (0, 1)),
        ((4, 3), {"strides": [1, 1]}, (1, 1)),
        ((0, 3), {"strides": [3, 1]}, (3, 1)),
    ],
)
def test_strides_are_honoured(shape, more, strides):
    drawn = draw(tensor(*shape, **more))
    assert drawn.stride() == strides
    assert tuple(drawn.shape) == shape
    assert drawn.isfinite().all()


def test_layout_does_not_change_the_values():
    plain, last = draw(tensor(2, 3, 4, 5)), draw(tensor(2, 3, 4, 5, layout="channels_last"))
    assert torch.equal(plain, last)


def test_gradients_nested_values_and_scalars():
    nested = {
        "kind": "nested",
        "form": "dict",
        "keys": ["a", "b"],
        "items": [
            tensor(2, requires_grad=True),
            {"kind": "nested", "form": "tuple", "items": [{"kind": "scalar", "value": 3}]},
        ],
    }
    drawn = draw(nested)
    assert drawn["a"].requires_grad
    assert drawn["a"].is_leaf
    assert drawn["b"] == (3,)


# --- the user's functions ----------------------------------------------------------------------------------------


def test_functions_are_seeded_in_all_generators():
    spec, reference = user(lambda: [torch.randn(3), torch.tensor(numpy.random.rand(3)), torch.tensor(random.random())])
    first, again, other = (values.draw_inputs(spec, key, "cpu", reference=reference)[0] for key in (4, 4, 5))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("value", "args", "kwargs"),
    [
        ([1, 2], [1, 2], {}),
        ((1, 2), [1, 2], {}),
        (3, [3], {}),
        ({"x": 1}, [], {"x": 1}),
        (((1,), {"x": 2}), [1], {"x": 2}),
        (([1], {"x": 2}), [[1], {"x": 2}], {}),
        ({}, [{}], {}),
    ],
)
def test_forms_of_what_functions_return(value, args, kwargs):
    assert values.as_call(value) == (args, kwargs)


def test_inputs_are_leaves_whatever_made_them():
    spec, reference = user(lambda: [torch.randn(3, requires_grad=True) * 2])
    drawn = values.draw_inputs(spec, 1, "cpu", reference=reference)[0][0]
    assert drawn.is_leaf
    assert drawn.requires_grad


def test_a_raising_function_names_the_line(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def get_inputs():\n    return 1 / 0\n")
    scope: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    spec, reference = user(scope["get_inputs"])
    reference.source_root = tmp_path
    with pytest.raises(LoadFailure) as caught:
        values.draw_inputs(spec, 1, "cpu", reference=reference)
    assert (caught.value.kind, caught.value.file, caught.value.line) == ("inputs-raised", "model.py", 2)


def test_a_missing_name_is_a_failure():
    spec, reference = user(list, name="other")
    with pytest.raises(LoadFailure, match="defines no 'get_inputs'"):
        values.draw_inputs({**spec, "name": "get_inputs"}, 1, "cpu", reference=reference)


def test_fixed_inputs_are_found_and_permuted():
    spec, reference = user(lambda: [torch.arange(32.0)])
    assert not values.inputs_vary(spec, "cpu", reference=reference)
    assert values.inputs_vary(*_permuted(spec), reference=reference)


def _permuted(spec):
    return {**spec, "permute": True}, "cpu"


# --- permutation -----------------------------------------------------------------------------------------------------


def test_values_are_permuted_but_never_masks_and_integers():
    mask = torch.tensor([[0.0, float("-inf")], [1.0, 2.0]])
    ids = torch.arange(100)
    spec, reference = user((mask, ids, torch.arange(100.0)), name="example_inputs")
    drawn_mask, drawn_ids, drawn = values.draw_inputs(spec, 9, "cpu", reference=reference)[0]
    assert drawn_mask[0, 1] == float("-inf")
    assert sorted(drawn_mask[drawn_mask.isfinite()].tolist()) == [0, 1, 2]
    assert torch.equal(drawn_ids, ids)
    assert not torch.equal(drawn, torch.arange(100.0))
    assert torch.equal(drawn.sort().values, torch.arange(100.0))


@pytest.mark.parametrize("strides", [(4, 1), (1, 8), (0, 1), (9, 2)])
def test_permuting_keeps_strides(strides):
    source = torch.randn(100).as_strided((8, 4), strides)
    moved = values.permute(source, 3)
    assert moved.stride() == strides
    assert moved.data_ptr() != source.data_ptr()


def test_captured_tensors_from_a_mapping_and_a_file(tmp_path):
    source = {"input.x": torch.randn(20)}
    save_file(source, tmp_path / "tensors.safetensors")
    spec = {"kind": "captured", "name": "x", "requires_grad": True}
    first = draw(spec, tensors=source)
    second = draw(spec, tensors=tmp_path / "tensors.safetensors")
    assert torch.equal(first, second)
    assert first.requires_grad
    assert torch.equal(first.detach().sort().values, source["input.x"].sort().values)
    with pytest.raises(LoadFailure, match=r"input\.y"):
        draw({**spec, "name": "y"}, tensors=source)


# --- stress --------------------------------------------------------------------------------------------------------


def test_stress_variants_change_floats_only():
    spec = call(tensor(1000), tensor(10, dtype="int64", fill="integers", low=0, high=9))
    plain, ids = values.draw_inputs(spec, 1, "cpu")[0]
    for transform, expected in [
        ({"kind": "scale", "factor": 10.0}, plain * 10),
        ({"kind": "offset", "value": 2.0}, plain + 2),
        ({"kind": "zeros"}, plain * 0),
    ]:
        changed, same_ids = values.draw_inputs(spec, 1, "cpu", transform=transform)[0]
        assert torch.equal(changed, expected)
        assert torch.equal(same_ids, ids)
    tail = values.draw_inputs(spec, 1, "cpu", transform={"kind": "heavy-tail", "share": 0.1})[0][0]
    assert 50 < (tail != plain).sum() < 200
    with pytest.raises(LoadFailure, match="unknown stress"):
        values.draw_inputs(spec, 1, "cpu", transform={"kind": "other"})


def test_wrong_specifications():
    for spec in (tensor(2, dtype="float33"), tensor(2, 3, strides=[1])):
        with pytest.raises(LoadFailure):
            draw(spec)
