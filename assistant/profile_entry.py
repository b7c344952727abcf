"""One module object as the recorder knows it; runs in the user's process, without drk."""

from __future__ import annotations

import sys
import weakref
from typing import Any


class Entry:
    """One module object: who it is, who calls it, with what kinds of arguments."""

    def __init__(self, number: int, module: Any, root: Entry | None, parent: Entry | None) -> None:
        self.number = number
        self.ref = weakref.ref(module)
        inner = module.__dict__.get("_modules", {}).get("_orig_mod")  # what torch.compile wraps
        self.compiled = inner is not None
        kind = type(module if inner is None else inner)
        self.class_name: str = kind.__qualname__
        self.class_file = str(getattr(sys.modules.get(kind.__module__), "__file__", "") or "")
        self.root = root or self
        self.parent = parent
        self.path = ""
        self.paths: dict[int, str] = {}
        self.called_at: int | None = None
        self.init: int | None = None
        self.parts = 0
        self.calls = 0
        self.other_calls = 0
        self.kinds: dict[Any, dict[str, Any]] = {}
        self.mark = f"m|{number}"

    def to_json(self) -> dict[str, Any]:
        """Return what the reader needs."""
        return {
            "id": self.number,
            "root": self.root.number,
            "parent": self.parent.number if self.parent is not None else None,
            "path": self.path,
            "class_name": self.class_name,
            "file": self.class_file,
            "compiled": self.compiled,
            "init": self.init,
            "called_at": self.called_at,
            "calls": self.calls,
            "other_calls": self.other_calls,
            "kinds": list(self.kinds.values()),
        }
