"""The experiments that prove what a candidate's own kernels are worth: ablation and poisoned memory.

*Ablation*: every launch of the candidate's kernels does nothing, and fresh memory is filled with NaN (floats) or a
pattern (integers). If the output is still right, the kernels did not make it. *Poison*: before an ordinary call, blocks
of the sizes that it allocates are filled with NaN and freed, so that stale right answers in recycled memory do not
survive.

Both run in the candidate's own process and can be tampered with there; the Judge looks at outputs only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from drk.gym.triton_adapter import launchables, silenced_kernels

_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_PATTERN = 0x5A
POISON_BLOCKS = 4


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with a pattern where there is no NaN; return the tensor."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(_PATTERN)


class PoisonedAllocations(TorchFunctionMode):
    """Fills every tensor that ``torch.empty`` and its kin return."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, and poison a fresh tensor."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _ALLOCATIONS and isinstance(result, torch.Tensor):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                poison(result)
        return result


@contextmanager
def ablated(files: frozenset[str], only: str | None = None) -> Iterator[list[str]]:
    """Turn launches of kernels from ``files`` (one name only, if given) into nothing.

    Yields a list that holds the name of each launch that was suppressed so far.
    """
    launched: list[str] = []
    with ExitStack() as stack, PoisonedAllocations():
        named = [(function, str(getattr(function.fn, "__name__", "?"))) for function in launchables(files)]
        chosen = [(function, name) for function, name in named if only is None or name == only]
        for function, name in chosen:
            _silence(function, name, launched, stack)
        # What was compiled before can be launched without its function.
        stack.enter_context(silenced_kernels({id(function): name for function, name in chosen}, launched.append))
        yield launched


def _silence(function: Any, name: str, launched: list[str], stack: ExitStack) -> None:
    before = vars(function).get("run")

    def restore() -> None:
        if before is None:
            del function.run
        else:
            function.run = before

    function.run = lambda *_args, **_kwargs: launched.append(name)
    stack.callback(restore)


def poison_free_memory(shapes: list[tuple[tuple[int, ...], torch.dtype]], device: str) -> None:
    """Fill and free blocks of the given sizes, so that the allocator hands out NaN rather than old answers."""
    held = []
    for shape, dtype in shapes:
        for _ in range(POISON_BLOCKS):
            held.append(poison(torch.empty(shape, dtype=dtype, device=device)))
    held.clear()
