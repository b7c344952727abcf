"""Structured logs, one JSON object a line on stderr, and the audit log.

Logs name jobs, never sources. The audit log says who asked for what (token name, task and candidate ids, sizes, the
answer), and holds source text only when a server was told to.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record, with whatever ``extra`` it carries, as one line of JSON."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {
            "at": stamp,
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _PLAIN})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(role: str, level: int = logging.INFO) -> None:
    """Send this process's logs to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("drk").setLevel(level)


class Audit:
    """Appends to the audit log; without a path it does nothing. Lines are written whole (O_APPEND)."""

    def __init__(self, path: str, *, sources: bool = False) -> None:
        self._file = os.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600) if path else -1
        self._sources = sources

    def write(self, action: str, principal: str, *, source: str = "", **facts: Any) -> None:
        """Note one action of ``principal``. ``source`` is kept only if the server was told to."""
        if self._file < 0:
            return
        line = {"at": time.time(), "action": action, "principal": principal, **facts}
        if self._sources and source:
            line["source"] = source
        os.write(self._file, (json.dumps(line, default=str) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
