"""gym <- assistant <- {training, lsp}: nobody imports upwards or sideways, relative imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ALLOWED = {
    "gym": {"gym"},
    "assistant": {"assistant", "gym"},
    "training": {"training", "assistant", "gym"},
    "lsp": {"lsp", "assistant", "gym"},
}


def imported_modules(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of everything that ``source`` imports, by statement or by literal string."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                kept = parts[: len(parts) - node.level + 1]
                base = ".".join([*kept, base]) if base else ".".join(kept)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            literals = (arg for arg in node.args[:1] if isinstance(arg, ast.Constant))
            yield from ((node.lineno, str(arg.value)) for arg in literals)


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return one text per import that goes against the direction."""
    part = module.split(".")[1]
    found = []
    for line, name in imported_modules(source, module, is_package=is_package):
        words = name.split(".")
        if words[0] == "drk" and len(words) > 1 and words[1] in ALLOWED and words[1] not in ALLOWED[part]:
            found.append(f"{module}:{line} imports {name}")
    return found


@pytest.mark.parametrize("part", ALLOWED)
def test_parts_import_downwards_only(part: str, repository: Path) -> None:
    files = sorted((repository / part).rglob("*.py"))
    assert files
    found = []
    for path in files:
        words = ["drk", *path.relative_to(repository).with_suffix("").parts]
        is_package = words[-1] == "__init__"
        module = ".".join(words[:-1] if is_package else words)
        found += violations(path.read_text(encoding="utf-8"), module, is_package=is_package)
    assert found == []


@pytest.mark.parametrize(
    ("source", "module", "is_package"),
    [
        ("import drk.assistant", "drk.gym.judge", False),
        ("from drk.assistant import cli", "drk.gym.judge", False),
        ("from drk import training", "drk.assistant.cli", False),
        ("from ..assistant import cli", "drk.gym.judge", False),
        ("from ..assistant import cli", "drk.gym", True),
        ("from ...assistant.cli import main", "drk.gym.sandbox.layers", False),
        ("from .. import lsp", "drk.training.advantages", False),
        ("def f():\n    import drk.training.losses", "drk.lsp.server", False),
        ("import importlib\nimportlib.import_module('drk.lsp')", "drk.training.losses", False),
    ],
)
def test_a_wrong_import_is_noticed(source: str, module: str, is_package: bool) -> None:
    assert len(violations(source, module, is_package=is_package)) == 1


def test_right_imports_pass() -> None:
    source = "from drk.gym.schema import Task\nfrom . import errors\nfrom ..gym import wire\nimport torch"
    assert violations(source, "drk.assistant.cli") == []
