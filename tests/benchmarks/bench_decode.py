"""How fast answers of a small model are decoded on a GPU, and that they are those of plain sampling.

    python tests/benchmarks/bench_decode.py [--rows 64 256] [--prompts 512] [--tokens 512] [--torch] [--out FILE]

The model has the nano model's shape and random weights: what it says means nothing, and takes as long as what a trained
one says. Answers end after a length drawn for each prompt, up to ``--tokens``. Prints a JSON object for each number of
rows: milliseconds a step, tokens a second, seconds of reading prompts, capturing and decoding. ``--torch`` leaves the
Triton kernels out. Each figure is of the second call (of the first: what was compiled and captured). Needs a GPU and
the ``train`` extra; ``--tiny`` is the path on a CPU, not a figure.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from drk.training.decode import Decoder
from drk.training.decode_model import TorchOperations
from drk.training.sampling import Prompt, Sampled, sample


def make_model(options: argparse.Namespace) -> Any:
    """Return a random model of the nano model's shape."""
    layers, width, heads = (2, 64, 2) if options.tiny else (8, 384, 6)
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=width, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=width // heads, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).eval().to("cpu" if options.tiny else "cuda")


def make_prompts(count: int, tokens: int) -> list[Prompt]:
    """Return prompts of 200 to 900 tokens, for answers of half of ``tokens`` up to all of them."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        length, most = (
            int(torch.randint(low, high, (1,), generator=generator))
            for low, high in ((200, 900), (tokens // 2, tokens + 1))
        )
        ids = torch.randint(0, 4096, (length,), generator=generator).tolist()
        found.append(Prompt(tuple(ids), number, most))
    return found


def timed(options: argparse.Namespace, model: Any, rows: int) -> dict[str, Any]:
    """Return the figures of one number of rows."""
    operations = TorchOperations() if options.torch or options.tiny else None
    decoder = Decoder(rows=rows, operations=operations, graphs=False if options.tiny else None)
    prompts, facts = make_prompts(options.prompts, options.tokens), {}
    for name in ("first", "second"):
        decoder.count_anew()
        begun = time.monotonic()
        decoder.sample(model, prompts, temperature=1.0, stop_ids=frozenset())
        facts[name] = {"seconds": round(time.monotonic() - begun, 2), **decoder.stats.facts()}
    return {"rows": rows, "prompts": len(prompts), **facts}


def agreement(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Return how answers and log-probabilities differ from those of plain sampling."""
    prompts = make_prompts(16, 48)
    decoder = Decoder(rows=64, graphs=False if options.tiny else None)
    found = {}
    for temperature in (0.0, 1.0):
        mine: list[Sampled] = decoder.sample(model, prompts, temperature=temperature, stop_ids=frozenset())
        begun = time.monotonic()
        plain = sample(model, prompts, temperature=temperature, stop_ids=frozenset(), pad_id=0)
        seconds = time.monotonic() - begun
        same = [(one, other) for one, other in zip(mine, plain, strict=True) if one.ids == other.ids]
        gaps = [abs(a - b) for one, other in same for a, b in zip(one.logps, other.logps, strict=True)]
        steps = max(len(one.ids) for one in plain)
        found[f"temperature_{temperature:g}"] = {
            "equal_answers": len(same), "of": len(plain), "largest_logp_gap": max(gaps, default=0.0),
            "plain_step_ms": round(1e3 * seconds / steps, 2),
        }  # fmt: skip
    return found


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = make_model(options)
    device = "cpu" if options.tiny else torch.cuda.get_device_name()
    facts: dict[str, Any] = {"device": device, "torch": torch.__version__, "agreement": agreement(options, model)}
    print(json.dumps(facts), flush=True)
    facts["runs"] = []
    for rows in options.rows:
        facts["runs"].append(timed(options, model, rows))
        print(json.dumps(facts["runs"][-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
