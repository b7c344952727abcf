"""``drk doctor``: real probes on this machine, and each row's verdict on machines that lack something."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from drk.assistant import doctor
from drk.assistant.cli import run
from drk.assistant.doctor import Check, check_package, check_platform, render_checks, run_probe, worst
from drk.assistant.errors import SCHEMA_VERSION
from drk.gym.devices import Gpu

Capture = pytest.CaptureFixture[str]


def test_the_real_machine(capsys: Capture) -> None:
    code = run(["doctor", "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in data["checks"]}
    assert data["schema_version"] == SCHEMA_VERSION
    assert code == (1 if any(row["status"] == "fail" for row in rows.values()) else 0)
    for name in ("python", "platform", "torch", "triton", "triton interpreter", "triton compile"):
        assert rows[name]["status"] == "ok", rows[name]
    assert {"sandbox", "landlock", "seccomp", "settings", "cache dir", "disk", "c compiler"} <= set(rows)
    assert all(row["fix"] for row in rows.values() if row["status"] != "ok")


def test_a_probe_that_fails_says_why() -> None:
    error = run_probe("compile", "sm_1", interpret=False)["error"]
    assert "Error" in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("system", "machine", "status"),
    [
        ("Linux", "x86_64", "ok"),
        ("Linux", "aarch64", "ok"),
        ("Linux", "riscv64", "fail"),
        ("Darwin", "arm64", "fail"),
        ("Windows", "AMD64", "fail"),
    ],
)
def test_platforms(system: str, machine: str, status: str) -> None:
    row = check_platform(system, machine)
    assert row.status == status
    assert bool(row.fix) == (status == "fail")


@pytest.mark.parametrize(
    ("found", "status"),
    [("2.10.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0", "ok"), ("2.9.1", "fail"), ("2.10.0a0+git12", "ok")],
)
def test_package_versions(found: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda _name: found)
    assert check_package("torch", (2, 10)).status == status


def test_a_missing_package() -> None:
    row = check_package("package-that-nobody-has", (1, 2))
    assert (row.status, row.fix) == ("fail", "pip install 'package-that-nobody-has>=1.2'")


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "list_gpus", list)
    (row,) = doctor.check_gpus()
    assert row.status == "warn"
    assert "not measured" in row.detail
    monkeypatch.setattr(doctor, "list_gpus", lambda: [Gpu("GPU-1", "NVIDIA H200", 0)])
    monkeypatch.setattr(doctor, "version", lambda _name: "2.13.0+cpu")
    assert [row.status for row in doctor.check_gpus()] == ["ok", "fail"]
    monkeypatch.setattr(doctor, "version", lambda _name: "2.13.0")
    assert [row.name for row in doctor.check_gpus()] == ["gpu 0"]


def test_the_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_c_compiler().status == "warn"
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h is missing" in doctor.check_c_compiler().detail
    (tmp_path / "Python.h").write_text("")
    assert doctor.check_c_compiler() == Check("c compiler", "ok", str(compiler))


def test_a_sandbox_level_that_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = doctor.sandbox.probe().without("landlock", "seccomp", "pidns", "netns")
    monkeypatch.setattr(doctor.sandbox, "probe", lambda gpu: layers)
    first, *rest = doctor.check_sandbox("standard", gpu=False)
    assert (first.status, first.detail) == ("fail", "level basic (asked for: standard)")
    assert "landlock" in first.fix
    assert "--sandbox basic" in first.fix
    assert {row.name.strip(): row.status for row in rest}["landlock"] == "warn"
    assert doctor.check_sandbox("basic", gpu=False)[0].status == "ok"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    row = doctor.check_writable("cache dir", blocked / "cache")
    assert row.status == "fail"
    assert "cache-dir" in row.fix
    assert doctor.check_writable("cache dir", tmp_path / "new" / "cache").status == "ok"
    assert stat.S_ISDIR((tmp_path / "new" / "cache").stat().st_mode)
    assert list((tmp_path / "new" / "cache").iterdir()) == []


@pytest.mark.parametrize(("free_bytes", "status"), [(10 * 2**30, "ok"), (2**30, "warn"), (2**20, "fail")])
def test_disk(free_bytes: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Callable[[Path], object] = lambda _path: type("Usage", (), {"free": free_bytes})()  # noqa: E731
    monkeypatch.setattr(doctor.shutil, "disk_usage", usage)
    assert doctor.check_disk(tmp_path / "not" / "there").status == status


def test_wrong_settings_are_a_row_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drk.toml").write_text("seeds = 3\nturn = 4\n")
    monkeypatch.chdir(tmp_path)
    row, settings = doctor.check_settings()
    assert row.status == "fail"
    assert str(tmp_path / "drk.toml") in row.detail
    assert row.fix == "did you mean 'turns'?"
    assert settings.seeds == 5


def test_show_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    (tmp_path / "drk.toml").write_text("seeds = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRK_TURNS", "7")
    assert run(["doctor", "--show-settings", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert (rows["seeds"]["value"], rows["seeds"]["origin"]) == (3, str(tmp_path / "drk.toml"))
    assert (rows["turns"]["value"], rows["turns"]["origin"]) == (7, "DRK_TURNS")
    assert run(["doctor", "--show-settings"]) == 0
    assert "DRK_TURNS" in capsys.readouterr().out


def test_text_and_exit_code_on_a_failing_check(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    rows = [
        Check("torch", "ok", "2.13"),
        Check("disk", "warn", "little\nspace", "free some"),
        Check("x", "fail", "no", "y"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: rows)
    assert run(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "ok    torch  2.13\nwarn  disk   little space\n      fix: free some\nfail  x      no\n      fix: y\n"
        "\n1 ok, 1 warn, 1 fail\n"
    )
    monkeypatch.setattr(doctor, "examine", lambda: rows[:2])
    assert run(["doctor", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "warn"


def test_worst_and_colour() -> None:
    assert worst([]) == "ok"
    assert "<ok  >" in render_checks([Check("a", "ok", "b")], lambda text, *_: f"<{text}>")


def test_the_proposer_that_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_API_KEY_FILE", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.check_model("builtin") == Check("proposer", "ok", "builtin")
    row = doctor.check_model("transformers:/no/such/folder")
    assert (row.status, bool(row.fix)) == ("fail", True)
    row = doctor.check_model("openai:m")
    assert row.status == "fail"
    assert "OPENAI_API_KEY" in row.detail or "extra" in row.detail
