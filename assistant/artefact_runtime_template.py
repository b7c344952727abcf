"""The part of every artefact that puts a kernel into a user's module: real code, copied as text.

Everything below the marker line is appended to the candidate's source by :mod:`drk.assistant.artefact`, after the
checks of :mod:`drk.assistant.artefact_guard_template`. It needs torch and triton only, so that a user can ship the file
without drk. It is a module of its own so that type checker, linter and tests see it.

What is guarded, and falls back to the original when it does not hold: device, dtype, shape class (everything but batch
dimensions), layout, plain arguments, train/eval mode, gradients, autocast, replaced or hooked parts, tracing. Other
batch sizes are checked once against the original before they are trusted.

Left out: functorch transforms over the optimised module, ``nn.DataParallel`` replicas (DDP works), tensors that are
plain attributes rather than parameters or buffers, and attributes changed after :func:`optimize`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drk.assistant.artefact_guard_template import (
    _ARGUMENTS,
    _CHANGED,
    _CHECK_NEW_SIZES,
    _FREE_SIZES,
    _GRADIENTS,
    _KERNEL_FAULTS,
    _KIND,
    _OUTPUT,
    _SUBMODULE,
    _TARGET,
    _TRAINING,
    _WEIGHTS,
    _alike,
    _build_kernels,
    _check_autocast,
    _check_replaced,
    _check_same_configuration,
    _find,
    _holder,
    _key,
    _match,
    _say,
    _slopes_alike,
    _state_marks,
    _Unfit,
)
from drk.assistant.artefact_operator_template import _OPERATOR, _named_state, _rebuild, _registered

# --- drk runtime ------------------------------------------------------------------------------------------------
_LOG = logging.getLogger(__name__)


def optimize(model: Any, build: Callable[..., Any] | None = None, place: str = _SUBMODULE) -> Any:
    """Let ``model`` use the kernels where they fit; return the same object (a function: its replacement).

    ``place`` is the part that gets them, where it is another than the verified one. ``build`` makes a model from the
    recorded arguments (default: the model's class); it shows whether this model was configured like the one that was
    verified. If not, the model is left alone and :func:`stats` says why.
    """
    if not isinstance(model, nn.Module):
        return optimized(model)
    try:
        part = model.get_submodule(place)
    except AttributeError:
        _LOG.warning("%s runs without its kernels: it has no part %s", _TARGET, place)
        return model
    if "forward" in vars(part):
        return model
    dispatch = _Dispatch(part)
    try:
        _check_same_configuration(model, build, place)
        dispatch.prepare()
    except _Unfit as unfit:
        dispatch.disable(str(unfit))
    part.forward = dispatch
    return model


def restore(model: Any, place: str = _SUBMODULE) -> Any:
    """Take the kernels out again; return the same model, or a function's original."""
    if not isinstance(model, nn.Module):
        dispatch = getattr(model, "drk_dispatch", None)
        return model if dispatch is None else dispatch.owner
    part = model.get_submodule(place)
    if isinstance(vars(part).get("forward"), _Dispatch):
        del part.forward
    return model


def stats(model: Any, place: str = _SUBMODULE) -> dict[str, Any]:
    """Return calls that used the kernels, calls that fell back, and how often for which reason.

    ``operator_calls`` are those of compiled and exported code, of all models in this process together.
    """
    if isinstance(model, nn.Module):
        dispatch = vars(model.get_submodule(place)).get("forward")
    else:
        dispatch = getattr(model, "drk_dispatch", None)
    if not isinstance(dispatch, _Dispatch):
        return {
            "optimized": False,
            "kernel_calls": 0,
            "operator_calls": 0,
            "fallback_calls": 0,
            "reasons": {},
            "disabled": "",
        }
    reasons = dict(dispatch.reasons)
    fallbacks = sum(reasons.values())
    return {
        "optimized": True,
        "kernel_calls": dispatch.kernel_calls,
        "operator_calls": _OPERATOR.calls,
        "fallback_calls": fallbacks,
        "reasons": reasons,
        "disabled": dispatch.disabled,
    }


def optimized(target: Any) -> Any:
    """Decorate the class, factory or function that was optimised: what it makes uses the kernels."""
    if _KIND == "factory":

        @functools.wraps(target)
        def factory(*args: Any, **kwargs: Any) -> Any:
            return optimize(target(*args, **kwargs), build=target)

        return factory
    if not isinstance(target, type):
        dispatch = _Dispatch(target)
        try:
            dispatch.prepare()  # nothing can be prepared while torch.compile traces the first call
        except _Unfit as unfit:
            dispatch.disable(str(unfit))

        @functools.wraps(target)
        def function(*args: Any, **kwargs: Any) -> Any:
            return dispatch(*args, **kwargs)

        function.drk_dispatch = dispatch  # type: ignore[attr-defined]
        return function
    construct: Callable[..., None] = target.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if type(self) is target:  # a subclass is something else than what was verified
            optimize(self)

    target.__init__ = __init__  # type: ignore[misc]
    return target


class _Dispatch:
    """Stands in for ``forward`` of one module, or for one function: kernels where they fit, else the original."""

    def __init__(self, owner: Any, disabled: str = "") -> None:
        self.owner = owner
        self.disabled = disabled
        self.kernel_calls = 0
        self.reasons: Counter[str] = Counter()
        self.kernels: nn.Module | None = None
        self.ties: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        self.own: list[tuple[dict[str, Any], str]] = []
        self.parts: list[tuple[nn.Module, type, list[nn.Module]]] = []
        self.trusted = {_key({size: size for size in _FREE_SIZES}), _key(_FREE_SIZES)}
        self.converted: tuple[Any, ...] = ()
        self.signature: inspect.Signature | None = None
        call = type(owner).forward if isinstance(owner, nn.Module) else owner
        # whoever asks for the signature or the code (torch.export does) gets the original's
        self.__wrapped__ = types.MethodType(call, owner) if isinstance(owner, nn.Module) else call
        self.__code__ = getattr(call, "__code__", None)
        self.names: list[str] | None = None
        self.state: list[tuple[dict[str, Any], str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            _Dispatch,
            (self.owner, self.disabled),
        )  # copies and pickles prepare themselves again, for the copied module

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the code that was there before."""
        if isinstance(self.owner, nn.Module):
            return type(self.owner).forward(self.owner, *args, **kwargs)
        return self.owner(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.traced(args, kwargs)
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return self.original(*args, **kwargs)
        try:
            if self.disabled:
                raise _Unfit(self.disabled)
            kernels = self.kernels if self.kernels is not None else self.prepare()
            args, kwargs, tensors, sizes = self.check_arguments(args, kwargs)
            self.check_state(tensors)
        except _Unfit as unfit:
            return self.fall_back(str(unfit), args, kwargs)
        try:
            if _key(sizes) in self.trusted:
                result = kernels(*args, **kwargs)
            else:
                result = self.first_use(kernels, sizes, args, kwargs)
        except _Unfit as unfit:
            return self.fall_back(str(unfit), args, kwargs)
        except torch.OutOfMemoryError as error:
            return self.fall_back(f"out of memory: {error}", args, kwargs)
        except _KERNEL_FAULTS as error:
            self.disable(f"the kernels failed: {type(error).__name__}: {error}")
            return self.fall_back(self.disabled, args, kwargs)
        self.kernel_calls += 1
        if _TRAINING:
            self.take_back_buffers()
        return result

    def traced(self, args: Any, kwargs: Any) -> Any:
        """Under torch.compile and torch.export: one registered operator where the kernels fit, else the original."""
        if self.disabled or self.kernels is None or self.names is None or _WEIGHTS == "converted" or _GRADIENTS:
            return self.original(*args, **kwargs)
        try:
            given = {**dict(zip(self.names, args, strict=False)), **kwargs}
            if len(given) != len(_ARGUMENTS) or len(args) + len(kwargs) != len(given):
                raise _Unfit("called with other arguments")
            tensors: list[Any] = []
            for name, expected in _ARGUMENTS:
                if name not in given:
                    raise _Unfit("called with other arguments")
                _match(name, expected, given[name], tensors, {})
            state = [holder[leaf] for holder, leaf in self.state]
            self.check_modes(tensors, state)
        except _Unfit:
            return self.original(*args, **kwargs)
        results = _registered(tensors, state)
        kept = len(results) - len(_CHANGED)
        for before, after in zip(state[len(state) - len(_CHANGED) :], results[kept:], strict=True):
            before.copy_(after)
        return _rebuild(_OUTPUT, iter(results[:kept]))

    def fall_back(self, reason: str, args: Any, kwargs: Any) -> Any:
        """Count, log once, and run the original."""
        self.reasons[reason] += 1
        if self.reasons[reason] == 1:
            _LOG.warning("%s runs without its kernels: %s", _TARGET, reason)
        return self.original(*args, **kwargs)

    def disable(self, reason: str) -> None:
        """Use the original from now on."""
        self.disabled = reason
        _LOG.warning("%s will not use its kernels: %s", _TARGET, reason)

    def first_use(self, kernels: nn.Module, sizes: dict[int, int], args: Any, kwargs: Any) -> Any:
        """Hold sizes that were not verified against the original, once."""
        told = ", ".join(f"{now} for {size}" for size, now in sizes.items())
        if not _CHECK_NEW_SIZES:
            raise _Unfit(f"sizes were not verified: {told}")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise _Unfit("new sizes cannot be checked while a CUDA graph is captured")
        expected = self.original(*args, **kwargs)
        result = kernels(*args, **kwargs)
        state = [mine[leaf] for _, mine, leaf in self.ties]
        slopes = not _GRADIENTS or _slopes_alike(self.original, kernels, args, kwargs, state)
        if not slopes or not _alike(result, expected):
            self.disable(f"with other sizes ({told}) the result differs from the original's")
            raise _Unfit(self.disabled)
        self.trusted.add(_key(sizes))
        return result

    # --- preparing -------------------------------------------------------------------------------------------

    def prepare(self) -> nn.Module:
        """Build the kernels' module and tie its parameters and buffers to the owner's."""
        self.signature = inspect.signature(self.__wrapped__)
        parameters = self.signature.parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        plain = [one.name for one in parameters if one.kind is kinds[0]]
        self.names = plain if all(one.kind in kinds for one in parameters) else None
        if isinstance(self.owner, nn.Module):
            self.parts = [(one, type(one), list(one.children())) for one in self.owner.modules()]
        kernels = _build_kernels(self.owner)
        self.tie(kernels)
        self.kernels = kernels.train(_TRAINING)
        if self.names is not None and _WEIGHTS == "copied" and not _GRADIENTS:
            self.prepare_operator(kernels, sum(name in plain for name, _ in _ARGUMENTS))
        return kernels

    def prepare_operator(self, kernels: nn.Module, positional: int) -> None:
        """Make the registered operator ready, and note which tensors it takes."""
        paths = [name.rpartition(".") for name in _named_state(self.owner)]
        self.state = [(_holder(self.owner.get_submodule(path), leaf), leaf) for path, _, leaf in paths]
        _OPERATOR.adopt(self.owner, kernels, ties=self.ties, own=self.own, positional=positional, trusted=self.trusted)

    def tie(self, kernels: nn.Module) -> None:
        """Note which tensors of ``kernels`` are the owner's, after checking that they match."""
        self.ties, self.own = [], []
        persistent = set(kernels.state_dict())
        for name, tensor in [*kernels.named_parameters(remove_duplicate=False),
                             *kernels.named_buffers(remove_duplicate=False)]:  # fmt: skip
            path, _, leaf = name.rpartition(".")
            mine = _holder(kernels.get_submodule(path), leaf)
            if _WEIGHTS == "converted":
                self.own.append((mine, leaf))
                continue
            theirs = _find(self.owner, path, leaf)
            if theirs is None and name in persistent:
                raise _Unfit(f"the model has no {name}")
            if theirs is None:
                self.own.append((mine, leaf))
                continue
            other = theirs[leaf]
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                raise _Unfit(f"{name} is {_say(other)} here and {_say(tensor)} where it was verified")
            mine[leaf] = other
            self.ties.append((theirs, mine, leaf))
        self.converted = _state_marks(self.owner) if _WEIGHTS == "converted" else ()

    # --- checks of every call ----------------------------------------------------------------------------------

    def check_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any, list[Any], dict[int, int]]:
        """Return the arguments as the kernels take them, all tensors, and the free sizes; else raise _Unfit."""
        wanted = len(_ARGUMENTS)
        if not kwargs and self.names is not None and len(args) == wanted:
            given = dict(zip(self.names, args, strict=False))
        else:
            assert self.signature is not None
            try:
                bound = self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _Unfit("the arguments do not fit the signature") from error
            given, args, kwargs = bound.arguments, bound.args, bound.kwargs
        if list(given) != [name for name, _ in _ARGUMENTS]:
            raise _Unfit(f"called with ({', '.join(given)})")
        tensors: list[Any] = []
        sizes: dict[int, int] = {}
        for name, expected in _ARGUMENTS:
            _match(name, expected, given[name], tensors, sizes)
        return args, kwargs, tensors, sizes

    def check_state(self, tensors: list[Any]) -> None:
        """Tie the owner's present tensors and check mode, device and gradients; else raise _Unfit."""
        device = tensors[0].device if tensors else None
        place = tensors[0].get_device() if tensors else None  # the quicker question
        if any(tensor.get_device() != place for tensor in tensors):
            raise _Unfit("the inputs are on several devices")
        self.check_parts()
        if self.converted and self.converted != _state_marks(self.owner):
            self.kernels = self.prepare()
        state = [self.tied(*tie) for tie in self.ties]
        for tensor in state:
            if tensor.get_device() != place and place is not None:
                raise _Unfit(f"the model is on {tensor.device}, the inputs are on {device}")
        for mine, leaf in self.own:
            if device is not None and mine[leaf].device != device:
                mine[leaf] = mine[leaf].detach().to(device)
        state += self.owner.parameters() if self.converted else []
        self.check_modes(tensors, state)

    def check_modes(self, tensors: list[Any], state: list[Any]) -> None:
        """Raise _Unfit when autocast differs or gradients are needed."""
        _check_autocast(tensors[0].device if tensors else None)
        if _GRADIENTS or not torch.is_grad_enabled():
            return
        for tensor in [*tensors, *state]:
            if tensor.requires_grad:
                raise _Unfit("gradients are needed (use torch.no_grad() or torch.inference_mode())")

    def check_parts(self) -> None:
        """Raise _Unfit when a part was replaced, has hooks, or is in another mode."""
        for part, kind, children in self.parts:
            if type(part) is not kind or list(part.children()) != children:
                raise _Unfit("a part of the model was replaced")
            if part.training is not _TRAINING:
                raise _Unfit("the model is in train mode" if part.training else "the model is in eval mode")
            if part is not self.owner and (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks):
                raise _Unfit("a part of the model has hooks")

    def tied(self, theirs: dict[str, Any], mine: dict[str, Any], leaf: str) -> Any:
        """Return the owner's present tensor, and let the kernels use it."""
        tensor = theirs.get(leaf)
        if tensor is not mine[leaf]:
            _check_replaced(leaf, tensor, mine[leaf])
            mine[leaf] = tensor
        return tensor

    def take_back_buffers(self) -> None:
        """Give buffers that the kernels replaced back to the owner."""
        for theirs, mine, leaf in self.ties:
            if theirs.get(leaf) is not mine[leaf]:
                theirs[leaf] = mine[leaf]
