from __future__ import annotations

from pathlib import Path

import pytest

from drk.assistant.errors import UsageError
from drk.assistant.llm.keys import NO_KEY, find_key, is_loopback, redact, without_key
from drk.assistant.llm.messages import ModelFault
from drk.assistant.llm.model_settings import ModelSettings, check_url, parse_prices
from drk.gym.schema import Call, Candidate, Task, TensorSpec

LOCAL = "http://127.0.0.1:8000/v1"
FAR = "https://models.example.com/v1"


def test_a_key_comes_from_the_variable_or_the_file_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert find_key(ModelSettings(), {"OPENAI_API_KEY": " abc "}) == "abc"
    assert find_key(ModelSettings(), {"OPENAI_API_KEY_FILE": str(file)}) == "from-file"
    assert find_key(ModelSettings(api_key_env="MINE"), {"MINE": "m", "OPENAI_API_KEY": "o"}) == "m"
    assert find_key(ModelSettings(base_url=LOCAL), {}) == NO_KEY
    assert find_key(ModelSettings(base_url=LOCAL), {"OPENAI_API_KEY": "o"}) == "o"


@pytest.mark.parametrize(
    ("settings", "environ", "says"),
    [
        (ModelSettings(), {}, "OPENAI_API_KEY is not set"),
        (ModelSettings(), {"OPENAI_API_KEY": ""}, "OPENAI_API_KEY is not set"),
        (ModelSettings(base_url=FAR), {"OTHER": "x"}, f"no key for {FAR}"),
        (ModelSettings(base_url=LOCAL, api_key_env="MINE"), {}, "MINE is not set"),
        (ModelSettings(), {"OPENAI_API_KEY_FILE": "/absent"}, "OPENAI_API_KEY_FILE names"),
        (ModelSettings(), {"OPENAI_API_KEY": "a\nb: c"}, "characters that no key has"),
    ],
)
def test_a_missing_key_names_its_setting(settings: ModelSettings, environ: dict[str, str], says: str) -> None:
    with pytest.raises(ModelFault, match=says):
        find_key(settings, environ)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [(LOCAL, True), ("http://localhost:1/v1", True), ("http://[::1]:2/", True), (FAR, False), ("", False)],
)
def test_loopback(url: str, loopback: bool) -> None:
    assert is_loopback(url) == loopback
    assert not is_loopback("http://127.0.0.1.evil.example/v1")


@pytest.mark.parametrize(
    "url", ["ftp://x", "x", "https://", "https://user:pw@host/v1", "https://h/v1?key=1", "http://["]
)
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises(UsageError, match="--base-url"):
        check_url(url)


def test_redaction() -> None:
    assert redact("key abc123 and sk-ABCDEFGHIJ", "abc123") == "key [key] and [key]"
    assert redact("none of it", NO_KEY) == "none of it"
    assert without_key("x abc123 sk-ABCDEFGHIJ", "abc123") == "x [key] sk-ABCDEFGHIJ"


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="unknown policy"):
        ModelSettings(policy="best").checked()
    with pytest.raises(UsageError, match="leaves no room"):
        ModelSettings(max_tokens=8000, context_tokens=8192).checked()
    assert parse_prices("0.25,2") == (0.25, 2.0)
    for text in ("1", "a,b", "-1,2", "1,2,3", "nan,1"):
        with pytest.raises(UsageError, match="--price"):
            parse_prices(text)


async def test_no_key_reaches_the_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from drk.gym import Gym, GymSettings

    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user-0123456789")
    monkeypatch.setenv("OPENAI_API_KEY_FILE", str(tmp_path / "key-file-0123456789"))
    model = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    spy = (
        "import os, torch\nseen = open('/proc/self/environ', 'rb').read().decode('latin-1') + repr(dict(os.environ))\n"
        "class ModelNew(torch.nn.Module):\n    def forward(self, x):\n"
        "        raise RuntimeError('spied: ' + str([name for name in ('OPENAI', '0123456789') if name in seen]))\n"
    )
    task = Task("t", {"m.py": model}, "m.py", "Model", inputs=Call((TensorSpec((4, 4)),)))
    async with Gym(GymSettings(device="interpret", seeds=1)) as gym:
        verdict = await gym.evaluate(task, Candidate(spy))
    assert verdict.error is not None
    assert "spied: []" in verdict.error.message or "Permission" in verdict.error.message
