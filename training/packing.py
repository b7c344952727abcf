"""Packed training of small causal models: documents side by side in rows, none sees its neighbours.

A *document* is a prompt and its answer; loss is on the answer. Rows are ``context`` tokens wide and filled first-fit,
longest first; documents are never cut. Attention is kept inside documents either by variable-length flash attention
(``varlen``: GPU, half precision) or by a block-diagonal mask (``mask``: anywhere, any precision); a test holds both
forms of the model to padded rows. Positions start at 0 in each document.

Left out: splitting documents over rows, and sequence parallelism.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
Attention = Literal["varlen", "mask"]
ATTENTION_NAME = "drk_varlen"


@dataclass(frozen=True)
class Document:
    """Token ids (an ``array`` where there are many documents), and where the answer begins in them."""

    ids: Sequence[int]
    answer_at: int


@dataclass(frozen=True)
class Batch:
    """Packed rows. ``labels[r, t]`` is the token after ``ids[r, t]`` in its document, where it belongs to the answer.

    Shapes are ``[R, L]``; ``owner`` numbers documents within the batch (-1: padding); ``bounds`` are the documents'
    and paddings' limits in the flattened rows.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    owner: Tensor
    bounds: Tensor
    longest: int

    @property
    def answer_tokens(self) -> int:
        """How many tokens have a loss."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``."""
        ids, labels, positions, owner, bounds = (
            one.to(device, non_blocking=True)
            for one in (self.ids, self.labels, self.positions, self.owner, self.bounds)
        )
        return Batch(ids, labels, positions, owner, bounds, self.longest)


def fill_rows(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Return rows of document numbers whose lengths fit in ``context``: first fit, longest first."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((i for i, left in enumerate(room) if left >= lengths[number]), None)
        if place is None:
            rows.append([])
            room.append(context)
            place = len(rows) - 1
        rows[place].append(number)
        room[place] -= lengths[number]
    return rows


def pack(documents: Sequence[Document], context: int, *, pad: int, rows: int = 0) -> Batch:
    """Return ``documents`` as one batch of rows ``context`` wide; ``rows`` above 0 adds empty ones to that number.

    Raises:
        ValueError: a document is longer than a row, or there are more rows than ``rows``.
    """
    if any(len(one.ids) > context for one in documents):
        raise ValueError(f"a document is longer than {context} tokens")
    layout = fill_rows([len(one.ids) for one in documents], context)
    if rows and len(layout) > rows:
        raise ValueError(f"{len(layout)} rows are needed, and {rows} were asked for")
    count = max(rows, len(layout))
    ids = np.full((count, context), pad)
    labels = np.full((count, context), IGNORED)
    positions = np.zeros((count, context), dtype=np.int64)
    owner = np.full((count, context), -1)
    numbers = np.arange(context)
    bounds, longest = [0], 1
    for r in range(count):
        start = 0
        for number in layout[r] if r < len(layout) else ():
            one = documents[number]
            values = np.asarray(one.ids, dtype=np.int64)
            end, first = start + len(values), max(one.answer_at, 1)
            ids[r, start:end] = values
            labels[r, start + first - 1 : end - 1] = values[first:]
            positions[r, start:end] = numbers[: len(values)]
            owner[r, start:end] = number
            bounds.append(r * context + end)
            longest, start = max(longest, len(values)), end
        if start < context:
            positions[r, start:] = numbers[: context - start]
            bounds.append((r + 1) * context)
            longest = max(longest, context - start)
    ids_, labels_, positions_, owner_ = (torch.from_numpy(one) for one in (ids, labels, positions, owner))
    return Batch(ids_, labels_, positions_, owner_, torch.tensor(bounds, dtype=torch.int32), longest)


def choose_attention(device: torch.device) -> Attention:
    """Return ``varlen`` where this torch and device have it and it runs, else ``mask``."""
    if device.type != "cuda":
        return "mask"
    try:
        from torch.nn.attention.varlen import varlen_attn

        sample = torch.randn(4, 1, 64, device=device, dtype=torch.bfloat16)
        bounds = torch.tensor([0, 2, 4], device=device, dtype=torch.int32)
        varlen_form(varlen_attn)(sample, sample, sample, bounds, 2, 0.125)
    except (ImportError, RuntimeError, TypeError, NotImplementedError):
        return "mask"
    return "varlen"


def set_attention(model: Any, attention: Attention) -> None:
    """Make ``model`` use variable-length attention; nothing is changed for ``mask``, which is an ordinary mask."""
    if attention == "mask":
        return
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    varlen = varlen_form(varlen_attn)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> tuple[Tensor, None]:  # noqa: ARG001
        heads = [one.transpose(1, 2).reshape(-1, one.shape[1], one.shape[3]).bfloat16() for one in (query, key, value)]
        scale = more.get("scaling") or query.shape[-1] ** -0.5
        q, k, v = heads
        result = varlen(q, k, v, more["cu_seq_lens_q"], more["max_length_q"], scale)
        return result.view(query.shape[0], query.shape[2], query.shape[1], query.shape[3]).to(query.dtype), None

    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)
    model.config._attn_implementation = ATTENTION_NAME


def varlen_form(function: Any) -> Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]:
    """Return causal attention of ``(query, key, value, bounds, longest, scale)`` by torch's ``varlen_attn``.

    Its arguments changed between versions; they are read once here, not in what is compiled.
    """
    known = inspect.signature(function).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    takes_scale = "scale" in known

    def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
        if takes_scale:
            return function(query, key, value, bounds, bounds, longest, longest, scale=scale, **causal)  # type: ignore[no-any-return]
        # the older form scales by the root of the head's width
        query = query * (scale * query.shape[-1] ** 0.5)
        return function(query, key, value, bounds, bounds, longest, longest, **causal)  # type: ignore[no-any-return]

    return attend


def packed_loss(model: Any, batch: Batch, attention: Attention) -> Tensor:
    """Return the summed loss over the answers' tokens of a batch that lies on the model's device."""
    hidden, labels = packed_hidden(model, batch, attention), batch.labels.view(-1)
    learned = labels != IGNORED
    logits = model.lm_head(hidden[learned])
    return torch.nn.functional.cross_entropy(logits.float(), labels[learned], reduction="sum")


def static_loss(model: Any, batch: Batch, attention: Attention) -> Tensor:
    """Return what :func:`packed_loss` returns, by shapes that do not depend on the values: a few logits more."""
    logits = model.lm_head(packed_hidden(model, batch, attention))
    return torch.nn.functional.cross_entropy(
        logits.float(), batch.labels.view(-1), reduction="sum", ignore_index=IGNORED
    )


def packed_hidden(model: Any, batch: Batch, attention: Attention) -> Tensor:
    """Return the last hidden states of a batch, ``[R * L, width]``."""
    if attention == "varlen":
        flat = (1, batch.ids.numel())
        # masks by kind of layer are taken as they are: making them, to be thrown away, would ask the device
        kinds = set(getattr(model.config, "layer_types", None) or ())
        found = model.model(
            input_ids=batch.ids.view(flat),
            position_ids=batch.positions.view(flat),
            attention_mask=dict.fromkeys(kinds) if kinds else None,
            use_cache=False,
            cu_seq_lens_q=batch.bounds,
            max_length_q=batch.longest,
        )
    else:
        found = model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=block_mask(batch.owner),
            use_cache=False,
        )
    return found.last_hidden_state.reshape(batch.ids.numel(), -1)  # type: ignore[no-any-return]


def block_mask(owner: Tensor) -> Tensor:
    """Return which token sees which, ``[R, 1, L, L]``: earlier ones of the same document, and itself."""
    length = owner.shape[1]
    same = owner[:, :, None] == owner[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=owner.device).tril()
    return (same & causal)[:, None]
