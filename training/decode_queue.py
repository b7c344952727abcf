"""Which prompt has which row of a decoder, and when: prompts wait, rows that are done are taken by the next.

A batch of answers of different lengths then takes about as many steps as the longest. The host knows bounds on each
row's length without asking the device, and looks who is done once in :data:`CHECK_STEPS` steps: each look waits for it.
When nobody waits any more and half of the rows are done, the others move to the front and fewer are computed.

Left out: priorities, and answers that outgrow their row: the cache has room for each prompt with its longest answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drk.training.decode_model import Cache, Forward, TorchOperations
from drk.training.decode_state import DecodeState
from drk.training.sampling import Prompt, Sampled, draws_of

CHECK_STEPS = 16
LEAST_ROWS = 32
"""Fewer rows take no less time."""
LEAST_CONTEXT = 256
PREFILL_TOKENS = 32768
"""Prompts' tokens in one pass."""
REFILL_SHARE = 8
"""New prompts are read once an eighth of the rows is free, or nobody else waits."""

Heard = Callable[[int, Sampled], None]
"""Hears an answer, and its prompt's number, as soon as it is there."""


@dataclass
class DecodeStats:
    """What decoding took, summed over calls. ``tokens`` are those of answers, ``graphs`` those captured.

    ``prefill_s`` and ``decode_s`` are the host's seconds, each up to a look at the device. ``cause`` tells why steps
    are not captured, ``kernel_fault`` why torch does what kernels of ours should.
    """

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    graphs: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    capture_s: float = 0.0
    cause: str = ""
    kernel_fault: str = ""

    def facts(self) -> dict[str, Any]:
        """Return the figures as JSON-able values, with tokens a second and milliseconds a step."""
        found = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}
        seconds = self.prefill_s + self.decode_s + self.capture_s
        found["tokens_per_s"] = round(self.tokens / seconds, 1) if seconds else 0.0
        found["step_ms"] = round(1e3 * self.decode_s / self.steps, 3) if self.steps else 0.0
        return found


@dataclass
class _Row:
    """What the host knows of a row: its prompt's number, and bounds on its length that need no look at the device."""

    number: int
    position: int
    left: int


@dataclass(frozen=True)
class Engine:
    """What makes steps. ``advance`` takes the number of rows, places to look at, and steps; it need not wait."""

    forward: Forward
    cache: Cache
    state: DecodeState
    stats: DecodeStats
    advance: Callable[[int, int, int], None]


class RowQueue:
    """One call's prompts on their way through an engine's rows."""

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], stop_ids: frozenset[int], heard: Heard) -> None:
        self._engine = engine
        self._cache, self._state, self._stats = engine.cache, engine.state, engine.stats
        self._prompts = prompts
        self._heard = heard
        self._stops = stop_ids
        self._waiting = deque(range(len(prompts)))
        self._rows: dict[int, _Row] = {}
        self._width = 0
        self._answers: dict[int, Sampled] = {}

    def run(self) -> list[Sampled]:
        """Return the answers, in the order of their prompts."""
        self._state.live.zero_()
        while self._waiting or self._rows:
            self._admit()
            begun = time.monotonic()
            self._draw_together()
            steps = min(CHECK_STEPS, max(row.left for row in self._rows.values()))
            reach = max(row.position for row in self._rows.values()) + steps
            captured = self._stats.capture_s
            self._engine.advance(self._width, self._span(reach), steps)
            for row in self._rows.values():
                row.position += min(steps, row.left)
                row.left -= min(steps, row.left)
            self._collect()
            self._stats.decode_s += time.monotonic() - begun - (self._stats.capture_s - captured)
        return [self._answers[number] for number in range(len(self._prompts))]

    def _span(self, reach: int) -> int:
        """Return a power of two that no position reaches: few different ones, so few graphs."""
        if not isinstance(self._engine.forward.operations, TorchOperations):
            return self._cache.context  # each row is read to its own length
        return min(power_of_two(reach, LEAST_CONTEXT), self._cache.context)

    def _admit(self) -> None:
        """Give free rows to waiting prompts."""
        rows = min(self._cache.rows, power_of_two(len(self._waiting) + len(self._rows), LEAST_ROWS))
        free = [row for row in range(rows) if row not in self._rows][: len(self._waiting)]
        if not free or (self._rows and len(free) < min(len(self._waiting), max(rows // REFILL_SHARE, 1))):
            return
        begun = time.monotonic()
        taken = [(row, self._waiting.popleft()) for row in free]
        for row, number in taken:
            prompt = self._prompts[number]
            self._rows[row] = _Row(number, len(prompt.ids) - 1, prompt.max_new_tokens)
        self._width = max(self._width, power_of_two(max(self._rows) + 1, LEAST_ROWS))
        self._width = min(self._width, self._cache.rows)
        for part in _parts(taken, self._prompts):
            self._read(part)
        self._put(taken)
        if self._state.live.is_cuda:
            torch.cuda.current_stream().synchronize()  # so that the time is this part's
        self._stats.prefill_s += time.monotonic() - begun

    def _read(self, taken: Sequence[tuple[int, int]]) -> None:
        """Fill the cache with prompts, but for their last tokens: the first step reads those."""
        longest = max(len(self._prompts[number].ids) for _, number in taken) - 1
        if longest == 0:
            return
        device = self._state.tokens.device
        known = [self._prompts[number].ids[:-1] for _, number in taken]
        ids = torch.tensor([list(one) + [0] * (longest - len(one)) for one in known], device=device)
        rows = torch.tensor([row for row, _ in taken], device=device)
        self._engine.forward.prefill(ids, rows, self._cache)
        self._stats.prompt_tokens += sum(len(one) + 1 for one in known)

    def _put(self, taken: Sequence[tuple[int, int]]) -> None:
        prompts, state = [self._prompts[number] for _, number in taken], self._state
        device = state.tokens.device
        rows = torch.tensor([row for row, _ in taken], device=device)
        found = [[one.ids[-1], len(one.ids) - 1, 0, one.max_new_tokens] for one in prompts]
        values = torch.tensor(found, device=device)
        for part, column in zip(state.parts()[:4], values.unbind(1), strict=True):
            part.index_copy_(0, rows, column)
        draws = draws_of(prompts, max(one.max_new_tokens for one in prompts)).to(device)
        state.draws[rows, : draws.shape[1]] = draws
        state.live[rows] = True

    def _draw_together(self) -> None:
        """Move rows to the front once half of the width is done with and nobody waits."""
        width = min(power_of_two(len(self._rows), LEAST_ROWS), self._width)
        if self._waiting or width == self._width:
            return
        late = [row for row in self._rows if row >= width]
        free = [row for row in range(width) if row not in self._rows][: len(late)]
        if late:
            device = self._state.tokens.device
            source, target = torch.tensor(late, device=device), torch.tensor(free, device=device)
            self._cache.move(source, target)
            for part in self._state.parts():
                part.index_copy_(0, target, part.index_select(0, source))
            self._state.live[source] = False
            for old, new in zip(late, free, strict=True):
                self._rows[new] = self._rows.pop(old)
        self._width = width

    def _collect(self) -> None:
        """Wait for the device, and take the answers that are done."""
        state, width = self._state, self._width
        live, counts = torch.stack([state.live[:width].to(torch.int64), state.counts[:width]]).tolist()
        done = [row for row in self._rows if not live[row]]
        if not done:
            return
        chosen = torch.tensor(done, device=state.ids.device)
        most = max(counts[row] for row in done)
        ids = state.ids[:, :most].index_select(0, chosen).tolist()
        logps = state.logps[:, :most].index_select(0, chosen).tolist()
        for place, row in enumerate(done):
            count, number = counts[row], self._rows.pop(row).number
            said = tuple(ids[place][:count])
            answer = Sampled(said, tuple(logps[place][:count]), said[-1] not in self._stops)
            self._stats.tokens += count
            self._stats.answers += 1
            self._answers[number] = answer
            self._heard(number, answer)


def _parts(taken: Sequence[tuple[int, int]], prompts: Sequence[Prompt]) -> list[list[tuple[int, int]]]:
    """Return rows and prompts in groups of like length, none of more than :data:`PREFILL_TOKENS` with its filling."""
    parts: list[list[tuple[int, int]]] = []
    for one in sorted(taken, key=lambda pair: -len(prompts[pair[1]].ids)):
        longest = len(prompts[parts[-1][0][1]].ids) if parts else 0
        if not parts or (len(parts[-1]) + 1) * longest > PREFILL_TOKENS:
            parts.append([])
        parts[-1].append(one)
    return parts


def power_of_two(count: int, least: int) -> int:
    """Return the smallest power of two that is at least ``count`` and ``least``."""
    return max(1 << (max(count, 1) - 1).bit_length(), least)
