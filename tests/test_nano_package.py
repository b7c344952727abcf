"""The weights' own distribution: built apart from drk, found by drk, and nothing of it in drk's wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="needs the package build")

from nano_parts import random_tensors, tiny_config, write_tokenizer

from drk.assistant.llm import nano_places
from drk.assistant.llm.nano_places import is_model_folder, nano_folder
from drk.assistant.llm.nano_weights import INT8_FILE, write_int8

PACKAGE = Path(__file__).parents[1] / "models" / "nano"


def test_the_wheel_holds_a_model_that_drk_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, site = (tmp_path / name for name in ("source", "out", "site"))
    source.mkdir()
    for name in ("pyproject.toml", "__init__.py", "README.md"):
        shutil.copyfile(PACKAGE / name, source / name)
    config = tiny_config(len(write_tokenizer(source)))
    (source / "config.json").write_text(json.dumps(config))
    (source / "templates").mkdir()
    (source / "templates" / "task.j2").write_text("{{ excerpt }}")
    write_int8(source / INT8_FILE, random_tensors(config), config)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.glob("drk_nano-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("DRK_NANO", raising=False)
    monkeypatch.setattr(nano_places, "checkout", lambda: tmp_path / "none")
    assert nano_folder() == site / "drk_nano"
    assert (site / "drk_nano" / "templates" / "task.j2").is_file()
    assert (site / "drk_nano" / "tokenizer_config.json").is_file()


def test_the_repository_s_own_folder_is_a_model_or_says_that_there_is_none() -> None:
    card = (PACKAGE / "README.md").read_text()
    assert is_model_folder(PACKAGE) != ("no weights in this folder yet" in card)
