"""From a name to a language model's proposer: ``openai:NAME``, ``vllm:FOLDER``, ``transformers:FOLDER``, or a folder.

``nano`` is the small model of this project (:mod:`drk.assistant.llm.nano_places` finds it); a folder with its quantised
weights is read in the same way. A checkpoint made here says in ``drk_model.json`` how it wants to be asked (templates,
context, length of answers, policy of history, temperature); settings that the user left alone follow it.

Everything that can be known without asking anyone is checked here: the extra, the key, the checkpoint's folder, the
settings. What needs the endpoint is checked by the proposer's ``start``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from drk.assistant.errors import UsageError
from drk.assistant.llm.messages import Backend, ModelFault
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.llm.nano_backend import NanoBackend
from drk.assistant.llm.nano_places import nano_folder
from drk.assistant.llm.openai_backend import OpenAIBackend
from drk.assistant.llm.proposer import LanguageModelProposer
from drk.assistant.llm.transformers_backend import TransformersBackend
from drk.assistant.llm.vllm_server import VllmBackend
from drk.assistant.prompts import Prompts
from drk.assistant.proposers import MODELS, NANO, is_nano

FACTS = "drk_model.json"


def fitted(settings: ModelSettings, name: str) -> ModelSettings:
    """Return ``settings`` with what the checkpoint in ``name`` asks for, where the user left the defaults alone.

    Raises:
        ModelFault: what it asks for cannot be read.
    """
    head, _, argument = name.partition(":")
    folder = Path(argument if head in ("transformers", "vllm") else name)
    path, usual = folder / FACTS, ModelSettings()
    if head == "openai" or not path.is_file():
        return settings
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        wanted: dict[str, Any] = {
            "templates": (folder / facts["templates"]).resolve() if facts.get("templates") else None,
            "context_tokens": int(facts["context_tokens"]),
            "max_tokens": int(facts["max_tokens"]),
            "policy": str(facts.get("policy", usual.policy)),
            "temperature": float(facts.get("temperature", usual.temperature)),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFault(f"{path} cannot be read", cause=repr(error)) from error
    changes = {key: value for key, value in wanted.items() if getattr(settings, key) == getattr(usual, key)}
    return replace(settings, **changes)


def make_model(name: str, settings: ModelSettings | None = None) -> LanguageModelProposer:
    """Return the proposer for a language model.

    Raises:
        UsageError: nothing stands behind the colon, or a setting cannot be used.
        ModelFault: no key, no extra, or no checkpoint.
    """
    settings = settings or ModelSettings()
    if is_nano(name):
        folder = nano_folder() if name == NANO else Path(name.removeprefix(f"{NANO}:"))
        settings = fitted(settings, str(folder)).checked()
        shown = f"{NANO}:{name.removeprefix(f'{NANO}:')}" if name != NANO else name
        return LanguageModelProposer(NanoBackend(folder, settings, name=shown), settings, Prompts(settings.templates))
    settings = fitted(settings, name).checked()
    return LanguageModelProposer(make_backend(name, settings), settings, Prompts(settings.templates))


def make_backend(name: str, settings: ModelSettings) -> Backend:
    """Return the backend that ``name`` stands for; raises as :func:`make_model`."""
    head, _, argument = name.partition(":")
    if head not in MODELS:
        head, argument = "transformers", name
    if not argument:
        wanted = "the model's name" if head == "openai" else "a checkpoint's folder"
        raise UsageError(f"{head} needs {wanted}", help=f"--model {head}:{'NAME' if head == 'openai' else 'FOLDER'}")
    if head == "openai":
        return OpenAIBackend(argument, settings)
    if settings.base_url:
        raise UsageError(f"--base-url is for openai:NAME, not for {head}", help="--model openai:NAME --base-url URL")
    return VllmBackend(argument, settings) if head == "vllm" else TransformersBackend(argument, settings)
