from __future__ import annotations

from pathlib import Path

from drk.lsp.settings import LspSettings, describe, resolve_settings


def test_layers_and_origins(tmp_path: Path) -> None:
    user = tmp_path / "user.toml"
    user.write_text("seeds = 3\n[lsp]\nhover = false\nmin-share = 0.2\ncommand = ['mine']\n")
    project = tmp_path / "a" / "b"
    project.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.drk.lsp]\nmin-share = 0.3\ncode-lens = false\n")
    environ = {"DRK_LSP_INLAY_HINTS": "false", "DRK_LSP_OPTIMIZE_ARGS": "--turns '2'"}
    found = resolve_settings(project, {"minShare": 0.4, "trace": {"server": "off"}}, environ=environ, user_file=user)
    assert found.problems == ()
    assert found.settings == LspSettings(
        command=("mine",),
        optimize_args=("--turns", "2"),
        min_share=0.4,
        code_lens=False,
        inlay_hints=False,
        hover=False,
    )
    assert found.origins["min_share"] == "editor"
    assert found.origins["code_lens"] == str(tmp_path / "a" / "pyproject.toml")
    assert found.origins["inlay_hints"] == "DRK_LSP_INLAY_HINTS"
    assert found.origins["command"] == str(user)
    assert {"name": "minShare", "value": 0.4, "origin": "editor"} in describe(found)


def test_prefer_turns_the_layers_round(tmp_path: Path) -> None:
    (tmp_path / "drk.toml").write_text("[lsp]\nmin-share = 0.3\n")
    nobody = tmp_path / "none.toml"
    values = {
        prefer: resolve_settings(
            tmp_path, {"minShare": 0.4, "prefer": prefer}, environ={}, user_file=nobody
        ).settings.min_share
        for prefer in ("editorFirst", "filesystemFirst", "editorOnly")
    }
    assert values == {"editorFirst": 0.4, "filesystemFirst": 0.3, "editorOnly": 0.4}
    only = resolve_settings(tmp_path, {"prefer": "editorOnly"}, environ={}, user_file=nobody)
    assert only.settings.min_share == 0.05


def test_a_projects_file_cannot_run_or_send_anything(tmp_path: Path) -> None:
    (tmp_path / "drk.toml").write_text(
        "[lsp]\ncommand = ['evil']\noptimize-args = ['--sandbox', 'basic']\nprofile-args = ['x']\ngym-url = 'http://e'\n"
    )
    found = resolve_settings(tmp_path, {}, environ={}, user_file=tmp_path / "none.toml")
    assert found.settings == LspSettings()
    assert len(found.problems) == 4
    assert all("a project's file cannot set" in problem for problem in found.problems)


def test_what_is_wrong_is_told_and_the_rest_holds(tmp_path: Path) -> None:
    (tmp_path / "drk.toml").write_text("not toml [")
    given = {"minShare": 3, "hover": "yes", "minshare": 1, "device": "cuda:1", "command": "drk", "prefer": "x"}
    found = resolve_settings(tmp_path, given, environ={"DRK_LSP_HOVER": "maybe"}, user_file=tmp_path / "none.toml")
    assert found.settings == LspSettings(device="cuda:1")
    assert len(found.problems) == 7
    told = "\n".join(found.problems)
    for word in (
        "minShare must be a number",
        "did you mean 'minShare'?",
        "command must be a list",
        "drk.toml",
        "prefer",
    ):
        assert word in told
