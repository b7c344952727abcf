"""One token's forward pass of a Llama-shaped model over a key-value cache of fixed size, written for CUDA graphs.

Takes a ``transformers`` Llama or Qwen3 model (RMS norms, rotary positions, grouped queries, SwiGLU; with or without
norms on queries and keys). Weights are read where they lie, but for those of heads and of gates, which are copied side
by side, since few large products take less time than many small ones: :meth:`Forward.refresh` copies them anew. Rows
are independent: each has its own length, its prompt begins at place 0 of its row of the cache, and nothing is padded on
the left. :meth:`Forward.prefill` fills the cache with prompts but for their last token, :meth:`Forward.step` reads one
token a row and gives the next one's logits; neither waits for the device.

Left out, and told by :func:`why_not`: biases, sliding windows, other activations, adapters, quantised weights, rotary
scalings that change with the length, weights on several devices, large models. Such models are sampled by
:func:`drk.training.sampling.sample`. What is computed is the model's own pass but for the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

SHAPES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
FIXED_ROPES = ("default", "linear", "llama3")
"""Rotary scalings whose frequencies do not depend on the length."""
LARGEST = 10**9
"""Parameters at most: most weights are held twice, and a large model's launches cost little beside its kernels."""


def why_not(model: Any) -> str:
    """Return why :class:`Forward` cannot run ``model``; empty where it can."""
    if type(model).__name__ not in SHAPES or not type(model).__module__.startswith("transformers."):
        return f"{type(model).__name__} is neither Llama nor Qwen3"
    config = model.config
    if sum(weight.numel() for weight in model.parameters()) > LARGEST:
        return f"it has more than {LARGEST} parameters"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "its attention has a window"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in FIXED_ROPES:
        return f"its rotary scaling is {rope}"
    linears = [part for name, part in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    if any(type(part) is not torch.nn.Linear or part.bias is not None for part in linears):
        return "its linear layers are adapted, quantised or have biases"
    kinds = {(weight.device, weight.dtype) for weight in model.parameters()}
    if len(kinds) != 1 or not next(iter(kinds))[1].is_floating_point:
        return "its weights are on several devices or in several types"
    return ""


@dataclass(frozen=True)
class Cache:
    """Keys and values by layer, ``[rows, heads, context, size]`` each, and the rotation of every place."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    cos: Tensor
    sin: Tensor

    @property
    def rows(self) -> int:
        """Rows that there is room for."""
        return self.keys[0].shape[0]

    @property
    def context(self) -> int:
        """Places of a row."""
        return self.keys[0].shape[2]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy whole rows ``source`` to rows ``target``; no row is in both."""
        for part in (*self.keys, *self.values):
            part.index_copy_(0, target, part.index_select(0, source))


class Operations(Protocol):
    """What a layer does beside its matrix products. Shapes: B rows, H query and K key heads of size D, W wide."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``x + delta`` and its RMS norm times ``weight``, ``[B, W]`` each."""
        ...

    def rotate(self, heads: Tensor, place: Place) -> Tensor:
        """Return the queries ``[B, H, D]``, normed and rotated; keys (likewise) and values go to the cache.

        ``heads`` are queries, keys and values, ``[B, H + 2 K, D]``.
        """
        ...

    def attend(self, q: Tensor, place: Place) -> Tensor:
        """Return the attention of each row's query to its places up to its position, ``[B, H * D]``."""
        ...

    def gated(self, both: Tensor) -> Tensor:
        """Return ``silu`` of the left half of ``both [B, 2 I]`` times the right half."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a step's rows stand in one layer: positions ``[B]``, the cache's first B rows, rotations, norms.

    ``span`` is a number of places that no position reaches.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    scale: float
    span: int


class TorchOperations:
    """:class:`Operations` by torch, for any device."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See :class:`Operations`."""
        total = x if delta is None else x + delta
        return total, functional.rms_norm(total, (total.shape[-1],), weight, eps)

    def rotate(self, heads: Tensor, place: Place) -> Tensor:
        """See :class:`Operations`."""
        key_heads = place.keys.shape[1]
        q, k, v = torch.split(heads, [heads.shape[1] - 2 * key_heads, key_heads, key_heads], dim=1)
        cos, sin = place.cos[place.positions, None], place.sin[place.positions, None]
        rows = torch.arange(q.shape[0], device=q.device)
        place.keys[rows, :, place.positions] = turned(normed(k, place.k_norm, place.eps), cos, sin)
        place.values[rows, :, place.positions] = v
        return turned(normed(q, place.q_norm, place.eps), cos, sin)

    def attend(self, q: Tensor, place: Place) -> Tensor:
        """See :class:`Operations`. Queries that share a key head take the place of a sequence of queries."""
        rows, heads, size = q.shape
        seen = torch.arange(place.span, device=q.device) <= place.positions[:, None]
        grouped = q.view(rows, place.keys.shape[1], -1, size)
        keys, values = place.keys[:, :, : place.span], place.values[:, :, : place.span]
        mask = seen[:, None, None].expand(-1, 1, grouped.shape[2], -1)
        found = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=place.scale)
        return found.reshape(rows, heads * size)

    def gated(self, both: Tensor) -> Tensor:
        """See :class:`Operations`."""
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm of each head, or ``x`` where the model has none."""
    return x if weight is None else functional.rms_norm(x, (x.shape[-1],), weight, eps)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x [..., D]`` rotated by its position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Forward:
    """The model's pass over a :class:`Cache`. ``model`` is one that :func:`why_not` has nothing against."""

    def __init__(self, model: Any, operations: Operations | None = None) -> None:
        config, self._base = model.config, model.model
        self._model, self._addresses = model, _addresses(model)
        self._layers = list(model.model.layers)[: config.num_hidden_layers]
        self._ops: Operations = operations or TorchOperations()
        self.heads: int = config.num_attention_heads
        self.key_heads: int = config.num_key_value_heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps: float = config.rms_norm_eps
        self.weight: Tensor = model.lm_head.weight
        self._side_by_side = [tuple(torch.cat(parts) for parts in _joined(layer)) for layer in self._layers]

    def refresh(self) -> None:
        """Read those weights again that are kept side by side, into the same memory."""
        for layer, kept in zip(self._layers, self._side_by_side, strict=True):
            for whole, parts in zip(kept, _joined(layer), strict=True):
                torch.cat(parts, out=whole)

    @property
    def operations(self) -> Operations:
        """What a step computes with beside matrix products."""
        return self._ops

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    def reads(self, model: Any) -> bool:
        """Return whether this is of ``model``, with its weights where they were: graphs are of use only then."""
        return model is self._model and self._addresses == _addresses(model)

    def row_bytes(self, context: int) -> int:
        """Return what one row of the cache takes."""
        return 2 * len(self._layers) * self.key_heads * self.size * context * self.weight.element_size()

    def make_cache(self, rows: int, context: int) -> Cache:
        """Return an empty cache for ``rows`` rows of ``context`` places."""
        device, dtype = self.weight.device, self.weight.dtype
        shape = (rows, self.key_heads, context, self.size)
        parts = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2 * len(self._layers))]
        rotary = self._base.rotary_emb
        angles = torch.arange(context, device=device).float()[:, None] * rotary.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        factor = rotary.attention_scaling
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return Cache(tuple(parts[0::2]), tuple(parts[1::2]), cos, sin)

    def prefill(self, ids: Tensor, rows: Tensor, cache: Cache) -> None:
        """Write the keys and values of ``ids [N, L]`` (filled up on the right with anything) to ``rows [N]``."""
        count, length = ids.shape
        x = functional.embedding(ids, self._base.embed_tokens.weight)
        cos, sin = cache.cos[:length], cache.sin[:length]
        for number, (layer, (heads, gates)) in enumerate(zip(self._layers, self._side_by_side, strict=True)):
            attention = layer.self_attn
            h = functional.rms_norm(x, (x.shape[-1],), layer.input_layernorm.weight, self.eps)
            all_heads = functional.linear(h, heads).view(count, length, -1, self.size).transpose(1, 2)
            q, k, v = torch.split(all_heads, [self.heads, self.key_heads, self.key_heads], dim=1)
            q = turned(normed(q, _weight(attention, "q_norm"), self.eps), cos, sin)
            k = turned(normed(k, _weight(attention, "k_norm"), self.eps), cos, sin)
            cache.keys[number][rows, :, :length] = k
            cache.values[number][rows, :, :length] = v
            if number + 1 == len(self._layers):
                return  # nobody reads what this layer says
            group = self.heads // self.key_heads
            if group > 1:
                k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scaling)
            x = x + functional.linear(found.transpose(1, 2).reshape(count, length, -1), attention.o_proj.weight)
            h = functional.rms_norm(x, (x.shape[-1],), layer.post_attention_layernorm.weight, self.eps)
            x = x + functional.linear(TorchOperations().gated(functional.linear(h, gates)), layer.mlp.down_proj.weight)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache, span: int) -> Tensor:
        """Read one token a row at its position, and return the next one's logits ``[B, V]`` in float32.

        Args:
            tokens: ``[B]``, of the cache's first B rows.
            positions: ``[B]``, below ``span``; all before them is in the cache.
            cache: gets keys and values of these tokens.
            span: places of the cache to look at, at most.
        """
        rows, ops = tokens.shape[0], self._ops
        x = functional.embedding(tokens, self._base.embed_tokens.weight)
        delta: Tensor | None = None
        for number, (layer, (heads, gates)) in enumerate(zip(self._layers, self._side_by_side, strict=True)):
            attention = layer.self_attn
            place = Place(
                positions,
                cache.keys[number][:rows],
                cache.values[number][:rows],
                cache.cos,
                cache.sin,
                _weight(attention, "q_norm"),
                _weight(attention, "k_norm"),
                self.eps,
                attention.scaling,
                span,
            )
            x, h = ops.add_norm(x, delta, layer.input_layernorm.weight, self.eps)
            turned_queries = ops.rotate(functional.linear(h, heads).view(rows, -1, self.size), place)
            found = ops.attend(turned_queries, place)
            delta = functional.linear(found, attention.o_proj.weight)
            x, h = ops.add_norm(x, delta, layer.post_attention_layernorm.weight, self.eps)
            delta = functional.linear(ops.gated(functional.linear(h, gates)), layer.mlp.down_proj.weight)
        _, h = ops.add_norm(x, delta, self._base.norm.weight, self.eps)
        return functional.linear(h, self.weight).float()


def _addresses(model: Any) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in model.parameters())


def _joined(layer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of a layer that are put side by side: for its heads, and for its gates."""
    attention, mlp = layer.self_attn, layer.mlp
    heads = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return heads, [mlp.gate_proj.weight, mlp.up_proj.weight]


def _weight(attention: Any, name: str) -> Tensor | None:
    part = getattr(attention, name, None)
    return None if part is None else part.weight
