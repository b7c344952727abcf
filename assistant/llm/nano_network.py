"""The small models' network, with a cache of keys and values: Llama's shape, norms on queries and keys if it has them.

A reader of weights, not a trainer: no gradients, no dropout. Prompts are read one at a time, each without padding;
then all rows go on together, each at its own position. Row ``b`` keeps its keys and values in columns 0, 1, ... of a
cache made once; what lies behind a row's position is never looked at. Rows that start from equal prompts share one
reading of it.

Left out: attention of other kinds (windows, sinks), scaled rotary positions, experts; a configuration that asks for
them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drk.assistant.llm.messages import ModelFault

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ("qwen3", "llama")
UNKNOWN = ("attention_bias", "mlp_bias", "use_sliding_window")


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of the network; ``context`` is how many positions it was made for."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    context: int
    epsilon: float
    theta: float
    tied: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> NetworkShape:
        """Return the sizes that ``config.json`` states.

        Raises:
            ModelFault: another kind of network, or a size is missing.
        """
        rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
        strange = [
            *([f"model_type {config.get('model_type')!r}"] if config.get("model_type") not in SHAPES else []),
            *([f"rotary positions {rotary}"] if rotary.get("rope_type", "default") != "default" else []),
            *(f"{name}={config[name]!r}" for name in UNKNOWN if config.get(name)),
            *([f"hidden_act={config.get('hidden_act')!r}"] if config.get("hidden_act", "silu") != "silu" else []),
        ]
        if strange:
            raise ModelFault(
                "this is no network of the nano model's kind",
                cause=", ".join(strange),
                help="--model transformers:FOLDER reads other kinds (the train extra)",
            )
        try:
            heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                width=width,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_width=int(config.get("head_dim") or width // heads),
                vocabulary=int(config["vocab_size"]),
                context=int(config["max_position_embeddings"]),
                epsilon=float(config["rms_norm_eps"]),
                theta=float(rotary.get("rope_theta") or config.get("rope_theta") or 10000.0),
                tied=bool(config.get("tie_word_embeddings")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFault("config.json lacks a size", cause=repr(error), help="fetch the folder again") from error


class NanoNetwork:
    """Weights by their names in ``transformers``; see the module's text.

    Raises:
        ModelFault: a tensor is missing or has another shape.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shape: NetworkShape) -> None:
        import torch

        self.shape = shape
        self._tensors = tensors
        self._embedding = self._named("model.embed_tokens.weight", shape.vocabulary, shape.width)
        self._output = self._embedding if shape.tied else self._named("lm_head.weight", shape.vocabulary, shape.width)
        self._final = self._named("model.norm.weight", shape.width)
        self._layers = [self._layer(f"model.layers.{number}.") for number in range(shape.layers)]
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        half = torch.arange(0, shape.head_width, 2, dtype=torch.float32, device=self.device)
        self._frequencies = shape.theta ** (-half / shape.head_width)

    def _named(self, name: str, *sizes: int) -> Tensor:
        found = self._tensors.get(name)
        if found is None or (sizes and tuple(found.shape) != sizes):
            there = "is missing" if found is None else f"has shape {list(found.shape)}, not {list(sizes)}"
            raise ModelFault(
                "the weights do not fit config.json", cause=f"{name} {there}", help="fetch the folder again"
            )
        return found

    def _layer(self, prefix: str) -> dict[str, Tensor]:
        import torch

        shape = self.shape
        attention = prefix + "self_attn."
        parts = [
            self._named(f"{attention}{one}_proj.weight", count * shape.head_width, shape.width)
            for one, count in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        ]
        gates = [self._named(f"{prefix}mlp.{one}_proj.weight") for one in ("gate", "up")]
        layer = {
            "qkv": torch.cat(parts),
            "out": self._named(f"{attention}o_proj.weight", shape.width, shape.heads * shape.head_width),
            "gate_up": torch.cat(gates),
            "down": self._named(f"{prefix}mlp.down_proj.weight", shape.width, gates[0].shape[0]),
            "before_attention": self._named(f"{prefix}input_layernorm.weight", shape.width),
            "before_mlp": self._named(f"{prefix}post_attention_layernorm.weight", shape.width),
        }
        for one in ("q", "k"):
            if f"{attention}{one}_norm.weight" in self._tensors:
                layer[f"{one}_norm"] = self._named(f"{attention}{one}_norm.weight", shape.head_width)
        return layer

    def cache(self, rows: int, length: int) -> Cache:
        """Return an empty cache for ``rows`` rows of at most ``length`` tokens."""
        import torch

        shape = self.shape
        sizes = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_width)
        return Cache(torch.zeros(sizes, dtype=self.dtype, device=self.device))

    def read_prompt(self, ids: Tensor, cache: Cache, rows: Tensor) -> Tensor:
        """Read one prompt ``[T]`` for all of ``rows``; return the logits ``[V]`` (float32) after its last token."""
        return self._logits(self._states(ids, cache, rows)[-1:])[0]

    def read_text(self, ids: Tensor) -> Tensor:
        """Return the logits ``[T, V]`` (float32) after each token of a text ``[T]``; nothing is kept."""
        return self._logits(self._states(ids))

    def _states(self, ids: Tensor, cache: Cache | None = None, rows: Tensor | None = None) -> Tensor:
        import torch

        positions = torch.arange(len(ids), device=self.device)
        state = self._embedding[ids][None]
        for number, layer in enumerate(self._layers):
            query, key, value = self._heads(layer, state, positions[None])
            if cache is not None:
                for place, one in zip(cache.values[number], (key, value), strict=True):
                    place[rows, :, : len(ids)] = one
            state = self._rest(layer, state, self._attend(query, key, value, causal=True))
        return state[0]

    def read_token(self, ids: Tensor, positions: Tensor, cache: Cache, length: int) -> Tensor:
        """Read one token a row; return the logits ``[B, V]`` (float32) after it.

        Args:
            ids: the tokens, ``[B]``.
            positions: where each stands in its row, ``[B]``.
            cache: of the ``B`` rows, whose earlier positions are filled.
            length: above the largest position; so many columns are looked at.
        """
        import torch

        rows = torch.arange(len(ids), device=self.device)
        seen = (torch.arange(length, device=self.device) <= positions[:, None])[:, None, None]
        state = self._embedding[ids][:, None]
        for number, layer in enumerate(self._layers):
            query, key, value = self._heads(layer, state, positions[:, None])
            for place, one in zip(cache.values[number], (key, value), strict=True):
                place[rows, :, positions] = one[:, :, 0]
            keys, values = cache.values[number, :, :, :, :length]
            state = self._rest(layer, state, self._attend(query, keys, values, seen=seen))
        return self._logits(state[:, 0])

    def _heads(self, layer: dict[str, Tensor], state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``[B, heads, T, head_width]``, the first two turned by position."""
        shape = self.shape
        joined = self._norm(state, layer["before_attention"]) @ layer["qkv"].T
        count = shape.heads + 2 * shape.kv_heads
        parts = joined.view(*joined.shape[:2], count, shape.head_width).transpose(1, 2)
        query, key, value = (
            parts[:, : shape.heads],
            parts[:, shape.heads : -shape.kv_heads],
            parts[:, -shape.kv_heads :],
        )
        if "q_norm" in layer:
            query, key = self._norm(query, layer["q_norm"]), self._norm(key, layer["k_norm"])
        angles = (positions.float()[..., None] * self._frequencies)[:, None]
        cosine, sine = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return _turned(query, cosine, sine), _turned(key, cosine, sine), value

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, seen: Tensor | None = None
    ) -> Tensor:
        import torch

        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, seen, is_causal=causal, enable_gqa=self.shape.heads != self.shape.kv_heads
        )
        return attended.transpose(1, 2).flatten(2)

    def _rest(self, layer: dict[str, Tensor], state: Tensor, attended: Tensor) -> Tensor:
        import torch

        state = state + attended @ layer["out"].T
        gate, up = (self._norm(state, layer["before_mlp"]) @ layer["gate_up"].T).chunk(2, dim=-1)
        return state + (torch.nn.functional.silu(gate) * up) @ layer["down"].T

    def _logits(self, state: Tensor) -> Tensor:
        return (self._norm(state, self._final) @ self._output.T).float()

    def _norm(self, state: Tensor, weight: Tensor) -> Tensor:
        values = state.float()
        values = values * (values.square().mean(dim=-1, keepdim=True) + self.shape.epsilon).rsqrt()
        return weight * values.to(self.dtype)


@dataclass(frozen=True)
class Cache:
    """Keys and values, ``[layers, 2, rows, kv_heads, length, head_width]``."""

    values: Tensor

    @property
    def length(self) -> int:
        """How many tokens a row may have."""
        return self.values.shape[4]

    def rows(self, kept: Sequence[int]) -> Cache:
        """Return a cache of some of the rows."""
        return Cache(self.values[:, :, list(kept)])


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    import torch

    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
