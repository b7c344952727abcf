"""The error tree: form, JSON, suggestions, and a place for every error of the gym."""

from __future__ import annotations

import inspect

import pytest

from drk.assistant import errors
from drk.assistant.errors import (
    ConfigError,
    DrkError,
    EnvironmentFault,
    ExitCode,
    Interrupted,
    TargetError,
    did_you_mean,
    error_json,
    format_error,
    from_gym,
)
from drk.gym import errors as gym_errors
from drk.gym.schema import SCHEMA_VERSION


def test_text_form() -> None:
    error = TargetError(
        "no such class", file="model.py", line=41, cause="it has A and B", help="type model.py:A\nor :B"
    )
    assert format_error(error) == (
        "error: no such class\n  --> model.py:41\n  cause: it has A and B\n  help: type model.py:A\n        or :B"
    )
    assert format_error(DrkError("short")) == "error: short"
    assert format_error(ConfigError("bad", file="drk.toml")) == "error: bad\n  --> drk.toml"


def test_json_form() -> None:
    data = error_json(TargetError("no", file="m.py", line=3))
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["status"] == "error"
    assert data["error"] == {
        "kind": "target",
        "message": "no",
        "file": "m.py",
        "line": 3,
        "cause": None,
        "help": None,
    }


def test_exit_codes() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 101, 130]
    assert TargetError("x").exit_code == 2
    assert Interrupted("x").exit_code == 130


@pytest.mark.parametrize(
    ("word", "expected"), [("devce", "did you mean 'device'?"), ("zzz", ""), ("device", "did you mean 'device'?")]
)
def test_suggestion(word: str, expected: str) -> None:
    assert did_you_mean(word, ["device", "sandbox"]) == expected


def gym_error_classes() -> list[type[gym_errors.GymError]]:
    return [cls for _, cls in inspect.getmembers(gym_errors, inspect.isclass) if issubclass(cls, gym_errors.GymError)]


@pytest.mark.parametrize("cls", gym_error_classes(), ids=lambda cls: cls.__name__)
def test_every_gym_error_has_a_place(cls: type[gym_errors.GymError]) -> None:
    mapped = from_gym(cls("what", help="next"))
    assert (mapped.message, mapped.help, mapped.exit_code) == ("what", "next", ExitCode.USAGE)
    expected = {"GymError": "gym", "HostError": "host"}.get(cls.__name__)
    if expected is None:
        assert mapped.kind not in ("gym", "host"), "a new error of the gym needs a kind of its own"
    else:
        assert mapped.kind == expected


def test_task_errors_keep_their_place_in_the_source() -> None:
    mapped = from_gym(gym_errors.TaskError("fails", kind="reference-raised", file="model.py", line=7, help="mend it"))
    assert isinstance(mapped, TargetError)
    assert (mapped.kind, mapped.file, mapped.line) == ("reference-raised", "model.py", 7)
    assert isinstance(from_gym(gym_errors.DeviceError("x")), EnvironmentFault)


def test_every_class_is_in_the_picture() -> None:
    picture = errors.__doc__ or ""
    classes = [name for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, DrkError)]
    assert len(classes) == 6
    for name in classes:
        assert name in picture
