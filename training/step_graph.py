"""One optimizer step as one CUDA graph: forward, backward, clipping and both optimizers in a single launch.

A small model's step is thousands of kernels of a few microseconds, and launching them takes the host several times as
long. What is captured must have fixed shapes and addresses: batches are copied into :class:`StaticBatch` (documents'
limits are repeated up to a fixed number), the loss runs over all places with those to ignore, gradients are zeroed in
place. The learning rate's share of its peak is a tensor (:meth:`drk.training.scratch_loop.Optimizers.scaled_step`).

The first steps run as they are, on the stream that is captured; they are steps of the training like any other. Where
capturing fails, training goes on without it and ``cause`` says why. A batch that does not fit the fixed shapes is
refused by :meth:`StaticBatch.take`; the caller then makes that step without the graph.

Honest limits: a graph holds its memory for as long as it lives; what it computes is not seen by a Python debugger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from drk.training.packing import Batch

WARM_UP_STEPS = 3
"""Steps before capturing: compilers and libraries choose and allocate in the first ones."""
SEGMENTS_A_ROW = 12
"""Documents and paddings that a row has at most; shorter documents in larger numbers make a step without the graph."""

Step = Callable[[Batch, Tensor], tuple[Tensor, Tensor]]
"""One whole optimizer step on a batch, at a share of the peak rates (a 0-d tensor): its loss and gradient norm."""


class StaticBatch:
    """Tensors at fixed addresses for batches of ``rows`` x ``context`` tokens; ``batch`` is what the step reads."""

    def __init__(self, rows: int, context: int, device: torch.device) -> None:
        self._segments = rows * SEGMENTS_A_ROW
        ids, labels, positions, owner = (torch.zeros(rows, context, dtype=torch.int64, device=device) for _ in range(4))
        bounds = torch.zeros(self._segments + 1, dtype=torch.int32, device=device)
        self.batch = Batch(ids, labels, positions, owner, bounds, context)

    def take(self, batch: Batch) -> bool:
        """Copy ``batch`` here, or return False where it has another shape or too many documents."""
        mine = self.batch
        if batch.ids.shape != mine.ids.shape or len(batch.bounds) > self._segments + 1:
            return False
        padded = batch.bounds.new_full((self._segments + 1,), int(batch.bounds[-1]))
        padded[: len(batch.bounds)] = batch.bounds
        mine.bounds.copy_(padded)
        mine.ids.copy_(batch.ids)
        mine.labels.copy_(batch.labels)
        mine.positions.copy_(batch.positions)
        mine.owner.copy_(batch.owner)
        return True


class GraphedStep:
    """Makes steps: the first ones as they are, then by a graph of one of them.

    Args:
        step: reads only its arguments and what it changes; gives the same kernels each time.
        static: where batches are copied to.
        capture: returns the graph of a call and its results; :func:`capture_graph` but in tests.

    ``replays`` tells whether there is a graph, ``cause`` why there is none.
    """

    def __init__(
        self,
        step: Step,
        static: StaticBatch,
        *,
        capture: Callable[[Callable[[], tuple[Tensor, Tensor]]], tuple[Any, tuple[Tensor, Tensor]]],
    ) -> None:
        self._step = step
        self._static = static
        self._capture = capture
        self._share = torch.ones((), device=static.batch.ids.device)
        self._made = 0
        self._graph: Any = None
        self._results: tuple[Tensor, Tensor] | None = None
        self.cause = ""

    @property
    def replays(self) -> bool:
        """Whether steps are replays of a graph by now."""
        return self._graph is not None

    def __call__(self, batch: Batch, share: float) -> tuple[Tensor, Tensor]:
        """Make one step; its loss and gradient norm are valid until the next one."""
        self._share.fill_(share)
        if not self._static.take(batch):
            return self._step(batch.to(self._share.device), self._share)
        if self._made >= WARM_UP_STEPS and self._graph is None and not self.cause:
            try:
                self._graph, self._results = self._capture(lambda: self._step(self._static.batch, self._share))
            except RuntimeError as error:  # whatever a kernel does that cannot be captured
                self.cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
        self._made += 1
        if self._graph is None or self._results is None:
            return self._step(self._static.batch, self._share)
        self._graph.replay()
        return self._results


def capture_graph(call: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Any, tuple[Tensor, Tensor]]:
    """Return the CUDA graph of ``call`` on the current stream, and its results' tensors; nothing is computed yet.

    Raises:
        RuntimeError: something in it cannot be captured. The current stream is as before.
    """
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        # other threads may call CUDA meanwhile; the backward pass is captured by its stream
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = call()
    finally:
        # an error that invalidates the capture leaves the library's context half left
        torch.cuda.set_stream(stream)
    return graph, results


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run what follows on a stream of its own: the default one cannot be captured. Nothing happens on a CPU."""
    if device.type != "cuda":
        yield
        return
    before, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)
