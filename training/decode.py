"""Sampling of small models with a static cache, one CUDA graph a step, and rows that leave when they are done.

A small model's token costs the host some twenty milliseconds where its kernels are launched one by one; the GPU needs
one. :class:`Decoder` captures the whole step (forward pass, draw, bookkeeping on the device) as one graph for each
number of rows, and replays it sixteen times before it looks who is done. Rows that are done are replaced by waiting
prompts; once none wait, the others move together and a graph of fewer rows goes on.

What a row says is what :func:`drk.training.sampling.sample` makes it say, but for the last bits: it has its own seed,
and draws by inverting the cumulative distribution with one uniform number a token. Each call reads the weights as they
are by then: in place, or anew into the place that graphs read.

Honest limits: shapes that :mod:`drk.training.decode_model` knows; no autocast (weights are used as they are). The cache
takes at most :data:`MEMORY_SHARE` of the memory that is free, and is kept until :meth:`Decoder.release`. Where
capturing fails steps are launched one by one, and ``stats.cause`` says why; ``stats.kernel_fault`` tells the same of
the kernels of :mod:`drk.training.decode_kernels`, which are compared with torch before they are used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from drk.training.decode_model import Cache, Forward, Operations, TorchOperations
from drk.training.decode_queue import (
    LEAST_CONTEXT,
    LEAST_ROWS,
    DecodeStats,
    Engine,
    Heard,
    RowQueue,
    power_of_two,
)
from drk.training.decode_state import DecodeState
from drk.training.sampling import Prompt, Sampled

MEMORY_SHARE = 0.35
"""Of the GPU's free memory, for keys and values."""
CONTEXT_STEP = 2048
TRIAL_PLACES = 80
"""Places of the cache in the kernels' trial: more than a tile's."""


class Decoder:
    """Samples from a model again and again; keeps its cache and graphs between calls.

    Args:
        rows: answers at a time, at most. Less where memory is short.
        graphs: whether steps are captured; None: on a CUDA device.
        operations: what layers compute with beside matrix products; None: Triton's on a CUDA device.
    """

    def __init__(self, *, rows: int = 256, graphs: bool | None = None, operations: Operations | None = None) -> None:
        self._most_rows = rows
        self._wants_graphs = graphs
        self._operations = operations
        self._forward: Forward | None = None
        self._cache: Cache | None = None
        self._state: DecodeState | None = None
        self._wanted = (0, 0, 0)
        self._graphs: dict[tuple[int, int], Any] = {}
        self._drawing: tuple[float, tuple[int, ...]] = (0.0, ())
        self._stops = torch.zeros(0, dtype=torch.int64)
        self._stream: Any = None
        self.stats = DecodeStats()

    def takes(self, device: torch.device) -> bool:
        """Return whether it is of use on ``device``: where steps are captured, or were asked to be made without."""
        return device.type == "cuda" or self._wants_graphs is False

    def count_anew(self) -> None:
        """Begin new figures. What does not work here stays known."""
        self.stats = DecodeStats(cause=self.stats.cause, kernel_fault=self.stats.kernel_fault)

    def release(self) -> None:
        """Give the cache and the graphs back; the next call makes them anew."""
        self._graphs.clear()
        self._forward = self._cache = self._state = None

    @torch.inference_mode()
    def sample(
        self,
        model: Any,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        stop_ids: frozenset[int],
        heard: Heard = lambda *_: None,
    ) -> list[Sampled]:
        """Return one answer a prompt, in order; see :func:`drk.training.sampling.sample`.

        Args:
            model: one that :func:`drk.training.decode_model.why_not` has nothing against.
            prompts: at least one, none empty.
            temperature: above 0, divides the logits; 0 takes the most likely token.
            stop_ids: tokens that end an answer.
            heard: called in this thread with each answer, as soon as it is there.

        Raises:
            RuntimeError: out of memory, among others. The cache is given back then.
        """
        try:
            with self._on_stream(model):
                self._prepare(model, prompts, temperature, stop_ids)
                engine = Engine(*self._ready(), self.stats, self.advance)
                return RowQueue(engine, prompts, stop_ids, heard).run()
        except RuntimeError:
            self.release()
            raise

    def _on_stream(self, model: Any) -> AbstractContextManager[Any]:
        device = next(model.parameters()).device
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # weights may be on their way
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def _prepare(self, model: Any, prompts: Sequence[Prompt], temperature: float, stop_ids: frozenset[int]) -> None:
        """Have a cache with room for the longest prompt with its answer, and no graph of other weights."""
        if self._operations is None:
            self._operations, self.stats.kernel_fault = operations_for(model)
        if self._forward is None or not self._forward.reads(model):
            self._graphs.clear()
            self._forward = Forward(model, self._operations)
        else:
            self._forward.refresh()
        forward, drawing = self._forward, (temperature, tuple(sorted(stop_ids)))
        if drawing != self._drawing or self._stops.device != forward.weight.device:
            self._graphs.clear()
            self._stops = torch.tensor(drawing[1], dtype=torch.int64, device=forward.weight.device)
            self._drawing = drawing
        wanted = (
            min(power_of_two(len(prompts), LEAST_ROWS), self._most_rows),
            context_of(max(len(one.ids) + one.max_new_tokens for one in prompts)),
            power_of_two(max(prompt.max_new_tokens for prompt in prompts), 64),
        )
        if self._cache is not None and _same_kind(self._cache, forward):
            wanted = (max(wanted[0], self._wanted[0]), max(wanted[1], self._wanted[1]), max(wanted[2], self._wanted[2]))
            if wanted == self._wanted:
                return
        self._graphs.clear()
        self._cache = self._state = None
        rows, context, tokens = self._wanted = wanted
        rows = min(rows, self._rows_that_fit(forward, context))
        self._cache = forward.make_cache(rows, context)
        self._state = DecodeState(rows, tokens, forward.weight.device)

    def _rows_that_fit(self, forward: Forward, context: int) -> int:
        device = forward.weight.device
        if device.type != "cuda":
            return self._most_rows
        torch.cuda.empty_cache()  # what was let go of before counts as free
        free, _ = torch.cuda.mem_get_info(device)
        fits = max(int(MEMORY_SHARE * free) // forward.row_bytes(context), 1)
        return 1 << (fits.bit_length() - 1)

    def advance(self, rows: int, span: int, steps: int) -> None:
        """Make ``steps`` steps of the first ``rows`` rows, none of which stands at ``span`` or beyond by then."""
        graph = self._graph(rows, span)
        for _ in range(steps):
            if graph is None:
                self._step(rows, span)
            else:
                graph.replay()
        self.stats.steps += steps

    def _graph(self, rows: int, span: int) -> Any:
        forward = self._ready()[0]
        wanted = forward.weight.device.type == "cuda" if self._wants_graphs is None else self._wants_graphs
        if not wanted or self.stats.cause:
            return None
        key = (rows, span)
        if key not in self._graphs:
            begun = time.monotonic()
            try:
                self._graphs[key] = self._capture(rows, span)
                self.stats.graphs += 1
            except RuntimeError as error:  # whatever a kernel does that cannot be captured
                self.stats.cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
                return None
            finally:
                self.stats.capture_s += time.monotonic() - begun
        return self._graphs[key]

    def _capture(self, rows: int, span: int) -> Any:
        """Return the graph of a step. Rows are held meanwhile: a step of a held row changes nothing that is read."""
        state = self._ready()[2]
        live = state.live.clone()
        state.live.zero_()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            for _ in range(2):  # compilers and libraries choose and allocate
                self._step(rows, span)
            torch.cuda.synchronize()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            # others may use the GPU meanwhile, by threads of their own
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._step(rows, span)
        finally:
            torch.cuda.set_stream(stream)
            state.live.copy_(live)
        return graph

    def _step(self, rows: int, span: int) -> None:
        forward, cache, state = self._ready()
        logits = forward.step(state.tokens[:rows], state.positions[:rows], cache, span)
        state.draw(logits, self._drawing[0], self._stops)

    def _ready(self) -> tuple[Forward, Cache, DecodeState]:
        if self._forward is None or self._cache is None or self._state is None:
            raise RuntimeError("the decoder has no cache: sample() makes it")
        return self._forward, self._cache, self._state


def _same_kind(cache: Cache, forward: Forward) -> bool:
    keys = cache.keys[0]
    return (keys.device, keys.dtype) == (forward.weight.device, forward.weight.dtype) and (
        keys.shape[1], keys.shape[3], len(cache.keys)
    ) == (forward.key_heads, forward.size, forward.layers)  # fmt: skip


def context_of(longest: int) -> int:
    """Return a row's places for so long a prompt with its answer: few different numbers, none much too large."""
    return (
        power_of_two(longest, LEAST_CONTEXT) if longest <= CONTEXT_STEP else -(-longest // CONTEXT_STEP) * CONTEXT_STEP
    )


def operations_for(model: Any) -> tuple[Operations, str]:
    """Return what layers compute with on the model's device, and why that is not Triton's kernels on a GPU.

    The kernels are tried first, in a step of two rows that torch makes as well: what they cannot do here, or do
    otherwise than torch, is left to torch.
    """
    if next(model.parameters()).device.type != "cuda":
        return TorchOperations(), ""
    try:
        from drk.training.decode_kernels import KERNEL_FAULTS, TritonOperations  # Triton is there only on Linux
    except ImportError as error:
        return TorchOperations(), f"no Triton: {error}"
    try:
        cause = difference(model, TritonOperations())
    except KERNEL_FAULTS as error:
        cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
    return (TorchOperations(), cause) if cause else (TritonOperations(), "")


@torch.inference_mode()
def difference(model: Any, operations: Operations) -> str:
    """Return how a step by ``operations`` differs from one by torch; empty where it does so by rounding only."""
    generator = torch.Generator().manual_seed(0)
    device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
    ids = torch.randint(0, model.config.vocab_size, (2, TRIAL_PLACES), generator=generator).to(device)
    positions, found = torch.tensor([0, TRIAL_PLACES - 1], device=device), []
    for forward in (Forward(model), Forward(model, operations)):
        cache = forward.make_cache(2, 2 * TRIAL_PLACES)
        forward.prefill(ids[:, :-1], torch.arange(2, device=device), cache)
        found.append(forward.step(ids[:, -1], positions, cache, TRIAL_PLACES))
    apart = float((found[1] - found[0]).abs().max() / found[0].abs().max())
    # not a number is no rounding either
    return "" if apart <= (1e-3 if dtype == torch.float32 else 5e-2) else f"kernels differ from torch by {apart:.1e}"
