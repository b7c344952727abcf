"""The environment's allow-list and the read-only roots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drk.gym.sandbox import Policy, environment, scrub
from drk.gym.sandbox.policy import places, read_only_roots

POLICY = Policy(scratch=Path("/scratch/7"))
SECRETS = {
    "HF_TOKEN": "a", "OPENAI_API_KEY": "a", "AWS_SECRET_ACCESS_KEY": "a", "AWS_PROFILE": "a", "DRK_TOKEN": "a",
    "https_proxy": "http://user:pass@host", "REDIS_URL": "redis://:pass@host", "SSH_AUTH_SOCK": "/tmp/agent",
    "LD_PRELOAD": "/evil.so", "PYTHONSTARTUP": "/x.py", "TRITON_API_KEY": "a", "OMP_TOKEN": "a",
    "GITHUB_TOKEN": "a", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run", "PYTHONPATH": "/home/u/project",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_secrets_and_hooks_do_not_pass(name):
    assert name not in environment(POLICY, SECRETS)


def test_the_zygote_gets_no_secrets_either():
    kept = scrub({**SECRETS, "HOME": "/home/u", "LANG": "C"})
    assert kept == {"HOME": "/home/u", "LANG": "C", "PYTHONPATH": "/home/u/project"}


def test_what_kernels_need_passes():
    needed = {
        "LANG": "C.UTF-8", "LC_ALL": "C", "LD_LIBRARY_PATH": "/usr/lib/x", "CUDA_HOME": "/usr/local/cuda",
        "CUDA_VISIBLE_DEVICES": "GPU-1", "OMP_NUM_THREADS": "4", "TRITON_INTERPRET": "1",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1", "PYTORCH_CUDA_ALLOC_CONF": "x",
    }  # fmt: skip
    assert environment(POLICY, needed).items() >= needed.items()


def test_every_place_is_below_scratch():
    found = environment(POLICY, {"HOME": "/home/u", "TMPDIR": "/tmp", "TRITON_CACHE_DIR": "/shared"})
    for name, path in places(POLICY).items():
        assert found[name] == str(path)
        assert path.is_relative_to(POLICY.scratch)
    assert found["USER"] == "drk"


def test_path_loses_what_is_closed(tmp_path):
    closed = tmp_path / "bin"
    closed.mkdir()
    base = {"PATH": f"{closed}:/usr/bin:relative::/usr/local/bin"}
    assert environment(POLICY, base, ("/usr",))["PATH"] == "/usr/bin:/usr/local/bin"
    opened = Policy(scratch=Path("/scratch/7"), readable=(tmp_path,))
    assert environment(opened, base, ("/usr",))["PATH"] == f"{closed}:/usr/bin:/usr/local/bin"
    assert environment(POLICY, {"PATH": str(closed)}, ("/usr",))["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    assert environment(POLICY, {"PATH": "/usrx/bin"}, ("/usr",))["PATH"] == "/usr/local/bin:/usr/bin:/bin"


def test_roots_never_open_a_home(tmp_path, monkeypatch):
    home = tmp_path / "people" / "me"
    home.mkdir(parents=True)
    library = tmp_path / "lib"
    library.mkdir()
    monkeypatch.setenv("HOME", str(home))
    libraries = f"{home}:{home.parent}:/:{library}:relative"
    roots = read_only_roots({"LD_LIBRARY_PATH": libraries, "PATH": os.environ["PATH"]})
    assert str(library) in roots
    assert not {str(home), str(home.parent), "/", "/home", "/root"} & set(roots)
    assert "/usr" in roots
    assert len(roots) == len(set(roots))
