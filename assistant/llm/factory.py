"""From a name to a language model's proposer: ``openai:NAME``, ``vllm:FOLDER``, ``transformers:FOLDER``, or a folder.

Everything that can be known without asking anyone is checked here: the extra, the key, the checkpoint's folder, the
settings. What needs the endpoint is checked by the proposer's ``start``.
"""

from __future__ import annotations

from drk.assistant.errors import UsageError
from drk.assistant.llm.messages import Backend
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.llm.openai_backend import OpenAIBackend
from drk.assistant.llm.proposer import LanguageModelProposer
from drk.assistant.llm.transformers_backend import TransformersBackend
from drk.assistant.llm.vllm_server import VllmBackend
from drk.assistant.prompts import Prompts
from drk.assistant.proposers import MODELS


def make_model(name: str, settings: ModelSettings | None = None) -> LanguageModelProposer:
    """Return the proposer for a language model.

    Raises:
        UsageError: nothing stands behind the colon, or a setting cannot be used.
        ModelFault: no key, no extra, or no checkpoint.
    """
    settings = (settings or ModelSettings()).checked()
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
