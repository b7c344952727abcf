"""One typed configuration for ``drk train``: sections, recipes, overrides, and errors that say what was meant.

A configuration is a TOML file or the name of a shipped recipe (``nano-cpu``, ``nano``, ``one-gpu-lora``, ``paper-8b``,
``paper-14b``). ``extends = "NAME"`` at its top takes another one's values first. ``--set section.key=value`` comes
last; its value is read as TOML, and as plain text where it is none. Unknown sections and keys are refused with a
suggestion, wrong types name the key: a typing error never trains with a default in silence.

Left out: environment variables (a run must be readable from its file), and settings of accelerate (number of processes,
FSDP, DeepSpeed), which belong to ``accelerate launch``. Times are in seconds.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from drk.assistant.errors import ConfigError, did_you_mean
from drk.training.config_sections import (
    AdvantageSection,
    GymSection,
    ModelSection,
    OptimizerSection,
    PromptSection,
    RejectionSection,
    RewardSection,
    RolloutSection,
    RunSection,
    ScratchSection,
    SftSection,
    TasksSection,
)

__all__ = [
    "AdvantageSection",
    "GymSection",
    "ModelSection",
    "OptimizerSection",
    "PromptSection",
    "RejectionSection",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "ScratchSection",
    "SftSection",
    "TasksSection",
    "TrainConfig",
    "config_to_toml",
    "load_config",
    "recipe_names",
]


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run is told."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    tasks: TasksSection = field(default_factory=TasksSection)
    prompt: PromptSection = field(default_factory=PromptSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    gym: GymSection = field(default_factory=GymSection)
    reward: RewardSection = field(default_factory=RewardSection)
    advantage: AdvantageSection = field(default_factory=AdvantageSection)
    rejection: RejectionSection = field(default_factory=RejectionSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    sft: SftSection = field(default_factory=SftSection)
    scratch: ScratchSection = field(default_factory=ScratchSection)


Values = dict[str, dict[str, Any]]


def recipe_names() -> tuple[str, ...]:
    """Return the names of the shipped recipes."""
    folder = resources.files("drk.training").joinpath("recipes")
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load_config(name: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration that a file or recipe and ``section.key=value`` overrides make.

    Raises:
        ConfigError: not found, no TOML, an unknown name, a wrong type or an impossible value.
    """
    values = _read(name, ())
    for text in overrides:
        section, key, value = _read_override(text)
        values.setdefault(section, {})[key] = _checked(section, key, value, origin="--set")
    sections = {
        section.name: section.default_factory(**values.get(section.name, {}))  # type: ignore[operator]
        for section in dataclasses.fields(TrainConfig)
    }
    config = TrainConfig(**sections)
    _check_whole(config)
    return config


def config_to_toml(config: TrainConfig) -> str:
    """Return ``config`` as TOML that :func:`load_config` reads back as the same values."""
    lines: list[str] = []
    for name, section in dataclasses.asdict(config).items():
        lines += [f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in section.items()), ""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 else f"\\{c}" if c in '"\\' else c for c in value)
        return f'"{escaped}"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)


def _read(name: str, chain: tuple[str, ...]) -> Values:
    if name in chain:
        raise ConfigError(f"{name} extends itself", file=chain[-1])
    text, origin = _find(name)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("the configuration is not valid TOML", file=origin, cause=str(error)) from error
    base = data.pop("extends", "")
    if not isinstance(base, str):
        raise ConfigError(f"extends must be text, not {base!r}", file=origin)
    values = _read(base, (*chain, name)) if base else {}
    for section, table in data.items():
        _section_type(section, origin)
        if not isinstance(table, dict):
            raise ConfigError(f"{section} must be a table, as [{section}]", file=origin)
        for key, value in table.items():
            values.setdefault(section, {})[key] = _checked(section, key, value, origin=origin)
    return values


def _find(name: str) -> tuple[str, str]:
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("the configuration cannot be read", file=str(path), cause=str(error)) from error
    if name not in recipe_names():
        known = ", ".join(recipe_names())
        raise ConfigError(
            f"no recipe of the name {name!r}", help=did_you_mean(name, recipe_names()) or f"a .toml file, or: {known}"
        )
    found = resources.files("drk.training").joinpath("recipes", f"{name}.toml")
    return found.read_text(encoding="utf-8"), f"recipe {name}"


def _read_override(text: str) -> tuple[str, str, Any]:
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise ConfigError(f"--set takes section.key=value, not {text!r}", help="--set run.steps=20")
    try:
        return section, key, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, raw


def _section_type(section: str, origin: str) -> type:
    hints = get_type_hints(TrainConfig)
    if section not in hints:
        known = ", ".join(hints)
        raise ConfigError(
            f"unknown section {section}", file=origin, help=did_you_mean(section, hints) or f"sections are: {known}"
        )
    found: type = hints[section]
    return found


def _checked(section: str, key: str, value: Any, *, origin: str) -> Any:
    hints: Mapping[str, Any] = get_type_hints(_section_type(section, origin))
    if key not in hints:
        near = did_you_mean(key, hints) or _elsewhere(key)
        known = ", ".join(hints)
        raise ConfigError(
            f"unknown setting {section}.{key}", file=origin, help=near or f"settings of {section} are: {known}"
        )
    wanted, name = hints[key], f"{section}.{key}"
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            choices = ", ".join(map(str, get_args(wanted)))
            near = did_you_mean(str(value), get_args(wanted))
            raise ConfigError(f"{name} must be one of {choices}, not {value!r}", file=origin, help=near)
        return value
    if get_origin(wanted) is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} must be a list of texts, not {value!r}", file=origin)
        return tuple(value)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise ConfigError(f"{name} must be {words[wanted]}, not {value!r}", file=origin)
    return value


def _elsewhere(key: str) -> str:
    for section, kind in get_type_hints(TrainConfig).items():
        if key in get_type_hints(kind):
            return f"did you mean {section}.{key}?"
    return ""


_POSITIVE = (
    "run.steps", "rollout.prompts_per_step", "rollout.turns", "rollout.max_new_tokens", "rollout.temperature",
    "rollout.concurrency", "rollout.batch_rows", "rollout.empty_attempts", "gym.parallel", "gym.seeds", "gym.min_pairs",
    "gym.compile_s", "gym.run_s", "gym.total_s",
    "optimizer.micro_batches", "optimizer.max_grad_norm", "model.context_tokens", "sft.batch_rows", "sft.micro_batches",
    "scratch.vocabulary", "scratch.texts", "scratch.batch_tokens", "scratch.layers", "scratch.heads", "scratch.width",
)  # fmt: skip


def _check_whole(config: TrainConfig) -> None:
    for name in _POSITIVE:
        section, key = name.split(".")
        if getattr(getattr(config, section), key) <= 0:
            raise ConfigError(f"{name} must be above 0")
    if config.rollout.samples_per_prompt < 2:
        raise ConfigError("rollout.samples_per_prompt must be at least 2: advantages compare samples of one prompt")
    rollout = config.rollout
    if rollout.group_sizes == "unequal" and (rollout.samples_per_prompt < 3 or rollout.prompts_per_step < 2):
        raise ConfigError("rollout.group_sizes = 'unequal' needs two prompts a step of three samples or more")
    if config.run.validate_every and not config.tasks.held_out:
        raise ConfigError("run.validate_every needs held-out tasks: set tasks.held_out")
    if not 0 <= config.advantage.gamma <= 1:
        raise ConfigError("advantage.gamma must lie in 0 to 1")
    if config.rejection.low > config.rejection.high:
        raise ConfigError("rejection.low is above rejection.high: no row would ever be kept")
    if config.rollout.max_new_tokens >= config.model.context_tokens:
        raise ConfigError("rollout.max_new_tokens leaves no room for a prompt in model.context_tokens")
    if config.rejection.prs == "soft" and not config.advantage.rejected_in_baseline:
        raise ConfigError("rejection.prs = 'soft' rejects no row, so advantage.rejected_in_baseline must be true")
    _check_speed(config)


def _check_speed(config: TrainConfig) -> None:
    if not 0 < config.rollout.wave_share <= 1:
        raise ConfigError("rollout.wave_share must lie above 0, and not above 1")
    if config.gym.min_pairs > config.gym.max_pairs:
        raise ConfigError("gym.min_pairs is above gym.max_pairs")
    if config.reward.speed == "device" and (config.gym.timing or config.reward.baseline != "eager"):
        raise ConfigError("reward.speed = 'device' needs gym.timing = false and reward.baseline = 'eager'")
