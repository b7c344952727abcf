"""The wheel holds exactly what git tracks: an unlisted subpackage would be dropped without a word."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PARTS = ("assistant", "gym", "lsp", "training")
SHIPPED = (".py", ".typed", ".j2", ".toml", ".yaml", ".json", ".safetensors")


def tracked_files(repository: Path) -> list[str]:
    """Return the paths that git tracks and that still exist."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True)
    return [path for path in listing.stdout.split("\0") if path and (repository / path).is_file()]


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build a wheel from a copy of the tracked files (an old ``build`` folder would leak into it otherwise)."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked_files(repository):
        copy = folder / "source" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / path, copy, follow_symlinks=False)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(folder / "source")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_equals_git(wheel: zipfile.ZipFile, repository: Path) -> None:
    expected = {
        f"drk/{path}"
        for path in tracked_files(repository)
        if path.split("/")[0] in PARTS and path.endswith(SHIPPED) and "/editors/" not in path
    }
    shipped = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert shipped == expected
    assert {f"drk/{part}/py.typed" for part in PARTS} <= shipped


def test_wheel_names_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = {name.split("/", 1)[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "drk = drk.assistant.cli:main" in wheel.read(names["entry_points.txt"]).decode()
    assert "licenses/LICENSE" in names
    metadata = wheel.read(names["METADATA"]).decode()
    assert "Requires-Dist: torch>=" in metadata
    assert "License-Expression: Apache-2.0" in metadata
