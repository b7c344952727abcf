"""``__all__`` of every package equals what is there: nothing missing, nothing accidental."""

from __future__ import annotations

import importlib
import tomllib
import types
from pathlib import Path

import pytest

PACKAGES = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["tool"]["setuptools"][
    "packages"
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_equals_what_is_there(name: str) -> None:
    package = importlib.import_module(name)
    declared = list(getattr(package, "__all__", []))
    assert len(declared) == len(set(declared)), "a name stands twice in __all__"
    missing = [word for word in declared if not hasattr(package, word)]
    assert missing == [], "names in __all__ that do not exist"
    public = {
        word
        for word, value in vars(package).items()
        if not word.startswith("_")
        and word != "TYPE_CHECKING"
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", name).startswith("drk.")
    }
    assert public - set(declared) == set(), "public names that __all__ does not list"


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_say_what_they_are(name: str) -> None:
    assert len((importlib.import_module(name).__doc__ or "").strip()) > 20


def test_every_package_folder_is_listed(repository: Path) -> None:
    found = {
        "drk." + ".".join(path.parent.relative_to(repository).parts)
        for part in ("gym", "assistant", "training", "lsp")
        for path in (repository / part).rglob("__init__.py")
    }
    assert found == set(PACKAGES)
