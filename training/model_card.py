"""The nano model's card, filled from the study's result files: what was not measured is said, nothing is typed in.

Reads ``data.json``, ``sft.json``, ``rl-ARM-SEED.json``, ``arms.json``, ``eval-LABEL.json``, ``stts-LABEL.json`` and
``export.json`` as ``tests/benchmarks/bench_nano.py`` writes them. Any of them may be missing, or hold less than a whole
run gives. A dry run's figures give a card that says that it is one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from drk.training.arms import arms_table
from drk.training.errors import TrainingError

COLUMNS = (
    "correct/turn_1",
    "correct/turn_3",
    "correct/best",
    "fast@1/best",
    "fast@1.2/turn_3",
    "fast@1.2/best",
    "fast@1.5/best",
    "hack_rate/best",
    "lazy_share",
)
SETS = {
    "in-distribution": "new modules of the families that it was trained on",
    "held-out": "compositions that were kept out of training by a hash",
    "long-chain": "chains of more operations than any in training",
    "handwritten": "modules that people wrote; the generator never saw them",
}
PAPER = {"Dr.Kernel-8B": "20.0", "Dr.Kernel-14B": "25.6"}
"""Fast@1.2 in per cent on KernelBench level 2 that the paper states (arXiv 2602.05885)."""
NOT_MEASURED = "not measured"

CARD = """\
# Dr. Kernel nano
{% if dry_run %}

**These figures are of a dry run with tiny sizes: they show that the path works, and nothing about a model.**
{% endif %}

A small causal language model (Qwen3's shape, trained from nothing) that reads a PyTorch module and writes the file of a
Triton replacement, `ModelNew`. It is a learned translator for the grammar of `drk data tasks` and what lies near it, no
general writer of kernels. Every answer must be judged by the gym before it is used; `drk optimize --model nano` does.

## Use

```bash
drk optimize model.py --model nano                      # weights found by drk; nothing else to install
DRK_NANO=FOLDER drk optimize model.py --model nano      # weights in a folder of your own
```

| | |
|---|---|
| parameters | {{ parameters }} |
| stored as | {{ stored }} |
| rounding to 8 bits (mean KL a token; same likeliest token) | {{ rounding }} |
| context, prompt and answer together | {{ context }} |

## Data

Generated modules and the builtin fusion compiler's answers, shards on disk and more that was written while it trained.
Launch choices, precision and the degree of fusion are drawn evenly. Verdicts in multi-turn conversations are written
from templates. No text of other people's repositories or of any benchmark is in it. The hand-written test set was never
seen by the generator.

| on disk | |
|---|---|
| pairs | {{ pairs }} |
| compositions | {{ compositions }} |
| answers that leave part of the work to torch, on purpose | {{ lazy }} |
| tokens in the vocabulary | {{ vocabulary }} |

## Recipe

| step | steps | seconds | what came of it |
|---|---|---|---|
| SFT from nothing | {{ sft.steps }} | {{ sft.seconds }} | {{ sft.outcome }} |
{% for arm in arms %}
| RL `{{ arm.name }}`, seed {{ arm.seed }}{{ arm.partly }} | {{ arm.steps }} | {{ arm.seconds }} | {{ arm.outcome }} |
{% else %}
| RL | {{ missing }} | {{ missing }} | no reinforcement was recorded |
{% endfor %}

Measured on: {{ devices | join(", ") }}. Commands stand in `docs/nano-model.md`; what TRLOO, PR, PRS and MRS are, in
`docs/training.md`.

## Figures

One row is one model on one set, judged by the gym (`drk verify`'s rules); `best` is best of history. Shares are of
tasks, whose number stands beside them.

| model | set | tasks | samples | {{ columns | join(" | ") }} |
|---|---|---|---|{{ "---|" * (columns | length) }}
{% for row in rows %}
| {{ row.model }} | {{ row.set }} | {{ row.tasks }} | {{ row.samples }} | {{ row.cells | join(" | ") }} |
{% else %}
| {{ missing }} | | | |{{ " |" * (columns | length) }}
{% endfor %}

{% for name, meaning in sets.items() %}
- {{ name }}: {{ meaning }}
{% endfor %}

{% if arms_table %}
Arms of reinforcement, from one checkpoint:

{{ arms_table }}
{% else %}
Arms of reinforcement: {{ missing }}.
{% endif %}

Turns at test time, share correct on the hand-written set:

{% for row in stts %}
- {{ row.model }}, history `{{ row.policy }}`: {{ row.cells }}
{% else %}
- {{ missing }}
{% endfor %}

## Beside the paper's models

| model | parameters | Fast@1.2, KernelBench level 2 |
|---|---|---|
{% for name, share in paper.items() %}
| {{ name }} (arXiv 2602.05885) | {{ name.rpartition("-")[2] }} | {{ share }} % (stated there) |
{% endfor %}
| this one | {{ parameters }} | {{ missing }} |

The paper's models are 500 to 1,000 times larger, start from pretrained models and write kernels for ordinary modules.
This one does not compete with them: the figures above are of its own sets and cannot be held against theirs.

## Limits

- It knows the operations of `drk data tasks`. No recurrence, indexing by values or control flow; float32 mostly.
- A module that leaves no room for an answer in the context is refused before anything is asked.
- Modules unlike the generated ones are its weak side (see the rows `handwritten`). What is wrong the gym rejects, and
  drk then says that nothing was won.
- Hints (`--hint`), hardware facts and measured kernels are not in its prompts: it was not taught to read them.

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
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False, keep_trailing_newline=True
    )
    named = {
        kind: {name: one for name, one in results.items() if name.startswith(kind)}
        for kind in ("rl-", "eval-", "stts-")
    }
    data, sft, export = (results.get(name, {}) for name in ("data", "sft", "export"))
    context = export.get("context_tokens")
    return environment.from_string(CARD).render(
        dry_run=any(result.get("dry_run") for result in results.values()),
        missing=NOT_MEASURED,
        parameters=_number(export.get("parameters")),
        stored=_stored(export),
        rounding=_rounding(export.get("rounding") or {}),
        context=f"{context:,} tokens" if context else NOT_MEASURED,
        pairs=_number(data.get("pairs")),
        compositions=_number(data.get("compositions")),
        vocabulary=_number(data.get("vocabulary")),
        lazy=_share(data.get("lazy_share")),
        sft={"steps": _number(sft.get("steps")), "seconds": _seconds(sft), "outcome": _sft_outcome(sft)},
        arms=[_arm(one) for one in named["rl-"].values()],
        columns=COLUMNS,
        rows=[row for name, one in named["eval-"].items() for row in _rows(name.removeprefix("eval-"), one)],
        sets=SETS,
        arms_table=arms_table(results["arms"]) if results.get("arms", {}).get("arms") else "",
        stts=[row for name, one in named["stts-"].items() for row in _turns(name.removeprefix("stts-"), one)],
        paper=PAPER,
        devices=sorted({str(one["device"]) for one in results.values() if one.get("device")}) or [NOT_MEASURED],
    )


def _rows(model: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "set": name,
            "tasks": _number(figures.get("tasks")),
            "samples": f"{result.get('samples', NOT_MEASURED)} at T={result.get('temperature', NOT_MEASURED)}",
            "cells": [_share(figures.get(column)) for column in COLUMNS],
        }
        for name, figures in result.get("sets", {}).items()
    ]


def _turns(model: str, result: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for policy, sets in result.get("policies", {}).items():
        for figures in sets.values():
            turns = sorted(int(key.rpartition("_")[2]) for key in figures if key.startswith("correct/turn_"))
            cells = [f"turn {turn} {_share(figures[f'correct/turn_{turn}'])}" for turn in turns]
            cells.append(f"best {_share(figures.get('correct/best'))}")
            rows.append({"model": model, "policy": policy, "cells": ", ".join(cells)})
    return rows


def _arm(result: dict[str, Any]) -> dict[str, str]:
    curve = result.get("curve") or [{}]
    ends = [
        f"{name} {_decimal(curve[0].get(name))} to {_decimal(curve[-1].get(name))}"
        for name in ("reward/mean", "correct/turn_1", "lazy_share", "hack_rate")
        if name in curve[-1]
    ]
    return {
        "name": str(result.get("arm", "unnamed")),
        "seed": str(result.get("seed", NOT_MEASURED)),
        "partly": "" if result.get("whole", True) else " (cut off)",
        "steps": _number(result.get("steps")),
        "seconds": _seconds(result),
        "outcome": ", ".join(ends) or NOT_MEASURED,
    }


def _sft_outcome(result: dict[str, Any]) -> str:
    last = result.get("last") or {}
    found = {"loss": last.get("loss"), "held-out loss": last.get("loss/held_out")}
    return ", ".join(f"{name} {_decimal(value)}" for name, value in found.items() if value is not None) or NOT_MEASURED


def _stored(export: dict[str, Any]) -> str:
    if "weights_bytes" not in export:
        return NOT_MEASURED
    mib = (export["weights_bytes"] / 2**20, export["total_bytes"] / 2**20)
    return f"8-bit integers with a scale a row: {mib[0]:.2f} MiB of weights, {mib[1]:.2f} MiB in all"


def _rounding(found: dict[str, Any]) -> str:
    if not found.get("tokens"):
        return NOT_MEASURED
    return f"{found['kl_mean']:.2g} nats; {_share(found['same_top_share'])} of {found['tokens']:,} tokens"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else NOT_MEASURED


def _decimal(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else NOT_MEASURED


def _seconds(result: dict[str, Any]) -> str:
    value = result.get("seconds")
    return f"{value:.0f}" if isinstance(value, int | float) else NOT_MEASURED


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else NOT_MEASURED
