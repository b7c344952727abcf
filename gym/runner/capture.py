"""Captures a module's ATen graph as plain JSON (runs inside the sandboxed Reference Runner).

The graph comes from ``torch.export`` without dynamo (``strict=False``), else with it (``strict=True``), else from
``make_fx`` on real values. It stays high-level: ``linear``, ``softmax``, ``layer_norm``, ``conv2d`` and
``scaled_dot_product_attention`` are kept as single nodes; only in-place operators are made functional.

What it leaves out: shapes are those of the given call (specialised), and modules whose control flow depends on values
are refused, as are outputs other than tensors, numbers, tuples (torch's named ones too), lists and dicts.
The result is untrusted data to whoever reads it: :mod:`drk.gym.graph` validates it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from drk.gym.runner.autocast_casts import write_casts
from drk.gym.runner.plain_graph import AUTOCAST, make_functional, mutates, size_by_values, write_out_blocks
from drk.gym.runner.unchecked import without_gradients, without_looks, without_modes

GRAPH_VERSION = 1
MAX_INLINE_ELEMENTS = 64
"""Constants up to this size travel by value."""

_PLAIN = (torch.Tensor, bool, int, float, str, type(None))
_STACK_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_INPLACE = re.compile(r"[a-z0-9]_$")


class CaptureError(Exception):
    """The module cannot be captured; ``attempts`` maps each method to why it failed."""

    def __init__(self, message: str, attempts: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.attempts = attempts or {}


@dataclass
class _Traced:
    """One method's result: a flat ATen graph whose placeholders are described in order."""

    method: str
    graph: fx.Graph
    placeholders: list[dict[str, Any]]
    output_nodes: list[Any]
    out_spec: pytree.TreeSpec
    mutations: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def capture(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the ATen graph of ``module(*args, **kwargs)`` as JSON data.

    Keys: ``version``, ``method``, ``signature`` (forward's parameters with the values they were given), ``state``
    (every parameter and buffer), ``placeholders``, ``nodes`` (name, op, args, kwargs, meta, module, file, line),
    ``output`` (structure of references), ``mutations`` (state key -> node that holds its new value), ``notes``.
    The module's state is not changed by this call.

    Raises:
        CaptureError: no method could trace the module, or its outputs have a form that a graph cannot state.
    """
    kwargs = dict(kwargs or {})
    attempts: dict[str, str] = {}
    methods: tuple[tuple[str, Callable[..., _Traced]], ...] = (
        ("export", lambda: _by_export(module, args, kwargs, strict=False)),
        ("export-strict", lambda: _by_export(module, args, kwargs, strict=True)),
        ("make_fx", lambda: _by_make_fx(module, args, kwargs)),
    )
    for name, method in methods:
        for hidden in (False, True):
            if hidden and not torch._C._len_torch_function_stack():
                continue
            try:
                hiding = without_modes() if hidden else contextlib.nullcontext()
                with warnings.catch_warnings(), hiding, without_gradients(module), without_looks():
                    warnings.simplefilter("ignore")
                    traced = method()
                return _to_json(traced, module, args, kwargs)
            except Exception as error:  # noqa: BLE001 - user code and tracers raise anything; the reason is kept
                attempts[name] = f"{type(error).__name__}: {str(error)[:500]}"
    reasons = "; ".join(f"{name}: {reason[:200]}" for name, reason in attempts.items())
    raise CaptureError(f"the module could not be captured as a graph ({reasons})", attempts)


# --- Methods -------------------------------------------------------------------------------------------------


def _by_export(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, strict: bool) -> _Traced:
    program = torch.export.export(module, tuple(args), kwargs, strict=strict)
    write_out_blocks(program)
    if mutates(program.graph) and not make_functional(program.graph):
        program = _functional(program)
    signature = program.graph_signature
    parameters = dict(signature.inputs_to_parameters)
    buffers = dict(signature.inputs_to_buffers)
    constants = dict(signature.inputs_to_lifted_tensor_constants)
    leaves = _input_paths(module, args, kwargs)
    placeholders: list[dict[str, Any]] = []
    for node in (node for node in program.graph.nodes if node.op == "placeholder"):
        entry: dict[str, Any] = {"name": node.name, "meta": _meta(node.meta.get("val"))}
        if node.name in parameters:
            entry |= {"kind": "parameter", "path": parameters[node.name]}
        elif node.name in buffers:
            entry |= {"kind": "buffer", "path": buffers[node.name]}
        elif node.name in constants:
            path = constants[node.name]
            entry |= {"kind": "constant", "path": path, "value": _inline(program.constants.get(path))}
        else:
            entry |= {"kind": "input", "path": leaves.pop(0)}
        placeholders.append(entry)
    results = next(node for node in program.graph.nodes if node.op == "output").args[0]
    skip = len(results) - len(signature.user_outputs)
    mutations = {path: name for name, path in signature.buffers_to_mutate.items()}
    if getattr(signature, "user_inputs_to_mutate", {}):
        raise CaptureError("the module changes its inputs in place")
    return _Traced(
        method="export-strict" if strict else "export",
        graph=program.graph,
        placeholders=placeholders,
        output_nodes=list(results[skip:]),
        out_spec=program.call_spec.out_spec,
        mutations=mutations,
    )


def _functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    if any(node.meta.get(AUTOCAST) for node in program.graph.nodes):
        raise CaptureError("the module changes tensors in place and computes under autocast")
    decomposed: torch.export.ExportedProgram = program.run_decompositions({})
    return decomposed


def _by_make_fx(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> _Traced:
    from torch.fx.experimental.proxy_tensor import make_fx

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    keys = list(state)
    flat_inputs, in_spec = pytree.tree_flatten((tuple(args), kwargs))
    where = [index for index, leaf in enumerate(flat_inputs) if isinstance(leaf, torch.Tensor)]
    spec: list[pytree.TreeSpec] = []

    def flat_call(*tensors: torch.Tensor) -> list[Any]:
        leaves = list(flat_inputs)
        for index, tensor in zip(where, tensors[len(keys) :], strict=True):
            leaves[index] = tensor
        call_args, call_kwargs = pytree.tree_unflatten(leaves, in_spec)
        overrides = dict(zip(keys, tensors[: len(keys)], strict=True))
        result = torch.func.functional_call(module, overrides, call_args, call_kwargs)
        flat, out_spec = pytree.tree_flatten(result)
        odd = next((item for item in flat if not isinstance(item, _PLAIN)), None)
        if odd is not None:
            raise CaptureError(f"the output holds a {type(odd).__name__}, which a graph cannot state")
        spec[:] = [out_spec]
        return flat

    tensors = [*(state[key].detach() for key in keys), *(flat_inputs[index] for index in where)]
    traced = make_fx(flat_call, tracing_mode="real", pre_dispatch=True)(*tensors)
    if mutates(traced.graph):
        raise CaptureError("the module changes tensors in place, which tracing does not make functional")
    if any(size_by_values(node) for node in traced.graph.nodes):
        raise CaptureError("sizes of tensors depend on values")
    names = [node for node in traced.graph.nodes if node.op == "placeholder"]
    parameters = {key for key, _ in module.named_parameters()}
    placeholders: list[dict[str, Any]] = [
        {"name": node.name, "kind": "parameter" if key in parameters else "buffer", "path": key, "meta": _meta(tensor)}
        for node, key, tensor in zip(names, keys, tensors, strict=False)
    ]
    inputs = zip(names[len(keys) :], _input_paths(module, args, kwargs), tensors[len(keys) :], strict=True)
    placeholders += [{"name": n.name, "kind": "input", "path": p, "meta": _meta(t)} for n, p, t in inputs]
    for node in (node for node in traced.graph.nodes if node.op == "get_attr"):
        value = getattr(traced, str(node.target))
        placeholders.append(
            {"name": node.name, "kind": "constant", "path": str(node.target), "meta": _meta(value)}
            | {"value": _inline(value)}
        )
    output = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    note = "torch.export could not take this module; it was traced on real values"
    return _Traced("make_fx", traced.graph, placeholders, list(output), spec[0], {}, [note])


# --- Encoding ------------------------------------------------------------------------------------------------


def _to_json(traced: _Traced, module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    outputs = pytree.tree_unflatten([_encode(item) for item in traced.output_nodes], traced.out_spec)
    graph = {
        "version": GRAPH_VERSION,
        "method": traced.method,
        "training": module.training,
        "signature": _signature(module, args, kwargs),
        "state": _state(module),
        "placeholders": traced.placeholders,
        "nodes": [_node(node) for node in traced.graph.nodes if node.op == "call_function"],
        "output": _structure(outputs),
        "mutations": traced.mutations,
        "notes": traced.notes,
    }
    blocks: dict[str, set[str]] = {}
    for node in traced.graph.nodes:
        blocks.setdefault(node.meta.get(AUTOCAST) or "", set()).add(node.name)
    for autocast in sorted(set(blocks) - {""}):
        graph = write_casts(graph, autocast, blocks[autocast])
    return graph


def _node(node: fx.Node) -> dict[str, Any]:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        op = f"{target.namespace}.{target.__name__}"
    elif target is operator.getitem:
        op = "getitem"
    else:
        raise CaptureError(f"the graph calls {getattr(target, '__name__', target)!r}, which is no operator")
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = (stack[-1][0], stack[-1][1]) if stack else ("", "")
    frames = _STACK_FRAME.findall(node.meta.get("stack_trace") or "")
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    metas = value if isinstance(value, list | tuple) and not hasattr(value, "shape") else [value]
    return {
        "name": node.name,
        "op": op,
        "args": [_encode(item) for item in node.args],
        "kwargs": {key: _encode(item) for key, item in node.kwargs.items()},
        "meta": [_meta(item) for item in metas],
        "module": path,
        "module_type": kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}",
        "file": frames[-1][0] if frames else "",
        "line": int(frames[-1][1]) if frames else None,
    }


def _meta(value: Any) -> dict[str, Any] | None:
    if value is None or not hasattr(value, "shape"):
        return None
    strides = value.stride() if callable(getattr(value, "stride", None)) else value.stride
    return {
        "shape": [int(size) for size in value.shape],
        "dtype": _bare(value.dtype),
        "strides": [int(stride) for stride in strides],
    }


def _bare(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _encode(value: Any) -> Any:
    """Encode an argument: plain scalars as they are, everything else as a one-key object."""
    if isinstance(value, fx.Node):
        return {"ref": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {"list": [_encode(item) for item in value]}
    for kind in ("dtype", "device", "memory_format", "layout"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: _bare(value)}
    raise CaptureError(f"an operator takes an argument of type {type(value).__name__}")


def _structure(value: Any) -> Any:
    """Encode nested outputs or inputs; leaves are already encoded."""
    if isinstance(value, dict) and set(value) <= {"ref", "float", "list"} and len(value) == 1:
        return value
    if isinstance(value, dict) and type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _structure(item)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_structure(item) for item in value]}
    if isinstance(value, tuple) and getattr(torch.return_types, type(value).__name__, None) is type(value):
        return {"returned": [type(value).__name__, [_structure(item) for item in value]]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CaptureError(f"the output holds a {type(value).__name__}, which a graph cannot state")


def _inline(value: Any) -> Any:
    """Return a small constant's values as nested lists, or None."""
    if not isinstance(value, torch.Tensor) or value.numel() > MAX_INLINE_ELEMENTS or value.is_complex():
        return None
    data = value.detach().to("cpu", torch.float64 if value.is_floating_point() else value.dtype).tolist()
    flat = data if isinstance(data, list) else [data]
    return data if all(math.isfinite(item) for item in pytree.tree_leaves(flat)) else None


def _state(module: torch.nn.Module) -> list[dict[str, Any]]:
    persistent = set(module.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    entries: list[dict[str, Any]] = []
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    for kind, named in (("parameter", parameters), ("buffer", buffers)):
        for key, tensor in named:
            alias = first.setdefault(id(tensor), key)
            entry = {"key": key, "kind": kind, "persistent": key in persistent, "requires_grad": tensor.requires_grad}
            small = None if key in persistent else _inline(tensor)
            meta = _meta(tensor)
            entries.append(entry | {"alias_of": None if alias == key else alias, "meta": meta, "value": small})
    return entries


# --- Signature -----------------------------------------------------------------------------------------------


def _signature(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Describe forward's parameters; tensors inside the values are ``{"input": path}``."""
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs)
    entries: list[dict[str, Any]] = []
    for name, parameter in signature.parameters.items():
        entry: dict[str, Any] = {"name": name, "kind": parameter.kind.name.lower()}
        if parameter.default is not inspect.Parameter.empty:
            entry["default"] = _argument(name, parameter.default)
        if name in bound.arguments:
            entry["value"] = _argument(name, bound.arguments[name])
        entries.append(entry)
    return entries


def _argument(path: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"input": path}
    if type(value) in (list, tuple):
        items = [_argument(f"{path}[{index}]", item) for index, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _argument(f"{path}[{key!r}]", item)] for key, item in value.items()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | torch.device):
        return {"device" if isinstance(value, torch.device) else "dtype": _bare(value)}
    raise CaptureError(f"argument {path!r} is a {type(value).__name__}, which a graph cannot state")


def _input_paths(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the paths of the tensor leaves in the order in which tracers see them (positional, then keyword)."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest_name = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    paths: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict) and "input" in value:
            paths.append(value["input"])
        elif isinstance(value, dict) and "dict" in value:
            for _, item in value["dict"]:
                walk(item)
        elif isinstance(value, dict):
            for item in next(iter(value.values())):
                walk(item)

    rest = 0
    for index, value in enumerate(args):
        if index < len(plain):
            walk(_argument(plain[index].name, value))
        else:
            walk(_argument(f"{rest_name}[{rest}]", value))
            rest += 1
    known = {parameter.name for parameter in parameters}
    variable = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), "")
    for key, value in kwargs.items():
        walk(_argument(key if key in known else f"{variable}[{key!r}]", value))
    return paths
