"""Threads that a call starts work under the same modes as the call itself.

PyTorch's function and dispatch modes belong to one thread. In a thread of its own, work that a candidate leaves to
torch would not show in the log of operators, and ``cuda`` would not mean the CPU where that is simulated. With
:func:`follow_threads` in place each new Python thread enters the modes of the thread that starts it: the device's
remapping, and a log that writes into the same rows.

Left out: threads that were there before, whose modes are those of their start, and threads of native code.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from drk.gym.runner.operators import OperatorLog
from drk.gym.runner.patching import replace_attribute
from drk.gym.runner.remap import DeviceRemap

_STARTERS = ("start_new_thread", "start_new", "start_joinable_thread")


def follow_threads(stack: contextlib.ExitStack) -> None:
    """Let threads that are started from now on follow the modes of their starters, until ``stack`` closes."""
    for owner, prefix in ((_thread, ""), (threading, "_")):
        for name in _STARTERS:
            real = getattr(owner, prefix + name, None)
            if real is not None:
                replace_attribute(stack, owner, prefix + name, _following(real))


def _following(real: Callable[..., Any]) -> Callable[..., Any]:
    def start(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        modes: list[Any] = [DeviceRemap() for mode in functions if type(mode) is DeviceRemap]
        logs = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, OperatorLog)]
        modes += [log.sibling() for log in logs]
        if not modes:
            return real(function, *args, **kwargs)

        def run(*inner: Any, **named: Any) -> Any:
            with contextlib.ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                return function(*inner, **named)

        return real(run, *args, **kwargs)

    return start
