"""Small random models of the shapes that can be decoded over a static cache."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {"vocab_size": 60, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "head_dim": 12, "max_position_embeddings": 512, "pad_token_id": 0}  # fmt: skip


def make_model(kind: str = "qwen3", *, key_heads: int = 2, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings = {**SIZES, "num_key_value_heads": key_heads, "tie_word_embeddings": kind == "qwen3", **changes}
    config_type, model_type = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[kind]
    model = model_type(config_type(**settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():  # further from uniform than fresh weights, norms apart from one
            weight.add_(0.15 * torch.randn_like(weight))
    return model
