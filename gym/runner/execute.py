"""One judged call of a module in a Runner: restore state, run, collect every leaf that the Judge compares.

Leaves are named: ``out`` plus the path in the returned value, ``grad:input...`` and ``grad:param...`` for gradients,
``state:<key>`` for buffers and parameters that the call changed, ``input<path>`` for inputs that it changed. Python
numbers in the output become 0-dim float64 or int64 leaves. A candidate's list of changed inputs is its own claim; the
Judge compares the reference's list against what the candidate returns for the same names.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from drk.gym.runner import structure
from drk.gym.runner.float64 import float64, to_float64
from drk.gym.runner.operators import OperatorLog
from drk.gym.runner.recipes import scale_weights
from drk.gym.runner.rungs import RUNGS, on_rung
from drk.gym.runner.sampling import fingerprint, shrink


@dataclass
class StateSnapshot:
    """Copies of a module's parameters and buffers, to restore before each call and to find what a call changed.

    ``plain`` are copies of plain attributes (counters, lists of them), by part: they are restored and not compared.
    ``restorable`` names those, as (part, attribute), that are restored; None for all. A candidate's are restored only
    where the reference changes the like: to wind back whatever a candidate notes of its calls would undo a cache's key
    together with the proof that it is a cache.
    """

    tensors: dict[str, torch.Tensor]
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    restorable: frozenset[tuple[str, str]] | None = None

    @classmethod
    def take(cls, module: torch.nn.Module) -> StateSnapshot:
        """Copy all parameters and buffers, non-persistent ones included, and plain attributes."""
        plain = {path: copy.deepcopy(plain_attributes(part)) for path, part in module.named_modules()}
        return cls({key: value.detach().clone() for key, value in named_state(module)}, plain)

    def restore(self, module: torch.nn.Module) -> None:
        """Put the copies back in place and drop gradients."""
        with torch.no_grad():
            for key, value in named_state(module):
                saved = self.tensors.get(key)
                if saved is not None and saved.shape == value.shape:
                    value.detach().copy_(saved)
        parts = dict(module.named_modules())
        for path, key in self.changed_attributes(module):
            if self.restorable is None or (path, key) in self.restorable:
                parts[path].__dict__[key] = copy.deepcopy(self.plain[path][key])
        module.zero_grad(set_to_none=True)

    def changed_attributes(self, module: torch.nn.Module) -> list[tuple[str, str]]:
        """Return the plain attributes, as (part, attribute), that differ from their copies now."""
        return [
            (path, key)
            for path, part in module.named_modules()
            for key, kept in self.plain.get(path, {}).items()
            if is_plain(vars(part).get(key)) and vars(part).get(key) != kept
        ]

    def changed(self, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that differ from their copies now."""
        found = []
        for key, value in named_state(module):
            saved = self.tensors.get(key)
            if saved is None or saved.shape != value.shape or not same(saved, value):
                found.append((key, value.detach()))
        return found


def named_state(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers with their names; tied ones once."""
    return [*module.named_parameters(), *module.named_buffers()]


def plain_attributes(part: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes that are numbers, texts, or lists, tuples, dicts and sets of them."""
    internal = vars(torch.nn.Module())
    return {key: value for key, value in vars(part).items() if key not in internal and is_plain(value)}


def is_plain(value: Any) -> bool:
    """Say whether a value is a number, text, None, or a collection of them."""
    if type(value) is dict:
        return all(is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple, set):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN equal to NaN."""
    if left.is_floating_point() or left.is_complex():
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    return bool(torch.equal(left, right))


@dataclass
class CallOptions:
    """How a call is made.

    ``variant`` is ``native``, ``float64``, or a precision rung (``tf32``, ``bf16``, ``fp16``); ``autocast`` a dtype
    name or None; ``convolutions`` the rung that convolutions alone are put on (a GPU's default, mimicked on the CPU);
    ``sample`` how large leaves are shown (:mod:`drk.gym.runner.sampling`).
    """

    variant: str = "native"
    grad: bool = False
    autocast: str | None = None
    convolutions: str | None = None
    device: str = "cpu"
    key: int = 0
    log_operators: bool = False
    weights_factor: float | None = None
    sample: dict[str, Any] | None = None

    @property
    def whole(self) -> int:
        """The number of elements up to which a tensor is copied and shown whole."""
        return int(self.sample["above"]) if self.sample is not None else 2**62


@dataclass
class Outcome:
    """What a call gave: the leaves in order and a JSON description of the returned value."""

    leaves: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    description: dict[str, Any] = field(default_factory=dict)
    operators: list[dict[str, Any]] = field(default_factory=list)
    held: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    aliased: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def call_context(options: CallOptions) -> Iterator[None]:
    """Set gradient mode, autocast and float64 rewriting for one call."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad() if options.grad else torch.no_grad())
        if options.variant == "float64":
            stack.enter_context(float64())
        elif options.variant in RUNGS:
            stack.enter_context(on_rung(options.variant))
        elif options.convolutions:
            stack.enter_context(on_rung(options.convolutions, convolutions_only=True))
        if options.autocast and options.variant != "float64":
            dtype = getattr(torch, options.autocast)
            stack.enter_context(torch.autocast(torch.device(options.device).type, dtype=dtype))
        yield


def prepare_inputs(args: list[Any], kwargs: dict[str, Any], options: CallOptions) -> tuple[list[Any], dict[str, Any]]:
    """Return the inputs in the call's precision, as fresh leaves where gradients are asked for."""

    def convert(_path: str, tensor: torch.Tensor) -> torch.Tensor:
        value = to_float64(tensor) if options.variant == "float64" else tensor
        if not options.grad:
            return value.detach() if value.requires_grad else value  # the same object, for whoever keys on it
        value = value.detach()
        return value.requires_grad_() if value.is_floating_point() else value

    both = structure.map_tensors(convert, (args, kwargs))
    return list(both[0]), dict(both[1])


def call(
    module: torch.nn.Module,
    snapshot: StateSnapshot,
    inputs: tuple[list[Any], dict[str, Any]],
    options: CallOptions,
    before_work: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run ``module`` once from its saved state, and collect the leaves.

    Leaves are copies made in stream order right after the call: what a side stream, a thread or a second call writes
    later is not in them. ``held`` are the returned tensors themselves. Random numbers inside the call start from the
    key, so that two processes draw the same ones where they use the same generators in the same order. ``before_work``
    is called ahead of each operator that is logged.
    """
    snapshot.restore(module)
    if options.weights_factor is not None:
        scale_weights(module, options.weights_factor)
        snapshot = StateSnapshot.take(module)
    args, kwargs = prepare_inputs(*inputs, options)
    before = {path: fingerprint(tensor, options.whole) for path, tensor in structure.tensors((args, kwargs))}
    torch.manual_seed(options.key & 0x7FFFFFFF)
    with call_context(options):
        log = OperatorLog(before_work) if options.log_operators else None
        with log or contextlib.nullcontext():
            value = module(*args, **kwargs)
        held = output_leaves(value)
        leaves = [(name, tensor.clone()) for name, tensor in shrink(held, options.sample)]
        if options.grad:
            leaves += shrink(gradient_leaves(module, value, args, kwargs, options), options.sample)
    outcome = Outcome(leaves, structure.describe(value), log.rows if log is not None else [], held)
    outcome.aliased = sorted({name for name, _ in structure.aliases(held, structure.tensors((args, kwargs)))})
    outcome.attributes = snapshot.changed_attributes(module)
    changed = [(f"state:{key}", tensor) for key, tensor in snapshot.changed(module)]
    for path, tensor in structure.tensors((args, kwargs)):
        if not same(before[path], fingerprint(tensor, options.whole)):
            changed.append((f"input{path}", tensor.detach()))
    outcome.leaves += shrink(changed, options.sample)
    return outcome


def output_leaves(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the returned value's tensors and numbers as named tensors."""
    leaves: list[tuple[str, torch.Tensor]] = []
    for leaf in structure.flatten(value, "out"):
        if leaf.is_tensor:
            tensor = leaf.value.detach()
            leaves.append((leaf.path, tensor.to_dense() if tensor.layout != torch.strided else tensor))
        elif isinstance(leaf.value, bool | int | float):
            kind = torch.float64 if isinstance(leaf.value, float) else torch.int64
            leaves.append((leaf.path, torch.tensor(leaf.value, dtype=kind)))
    return leaves


def cotangent(tensor: torch.Tensor, key: int) -> torch.Tensor:
    """Draw a cotangent for an output from the key alone, in float32, then cast to the output's dtype and device."""
    generator = torch.Generator("cpu").manual_seed((key ^ 0x5DEECE66D) & 0x7FFFFFFF)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(tensor.device, tensor.dtype)


def gradient_leaves(
    module: torch.nn.Module, value: Any, args: list[Any], kwargs: dict[str, Any], options: CallOptions
) -> list[tuple[str, torch.Tensor]]:
    """Backpropagate a cotangent that depends on the key only; return the gradient of every leaf that has one."""
    outputs = [tensor for _, tensor in structure.tensors(value) if tensor.requires_grad]
    if not outputs:
        return []
    with torch._C.DisableTorchFunction():  # float64 rewriting would draw other values
        cotangents = [cotangent(tensor, options.key) for tensor in outputs]
    torch.autograd.backward(outputs, cotangents)
    leaves = [
        (f"grad:input{path}", tensor.grad)
        for path, tensor in structure.tensors((args, kwargs))
        if tensor.grad is not None
    ]
    leaves += [(f"grad:param.{key}", p.grad) for key, p in module.named_parameters() if p.grad is not None]
    return leaves
