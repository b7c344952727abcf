"""Setting an attribute of something foreign for a while, and putting back exactly what was there.

Runners stand in for parts of torch and Triton. Every such replacement goes through :func:`replace_attribute`, so that
closing the stack undoes all of them in reverse order, also after an error. Not thread-safe, as the things replaced are
not.
"""

from __future__ import annotations

import contextlib
from typing import Any

_ABSENT = object()


def replace_attribute(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set ``owner.name`` until ``stack`` closes; a name that was absent (or inherited, on a class) is deleted again."""
    before = vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)

    def restore() -> None:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, value)
    stack.callback(restore)
