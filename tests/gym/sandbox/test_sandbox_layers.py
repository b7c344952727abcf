"""Layers as values: levels, what is lacking, messages, JSON; and the probe on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from drk.gym.errors import SandboxUnavailable
from drk.gym.sandbox import Layer, Layers, achieved_level, lacking, require
from drk.gym.sandbox.probe import attempt

GOOD = Layer(True)
NAMES = (
    "rlimits", "no_new_privs", "pdeathsig", "landlock", "seccomp", "pidns", "netns", "ipcns", "uid_drop",
    "capability_drop", "process_limit", "memory_watch",
)  # fmt: skip


def everything(**changes):
    return Layers(**{**dict.fromkeys(NAMES, GOOD), "landlock_abi": 7, **changes})


def probed():
    """Probe in a process of its own, as the zygote does: this one may have threads."""
    code = "import json; from drk.gym.sandbox import probe; print(json.dumps(probe().as_dict()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Layers.from_dict(json.loads(done.stdout))


def test_levels_by_effect():
    full = everything()
    assert achieved_level(full) == "strict"
    assert achieved_level(full.without("pidns")) == "standard"
    assert achieved_level(full.without("pidns", "netns", "ipcns", "uid_drop")) == "standard", "stock Docker"
    assert achieved_level(full.without("seccomp")) == "standard", "a network namespace does"
    assert achieved_level(full.without("seccomp", "netns")) == "basic"
    assert achieved_level(full.without("landlock")) == "basic"
    assert achieved_level(everything(landlock_abi=5)) == "standard"


def test_lacking_names_the_layers():
    layers = everything(landlock_abi=4).without("pidns", "seccomp")
    assert lacking("strict", layers) == ("seccomp", "pidns", "landlock")
    assert lacking("standard", layers) == ()
    assert lacking("basic", layers) == ()
    assert lacking("basic", layers.without("rlimits")) == ("rlimits",)


def test_require_says_what_is_missing_what_it_exposes_and_what_to_do():
    missing = Layer(False, "Landlock ABI 1", "files are open", "use a newer kernel")
    with pytest.raises(SandboxUnavailable) as caught:
        require("standard", everything(landlock=missing, landlock_abi=0))
    assert "Landlock ABI 1" in caught.value.message
    assert "files are open" in caught.value.message
    assert caught.value.help == "use a newer kernel; or ask for --sandbox=basic"
    require("basic", everything(landlock=missing, landlock_abi=0))


def test_without_and_missing():
    layers = everything().without("landlock", "netns")
    assert layers.missing() == ("landlock", "netns")
    assert layers.landlock_abi == 0
    assert layers.landlock.detail == "switched off"
    assert [name for name, _ in layers.rows()] == list(NAMES)


def test_json_round_trip():
    layers = everything(roots=("/usr", "/opt/python"), runner_uid=7, user_namespace=True)
    assert Layers.from_dict(json.loads(json.dumps(layers.as_dict()))) == layers
    with pytest.raises(TypeError):
        Layers.from_dict({"rlimits": {"ok": True}})


def test_the_probe_explains_every_missing_layer():
    layers = probed()
    assert layers.rlimits.ok
    assert layers.no_new_privs.ok
    assert "/usr" in layers.roots
    for name, layer in layers.rows():
        assert layer.detail, name
        if not layer.ok:
            assert layer.exposes, name
            assert layer.remedy, name
    assert (layers.landlock_abi >= 2) == layers.landlock.ok


def test_an_attempt_reports_errno_and_leaves_this_process_alone():
    folder = os.getcwd()
    assert attempt(lambda: os.chdir("/")) == ""
    assert os.getcwd() == folder
    assert attempt(lambda: os.chdir("/no/such/place")).startswith("ENOENT")
    assert attempt(lambda: os.kill(os.getpid(), 9)) == "killed by signal 9"
