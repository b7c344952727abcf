"""Records how a module's parts are called in one run of the whole module (inside a Reference Runner).

For each submodule: how often it was called, with what kinds of arguments, and how long it took, children included.
Arguments are described as the schema's Call does (shape, dtype, strides, range), not by their values: what is verified
with drawn inputs is judged again in the whole module. Times are wall-clock microseconds; on a GPU the device is waited
for around each part, so that they say where the time is, not how long a call takes.

Left out: parts called with arguments that have no form in the schema (``call`` is null then).
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_PARTS = 2000


@dataclass
class _Seen:
    """What was seen of one part."""

    kinds: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    calls: int = 0
    time_us: float = 0.0
    began: list[float] = field(default_factory=list)


class _Clock:
    """Microseconds without what recording itself takes; waits for the device first."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device != "cpu"
        self.recording_us = 0.0

    def now_us(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() * 1e6 - self.recording_us


def record_parts(module: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """Call ``module`` once and return one row for each part that was called; the module's own has an empty path.

    Rows hold ``path``, ``type``, ``leaf`` (no parts of its own), ``calls``, ``time_us``, ``kinds`` (how many kinds of
    calls), ``call`` (of the only kind, else null) and ``signature`` (equal for parts that are alike and called alike).
    """
    clock = _Clock(device)
    parts = dict(list(module.named_modules())[:MAX_PARTS])
    seen = {path: _Seen() for path in parts}
    handles = []
    for path, part in parts.items():
        handles += _watch(part, seen[path], clock)
    try:
        module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return [_row(path, parts[path], found) for path, found in seen.items() if found.calls]


def _watch(part: torch.nn.Module, seen: _Seen, clock: _Clock) -> list[Any]:
    def begin(_part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before = time.perf_counter()
        described = _call(args, kwargs)
        seen.kinds.setdefault(json.dumps(described, sort_keys=True), described)
        clock.recording_us += (time.perf_counter() - before) * 1e6
        seen.began.append(clock.now_us())

    def end(_part: Any, _args: Any, _output: Any) -> None:
        seen.calls += 1
        seen.time_us += clock.now_us() - seen.began.pop()

    return [part.register_forward_pre_hook(begin, with_kwargs=True), part.register_forward_hook(end)]


def _row(path: str, part: torch.nn.Module, seen: _Seen) -> dict[str, Any]:
    only = next(iter(seen.kinds.values())) if len(seen.kinds) == 1 else None
    state = [(key, list(value.shape), str(value.dtype)) for key, value in part.state_dict().items()]
    alike = json.dumps([str(part), type(part).__qualname__, part.training, state, sorted(seen.kinds)])
    return {
        "path": path,
        "type": type(part).__name__,
        "leaf": next(part.children(), None) is None,
        "calls": seen.calls,
        "time_us": round(seen.time_us, 1),
        "kinds": len(seen.kinds),
        "call": only,
        "signature": hashlib.sha256(alike.encode()).hexdigest()[:16],
    }


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    described = [_argument(value) for value in args], {name: _argument(value) for name, value in kwargs.items()}
    if None in described[0] or None in described[1].values():
        return None
    return {"args": described[0], "kwargs": described[1]}


def _argument(value: Any) -> dict[str, Any] | None:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if value is None or isinstance(value, bool | int | float | str):
        return {"kind": "scalar", "value": value}
    if type(value) in (list, tuple):
        items = [_argument(item) for item in value]
        return None if None in items else {"kind": "nested", "form": type(value).__name__, "items": items}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        items = [_argument(item) for item in value.values()]
        return None if None in items else {"kind": "nested", "form": "dict", "keys": list(value), "items": items}
    return None


def _tensor(value: torch.Tensor) -> dict[str, Any] | None:
    if value.layout != torch.strided or value.is_complex() or not value.numel():
        return None
    spec: dict[str, Any] = {
        "kind": "tensor",
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "strides": None if value.is_contiguous() else list(value.stride()),
    }
    if value.dtype == torch.bool:
        return {**spec, "fill": "bernoulli"}
    low, high = (float(end) for end in value.detach().aminmax())
    if not value.is_floating_point():
        return {**spec, "fill": "integers", "low": low, "high": high + 1}
    if 0.0 <= low < high < float("inf"):
        return {**spec, "fill": "uniform", "low": low, "high": high}  # probabilities, squares: never negative
    return spec
