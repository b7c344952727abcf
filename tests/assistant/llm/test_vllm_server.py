"""The server's life: started, asked, ended; a package of vLLM's name runs the stand-in endpoint as that would."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from drk.assistant.llm.messages import Message, ModelFault, Request
from drk.assistant.llm.model_settings import ModelSettings

pytest.importorskip("openai", reason="the llm extra is not installed")
from drk.assistant.llm.vllm_server import VllmBackend

SERVER = """
import argparse, os, subprocess, sys, time
sys.path.insert(0, {support!r})
from model_endpoint import Answer, Endpoint
parser = argparse.ArgumentParser()
for name in ("model", "served-model-name", "host", "port", "max-model-len"):
    parser.add_argument("--" + name, required=True)
options = parser.parse_args()
assert options.host == "127.0.0.1" and options.max_model_len == "4096"
assert "OPENAI_API_KEY" not in os.environ
open(options.model + "/pid", "w").write(str(os.getpid()))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(options.model + "/child", "w").write(str(child.pid))
script = lambda body, number: Answer("from " + body["model"])
Endpoint(script, key=os.environ["VLLM_API_KEY"], port=int(options.port)).server.serve_forever()
"""


@pytest.fixture
def checkpoint(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "api_server.py").write_text(SERVER.format(support=str(repository / "tests" / "support")))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_it_is_started_asked_and_ended(checkpoint: Path) -> None:
    backend = VllmBackend(str(checkpoint), ModelSettings(context_tokens=4096, max_tokens=64))
    await backend.start()
    reply = await backend.complete(Request((Message("user", "hello"),)))
    pids = [int((checkpoint / name).read_text()) for name in ("pid", "child")]
    assert all(is_alive(pid) for pid in pids)
    await backend.close()
    assert (reply.text, reply.model) == ("from model", f"vllm:{checkpoint}")
    assert not any(is_alive(pid) for pid in pids)
    assert os.getpgid(0) not in pids


async def test_a_server_that_ends_shows_its_last_words(checkpoint: Path, tmp_path: Path) -> None:
    server = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.write_text("raise SystemExit('no CUDA here')")
    backend = VllmBackend(str(checkpoint), ModelSettings())
    with pytest.raises(ModelFault, match="ended with exit code 1") as caught:
        await backend.start()
    assert "no CUDA here" in caught.value.cause


def test_a_missing_package_gives_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelFault, match="need the package vllm") as caught:
        VllmBackend(str(tmp_path), ModelSettings())
    assert caught.value.help.startswith("pip install vllm")
