"""The language server's settings in layers, each value with its origin.

From strongest to weakest: the editor (section ``drk``), ``DRK_LSP_*`` variables, the project's table (``[lsp]`` in
``drk.toml``, ``[tool.drk.lsp]`` in ``pyproject.toml``; the nearest folder upwards that has one), the user's file, the
default. ``prefer`` turns this round: ``filesystemFirst`` puts files above the editor, ``editorOnly`` ignores them.

What could run code or send it elsewhere (``command``, extra arguments, the gym's address) is never taken from a
project's file: whoever merely opens a checkout did not ask for it. Names are ``min-share`` in files, ``minShare`` in
editors, ``DRK_LSP_MIN_SHARE`` in the environment. A wrong name or type is a problem that is told; the rest holds.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from drk.assistant.errors import did_you_mean
from drk.assistant.settings import default_user_file

Prefer = Literal["editorFirst", "filesystemFirst", "editorOnly"]
RESTRICTED = ("command", "optimize_args", "profile_args", "gym_url")
"""Settings that a project's file may not give."""


@dataclass(frozen=True)
class LspSettings:
    """What an editor shows and what its jobs run with. ``min_share`` is a share of time (0..1)."""

    command: tuple[str, ...] = ()
    """The ``drk`` to run jobs with, such as that of the project's environment; empty: the server's own."""
    optimize_args: tuple[str, ...] = ()
    profile_args: tuple[str, ...] = ()
    gym_url: str = ""
    device: str = ""
    min_share: float = 0.05
    diagnostics: bool = True
    code_lens: bool = True
    inlay_hints: bool = True
    hover: bool = True


@dataclass(frozen=True)
class ResolvedLsp:
    """Settings, the origin of each field, and what was wrong with what was given."""

    settings: LspSettings
    origins: Mapping[str, str]
    problems: tuple[str, ...] = ()


Layer = dict[str, tuple[Any, str]]


def resolve_settings(
    root: Path,
    editor: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    user_file: Path | None = None,
) -> ResolvedLsp:
    """Return the settings that hold for files below ``root``; nothing is raised, problems are told in the result."""
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    given = dict(editor or {})
    prefer = given.pop("prefer", "editorFirst")
    if prefer not in get_args(Prefer):
        problems.append(f"drk.prefer must be one of {', '.join(get_args(Prefer))}, not {prefer!r}")
        prefer = "editorFirst"
    in_editor = _layer(given, "editor", problems)
    files: list[Layer] = []
    if prefer != "editorOnly":
        files = [_file_layer(user_file or default_user_file(environ), problems), _project_layer(root, problems)]
    variables = _layer(_variables(environ), "DRK_LSP_", problems)
    layers = [in_editor, *files, variables] if prefer == "filesystemFirst" else [*files, variables, in_editor]
    values: dict[str, Any] = {}
    origins = {item.name: "default" for item in fields(LspSettings)}
    for layer in layers:
        for name, (value, origin) in layer.items():
            values[name], origins[name] = value, origin
    return ResolvedLsp(LspSettings(**values), origins, tuple(problems))


def describe(resolved: ResolvedLsp) -> list[dict[str, Any]]:
    """Return one JSON-able row per setting: name as editors write it, value, origin."""
    return [
        {"name": camel(item.name), "value": _plain(getattr(resolved.settings, item.name)), "origin": origin}
        for item, origin in ((item, resolved.origins[item.name]) for item in fields(LspSettings))
    ]


def camel(name: str) -> str:
    """Return ``min_share`` as ``minShare``."""
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: _parse(raw, _default(snake))
        for name, raw in environ.items()
        if name.startswith("DRK_LSP_") and (snake := name.removeprefix("DRK_LSP_").lower())
    }


def _parse(raw: str, default: Any) -> Any:
    """Read a variable as the type of the setting; what cannot be read stays text and is told by the check."""
    if isinstance(default, bool):
        return {"1": True, "true": True, "0": False, "false": False}.get(raw.strip().lower(), raw)
    if isinstance(default, tuple):
        return shlex.split(raw)
    if isinstance(default, float):
        try:
            return float(raw)
        except ValueError:
            return raw
    return raw


def _default(name: str) -> Any:
    return getattr(LspSettings(), name, "")


def _project_layer(root: Path, problems: list[str]) -> Layer:
    for folder in (root, *root.parents):
        for path in (folder / "drk.toml", folder / "pyproject.toml"):
            table = _table(path, problems)
            if table is not None:
                layer = _layer(table, str(path), problems)
                for name in [name for name in layer if name in RESTRICTED]:
                    problems.append(
                        f"{path}: a project's file cannot set {name.replace('_', '-')}; set it in the editor"
                    )
                    del layer[name]
                return layer
    return {}


def _file_layer(path: Path, problems: list[str]) -> Layer:
    return _layer(_table(path, problems) or {}, str(path), problems)


def _table(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return the server's table of a settings file; null where the file is no drk settings file."""
    if not path.is_file():
        return None
    try:
        data: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return {}
    if path.name == "pyproject.toml":
        data = data.get("tool", {}).get("drk")
    if not isinstance(data, dict):
        return None
    table = data.get("lsp", {})
    return table if isinstance(table, dict) else {}


def _layer(given: Mapping[str, Any], origin: str, problems: list[str]) -> Layer:
    layer: Layer = {}
    known = {item.name for item in fields(LspSettings)}
    for key, raw in given.items():
        name = _snake(key)
        where = key if origin == "DRK_LSP_" else origin
        if name not in known:
            if origin != "editor" or not isinstance(raw, dict):  # editors keep their own tables, such as `trace`
                problems.append(f"{where}: unknown setting {key}. {did_you_mean(key, map(camel, known))}".strip())
            continue
        value, wrong = _check(name, raw)
        if wrong:
            problems.append(f"{where}: {key} must be {wrong}, not {raw!r}")
        elif raw is not None:
            layer[name] = (value, where)
    return layer


def _snake(key: str) -> str:
    key = key.removeprefix("DRK_LSP_").lower() if key.startswith("DRK_LSP_") else key
    return re.sub(r"(?<=[a-z])([A-Z])", lambda match: "_" + match[1].lower(), key).replace("-", "_")


def _check(name: str, raw: Any) -> tuple[Any, str]:
    """Return the value as its field's type and an empty text, or what it must be."""
    default = _default(name)
    if raw is None:
        return None, ""
    if isinstance(default, bool):
        return raw, "" if isinstance(raw, bool) else "true or false"
    if isinstance(default, float):
        right = isinstance(raw, int | float) and not isinstance(raw, bool) and 0 <= raw <= 1
        return raw, "" if right else "a number from 0 to 1"
    if isinstance(default, tuple):
        right = isinstance(raw, list | tuple) and all(isinstance(item, str) for item in raw)
        return tuple(raw) if right else raw, "" if right else "a list of texts"
    return raw, "" if isinstance(raw, str) else "text"
