"""The nano model's card, filled from the study's result files: what was not measured is said, nothing is typed in.

Reads ``data.json``, ``sft.json``, ``rl-ARM-SEED.json``, ``eval-LABEL.json`` and ``stts-LABEL.json`` as
``tests/benchmarks/bench_nano.py`` writes them. A dry run's figures give a
card that says that it is one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from drk.training.errors import TrainingError

COLUMNS = (
    "correct/turn_1",
    "correct/best",
    "fast@1/best",
    "fast@1.2/best",
    "fast@1.5/best",
    "hack_rate/best",
    "lazy_share",
)

CARD = """\
# Dr. Kernel nano
{% if dry_run %}

**These figures are of a dry run with tiny sizes: they show that the path works, and nothing about a model.**
{% endif %}

A causal language model (Qwen3's shape, from nothing) that reads a PyTorch module and writes the file of a Triton
replacement, `ModelNew`. It is a learned translator for the grammar of `drk data tasks` and what lies near it, not a
general writer of kernels. Every answer must be judged by the gym before it is used;
`drk optimize --model nano` does so.

## Data

Generated modules and the builtin fusion compiler's answers: {{ data.get("pairs", "not recorded") }} pairs on disk of
{{ data.get("compositions", "not recorded") }} compositions ({{ data.get("vocabulary", "not recorded") }} tokens in the
vocabulary), and more written while it trained. Launch choices, precision and the degree of fusion are drawn evenly.
Verdicts in multi-turn conversations are written from templates. No text of other people's repositories or of any
benchmark is in it. The hand-written test set was never seen by the generator.

## Training

SFT: {{ sft.get("steps", "not recorded") }} steps in
{{ "%.0f" % sft["seconds"] if "seconds" in sft else "not recorded" }} s.
{% for arm in arms %}
RL `{{ arm["arm"] }}`, seed {{ arm["seed"] }}: {{ arm["steps"] }} steps in {{ "%.0f" % arm["seconds"] }} s.
{% else %}
No reinforcement was recorded.
{% endfor %}
Measured on: {{ devices | join(", ") }}.

## Figures

One row is one model on one set; `best` is best of history. Judged by the gym (`drk verify`'s rules).

| model | set | tasks | {{ columns | join(" | ") }} |
|---|---|---|{{ "---|" * (columns | length) }}
{% for row in rows %}
| {{ row.model }} | {{ row.set }} | {{ row.tasks }} | {{ row.cells | join(" | ") }} |
{% endfor %}

Beside the paper's models: Dr.Kernel-8B and 14B (arXiv 2602.05885) are 500 to 1,000 times larger and write kernels for
ordinary modules; on KernelBench level 2 they reach Fast@1.2 of 20.0 and 25.6 %. This model is not measured there.

## Limits

No recurrence, indexing by values or control flow; contexts of 2,048 tokens; float32 mostly. Answers for modules
far from the grammar are wrong more often than right.

## Licence

Apache-2.0, weights and tokenizer included.
"""


def write_card(results: Path, path: Path) -> Path:
    """Write the card to ``path`` and return it.

    Raises:
        TrainingError: there are no results, or one of them is no JSON.
    """
    found = {}
    for one in sorted(results.glob("*.json")):
        try:
            found[one.stem] = json.loads(one.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TrainingError(f"{one} is no JSON: {error}") from error
    if not found:
        raise TrainingError(f"no results in {results}", help="run the steps of bench_nano.py first")
    path.write_text(card_text(found), encoding="utf-8")
    return path


def card_text(results: dict[str, Any]) -> str:
    """Return the card as Markdown; ``results`` maps a result's name to its figures."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False)
    rows = [
        {"model": name.removeprefix("eval-"), "set": set_name, "tasks": figures.get("tasks"), "cells": _cells(figures)}
        for name, result in results.items()
        if name.startswith("eval-")
        for set_name, figures in result["sets"].items()
    ]
    return environment.from_string(CARD).render(
        dry_run=any(result.get("dry_run") for result in results.values()),
        data=results.get("data", {}),
        sft=results.get("sft", {}),
        arms=[result for name, result in results.items() if name.startswith("rl-")],
        columns=COLUMNS,
        rows=rows,
        devices=sorted({str(result.get("device", "unknown")) for result in results.values()}),
    )


def _cells(figures: dict[str, Any]) -> list[str]:
    return [_share(figures.get(name)) for name in COLUMNS]


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "not measured"
