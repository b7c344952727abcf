"""The rows of a decoding step as tensors at fixed addresses, and what one step does to them, on the device alone.

A row has a last token, the place where its key goes, the tokens said so far with their log-probabilities, and the
uniform numbers that it will draw by. A row that is not live goes through a step unchanged, whatever is computed for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drk.training.sampling import choose


class DecodeState:
    """Up to ``rows`` rows with answers of up to ``tokens`` tokens; ``counts`` and ``limits`` are of such tokens."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        self.tokens, self.positions, self.counts, self.limits = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)
        self.ids = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
        self.logps = torch.zeros(rows, tokens, device=device)
        self.draws = torch.zeros(rows, tokens, dtype=torch.float64, device=device)

    def parts(self) -> tuple[Tensor, ...]:
        """Return all tensors; the first dimension is rows."""
        return (self.tokens, self.positions, self.counts, self.limits, self.live, self.ids, self.logps, self.draws)

    def draw(self, logits: Tensor, temperature: float, stops: Tensor) -> None:
        """Append a token to each live row of the first B.

        Args:
            logits: ``[B, V]``, of what follows each row's last token.
            temperature: see :func:`drk.training.sampling.sample`.
            stops: the tokens that end an answer.
        """
        parts = (part[: logits.shape[0]] for part in self.parts())
        tokens, positions, counts, limits, live, ids, logps, draws = parts
        place = counts.clamp(max=ids.shape[1] - 1)[:, None]
        chosen, scores = choose(logits, draws.gather(1, place).squeeze(1), temperature)
        tokens.copy_(torch.where(live, chosen, tokens))
        ids.scatter_(1, place, torch.where(live[:, None], chosen[:, None], ids.gather(1, place)))
        logps.scatter_(1, place, torch.where(live[:, None], scores[:, None], logps.gather(1, place)))
        positions.add_(live)
        counts.add_(live)
        ended = (chosen[:, None] == stops).any(dim=1) | (counts >= limits)
        live.logical_and_(~ended)
