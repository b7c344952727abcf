"""Nested values as leaves with paths, and their JSON description.

What a module takes and returns may be a tensor, a tuple, list, dict, dataclass, named tuple, an output class of the
Hugging Face kind (an ordered dict that is a dataclass too), ``None`` or a plain scalar, nested at will. This module
takes such a value apart into leaves, each with the Python expression that reaches it (``[0]``, ``['mask']``,
``.logits``), puts it together again, and describes it as JSON: types, shapes, dtypes, strides, device.

Limits: cycles and values deeper than 64 levels or with more than 100,000 leaves are refused; sets, iterators and
objects of other classes are opaque leaves, described by type name only. A description made in a process that holds
candidate code is a claim, not evidence.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_DEPTH = 64
MAX_LEAVES = 100_000


class StructureError(ValueError):
    """A value is cyclic, too deep or too large to be taken apart."""


@dataclass(frozen=True)
class Leaf:
    """One end of a nested value: ``path`` is the Python expression after the root's name, empty for the root."""

    path: str
    value: Any

    @property
    def is_tensor(self) -> bool:
        """True for tensors, parameters and tensor subclasses."""
        return isinstance(self.value, torch.Tensor)


def type_name(value: Any) -> str:
    """Return ``module.QualifiedName`` of the exact type, builtins without their module."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the torch name without prefix, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields") and hasattr(type(value), "_make")


def form_of(value: Any) -> str:
    """Name the form: tensor, none, scalar, namedtuple, tuple, list, dict, dataclass or opaque."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if value is None:
        return "none"
    if isinstance(value, (bool, int, float, complex, str)):
        return "scalar"
    if _is_namedtuple(value):
        return "namedtuple"
    for kind, name in ((tuple, "tuple"), (list, "list"), (Mapping, "dict")):
        if isinstance(value, kind):
            return name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclass"
    return "opaque"


def children(value: Any) -> list[tuple[str, Any]]:
    """Return the direct parts of a container with their path steps; an empty list for leaves."""
    form = form_of(value)
    if form in ("tuple", "list"):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if form == "dict":
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if form == "namedtuple":
        return [(f".{name}", getattr(value, name)) for name in type(value)._fields]
    if form == "dataclass":
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _is_container(value: Any) -> bool:
    return form_of(value) not in ("tensor", "none", "scalar", "opaque")


def flatten(value: Any, root: str = "") -> list[Leaf]:
    """Return the leaves of ``value`` in order, ``None`` and scalars included; paths start with ``root``.

    Raises:
        StructureError: too deep (or cyclic), or too many leaves.
    """
    leaves: list[Leaf] = []

    def visit(path: str, part: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise StructureError(f"a nested value is deeper than {MAX_DEPTH} levels at {path[:200]}")
        if not _is_container(part):
            if len(leaves) >= MAX_LEAVES:
                raise StructureError(f"a nested value has more than {MAX_LEAVES} leaves")
            leaves.append(Leaf(path, part))
            return
        for step, item in children(part):
            visit(path + step, item, depth + 1)

    visit(root, value, 0)
    return leaves


def _rebuild(value: Any, parts: list[Any]) -> Any:
    form = form_of(value)
    if form == "list" and type(value) is list:
        return parts
    if form == "tuple" and type(value) in (tuple, torch.Size):
        return tuple(parts)
    if form == "namedtuple":
        return type(value)._make(parts)
    if form == "dict" and type(value) is dict:
        return dict(zip(value, parts, strict=True))
    clone = copy.copy(value)
    if form == "dataclass":
        for field, part in zip(dataclasses.fields(value), parts, strict=True):
            object.__setattr__(clone, field.name, part)
        return clone
    if form == "dict":
        for key, part in zip(value, parts, strict=True):
            clone[key] = part
        return clone
    if form == "list":
        clone[:] = parts
        return clone
    return tuple.__new__(type(value), parts)


def unflatten(like: Any, leaves: Iterable[Any]) -> Any:
    """Build a value of the same form as ``like`` whose leaves are ``leaves`` (in :func:`flatten`'s order).

    Containers are new, so ``like`` is not changed. Dict and list subclasses and dataclasses are shallow copies with
    their parts replaced, so that their constructors do not run.

    Raises:
        StructureError: the number of leaves differs.
    """
    rest = iter(leaves)
    missing = object()

    def build(part: Any) -> Any:
        if not _is_container(part):
            leaf = next(rest, missing)
            if leaf is missing:
                raise StructureError("fewer leaves than the value has")
            return leaf
        return _rebuild(part, [build(item) for _, item in children(part)])

    result = build(like)
    if next(rest, missing) is not missing:
        raise StructureError("more leaves than the value has")
    return result


def map_tensors(function: Callable[[str, torch.Tensor], Any], value: Any, root: str = "") -> Any:
    """Return ``value`` with each tensor leaf replaced by ``function(path, tensor)``; other leaves stay as they are."""
    leaves = flatten(value, root)
    return unflatten(value, [function(leaf.path, leaf.value) if leaf.is_tensor else leaf.value for leaf in leaves])


def tensors(value: Any, root: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return path and tensor of each tensor leaf."""
    return [(leaf.path, leaf.value) for leaf in flatten(value, root) if leaf.is_tensor]


def describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Describe one tensor: shape and strides in elements, dtype, device, layout, whether it is a subclass."""
    strided = tensor.layout == torch.strided
    return {
        "form": "tensor",
        "type": type_name(tensor),
        "subclass": type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter,
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "strides": list(tensor.stride()) if strided else None,
        "layout": str(tensor.layout).removeprefix("torch."),
        "device": tensor.device.type,
        "requires_grad": tensor.requires_grad,
        "lazy": tensor.is_neg() or tensor.is_conj(),
        "attributes": sorted(str(name) for name in vars(tensor))[:10],
    }


def _scalar_json(value: Any) -> Any:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return repr(value)
    return value if not isinstance(value, str) else value[:1000]


def describe(value: Any) -> dict[str, Any]:
    """Describe a nested value as JSON: ``form`` and ``type`` at each level, :func:`describe_tensor` at tensor leaves.

    Raises:
        StructureError: see :func:`flatten`.
    """
    flatten(value)
    return _describe(value)


def _describe(value: Any) -> dict[str, Any]:
    form = form_of(value)
    if form == "tensor":
        return describe_tensor(value)
    if form == "scalar":
        return {"form": form, "type": type_name(value), "value": _scalar_json(value)}
    if not _is_container(value):
        return {"form": form, "type": type_name(value)}
    parts = children(value)
    described: dict[str, Any] = {
        "form": form,
        "type": type_name(value),
        "items": [_describe(item) for _, item in parts],
    }
    if form not in ("tuple", "list"):
        described["keys"] = [step for step, _ in parts]
    return described


def _storage_pointer(tensor: torch.Tensor) -> int | None:
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    return tensor.untyped_storage().data_ptr()


def aliases(
    left: Sequence[tuple[str, torch.Tensor]], right: Sequence[tuple[str, torch.Tensor]]
) -> list[tuple[str, str]]:
    """Return the pairs of paths whose tensors share a storage (views included); a path is no alias of itself."""
    by_pointer: dict[int, list[str]] = {}
    for path, tensor in right:
        pointer = _storage_pointer(tensor)
        if pointer is not None:
            by_pointer.setdefault(pointer, []).append(path)
    found: list[tuple[str, str]] = []
    for path, tensor in left:
        pointer = _storage_pointer(tensor)
        if pointer is not None:
            found.extend((path, other) for other in by_pointer.get(pointer, ()) if other != path)
    return found


def size_bytes(value: Any) -> int:
    """Return the bytes of all tensors in ``value``."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(value))


def has_indices(value: Any) -> bool:
    """Whether ``value`` holds integer tensors, whose values may be places in other tensors."""
    integers = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    return any(tensor.dtype in integers for _, tensor in tensors(value))


def elements(value: Any) -> int:
    """Return the number of elements of all tensors in ``value``."""
    return sum(tensor.numel() for _, tensor in tensors(value))
