"""The command line's options that concern language models, and how they become settings. No secret is ever one.

``drk optimize`` and ``drk eval`` share them. What few people change stands behind ``--model-option NAME=VALUE``, whose
names are those of :class:`drk.assistant.llm.model_settings.ModelSettings` with dashes. ``OPENAI_BASE_URL`` is taken as
``--base-url`` where none is given, as other tools do; what was resolved is kept in the run's configuration.

Left out: settings files. A project that was merely checked out must not choose where a user's key is sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from drk.assistant.errors import UsageError, did_you_mean
from drk.assistant.llm.model_settings import ModelSettings, parse_prices
from drk.assistant.proposers import BuiltinProposer, Proposer, SeededProposer, is_model, is_nano, make_proposer

BaseUrl = Annotated[str | None, typer.Option("--base-url", help="OpenAI-compatible endpoint, as http://host:8000/v1.")]
ModelOption = Annotated[
    list[str] | None,
    typer.Option("--model-option", help="NAME=VALUE, such as temperature=0.7 or api-key-env=MY_KEY; repeatable."),
]
MaxCost = Annotated[float | None, typer.Option("--max-cost", min=0, help="Budget in dollars for model calls.")]
MaxGpuSeconds = Annotated[
    float | None, typer.Option("--max-gpu-seconds", min=0, help="Budget in seconds for which judging holds the GPU.")
]
Hint = Annotated[list[str] | None, typer.Option("--hint", help="A suggestion to the model; repeatable.")]
FromFile = Annotated[
    list[Path] | None, typer.Option("--from", help="A candidate of yours to judge next, and to go on from; repeatable.")
]
BuiltinFirst = Annotated[
    bool | None, typer.Option("--builtin-first/--no-builtin-first", help="Whether builtin makes a model's first turn.")
]

_NOT_OPTIONS = ("base_url", "max_cost_usd", "prices")


def model_settings(
    base_url: str | None,
    options: Sequence[str],
    max_cost_usd: float | None,
    *,
    known: ModelSettings | None = None,
    environ: Mapping[str, str] | None = None,
) -> ModelSettings:
    """Return checked settings from the command line; what it leaves open is as in ``known``.

    Raises:
        UsageError: an option is unknown or its value cannot be used.
    """
    environ = os.environ if environ is None else environ
    base_url = base_url or environ.get("OPENAI_BASE_URL", "")
    settings = replace(known or ModelSettings(), base_url=base_url, max_cost_usd=max_cost_usd)
    for text in options:
        settings = _with_option(settings, text)
    return settings.checked()


def _with_option(settings: ModelSettings, text: str) -> ModelSettings:
    word, sign, value = text.partition("=")
    if word == "price" and sign:
        return replace(settings, prices=parse_prices(value))
    name = word.replace("-", "_")
    kinds = {one.name: type(getattr(settings, one.name)) for one in fields(settings) if one.name not in _NOT_OPTIONS}
    if not sign or name not in kinds:
        known = sorted(["price", *(one.replace("_", "-") for one in kinds)])
        near = did_you_mean(word, known) or f"known are: {', '.join(known)}"
        raise UsageError(f"unknown model option {text!r}", help=near)
    if name == "templates":
        return replace(settings, templates=Path(value).expanduser().resolve())
    return replace(settings, **{name: _read(word, value, kinds[name])})


def _read(word: str, value: str, kind: type) -> Any:
    """Read a value as ``kind``; numbers must be positive (0 is allowed for temperature and back-off)."""
    if kind is str:
        return value
    if kind is bool:
        if value not in ("true", "false"):
            raise UsageError(f"--model-option {word} must be true or false, not {value!r}")
        return value == "true"
    try:
        number = kind(value)
    except ValueError:
        number = kind(-1)
    if not 0 <= number < 1e9 or (number == 0 and word not in ("temperature", "backoff-s")):
        raise UsageError(f"--model-option {word} must be a positive number, not {value!r}")
    return number


def settings_json(settings: ModelSettings) -> dict[str, Any]:
    """Return the JSON form for a run's configuration; there is no secret in it."""
    return {**asdict(settings), "templates": None if settings.templates is None else str(settings.templates)}


def settings_from_json(data: Mapping[str, Any]) -> ModelSettings:
    """Return settings from a run's configuration; names that are not known any more are skipped."""
    known = {one.name for one in fields(ModelSettings)}
    values = {name: value for name, value in data.items() if name in known}
    if values.get("templates") is not None:
        values["templates"] = Path(values["templates"])
    if values.get("prices") is not None:
        values["prices"] = tuple(values["prices"])
    return ModelSettings(**values)


def proposer_for(name: str, settings: ModelSettings, *, builtin_first: bool | None) -> Proposer:
    """Return the proposer that ``name`` stands for; a language model's first turn is builtin's where asked for.

    ``builtin_first`` null is the usual: for every model but nano, which was taught on conversations of its own.

    Raises:
        UsageError: as :func:`drk.assistant.proposers.make_proposer`.
        ModelFault: likewise.
    """
    proposer = make_proposer(name, settings)
    builtin_first = not is_nano(name) if builtin_first is None else builtin_first
    return SeededProposer(BuiltinProposer(), proposer) if builtin_first and is_model(name) else proposer
