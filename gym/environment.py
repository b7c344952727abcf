"""What a verdict was reached with: versions and platform. Facts of the device are added by the gym."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def package_version(name: str) -> str | None:
    """Return the installed version of a package, or None; imports nothing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def environment() -> dict[str, Any]:
    """Return versions of drk, Python, torch and Triton, and the platform."""
    return {
        "drk": package_version("drk"),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "triton": package_version("triton"),
        "platform": platform.platform(),
        "machine": platform.machine(),
    }
