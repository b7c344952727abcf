"""The registered operator of every artefact: the kernels as one node of a compiled or exported graph.

Pasted by :mod:`drk.assistant.artefact` between the guard and the dispatcher. ``torch.compile``, ``torch.export`` and
CUDA graphs of compiled code see one operator with a fake implementation; the eager path does not use it, since a
registered operator costs tens of microseconds a call.

The operator takes all tensors as arguments (inputs and state), so that one operator serves every model of the class,
and returns the new values of buffers that the call changes. When it runs it checks shapes and layouts again, holds new
sizes against the original once, and runs the original with the same tensors where the kernels do not fit. Outputs
share memory with nothing and have the layout that was verified. The fake implementation runs the original on fake
tensors.

Left out: gradients (the original is traced where they are needed) and converted weights.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from drk.assistant.artefact_guard_template import (
    _ARGUMENTS,
    _AUTOCAST,
    _CHANGED,
    _CHECK_NEW_SIZES,
    _KERNEL_FAULTS,
    _OPERATOR_NAME,
    _OUTPUT,
    _TARGET,
    _TRAINING,
    _alike,
    _autocast_dtype,
    _key,
    _match,
    _Unfit,
)

_LOG = logging.getLogger(__name__)

# --- drk operator -----------------------------------------------------------------------------------------------


def _hollow(module: nn.Module, tensors: Iterable[Any]) -> nn.Module:
    """Return a copy of the module that has no memory for these tensors."""
    memo: dict[int, Any] = {}
    for one in tensors:
        empty = torch.empty_like(one, device="meta")
        memo[id(one)] = nn.Parameter(empty, one.requires_grad) if isinstance(one, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


class _Original(nn.Module):
    """The original without memory for its weights; they come with each call."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.inner = _hollow(owner, [*owner.parameters(), *owner.buffers()])
        vars(self.inner).pop("forward", None)
        self.train(_TRAINING)

    def forward(self, changed: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Call it; buffers that it replaces are written back into ``changed``."""
        result = type(self.inner).forward(self.inner, *args, **kwargs)
        for name, tensor in changed.items():
            now = self.inner.get_buffer(name)
            if now is not tensor:
                tensor.copy_(now)
        return result


class _Operator:
    """What the registered operator does; made ready by the first model that is prepared."""

    def __init__(self) -> None:
        self.ready = False
        self.disabled = ""
        self.calls = 0
        self.kernels: Any = None
        self.original: Any = None
        self.names: list[str] = []
        self.places: list[tuple[dict[str, Any], str, int]] = []
        self.own: list[tuple[dict[str, Any], str]] = []
        self.positional = 0
        self.trusted: set[Any] = set()
        self.lock = threading.Lock()

    def adopt(
        self, owner: Any, kernels: nn.Module, *, ties: list[Any], own: list[Any], positional: int, trusted: set[Any]
    ) -> None:
        """Take over what a prepared dispatcher knows."""
        if self.ready:
            return
        named = _named_state(owner)
        at = {id(tensor): index for index, tensor in enumerate(named.values())}
        self.kernels = _hollow(kernels, [mine[leaf] for _, mine, leaf in ties])
        pairs = zip(kernels.modules(), self.kernels.modules(), strict=True)
        holders: dict[int, Any] = {}
        for old, new in pairs:
            holders |= {id(old._parameters): new._parameters, id(old._buffers): new._buffers}
        self.places = [(holders[id(mine)], leaf, at[id(theirs[leaf])]) for theirs, mine, leaf in ties]
        self.own = [(holders[id(mine)], leaf) for mine, leaf in own]
        self.original = _Original(owner) if isinstance(owner, nn.Module) else owner
        self.names, self.positional, self.trusted = list(named), positional, set(trusted)
        self.ready = True

    def run(self, inputs: list[Any], state: list[Any]) -> list[Any]:
        """Run the kernels on real tensors, or the original where they do not fit."""
        with torch.no_grad(), _as_verified(inputs), self.lock:
            tensors = _with_own_changes(state)
            flat = self.fused(inputs, tensors)
            if flat is None:
                tensors = _with_own_changes(state)
                flat = self.plain(inputs, tensors)
            return [*_fresh(flat, [*inputs, *tensors]), *tensors[len(tensors) - len(_CHANGED) :]]

    def fused(self, inputs: list[Any], tensors: list[Any]) -> list[Any] | None:
        """Return the kernels' results, or None where the original has to run."""
        if self.disabled:
            return None
        try:
            sizes: dict[int, int] = {}
            args, kwargs = _arguments(inputs, self.positional, sizes)
            expected = self.first_use(inputs, tensors, sizes)
            for holder, leaf, index in self.places:
                holder[leaf] = tensors[index]
            for holder, leaf in self.own:
                if inputs and holder[leaf].device != inputs[0].device:
                    holder[leaf] = holder[leaf].detach().to(inputs[0].device)
            flat = _flatten(_OUTPUT, self.kernels(*args, **kwargs))
            for holder, leaf, index in self.places:
                if holder[leaf] is not tensors[index]:
                    tensors[index].copy_(holder[leaf])
        except (_Unfit, torch.OutOfMemoryError):
            return None
        except _KERNEL_FAULTS as error:
            self.disable(f"the kernels failed: {type(error).__name__}: {error}")
            return None
        if expected is not None and not _alike(flat, expected):
            self.disable(f"with other sizes ({sizes}) the result differs from the original's")
            return None
        self.trusted.add(_key(sizes))
        self.calls += 1
        return flat

    def first_use(self, inputs: list[Any], tensors: list[Any], sizes: dict[int, int]) -> list[Any] | None:
        """Return the original's results for sizes that were not verified, else None."""
        if _key(sizes) in self.trusted:
            return None
        if not _CHECK_NEW_SIZES or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            raise _Unfit("sizes were not verified")
        return self.plain(inputs, tensors)

    def disable(self, reason: str) -> None:
        """Use the original from now on."""
        self.disabled = reason
        _LOG.warning("%s will not use its kernels in compiled code: %s", _TARGET, reason)

    def plain(self, inputs: list[Any], tensors: list[Any]) -> list[Any]:
        """Return the original's results with these tensors as its state."""
        args, kwargs = _arguments(inputs, self.positional)
        if not isinstance(self.original, _Original):
            return _flatten(_OUTPUT, self.original(*args, **kwargs))
        state = dict(zip((f"inner.{name}" for name in self.names), tensors, strict=True))
        changed = {name: state[f"inner.{name}"] for name in _CHANGED}
        return _flatten(_OUTPUT, torch.func.functional_call(self.original, state, (changed, args, kwargs)))

    def fake(self, inputs: list[Any], state: list[Any]) -> list[Any]:
        """Return empty results of the right shapes and layouts, for tracing."""
        with torch.no_grad(), _as_verified(inputs):
            tensors = _with_own_changes(state)
            flat = self.plain(inputs, tensors)
        results = [_empty(tensor, order) for tensor, order in zip(flat, _orders(_OUTPUT), strict=True)]
        return [*results, *tensors[len(tensors) - len(_CHANGED) :]]


def _with_own_changes(state: list[Any]) -> list[Any]:
    """Return the state with copies of the tensors that the call changes, which stand last."""
    kept = len(state) - len(_CHANGED)
    return [*state[:kept], *(one.clone() for one in state[kept:])]


def _named_state(owner: Any) -> dict[str, Any]:
    """Return all tensors of the model by name, those that the call changes last."""
    if not isinstance(owner, nn.Module):
        return {}
    named = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    return {**{name: one for name, one in named.items() if name not in _CHANGED}, **{n: named[n] for n in _CHANGED}}


def _as_verified(inputs: list[Any]) -> Any:
    """Return autocast as it was when the kernels were verified."""
    kind = inputs[0].device.type if inputs else "cuda"
    return torch.autocast(kind, dtype=_autocast_dtype(), enabled=bool(_AUTOCAST))


def _arguments(inputs: list[Any], positional: int, sizes: dict[int, int] | None = None) -> tuple[list[Any], Any]:
    """Return positional and keyword arguments made of the operator's inputs; with ``sizes``, check them again."""
    rest = iter(inputs)
    given = [(name, _rebuild(expected, rest)) for name, expected in _ARGUMENTS]
    if sizes is not None:
        for (name, value), (_, expected) in zip(given, _ARGUMENTS, strict=True):
            _match(name, expected, value, [], sizes)
    return [value for _, value in given[:positional]], dict(given[positional:])


def _rebuild(record: Any, tensors: Iterator[Any]) -> Any:
    """Return the value that a record describes, with tensors from the iterator."""
    form, content = record[0], record[1]
    if form == "tensor":
        return next(tensors)
    if form == "value":
        return content
    if form == "dict":
        return {key: _rebuild(item, tensors) for key, item in content}
    items = [_rebuild(item, tensors) for item in content]
    if form in ("list", "tuple"):
        return items if form == "list" else tuple(items)
    return getattr(torch.return_types, form)(items)


def _flatten(record: Any, value: Any) -> list[Any]:
    """Return the tensors of a result in the record's order."""
    form, content = record[0], record[1]
    if form == "tensor":
        return [value]
    if form == "value":
        return []
    items = [(item, value[key]) for key, item in content] if form == "dict" else list(zip(content, value, strict=True))
    return [tensor for item, one in items for tensor in _flatten(item, one)]


def _orders(record: Any) -> list[Any]:
    """Return the order of dimensions in memory of each tensor of a record."""
    if record[0] == "tensor":
        return [record[1]]
    if record[0] == "value":
        return []
    items = [item for _, item in record[1]] if record[0] == "dict" else record[1]
    return [order for item in items for order in _orders(item)]


def _empty(tensor: Any, order: tuple[int, ...]) -> Any:
    inverse = [order.index(dim) for dim in range(len(order))]
    return tensor.new_empty([tensor.shape[dim] for dim in order]).permute(inverse)


def _fresh(flat: list[Any], given: list[Any]) -> list[Any]:
    """Return results in their verified layout, in memory that nothing else uses; copies only where it must."""
    taken = {one.untyped_storage().data_ptr() for one in given}
    results = []
    for tensor, order in zip(flat, _orders(_OUTPUT), strict=True):
        inverse = [order.index(dim) for dim in range(len(order))]
        result = tensor.permute(order).contiguous().permute(inverse)
        if result.untyped_storage().data_ptr() in taken:
            result = result.clone()
        taken.add(result.untyped_storage().data_ptr())
        results.append(result)
    return results


_OPERATOR = _Operator()
_registered = torch.library.custom_op(
    _OPERATOR_NAME, _OPERATOR.run, mutates_args=(), schema="(Tensor[] inputs, Tensor[] state) -> Tensor[]"
)
_registered.register_fake(_OPERATOR.fake)
