"""What a checkpoint says about how it wants to be asked, for ``drk optimize --model FOLDER``: ``drk_model.json``.

Templates are copied beside it where they are not the usual ones, so that a model asks for the prompts that it was
trained on. Read by :mod:`drk.assistant.llm.factory`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from drk.training.config import TrainConfig
from drk.training.prompting import BARE_TEMPLATES

FACTS = "drk_model.json"


def write_model_facts(folder: Path, config: TrainConfig) -> None:
    """Write the facts of a model trained with ``config`` into its folder."""
    templates = config.prompt.templates
    source = {"full": None, "bare": BARE_TEMPLATES}.get(templates, Path(templates))
    if source is not None:
        shutil.copytree(source, folder / "templates", dirs_exist_ok=True)
    facts = {
        "templates": "templates" if source is not None else "",
        "context_tokens": config.model.context_tokens,
        "max_tokens": config.rollout.max_new_tokens,
        "policy": config.prompt.policy,
        "temperature": config.rollout.temperature,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
