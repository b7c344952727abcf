"""constraints.txt pins what pyproject.toml asks for, and names no hosts or paths."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@pytest.fixture(scope="module")
def pins(repository: Path) -> dict[str, str]:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("extra", ["", "test"])
def test_every_direct_dependency_is_pinned_within_its_range(extra: str, pins: dict[str, str], repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    assert wanted
    for text in wanted:
        requirement = Requirement(text)
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not pinned"
        assert requirement.specifier.contains(pin), f"{requirement.name}: {pin} is outside {requirement.specifier}"


def test_lines_are_plain_pins(pins: dict[str, str], repository: Path) -> None:
    lines = [line for line in (repository / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(pins)
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line), line
