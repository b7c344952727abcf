"""Timed runs in a Runner: ``warm``, ``prepare`` (fresh values, cold cache), ``go`` (the window), ``outputs``.

``compile`` goes before ``warm`` of the compiled form where there is time for it: it needs no GPU to speak of.

Where the task's gradients are judged, a call is a forward and a backward pass.

Both Runners run this same code, so what it costs falls on baseline and candidate alike. The event time it answers is a
claim: the Judge holds it against its own clock, which spans ``go`` only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from drk.gym.runner import execute, structure
from drk.gym.runner.compile_ahead import compile_ahead, import_compiler
from drk.gym.runner.execute import CallOptions
from drk.gym.runner.sampling import shrink
from drk.gym.runner.training_step import Stepped, TrainingStep

if TYPE_CHECKING:
    from drk.gym.runner.session import Session

MIN_WARM_CALLS = 3
MAX_WARM_CALLS = 20
MAX_WARM_S = 10.0
SPIN_CYCLES = 60_000
# Taken before any user code is imported: replacing the names later changes nothing here.
_EVENT, _RECORD, _ELAPSED = torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time
_SYNCHRONIZE, _SLEEP, _CLOCK = torch.cuda.synchronize, torch.cuda._sleep, time.perf_counter


class Timer:
    """Times the module of a session, or its compiled forms."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.forms: dict[str, Callable[..., Any]] = {}
        self.calls: list[tuple[list[Any], dict[str, Any]]] = []
        self.values: list[Any] = []
        self.keys: list[int] = []
        self.draws = False
        self.form = "eager"
        self.flush: torch.Tensor | None = None

    # --- warm-up -----------------------------------------------------------------------------------------

    def import_compiler(self, _message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Import what ``torch.compile`` needs, which takes seconds and neither the module nor the GPU."""
        import_compiler()
        return {}

    def compile(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Compile the module for ``warm`` without running it; answer whether that could be done."""
        if self._trains:
            return {"compiled": False}
        self._start_clean()
        key = int(message["key"])
        args, kwargs = self._draw(key)
        with execute.call_context(self._options(key)):
            return {"compiled": compile_ahead(self.session.built, args, kwargs)}

    def warm(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Call a form until it is steady; answer its rough latency in seconds and the first call's time."""
        form, key = message["form"], int(message["key"])
        self._start_clean()
        forward = self._form(form)
        options = self._options(key)
        args, kwargs = self._draw(key)
        times: list[float] = []
        value: Any = None
        random_before = torch.cuda.get_rng_state()
        start = _CLOCK()
        while len(times) < MAX_WARM_CALLS and _CLOCK() - start < MAX_WARM_S:
            self.session.snapshot.restore(self.session.built)
            _SYNCHRONIZE()
            before = _CLOCK()
            with execute.call_context(options):
                value = forward(*args, **kwargs)
            _SYNCHRONIZE()
            times.append(_CLOCK() - before)
            if len(times) >= MIN_WARM_CALLS and times[-1] > 0.7 * times[-2] and sum(times[1:]) > 0.025:
                break
        self.draws = self.draws or not torch.equal(random_before, torch.cuda.get_rng_state())
        return {
            "first_s": times[0],
            "latency_s": min(times),
            "calls": len(times),
            "input_bytes": structure.size_bytes((args, kwargs)) + _held_bytes(value),
        }

    def _start_clean(self) -> None:
        # What correctness left in the allocator's pools would make two processes with the same code differ.
        self.values, self.calls = [], []
        self.session.forget_calls()
        gc.collect()
        if self.session.role == "reference":
            # What is left lives as long as the process: the next collection need not walk torch and Inductor again
            # (0.1 s). Not in a candidate's process: its kernels are found through the collector.
            gc.freeze()
        torch.cuda.empty_cache()

    def _form(self, name: str) -> Callable[..., Any]:
        if name not in self.forms:
            module = self.session.built
            if name == "eager":
                self.forms[name] = module
            elif name == "compile":
                self.forms[name] = torch.compile(module)
            elif name == "max_autotune":
                self.forms[name] = torch.compile(module, mode="max-autotune-no-cudagraphs")
            else:
                raise ValueError(f"unknown form {name!r}")
            if self._trains:
                self.forms[name] = TrainingStep(self.forms[name], module)
        return self.forms[name]

    @property
    def _trains(self) -> bool:
        return bool(self.session.meta.get("grad"))

    def _draw(self, key: int) -> tuple[list[Any], dict[str, Any]]:
        """Draw one call's inputs, as leaves where gradients are taken."""
        inputs = self.session.draw(key)
        return execute.prepare_inputs(*inputs, self._options(key)) if self._trains else inputs

    def _options(self, key: int) -> CallOptions:
        autocast = self.session.timing_autocast or self.session.meta.get("autocast")
        return CallOptions(autocast=autocast, device=self.session.device, key=key, grad=self._trains)

    # --- the window --------------------------------------------------------------------------------------

    def prepare(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Draw fresh inputs for each call of the coming window, restore state, empty the L2 cache."""
        self.form = message["form"]
        self.values = []
        self.calls = []
        self.keys = [int(key) for key in message["keys"]]
        self.session.snapshot.restore(self.session.built)
        for key in message["keys"]:
            self.calls.append(self._draw(int(key)))
        forward = self._form(self.form)
        if isinstance(forward, TrainingStep):
            forward.draw([int(key) for key in message["keys"]])
        self._flush_cache()
        _SYNCHRONIZE()
        return {}

    def _flush_cache(self) -> None:
        if self.flush is None:
            l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
            self.flush = torch.empty(2 * l2_bytes // 4, dtype=torch.int32, device="cuda")
        self.flush.zero_()

    def go(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Run the window; answer milliseconds by events.

        The first ``lead`` calls are answered apart (``lead_ms``): other processes have just emptied the caches that a
        launch runs from, which in a loop of calls is not so.

        With ``repeat`` the prepared inputs are cycled through that many calls and only the last value is kept: a long
        window, in which work that hides from the events shows on the Judge's clock.
        """
        forward, options = self._form(self.form), self._options(int(message.get("key", 0)))
        repeat, lead = int(message.get("repeat", 0)), int(message.get("lead", 0))
        first, begin, end = (_EVENT(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        # The device idles while the first launch is prepared on the host; a short spin hides that, and only that.
        _SLEEP(SPIN_CYCLES)  # type: ignore[no-untyped-call]
        with execute.call_context(options):
            _RECORD(first)
            if repeat:
                _RECORD(begin)
                self._cycle(forward, repeat)
            else:
                for index, (args, kwargs) in enumerate(self.calls):
                    if index == lead:
                        _RECORD(begin)
                    self._seed(index)
                    self.values.append(forward(*args, **kwargs))
            _RECORD(end)
        _SYNCHRONIZE()
        return {"event_ms": _ELAPSED(begin, end), "lead_ms": _ELAPSED(first, begin)}

    def _cycle(self, forward: Callable[..., Any], repeat: int) -> None:
        count = len(self.calls)
        for index in range(repeat):
            args, kwargs = self.calls[index % count]
            self._seed(index % count)
            self.values = [forward(*args, **kwargs)]

    def _seed(self, index: int) -> None:
        """Have a module that draws random numbers draw the same ones in both Runners, where it does so at all."""
        if self.draws:
            torch.manual_seed(self.keys[index] & 0x7FFFFFFF)

    def outputs(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Lay out what call ``index`` of the last window returned."""
        value = self.values[int(message["index"])]
        gradients: list[tuple[str, torch.Tensor]] = []
        if isinstance(value, Stepped):
            value, gradients = value.value, value.gradients
        shown = shrink([*execute.output_leaves(value), *gradients], message.get("sample"))
        return {**self.session.offer(shown), "description": structure.describe(value)}

    def rest(self, _message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Give back the memory that timing took."""
        self.flush = None
        self._start_clean()
        return {}


def _held_bytes(value: Any) -> int:
    """What a call with a backward pass makes a window hold beside its inputs: cotangents and gradients."""
    if not isinstance(value, Stepped):
        return 0
    return structure.size_bytes(value.value) + structure.size_bytes([one for _, one in value.gradients])
