"""What differs in form between two outputs, also where one description is nonsense."""

from __future__ import annotations

from typing import Any

import pytest

from drk.gym.output_form import structure_difference

TENSOR = {"form": "tensor", "type": "torch.Tensor", "layout": "strided", "lazy": False, "requires_grad": False}


@pytest.mark.parametrize(
    ("mine", "theirs", "word"),
    [
        (None, {"form": "tensor"}, "description"),
        ({"form": "list", "items": []}, {"form": "tuple", "items": []}, "list instead of tuple"),
        ({"form": "tensor", "subclass": True, "type": "Lazy"}, {"form": "tensor"}, "subclass"),
        ({"form": "tuple", "items": [{"form": "tensor"}]}, {"form": "tuple", "items": []}, "1 values"),
        ({"form": "dict", "keys": ["['a']"]}, {"form": "dict", "keys": ["['b']"]}, "keys"),
        ({**TENSOR, "layout": "sparse_coo"}, TENSOR, "layout sparse_coo instead of strided"),
        (TENSOR, {**TENSOR, "layout": "sparse_csr"}, "layout strided"),
        ({**TENSOR, "lazy": True}, TENSOR, "negated"),
        ({**TENSOR, "requires_grad": True}, TENSOR, "gradients"),
        ({**TENSOR, "type": "torch.nn.parameter.Parameter"}, TENSOR, "subclass"),
        ({**TENSOR, "attributes": ["read"]}, TENSOR, "attributes"),
        ({"form": "tuple", "items": 7}, {"form": "tuple", "items": [TENSOR]}, "0 values"),
        ({"form": "tuple", "items": [7]}, {"form": "tuple", "items": [TENSOR]}, "description"),
        ({"form": ["tensor"]}, TENSOR, "instead of tensor"),
    ],
)
def test_differences(mine: Any, theirs: dict[str, Any], word: str) -> None:
    assert word in structure_difference(mine, theirs)


def test_the_same_form() -> None:
    both = {"form": "dict", "keys": ["['a']"], "items": [TENSOR]}
    assert structure_difference(both, both) == ""
    lazy = {**TENSOR, "lazy": True, "requires_grad": True}
    assert structure_difference(lazy, lazy) == structure_difference(TENSOR, lazy) == ""
