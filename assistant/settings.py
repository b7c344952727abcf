"""Settings in layers, each value with its origin.

A flag wins over a ``DRK_*`` variable, that over the project (``drk.toml``, or ``[tool.drk]`` in ``pyproject.toml``, in
the nearest folder upwards that has one), that over the user's file (``drk.toml`` in the user's configuration folder),
that over the default. Names are the same everywhere: ``max-time-s`` in TOML, ``DRK_MAX_TIME_S``, ``--max-time``;
TOML may also write underscores. An unknown name or a wrong type is an error that names the file and the key.

A project file cannot lower the sandbox to ``basic``: whoever merely checked out a project did not ask for that.
Paths in a file are relative to that file's folder; in variables and flags, to the current one.

Reserved for other parts, and not read here: the tables ``gym``, ``train``, ``lsp``, ``eval`` and variables
``DRK_GYM_*``, ``DRK_TRAIN_*``, ``DRK_LSP_*``, ``DRK_EVAL_*``; ``DRK_NANO`` names the nano model's folder.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from drk.assistant.errors import ConfigError, did_you_mean

_RESERVED = ("gym", "train", "lsp", "eval")
_READ_ELSEWHERE = frozenset({"DRK_NANO"})
_FLAGS = {"max_time_s": "--max-time"}


@dataclass(frozen=True)
class Rule:
    """What a setting means and which values it may have; ``says`` describes ``pattern`` to people."""

    about: str
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    says: str = ""
    low: float | None = None
    high: float | None = None


def user_cache_dir() -> Path:
    """Return the platform's cache folder for drk."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("drk"))


@dataclass(frozen=True)
class Settings:
    """What a run is told; :data:`RULES` says what each field means and may hold. Times are in seconds."""

    device: str = "auto"
    target: str = "sm_90"
    sandbox: Literal["strict", "standard", "basic"] = "standard"
    precision: Literal["match", "strict", "tf32", "bf16"] = "match"
    tolerance: Literal["float64", "paper"] = "float64"
    seeds: int = 5
    turns: int = 4
    max_time_s: float = 600.0
    model: str = "builtin"
    cache_dir: Path = field(default_factory=user_cache_dir)
    runs_dir: Path = Path(".drk/runs")
    color: Literal["auto", "always", "never"] = "auto"


RULES: Mapping[str, Rule] = {
    "device": Rule(
        "where candidates run", pattern=re.compile(r"auto|interpret|cuda:\d+"), says="auto, interpret or cuda:N"
    ),
    "target": Rule(
        "GPU architecture that kernels are compiled for when none is at hand",
        pattern=re.compile(r"sm_\d{2,3}a?"),
        says="an architecture such as sm_80, sm_90 or sm_100",
    ),
    "sandbox": Rule("isolation of code under test", choices=("strict", "standard", "basic")),
    "precision": Rule("which numeric rung a kernel may stand on", choices=("match", "strict", "tf32", "bf16")),
    "tolerance": Rule("correctness: against float64 truth, or KernelBench's rule", choices=("float64", "paper")),
    "seeds": Rule("secret input draws for each correctness cell", low=1, high=1000),
    "turns": Rule("propose-judge turns at most", low=1, high=1000),
    "max_time_s": Rule("wall-clock budget of a run in seconds", low=1, high=7 * 86400),
    "model": Rule("proposer of candidates"),
    "cache_dir": Rule("verdict and compile caches"),
    "runs_dir": Rule("where run folders go"),
    "color": Rule("colour on the terminal", choices=("auto", "always", "never")),
}


@dataclass(frozen=True)
class Resolved:
    """Settings and, for each field, where its value came from (``default``, a file, ``DRK_SEEDS``, ``--seeds``)."""

    settings: Settings
    origins: Mapping[str, str]


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    user_file: Path | None = None,
) -> Resolved:
    """Resolve every setting. Flags whose value is ``None`` were not given.

    Raises:
        ConfigError: unknown name, wrong type, value out of range, unreadable file.
    """
    cwd = cwd or Path.cwd()
    environ = os.environ if environ is None else environ
    values = asdict(Settings(runs_dir=cwd / ".drk" / "runs"))
    origins = dict.fromkeys(values, "default")
    layers = [
        _read_user_file(user_file or default_user_file(environ)),
        _read_project(cwd),
        _read_environ(environ, cwd),
        _read_flags(flags or {}, cwd),
    ]
    for layer in layers:
        for name, (value, origin) in layer.items():
            values[name], origins[name] = value, origin
    return Resolved(Settings(**values), origins)


def default_user_file(environ: Mapping[str, str]) -> Path:
    """Return the user's settings file: ``$XDG_CONFIG_HOME/drk/drk.toml`` or the platform's place for it."""
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"]) / "drk" / "drk.toml"
    import platformdirs

    return Path(platformdirs.user_config_dir("drk")) / "drk.toml"


Layer = dict[str, tuple[Any, str]]


def _read_user_file(path: Path) -> Layer:
    return _read_table(_load_toml(path), path, prefix="") if path.is_file() else {}


def _read_project(cwd: Path) -> Layer:
    for folder in (cwd, *cwd.parents):
        path = folder / "drk.toml"
        if path.is_file():
            return _guard_project(_read_table(_load_toml(path), path, prefix=""), path)
        path = folder / "pyproject.toml"
        if path.is_file():
            tool = _load_toml(path).get("tool", {})
            if isinstance(tool, dict) and "drk" in tool:
                return _guard_project(_read_table(tool["drk"], path, prefix="tool.drk."), path)
    return {}


def _guard_project(layer: Layer, path: Path) -> Layer:
    if layer.get("sandbox", ("", ""))[0] == "basic":
        raise ConfigError(
            "a project file cannot set sandbox to 'basic'",
            file=str(path),
            cause="it would run code under test almost unguarded for everyone who checks the project out",
            help="use --sandbox basic, DRK_SANDBOX=basic, or your own settings file",
        )
    return layer


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise ConfigError(
            "the settings file is not valid TOML",
            file=str(path),
            line=int(line[1]) if line else None,
            cause=str(error),
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the settings file cannot be read", file=str(path), cause=str(error)) from error


def _read_table(table: Any, path: Path, *, prefix: str) -> Layer:
    if not isinstance(table, dict):
        raise ConfigError(f"{prefix.rstrip('.')} must be a table", file=str(path))
    layer: Layer = {}
    for key, raw in table.items():
        name = key.replace("-", "_")
        if key in _RESERVED and isinstance(raw, dict):
            continue
        if name not in RULES:
            near = did_you_mean(key, [*(n.replace("_", "-") for n in RULES), *_RESERVED])
            raise ConfigError(f"unknown setting {prefix}{key}", file=str(path), help=near or _all_names())
        layer[name] = (_check(name, raw, file=str(path), key=prefix + key, base=path.parent), str(path))
    return layer


def _read_environ(environ: Mapping[str, str], cwd: Path) -> Layer:
    layer: Layer = {}
    for key, raw in environ.items():
        if not key.startswith("DRK_") or key.startswith(tuple(f"DRK_{name.upper()}_" for name in _RESERVED)):
            continue
        if key in _READ_ELSEWHERE:
            continue
        name = key.removeprefix("DRK_").lower()
        if name not in RULES:
            near = did_you_mean(key, [f"DRK_{n.upper()}" for n in RULES])
            raise ConfigError(f"unknown variable {key}", file="the environment", help=near or f"unset {key}")
        if raw:
            layer[name] = (_check(name, _parse(name, raw), file="the environment", key=key, base=cwd), key)
    return layer


def _read_flags(flags: Mapping[str, Any], cwd: Path) -> Layer:
    layer: Layer = {}
    for name, value in flags.items():
        if value is not None:
            flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
            layer[name] = (_check(name, value, file="", key=flag, base=cwd), flag)
    return layer


def _parse(name: str, raw: str) -> Any:
    """Read a variable's text as the type of its field; what cannot be read stays text, for the type check to name."""
    kind = _type_of(name)
    try:
        return int(raw) if kind is int else float(raw) if kind is float else raw
    except ValueError:
        return raw


def _type_of(name: str) -> type:
    if name in ("cache_dir", "runs_dir"):
        return Path
    return type(getattr(Settings, name))


def _check(name: str, value: Any, *, file: str, key: str, base: Path) -> Any:
    """Return ``value`` as its field's type, or raise naming ``file`` and ``key``."""
    kind = _type_of(name)
    if kind is float and type(value) is int:
        value = float(value)
    if kind is Path and isinstance(value, (str, Path)):
        return base / Path(value).expanduser()
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
        raise ConfigError(f"{key} must be {words[kind]}, not {value!r}", file=file)
    wrong = _broken_rule(value, RULES[name])
    if wrong:
        near = did_you_mean(str(value), RULES[name].choices)
        raise ConfigError(f"{key} must be {wrong}, not {value!r}", file=file, help=near)
    return value


def _broken_rule(value: Any, rule: Rule) -> str:
    """Say what ``value`` should have been, or return an empty string."""
    if rule.choices and value not in rule.choices:
        return "one of " + ", ".join(rule.choices)
    if rule.pattern is not None and not rule.pattern.fullmatch(value):
        return rule.says
    if rule.low is not None and rule.high is not None and not rule.low <= value <= rule.high:
        return f"from {rule.low} to {rule.high}"
    return ""


def _all_names() -> str:
    return "settings are: " + ", ".join(name.replace("_", "-") for name in RULES)


def describe_settings(resolved: Resolved) -> list[dict[str, Any]]:
    """Return one JSON-able row per setting: name, value, origin, about."""
    rows: list[dict[str, Any]] = []
    for name, rule in RULES.items():
        value = getattr(resolved.settings, name)
        rows.append(
            {
                "name": name.replace("_", "-"),
                "value": str(value) if isinstance(value, Path) else value,
                "origin": resolved.origins[name],
                "about": rule.about,
            }
        )
    return rows
