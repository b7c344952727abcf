from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drk.lsp.job_flow import last_word, profile_spec
from drk.lsp.jobs import Job, JobEnd
from drk.lsp.settings import LspSettings


def server_for(root: Path, **settings: Any) -> Any:
    return SimpleNamespace(settings_for=lambda _: LspSettings(**settings), root_for=lambda _: root)


def places(project: Path) -> str:
    words = list(profile_spec(server_for(project), project / "part" / "model.py").arguments)
    return words[words.index("--profiles-dir") + 1]


def test_a_profile_goes_where_the_editor_looks_for_it(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "part").mkdir(parents=True)
    (tmp_path / ".drk" / "profiles").mkdir(parents=True)
    assert places(project) == str(project / ".drk" / "profiles")  # not above the workspace
    (project / "part" / ".drk" / "profiles").mkdir(parents=True)
    assert places(project) == str(project / "part" / ".drk" / "profiles")


def test_settings_reach_the_profile_s_command_line(tmp_path: Path) -> None:
    server = server_for(tmp_path, device="cuda:1", profile_args=("--steps", "3"), command=("mine",))
    spec = profile_spec(server, tmp_path / "model.py")
    assert spec.command == ("mine",)
    assert list(spec.arguments)[-4:] == ["--device", "cuda:1", "--steps", "3"]


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (
            "a warning\nerror: cannot write x\n  --> a.py:3\n  cause: full\n  help: free some\n",
            "cannot write x. a.py:3. full. free some",
        ),
        ("Traceback\nlast line.\n", "last line"),
        ("", "exit 2"),
    ],
)
def test_an_error_in_text_is_quoted(tmp_path: Path, output: str, told: str) -> None:
    job = Job(1, profile_spec(server_for(tmp_path), tmp_path / "model.py"))
    assert last_word(job, JobEnd("refused", 2, output=output))[0] == f"failed: {told}"
