"""The ATen graph of a module, on the trusted side: parsed and validated. Never imports torch.

A Runner that holds user code sends the JSON of :func:`drk.gym.runner.capture.capture`. It is untrusted: names must be
identifiers, sizes are limited, every reference must point backwards. What is accepted becomes frozen dataclasses.

Shapes are those of the captured call. What an operator means is not checked here: whoever generates code from a graph
must treat unknown operators as opaque. Costs are in :mod:`drk.gym.graph_cost`.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from drk.gym.errors import BundleError

MAX_NODES = 20_000
MAX_DIMS = 16
MAX_TEXT = 400

_NAME = re.compile(r"^[A-Za-z_]\w{0,127}$", re.ASCII)
_OP = re.compile(r"^(?:[a-zA-Z_]\w*\.)?[a-zA-Z_]\w*(?:\.\w+)?$", re.ASCII)
_KEY = re.compile(r"^\w+(?:\.\w+)*$", re.ASCII)
_SYMBOLS = ("dtype", "device", "memory_format", "layout")

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex128": 16,
}  # fmt: skip
"""Bytes of one element by dtype name."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype name and strides (in elements) of one tensor at capture."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements once."""
        return self.numel * ITEM_BYTES.get(self.dtype, 4)

    @cached_property
    def contiguous(self) -> bool:
        """Whether the strides are those of a row-major tensor (dimensions of size 1 do not matter)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Ref:
    """A reference to a placeholder or node by name."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A torch constant: ``kind`` is dtype, device, memory_format or layout; ``name`` has no ``torch.`` prefix."""

    kind: str
    name: str


@dataclass(frozen=True)
class Pack:
    """A nested structure. ``form`` is list, tuple, dict or input; ``keys`` are given for dicts.

    A tuple that is one of ``torch.return_types`` has that type's name as its one key.
    """

    form: str
    items: tuple[Any, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placeholder:
    """A graph input: ``kind`` is input, parameter, buffer or constant; ``value`` holds small constants."""

    name: str
    kind: str
    path: str
    meta: TensorMeta
    value: Any = None


@dataclass(frozen=True)
class Node:
    """One operator call. ``args`` hold Ref, Symbol, tuples and plain scalars; ``metas`` one entry per result."""

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    metas: tuple[TensorMeta | None, ...] = ()
    module: str = ""
    module_type: str = ""
    file: str = ""
    line: int | None = None

    @property
    def meta(self) -> TensorMeta:
        """The single result's metadata.

        Raises:
            BundleError: the operator has no single tensor result.
        """
        if len(self.metas) != 1 or self.metas[0] is None:
            raise BundleError(f"{self.name} ({self.op}) has no single tensor result")
        return self.metas[0]

    @cached_property
    def bare_op(self) -> str:
        """The operator without namespace and overload: ``aten.mul.Tensor`` is ``mul``."""
        parts = self.op.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    def inputs(self) -> tuple[str, ...]:
        """Names of the values this node reads, in order, repeated ones once."""
        return self._inputs

    @cached_property  # planners ask very often
    def _inputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*references(self.args), *references(tuple(self.kwargs.values()))]))


@dataclass(frozen=True)
class State:
    """One parameter or buffer of the module; ``alias_of`` names the key it is tied to."""

    key: str
    kind: str
    persistent: bool
    requires_grad: bool
    alias_of: str | None
    meta: TensorMeta
    value: Any = None


@dataclass(frozen=True)
class Parameter:
    """One parameter of forward. ``has_default`` and ``has_value`` say whether those fields mean anything."""

    name: str
    kind: str
    has_default: bool
    default: Any
    has_value: bool
    value: Any


@dataclass(frozen=True)
class Graph:
    """A validated graph in topological order."""

    method: str
    training: bool
    signature: tuple[Parameter, ...]
    state: tuple[State, ...]
    placeholders: tuple[Placeholder, ...]
    nodes: tuple[Node, ...]
    output: Any
    mutations: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Names of all values: those given, then those computed, in order."""
        return [*(item.name for item in self.placeholders), *(node.name for node in self.nodes)]

    def metas(self) -> dict[str, TensorMeta]:
        """Metadata of every value that is a single tensor."""
        table = {item.name: item.meta for item in self.placeholders}
        table |= {n.name: n.metas[0] for n in self.nodes if len(n.metas) == 1 and n.metas[0] is not None}
        return table

    def users(self) -> dict[str, tuple[str, ...]]:
        """For each value the nodes that read it; the graph's outputs and mutations count as user ``"output"``."""
        table: dict[str, list[str]] = {name: [] for name in self.names()}
        for node in self.nodes:
            for name in node.inputs():
                table[name].append(node.name)
        for name in (*references(self.output), *self.mutations.values()):
            table[name].append("output")
        return {name: tuple(users) for name, users in table.items()}


def references(value: Any) -> Iterator[str]:
    """Yield the names referred to inside nested arguments."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for item in value:
            yield from references(item)
    elif isinstance(value, Pack):
        yield from references(value.items)


# --- Parsing -------------------------------------------------------------------------------------------------


def graph_from_json(data: Any) -> Graph:
    """Parse and validate what a Runner sent.

    Raises:
        BundleError: the form is wrong, a name is no identifier, a reference points nowhere, or a limit is exceeded.
    """
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BundleError(f"not a valid graph: {type(error).__name__}: {str(error)[:200]}") from error


def _parse(data: Mapping[str, Any]) -> Graph:
    _require(len(data["nodes"]) <= MAX_NODES, "too many nodes")
    known: set[str] = set()
    placeholders = []
    for item in data["placeholders"]:
        name = _name(item["name"])
        _require(item["kind"] in ("input", "parameter", "buffer", "constant"), "placeholder kind")
        meta = _meta(item["meta"])
        placeholders.append(Placeholder(name, item["kind"], _text(item["path"]), meta, _number_tree(item.get("value"))))
        known.add(name)
    nodes = []
    for item in data["nodes"]:
        nodes.append(_node(item, known))
        _require(item["name"] not in known, f"duplicate name {item['name']}")
        known.add(item["name"])
    return Graph(
        method=_text(data["method"]),
        training=bool(data["training"]),
        signature=tuple(_parameter(item) for item in data["signature"]),
        state=tuple(_state(item) for item in data["state"]),
        placeholders=tuple(placeholders),
        nodes=tuple(nodes),
        output=_value(data["output"], known, packed=True),
        mutations={_key(key): _value({"ref": name}, known).name for key, name in data.get("mutations", {}).items()},
        notes=tuple(_text(note) for note in data.get("notes", [])),
    )


def _node(item: Mapping[str, Any], known: set[str]) -> Node:
    op = _text(item["op"])
    _require(_OP.match(op) is not None, f"operator {op!r}")
    line = item.get("line")
    return Node(
        name=_name(item["name"]),
        op=op,
        args=tuple(_value(arg, known) for arg in item["args"]),
        kwargs={_name(key): _value(arg, known) for key, arg in item["kwargs"].items()},
        metas=tuple(None if meta is None else _meta(meta) for meta in item["meta"]),
        module=_text(item.get("module") or ""),
        module_type=_text(item.get("module_type") or ""),
        file=_text(item.get("file") or ""),
        line=line if isinstance(line, int) else None,
    )


def _parameter(item: Mapping[str, Any]) -> Parameter:
    default, value = _value(item.get("default"), set(), packed=True), _value(item.get("value"), set(), packed=True)
    return Parameter(_name(item["name"]), _text(item["kind"]), "default" in item, default, "value" in item, value)


def _state(item: Mapping[str, Any]) -> State:
    alias = item.get("alias_of")
    return State(
        key=_key(item["key"]),
        kind="parameter" if item["kind"] == "parameter" else "buffer",
        persistent=bool(item["persistent"]),
        requires_grad=bool(item["requires_grad"]),
        alias_of=None if alias is None else _key(alias),
        meta=_meta(item["meta"]),
        value=_number_tree(item.get("value")),
    )


def _value(value: Any, known: set[str], *, packed: bool = False) -> Any:
    """Decode an argument; ``packed`` keeps the form of lists, which only signatures and outputs need."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value)
    (kind, inner), *rest = value.items()
    _require(not rest, "one key per encoded value")
    if kind == "ref":
        _require(inner in known, f"reference to {inner!r}")
        return Ref(inner)
    if kind == "float":
        return float(inner)
    if kind in _SYMBOLS:
        _require(_SYMBOL_NAME.match(inner) is not None, f"{kind} {inner!r}")
        return Symbol(kind, inner)
    if kind == "input":
        return Pack("input", (_text(inner),))
    if kind == "dict":
        items = tuple(_value(item, known, packed=packed) for _, item in inner)
        return Pack("dict", items, tuple(_text(key) for key, _ in inner))
    if kind == "returned":
        name, parts = inner
        _require(isinstance(name, str) and name.isidentifier(), f"type {name!r}")
        return Pack("tuple", tuple(_value(item, known, packed=packed) for item in parts), (name,))
    _require(kind in ("list", "tuple"), f"form {kind!r}")
    items = tuple(_value(item, known, packed=packed) for item in inner)
    return Pack(kind, items) if packed else items


_SYMBOL_NAME = re.compile(r"^[a-z]\w*(?::\d+)?$", re.ASCII)


def _meta(item: Mapping[str, Any]) -> TensorMeta:
    shape, strides = tuple(item["shape"]), tuple(item["strides"])
    sizes_ok = all(type(size) is int and 0 <= size < 2**48 for size in (*shape, *strides))
    _require(len(shape) == len(strides) <= MAX_DIMS and sizes_ok, "shape or strides")
    _require(re.match(r"^[a-z]\w{0,31}$", item["dtype"], re.ASCII) is not None, "dtype")
    return TensorMeta(shape, item["dtype"], strides)


def _number_tree(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return tuple(_number_tree(item) for item in list(value)[:MAX_NODES])


def _name(text: str) -> str:
    _require(_NAME.match(text) is not None and not keyword.iskeyword(text), f"name {text!r}")
    return text


def _key(text: str) -> str:
    _require(_KEY.match(text) is not None and len(text) <= MAX_TEXT, f"state key {text!r}")
    return text


def _text(text: str) -> str:
    _require(isinstance(text, str), "text expected")
    return text[:MAX_TEXT]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"not a valid graph: {what}")
