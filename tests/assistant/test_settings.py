"""Layered settings: precedence, origins, and errors that name the file and the key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.errors import ConfigError
from drk.assistant.settings import RULES, Resolved, Settings, describe_settings, load_settings


def load(folder: Path, *, flags: dict[str, Any] | None = None, **environ: str) -> Resolved:
    return load_settings(flags, cwd=folder, environ=environ, user_file=folder / "user" / "drk.toml")


def test_defaults(tmp_path: Path) -> None:
    resolved = load(tmp_path)
    assert resolved.settings.seeds == 5
    assert resolved.settings.sandbox == "standard"
    assert resolved.settings.runs_dir == tmp_path / ".drk" / "runs"
    assert set(resolved.origins.values()) == {"default"}


def test_each_layer_wins_over_the_one_below(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "drk.toml").write_text("seeds = 2\nturns = 2\nmax-time-s = 2\ntarget = 'sm_80'\n")
    (tmp_path / "pyproject.toml").write_text("[tool.drk]\nseeds = 3\nturns = 3\nmax_time_s = 3.5\n")
    resolved = load(tmp_path, flags={"seeds": 5, "turns": None}, DRK_SEEDS="4", DRK_TURNS="4")
    settings = resolved.settings
    assert (settings.seeds, settings.turns, settings.max_time_s, settings.target) == (5, 4, 3.5, "sm_80")
    assert resolved.origins["seeds"] == "--seeds"
    assert resolved.origins["turns"] == "DRK_TURNS"
    assert resolved.origins["max_time_s"] == str(tmp_path / "pyproject.toml")
    assert resolved.origins["target"] == str(tmp_path / "user" / "drk.toml")
    assert resolved.origins["device"] == "default"


def test_the_nearest_folder_that_has_settings_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "drk.toml").write_text("seeds = 7\nruns-dir = 'runs'\n")
    (inner / "pyproject.toml").write_text("[tool.other]\nseeds = 8\n")
    settings = load(inner).settings
    assert settings.seeds == 7
    assert settings.runs_dir == tmp_path / "runs"
    (inner / "drk.toml").write_text("turns = 9\n")
    assert load(inner).settings.seeds == 5


def test_tables_of_other_parts_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.drk]\nseeds = 3\n[tool.drk.gym]\nworkers = 4\n")
    assert load(tmp_path, DRK_GYM_TOKEN="x", DRK_TRAIN_STEPS="1").settings.seeds == 3


@pytest.mark.parametrize(
    ("text", "message", "help_text"),
    [
        ("seed = 3", "unknown setting seed", "did you mean 'seeds'?"),
        ("max-time = 3", "unknown setting max-time", "did you mean 'max-time-s'?"),
        ("zzz = 3", "unknown setting zzz", "settings are: device, target"),
        ("seeds = '3'", "seeds must be a whole number, not '3'", ""),
        ("seeds = true", "seeds must be a whole number, not True", ""),
        ("seeds = 2.5", "seeds must be a whole number, not 2.5", ""),
        ("seeds = 0", "seeds must be from 1 to 1000, not 0", ""),
        ("max-time-s = nan", "max-time-s must be from 1 to 604800, not nan", ""),
        ("device = 'cuda'", "device must be auto, interpret or cuda:N, not 'cuda'", ""),
        ("target = 'hopper'", "target must be an architecture such as", ""),
        ("precision = 'stric'", "precision must be one of match, strict, tf32, bf16", "did you mean 'strict'?"),
        ("cache-dir = 3", "cache-dir must be a path, not 3", ""),
        ("gym = 3", "unknown setting gym", ""),
        ("sandbox = 'basic'", "a project file cannot set sandbox to 'basic'", "--sandbox basic"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str, help_text: str) -> None:
    path = tmp_path / "drk.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert caught.value.message.startswith(message)
    assert help_text in caught.value.help
    assert caught.value.file == str(path)


def test_keys_in_pyproject_are_named_in_full(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.drk]\nseeds = 'x'\n")
    with pytest.raises(ConfigError, match=r"tool\.drk\.seeds must be"):
        load(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool]\ndrk = 3\n")
    with pytest.raises(ConfigError, match=r"tool\.drk must be a table"):
        load(tmp_path)


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "drk.toml").write_text("seeds = 3\nturns =\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert caught.value.line == 2
    (tmp_path / "drk.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DRK_SEEDS", "many", "DRK_SEEDS must be a whole number, not 'many'"),
        ("DRK_SEEDS", "0", "DRK_SEEDS must be from 1 to 1000"),
        ("DRK_DEVCE", "auto", "unknown variable DRK_DEVCE"),
    ],
)
def test_a_wrong_variable_is_refused(tmp_path: Path, name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **{name: value})
    assert caught.value.message.startswith(message)
    assert caught.value.file == "the environment"


def test_variables_flags_and_the_users_file_may_ask_for_basic(tmp_path: Path) -> None:
    assert load(tmp_path, DRK_SANDBOX="basic").settings.sandbox == "basic"
    assert load(tmp_path, flags={"sandbox": "basic"}).settings.sandbox == "basic"
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "drk.toml").write_text("sandbox = 'basic'")
    assert load(tmp_path).settings.sandbox == "basic"


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    assert load(tmp_path, DRK_SEEDS="").origins["seeds"] == "default"


def test_a_wrong_flag_is_named_as_typed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-time must be from 1"):
        load(tmp_path, flags={"max_time_s": 0.0})


def test_every_field_has_a_rule_and_a_row(tmp_path: Path) -> None:
    names = [f.name for f in fields(Settings)]
    assert list(RULES) == names
    rows = describe_settings(load(tmp_path, DRK_SEEDS="9"))
    assert [row["name"] for row in rows] == [name.replace("_", "-") for name in names]
    assert next(row for row in rows if row["name"] == "seeds") == {
        "name": "seeds",
        "value": 9,
        "origin": "DRK_SEEDS",
        "about": RULES["seeds"].about,
    }
