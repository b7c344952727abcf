"""Where the nano model is looked for, what is typed when it is nowhere, and how a checkpoint's wishes are met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nano_parts import random_tensors, tiny_config, write_tokenizer

from drk.assistant.errors import UsageError
from drk.assistant.llm import nano_places
from drk.assistant.llm.messages import ModelFault
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.llm.nano_places import nano_folder
from drk.assistant.llm.nano_weights import INT8_FILE, write_int8
from drk.assistant.proposers import is_nano, make_proposer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = tiny_config(len(write_tokenizer(folder)))
    (folder / "config.json").write_text(json.dumps(config))
    write_int8(folder / INT8_FILE, random_tensors(config), config)
    return folder


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(nano_places, "checkout", lambda: tmp_path / "checkout")
    monkeypatch.delenv("DRK_NANO", raising=False)


@pytest.mark.usefixtures("nowhere")
def test_the_places_come_in_their_order(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFault, match="not on this machine") as caught:
        nano_folder()
    assert str(tmp_path / "data" / "drk" / "models" / "nano") in caught.value.help
    assert "DRK_NANO=FOLDER drk optimize" in caught.value.help
    for place in ("data/drk/models/nano", "checkout/models/nano"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).symlink_to(model)
        assert nano_folder() == tmp_path / place
    package = tmp_path / "site" / "drk_nano"
    package.parent.mkdir()
    package.symlink_to(model)
    monkeypatch.syspath_prepend(str(package.parent))
    assert nano_folder() == package
    assert nano_folder({"DRK_NANO": str(model)}) == model


@pytest.mark.usefixtures("nowhere")
def test_the_variable_is_believed_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFault, match="DRK_NANO names no model") as caught:
        nano_folder({"DRK_NANO": str(tmp_path)})
    assert "nano.safetensors" in caught.value.cause


def test_a_name_a_folder_and_a_prefix_mean_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRK_NANO", str(model))
    names = ["nano", f"nano:{model}", str(model)]
    assert all(is_nano(name) for name in names)
    assert not is_nano(str(model.parent))
    assert [make_proposer(name).name for name in names] == ["nano", f"nano:{model}", f"nano:{model}"]
    with pytest.raises(ModelFault, match="no model of the nano model's kind"):
        make_proposer("nano:/absent")


def test_settings_follow_the_checkpoint_where_the_user_left_them_alone(model: Path) -> None:
    facts = {"templates": "", "context_tokens": 2048, "max_tokens": 512, "policy": "append-all", "temperature": 0.5}
    (model / "drk_model.json").write_text(json.dumps(facts))
    asked = make_proposer(f"nano:{model}", ModelSettings(max_tokens=100))._settings
    assert (asked.context_tokens, asked.max_tokens, asked.policy, asked.temperature) == (2048, 100, "append-all", 0.5)
    (model / "drk_model.json").write_text(json.dumps(facts | {"policy": "no-such"}))
    with pytest.raises(UsageError, match="unknown policy"):
        make_proposer(f"nano:{model}")


def test_help_and_finding_the_model_need_no_torch(model: Path) -> None:
    code = (
        "import sys; from drk.assistant.proposers import make_proposer; import drk.assistant.cli; "
        f"make_proposer('nano:{model}'); print(sorted({{'torch', 'transformers', 'tokenizers'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
