"""Slow a candidate's side streams down, so that what it does not wait for is seen to be missing.

Work on another stream is honest when the caller's stream waits for it before the call returns. Whether it does cannot
be asked of CUDA, and small kernels win the race against the copy of the output that follows. Here the first work that
a call puts on another stream is preceded there by a spin: a caller who waits loses a millisecond, one who does not
returns memory that is still poisoned.

Honest limits: seen are launches by Triton and, where operators are logged, ATen's; a stream that is being captured
into a CUDA graph is left alone, since the spin would be replayed for ever. The names are taken before user code is
imported, in its process all the same.
"""

from __future__ import annotations

import torch

DELAY_CYCLES = 2_000_000
_SLEEP, _CURRENT, _CAPTURING = (
    torch.cuda._sleep,
    torch.cuda.current_stream,
    torch.cuda.is_current_stream_capturing,
)


class SideStreamDelay:
    """For one call: call :meth:`note` before each piece of work; nothing happens without a GPU."""

    def __init__(self, device: str) -> None:
        self._gpu = device != "cpu"
        self._known = {_CURRENT().cuda_stream} if self._gpu else set()

    def note(self) -> None:
        """Delay the current stream if it is not the caller's and was not delayed before."""
        if not self._gpu:
            return
        stream = _CURRENT().cuda_stream
        if stream in self._known or _CAPTURING():
            return
        self._known.add(stream)
        _SLEEP(DELAY_CYCLES)  # type: ignore[no-untyped-call]
