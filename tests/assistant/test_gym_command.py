"""``drk gym``: refusals before anything starts, tokens, and a whole life of a server. (Faults: tests/gym/serve.)"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from pathlib import Path

import pytest
from gym_service import RIGHT, GymService

from drk.assistant import gym_command
from drk.assistant.cli import run
from drk.assistant.console import Console
from drk.assistant.errors import EnvironmentFault, UsageError
from drk.assistant.gym_address import gym_url, launch_ahead, open_gym
from drk.assistant.gym_command import check_access, check_port, choose_devices, fitting_slots, is_loopback
from drk.gym.devices import Gpu
from drk.gym.engine import Gym
from drk.gym.errors import HostError
from drk.gym.settings import GymSettings

SERVE = all(importlib.util.find_spec(name) for name in gym_command.NEEDED)
NEEDS_SERVER = pytest.mark.skipif(not SERVE, reason="needs the serve extra")
GPUS = [Gpu("GPU-1", "NVIDIA H200", 0), Gpu("GPU-2", "NVIDIA Weird Thing (9)", 1)]


def test_devices_become_workers_with_a_class() -> None:
    assert choose_devices([], GPUS) == [("cuda:0", "h200"), ("cuda:1", "nvidia-weird-thing-9")]
    assert choose_devices(["auto"], []) == [("interpret", "interpret")]
    assert choose_devices(["cuda:1", "interpret"], GPUS) == [
        ("cuda:1", "nvidia-weird-thing-9"),
        ("interpret", "interpret"),
    ]
    with pytest.raises(EnvironmentFault, match="no such device: cuda:7"):
        choose_devices(["cuda:7"], GPUS)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("gym.example", False),
        ("", False),
    ],
)
def test_what_is_loopback(host, local) -> None:
    assert is_loopback(host) is local


def test_nothing_is_opened_to_strangers(tmp_path) -> None:
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(UsageError, match="nobody has a token"):
            check_access(host, tmp_path / "none", insecure_local=False)
    with pytest.raises(UsageError, match="loopback only"):
        check_access("0.0.0.0", tmp_path / "none", insecure_local=True)
    check_access("127.0.0.1", tmp_path / "none", insecure_local=True)


def test_an_address_that_is_taken_or_open_to_all_is_told_before_anything_starts(capsys) -> None:
    console = Console()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"cannot listen on 127.0.0.1:{port}"):
            check_port("127.0.0.1", port, console)
    check_port("127.0.0.1", port, console)
    assert not capsys.readouterr().err
    check_port("0.0.0.0", port, console)
    assert "unencrypted" in capsys.readouterr().err
    with pytest.raises(EnvironmentFault, match="cannot listen"):
        check_port("198.51.100.7", port, console)


def test_slots_fit_the_cores() -> None:
    assert fitting_slots("interpret", 1, 64) == 3
    assert [fitting_slots("cuda:0", workers, 16) for workers in (1, 2, 8)] == [14, 7, 3]
    assert fitting_slots("cuda:0", 1, 2) == 3


@NEEDS_SERVER
def test_up_refuses_in_the_usual_form(capsys) -> None:
    assert run(["gym", "up", "--host", "0.0.0.0"]) == 2
    assert "error: nobody has a token for this gym" in capsys.readouterr().err
    assert run(["gym", "up", "--insecure-local", "--host", "0.0.0.0"]) == 2
    assert run(["gym", "worker"]) == 2
    assert "a worker needs the gym's Redis" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gym_command, "NEEDED", ("no_such_package_here",))
    assert run(["gym", "up"]) == 2
    assert "pip install 'drk[serve]'" in capsys.readouterr().err


def test_tokens_are_made_listed_and_revoked(tmp_path, capsys) -> None:
    file = ["--tokens", str(tmp_path / "t")]
    assert run(["gym", "token", "create", "ci", "--scope", "evaluate", "--days", "3", *file]) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("drk_")
    assert run(["gym", "token", "create", "ci", *file]) == 2
    assert "there is a token named 'ci'" in capsys.readouterr().err
    assert run(["gym", "token", "list", "--format", "json", *file]) == 0
    rows = json.loads(capsys.readouterr().out)["tokens"]
    assert [(row["name"], row["scopes"]) for row in rows] == [("ci", ["evaluate"])]
    assert run(["gym", "token", "revoke", "ci", *file]) == 0
    assert run(["gym", "token", "list", *file]) == 0
    assert "no tokens" in capsys.readouterr().err


def test_status_of_a_server_that_is_not_there(monkeypatch, capsys) -> None:
    monkeypatch.setattr("drk.gym.gym_connection.FIRST_PAUSE_S", 5.0)
    assert run(["gym", "status", "--gym", "http://127.0.0.1:1"]) == 2
    assert "does not answer" in capsys.readouterr().err


async def test_the_flag_wins_over_the_variable(monkeypatch) -> None:
    monkeypatch.setenv("DRK_GYM_URL", "http://a")
    assert gym_url() == "http://a"
    assert gym_url("http://b") == "http://b"
    assert gym_url("") == ""
    monkeypatch.setattr("drk.assistant.gym_address.PATIENCE_S", 0.1)
    with pytest.raises(HostError, match="http://a does not answer"):
        async with open_gym(GymSettings()):
            pass
    here = GymSettings(device="interpret", offline_compile=False)
    async with open_gym(here, "") as local:
        assert isinstance(local, Gym)


def test_nothing_is_launched_for_a_device_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setattr("drk.assistant.gym_address.list_gpus", list)
    assert launch_ahead(GymSettings(device="cuda:9")) == []


@NEEDS_SERVER
@pytest.mark.slow
def test_a_servers_life(tmp_path, monkeypatch, capsys) -> None:
    tokens = tmp_path / "tokens"
    assert run(["gym", "token", "create", "me", "--scope", "admin", "--tokens", str(tokens)]) == 0
    token = capsys.readouterr().out.strip()
    with GymService("--tokens", str(tokens), "--seeds", "1") as service:
        at = ["--gym", service.url]
        assert run(["gym", "status", *at]) == 2
        assert "DRK_GYM_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("DRK_GYM_TOKEN", token)
        assert run(["gym", "status", *at]) == 0
        assert capsys.readouterr().out.startswith("healthy: 1 workers")
        (tmp_path / "model.py").write_text(RIGHT.replace("ModelNew", "Model"))
        (tmp_path / "candidate.py").write_text(RIGHT)
        words = [str(tmp_path / "model.py"), str(tmp_path / "candidate.py"), "--input", "x=f32[8,16]"]
        monkeypatch.setattr(sys, "argv", ["drk", "verify"])
        assert run(["verify", *words, *at, "--format", "json"]) == 0
        verdict = json.loads(capsys.readouterr().out)
        assert (verdict["status"], verdict["sandbox_level"]) == ("accepted", "standard")
        assert run(["gym", "drain", *at]) == 0
        assert "refuses new jobs" in capsys.readouterr().out
        assert run(["gym", "status", *at, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["draining"] is True
        assert run(["gym", "drain", "--off", *at]) == 0
    assert Path(service.folder).exists() is False
