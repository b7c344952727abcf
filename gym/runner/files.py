"""Files that a Runner's scratch folder begins with: the task's sources, a Triton cache's first entries.

Left out: checks of the names, which are made when a task is read.
"""

from __future__ import annotations

from pathlib import Path


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files below ``folder``; paths were checked when the task was read."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
