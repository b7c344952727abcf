"""The assistant: what a developer meets. Command line, intake, proposers, search, artefacts.

It stands on :mod:`drk.gym`, which judges what the assistant proposes, and knows nothing of training or editors (a test
holds the direction). Modules are imported by their own names, ``drk.assistant.cli`` and so on; importing this package
imports nothing, so that ``drk --help`` starts at once; :func:`capture` (:mod:`drk.assistant.capture_session`), which
notebooks use, is fetched when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drk.assistant.capture_session import capture

__all__ = ["capture"]


def __getattr__(name: str) -> Any:
    if name == "capture":
        from drk.assistant.capture_session import capture

        return capture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
