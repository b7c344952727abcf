from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drk.gym.runner import structure

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Pair:
    left: object
    right: object


@dataclass
class ModelOutput(OrderedDict):
    """The form of the large libraries' outputs: a dict that is a dataclass too."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Labelled(torch.Tensor):
    pass


ends = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.floats(allow_nan=False))
nested = st.recursive(
    ends,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=12,
)


@given(nested)
def test_unflatten_is_the_inverse_of_flatten(value):
    leaves = [leaf.value for leaf in structure.flatten(value)]
    again = structure.unflatten(value, leaves)
    assert again == value
    assert structure.describe(again) == structure.describe(value)


@given(nested)
def test_descriptions_are_json(value):
    assert json.loads(json.dumps(structure.describe(value), allow_nan=False)) == structure.describe(value)


def test_paths_are_python_expressions():
    value = {"a": [1, (2, Point(3, Pair(4, None)))]}
    paths = {leaf.path: leaf.value for leaf in structure.flatten(value, "value")}
    assert paths == {path: eval(path, {"value": value}) for path in paths}  # the paths are ours
    assert "value['a'][1][1].y.left" in paths


def test_output_classes_of_the_dict_kind_are_rebuilt():
    value = ModelOutput(loss=torch.ones(()), logits=torch.zeros(2))
    again = structure.map_tensors(lambda _path, tensor: tensor + 1, value)
    assert type(again) is ModelOutput
    assert again["loss"] == again.loss == 2
    assert value.loss == 1
    assert structure.describe(value)["keys"] == ["['loss']", "['logits']"]


def test_tensors_are_described_as_they_are():
    row = structure.describe(torch.zeros(3, 4, dtype=torch.bfloat16).t())
    assert (row["shape"], row["strides"], row["dtype"], row["subclass"]) == ([4, 3], [1, 4], "bfloat16", False)
    assert structure.describe(torch.zeros(2).as_subclass(Labelled))["subclass"] is True
    assert structure.describe(torch.nn.Parameter(torch.zeros(2)))["subclass"] is False
    assert structure.describe(torch.eye(2).to_sparse())["strides"] is None


def test_numbers_without_a_json_form_are_text():
    assert structure.describe(float("inf"))["value"] == "inf"
    assert structure.describe(float("nan"))["value"] == "nan"
    assert structure.describe(1 + 2j)["value"] == "(1+2j)"


def test_other_objects_are_opaque():
    assert structure.describe({1, 2}) == {"form": "opaque", "type": "set"}
    assert [leaf.value for leaf in structure.flatten([torch.nn.ReLU])] == [torch.nn.ReLU]


def test_cycles_and_huge_values_are_refused(monkeypatch):
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(structure.StructureError, match="deeper"):
        structure.flatten(cycle)
    monkeypatch.setattr(structure, "MAX_LEAVES", 10)
    with pytest.raises(structure.StructureError, match="more than 10"):
        structure.describe(list(range(11)))


def test_unflatten_refuses_another_number_of_leaves():
    with pytest.raises(structure.StructureError, match="fewer"):
        structure.unflatten([1, 2], [1])
    with pytest.raises(structure.StructureError, match="more"):
        structure.unflatten([1, 2], [1, 2, 3])


def test_aliases_see_views_but_not_copies_or_themselves():
    base, other = torch.zeros(4, 4), torch.zeros(4)
    inputs = [("args[0]", base), ("args[1]", other)]
    outputs = [("out[0]", base[1:]), ("out[1]", base.clone()), ("out[2]", torch.empty(0))]
    assert structure.aliases(outputs, inputs) == [("out[0]", "args[0]")]
    assert structure.aliases(inputs, inputs) == []
