"""What README and docs/cli.md say is true: commands, links, settings, exit codes, and the Python example runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drk.assistant.cli import COMMANDS
from drk.assistant.errors import ExitCode
from drk.assistant.settings import RULES, load_settings
from drk.gym.schema import RUNGS


def marked_command(text: str, name: str) -> str:
    """Return the code block after the line ``<!-- NAME -->``."""
    found = re.search(rf"^<!-- {name} -->\n```bash\n(.+?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", ["first command", "second command"])
def test_the_two_commands_are_one_line_each_and_use_the_repositorys_own_environment(
    name: str, repository: Path
) -> None:
    command = marked_command((repository / "README.md").read_text(), name)
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e ")
    check = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    assert all((repository / path).is_file() for path in re.findall(r"docs/\S+\.py", command))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/cli.md"])
def test_links_lead_somewhere(page: str, repository: Path) -> None:
    path = repository / page
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_the_command_line_page_is_complete(repository: Path) -> None:
    text = (repository / "docs" / "cli.md").read_text()
    for name in COMMANDS:
        assert f"`drk {name}" in text, name
    for code in ExitCode:
        assert f"\n| {int(code)} |" in text, code
    for rung in RUNGS:
        assert f"`{rung}`" in text


def test_the_settings_on_the_page_are_the_settings(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs" / "cli.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| `(DRK_\w+)` \| (?:`([^`]+)`|[^|]+) \|", text, re.MULTILINE)
    assert [row[0] for row in rows] == [name.replace("_", "-") for name in RULES]
    for name, variable, default in rows:
        assert variable == "DRK_" + name.upper().replace("-", "_")
        if default and default != ".drk/runs":
            settings = load_settings(
                {}, cwd=tmp_path, environ={variable: default}, user_file=tmp_path / "none"
            ).settings
            untouched = load_settings({}, cwd=tmp_path, environ={}, user_file=tmp_path / "none").settings
            assert settings == untouched, name


def test_the_python_example_runs(repository: Path, tmp_path: Path) -> None:
    found = re.search(r"```python\n(.+?)```", (repository / "README.md").read_text(), re.DOTALL)
    assert found is not None
    fixture = (
        "import torch\nfrom torch import nn\n\nclass {}(nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    )
    (tmp_path / "model.py").write_text(fixture.format("Net"))
    (tmp_path / "candidate.py").write_text(fixture.format("ModelNew"))
    (tmp_path / "example.py").write_text(found[1])
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accepted ")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_continuous_check_is_sound_shell(repository: Path) -> None:
    path = repository / ".ci" / "run"
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    text = path.read_text()
    assert 'readme_command "first command"' in text
    assert 'readme_command "second command"' in text
