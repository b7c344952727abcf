"""A model of the nano model's kind that knows a few answers by heart: real weights, real sampling, made in seconds.

Its tokens are lines of the texts that it learns, so that answers are short; everything else is read byte by byte. It
needs neither ``transformers`` nor ``tokenizers``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import drk.training
from drk.assistant.llm.messages import Message
from drk.assistant.llm.nano_network import NanoNetwork, NetworkShape
from drk.assistant.llm.nano_tokenizer import NanoTokenizer, byte_alphabet
from drk.assistant.llm.nano_weights import INT8_FILE, PLAIN_FILE, write_int8

SPECIAL = ("<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PIECES = r"[A-Za-z_][A-Za-z_]*|[0-9]|\n[ ]*|[ ]+|[^A-Za-z_0-9\s]+|\s+"
TEMPLATES = Path(next(iter(drk.training.__path__))) / "templates"

Conversation = tuple[Sequence[Message], str]


def write_tokenizer(folder: Path, phrases: Sequence[str] = ()) -> NanoTokenizer:
    """Write a tokenizer of bytes, two merges and ``phrases``, and return it."""
    words = [*SPECIAL, *byte_alphabet().values(), "in", "inp"]
    texts = sorted(set(phrases), key=lambda one: (-len(one), one))
    added = [*SPECIAL, *texts]
    numbers = [*range(len(SPECIAL)), *range(len(words), len(words) + len(texts))]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, "special": text in SPECIAL, **plain}
            for number, text in zip(numbers, added, strict=True)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<|unknown|>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {word: number for number, word in enumerate(words)}, "merges": [["i", "n"], ["in", "p"]],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    said = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": "<|unknown|>", "chat_template": TEMPLATE}
    said |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return NanoTokenizer(folder)


def tiny_config(
    vocabulary: int, *, model_type: str = "qwen3", kv_heads: int = 2, context: int = 2048
) -> dict[str, Any]:
    """Return ``config.json`` of a network of two layers, 32 wide."""
    return {
        "architectures": ["Qwen3ForCausalLM" if model_type == "qwen3" else "LlamaForCausalLM"],
        "model_type": model_type, "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": kv_heads, "head_dim": 16,
        "max_position_embeddings": context, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "eos_token_id": 2, "pad_token_id": 0,
        "bos_token_id": None, "dtype": "float32",
    }  # fmt: skip


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights for ``config``, named as ``transformers`` names them."""
    generator = torch.Generator().manual_seed(seed)
    width, head, hidden = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    tensors = {"model.embed_tokens.weight": drawn(config["vocab_size"], width), "model.norm.weight": torch.ones(width)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        tensors |= {
            f"{layer}self_attn.q_proj.weight": drawn(heads * head, width),
            f"{layer}self_attn.k_proj.weight": drawn(kv_heads * head, width),
            f"{layer}self_attn.v_proj.weight": drawn(kv_heads * head, width),
            f"{layer}self_attn.o_proj.weight": drawn(width, heads * head),
            f"{layer}mlp.gate_proj.weight": drawn(hidden, width),
            f"{layer}mlp.up_proj.weight": drawn(hidden, width),
            f"{layer}mlp.down_proj.weight": drawn(width, hidden),
            f"{layer}input_layernorm.weight": torch.ones(width),
            f"{layer}post_attention_layernorm.weight": torch.ones(width),
        }
        if config["model_type"] == "qwen3":
            tensors |= {f"{layer}self_attn.{one}_norm.weight": torch.ones(head) for one in "qk"}
    return tensors


def learnt_tensors(
    tokenizer: NanoTokenizer, config: dict[str, Any], conversations: Sequence[Conversation]
) -> dict[str, torch.Tensor]:
    """Return weights that give each conversation's answer, by training until every token is the likeliest.

    Raises:
        AssertionError: 400 steps did not do.
    """
    tensors = {name: one.requires_grad_() for name, one in random_tensors(config).items()}
    documents = []
    for messages, answer in conversations:
        prompt = tokenizer.encode_chat(messages)
        documents.append((len(prompt), torch.tensor([*prompt, *tokenizer.encode(answer), tokenizer.end])))
    optimizer = torch.optim.Adam(tensors.values(), lr=0.02)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network gains nothing from more, and loses much on a busy machine
    try:
        return _learn(tensors, config, documents, optimizer)
    finally:
        torch.set_num_threads(threads)


def _learn(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    documents: Sequence[tuple[int, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
) -> dict[str, torch.Tensor]:
    for _ in range(400):
        network = NanoNetwork(tensors, NetworkShape.read(config))
        logits = torch.cat([network.read_text(ids)[start - 1 : -1] for start, ids in documents])
        wanted = torch.cat([ids[start:] for start, ids in documents])
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        if loss < 0.02 and bool((logits.argmax(-1) == wanted).all()):
            return {name: one.detach() for name, one in tensors.items()}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the answers were not learnt: loss {loss}")


def lines_of(conversations: Sequence[Conversation]) -> list[str]:
    """Return the lines of all texts that may be phrases."""
    texts = [text for messages, answer in conversations for text in (*(one.content for one in messages), answer)]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return [line for line in lines if len(line) >= 6 and line.isascii()]


def write_nano(folder: Path, conversations: Sequence[Conversation], *, plain: bool = False) -> Path:
    """Write a model that gives the answers of ``conversations``: quantised, or ``plain`` as training leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder, lines_of(conversations))
    config = tiny_config(len(tokenizer))
    tensors = learnt_tensors(tokenizer, config, conversations)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copytree(TEMPLATES, folder / "templates", dirs_exist_ok=True)
    facts = {"templates": "templates", "context_tokens": 2048, "max_tokens": 768, "policy": "append-all"}
    (folder / "drk_model.json").write_text(json.dumps(facts))
    if plain:
        from safetensors.torch import save_file

        save_file(tensors, folder / PLAIN_FILE, {"format": "pt"})
    else:
        write_int8(folder / INT8_FILE, tensors, config)
    return folder
