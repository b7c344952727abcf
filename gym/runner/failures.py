"""What goes wrong in user code, as data: stage, kind, message, and the user's own file and line.

Everything that a Runner does with a user's or a candidate's code stands inside :func:`user_code`, which turns whatever
the code raises (``SystemExit`` included) into a :class:`LoadFailure` that points into the user's sources and never into
ours. A failure travels as small JSON to the Judge, which treats it as a claim.

Left out: crashes of the process, time limits and memory limits, which only the Judge can see.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_MESSAGE = 2000


class LoadFailure(Exception):
    """User code could not be loaded or run.

    ``kind`` is a stable identifier such as ``syntax``, ``missing-module``, ``exit-at-import``, ``reads-stdin``,
    ``raised``; ``file`` is relative to the source root, ``line`` 1-based; ``help`` is a next step or empty.
    """

    def __init__(
        self,
        stage: str,
        kind: str,
        message: str,
        *,
        file: str = "",
        line: int | None = None,
        help: str = "",  # noqa: A002 - the word users read
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.kind = kind
        self.message = message
        self.file = file
        self.line = line
        self.help = help

    def as_json(self) -> dict[str, Any]:
        """Return the failure as a JSON object, its texts cut to 2000 characters."""
        return {
            "stage": self.stage,
            "kind": self.kind,
            "message": self.message[:MAX_MESSAGE],
            "file": self.file,
            "line": self.line,
            "help": self.help[:MAX_MESSAGE],
        }


def user_position(error: BaseException, root: Path) -> tuple[str, int | None]:
    """Return file (relative to ``root``) and line of the innermost traceback frame inside ``root``.

    A syntax error counts by its own position. ``("", None)`` when no frame lies inside.
    """
    base = root.resolve()
    if isinstance(error, SyntaxError) and error.filename:
        inside = _relative(error.filename, base)
        if inside:
            return inside, error.lineno
    found: tuple[str, int | None] = ("", None)
    for frame, line in traceback.walk_tb(error.__traceback__):
        inside = _relative(frame.f_code.co_filename, base)
        if inside:
            found = (inside, line)
    return found


def _relative(name: str, base: Path) -> str:
    if name.startswith("<"):
        return ""
    path = Path(name)
    if path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    resolved = path.resolve()
    return resolved.relative_to(base).as_posix() if resolved.is_relative_to(base) else ""


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _kind(error: BaseException, kind: str) -> tuple[str, str]:
    """Return kind and help for ``error``; ``kind`` is the fallback."""
    if isinstance(error, SyntaxError):
        return "syntax", ""
    if isinstance(error, ModuleNotFoundError):
        return "missing-module", (
            f"install {(error.name or 'it').split('.')[0]!r} where drk runs; a module of the project itself must lie "
            "under the project's root and be imported by its literal name"
        )
    if isinstance(error, FileNotFoundError):
        return "missing-file", "data files do not travel with the sources: build the value in the file instead"
    if isinstance(error, EOFError):
        return "reads-stdin", "standard input is closed: put input() below if __name__ == '__main__'"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out-of-memory", ""
    return kind, ""


@contextmanager
def user_code(stage: str, root: Path, *, kind: str = "raised", what: str = "") -> Iterator[None]:
    """Turn whatever the body raises into a :class:`LoadFailure` at the user's own line.

    Args:
        stage: the verdict's stage (``load``, ``run``).
        root: folder of the user's sources, for the position.
        kind: kind of failures that have no kind of their own.
        what: what was done, put before the message.

    Raises:
        LoadFailure: the body raised; failures pass through unchanged.
    """
    prefix = f"{what}: " if what else ""
    try:
        yield
    except LoadFailure:
        raise
    except SystemExit as error:
        file, line = user_position(error, root)
        message = f"{prefix}the code exits (SystemExit: {error.code}); it may parse arguments or call sys.exit()"
        advice = "put argument parsing and sys.exit() below if __name__ == '__main__'"
        raise LoadFailure(stage, "exit", message, file=file, line=line, help=advice) from error
    except Exception as error:
        file, line = user_position(error, root)
        found, advice = _kind(error, kind)
        raise LoadFailure(stage, found, prefix + _message(error), file=file, line=line, help=advice) from error
