"""Bearer tokens: made by ``drk gym token``, kept as hashes in a file that the server rereads when it changes.

A token is ``drk_<id>_<secret>`` with 256 random bits in the secret, so one SHA-256 is hash enough. Look-up is by id,
the comparison takes the same time for any secret, and an unknown id is compared against a hash that nothing has.

Scopes: ``evaluate`` (submit, read and cancel one's own), ``profile`` (the same for profiles), ``read`` (read
everybody's results), ``metrics``, ``admin`` (all of these, drain, cancel anybody's). Quotas: open jobs, jobs a minute.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drk.gym.errors import GymError

SCOPES = ("evaluate", "profile", "read", "metrics", "admin")
DEFAULT_SCOPES = ("evaluate", "profile")
OPEN_LIMIT = 10_000
PER_MINUTE = 20_000
_NOTHING = "0" * 64


class TokenError(GymError):
    """A tokens file cannot be read, or a token cannot be made or found."""


@dataclass(frozen=True)
class Principal:
    """Who asks. ``name`` owns jobs; ``open_limit`` and ``per_minute`` are quotas."""

    name: str
    scopes: frozenset[str]
    open_limit: int = OPEN_LIMIT
    per_minute: int = PER_MINUTE

    def may(self, scope: str) -> bool:
        """Whether this scope was given (``admin`` holds all)."""
        return scope in self.scopes or "admin" in self.scopes


LOCAL = Principal("local", frozenset({"admin"}))
"""Whoever reaches a server that was started with ``--insecure-local``."""


@dataclass(frozen=True)
class TokenRecord:
    """What the file holds of one token."""

    id: str
    name: str
    sha256: str
    scopes: tuple[str, ...]
    open_limit: int = OPEN_LIMIT
    per_minute: int = PER_MINUTE
    created_at: float = 0.0
    expires_at: float | None = None


def read_records(path: Path) -> tuple[TokenRecord, ...]:
    """Return the tokens of a file; none when there is no file.

    Raises:
        TokenError: it cannot be read, or others than its owner may write it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o022:
                raise TokenError(f"others may write {path}", help=f"chmod 600 {path}")
            rows = json.load(file)["tokens"]
        return tuple(TokenRecord(**{**row, "scopes": tuple(row["scopes"])}) for row in rows)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenError(f"the tokens file {path} cannot be read: {error}") from error


def write_records(path: Path, records: Iterable[TokenRecord]) -> None:
    """Replace the file, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps({"tokens": [asdict(record) for record in records]}, indent=1)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tokens-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    Path(temporary).replace(path)


def create(
    path: Path,
    name: str,
    scopes: Iterable[str] = DEFAULT_SCOPES,
    *,
    open_limit: int = OPEN_LIMIT,
    per_minute: int = PER_MINUTE,
    days: float | None = None,
) -> str:
    """Add a token to the file and return its text, which is nowhere kept.

    Raises:
        TokenError: the name is taken or empty, or a scope does not exist.
    """
    records = read_records(path)
    chosen = tuple(dict.fromkeys(scopes))
    wrong = [scope for scope in chosen if scope not in SCOPES]
    if wrong or not chosen:
        raise TokenError(f"no such scope: {', '.join(wrong) or 'none given'}", help="scopes are: " + ", ".join(SCOPES))
    if not name or name == LOCAL.name or not name.replace("-", "").replace("_", "").isalnum() or len(name) > 64:
        raise TokenError(f"not a name for a token: {name!r}", help="use letters, digits, - and _")
    if any(record.name == name for record in records):
        raise TokenError(f"there is a token named {name!r}", help="revoke it first, or choose another name")
    identifier, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    now = time.time()
    record = TokenRecord(
        identifier, name, _digest(secret), chosen, open_limit, per_minute, now, now + days * 86400 if days else None
    )
    write_records(path, [*records, record])
    return f"drk_{identifier}_{secret}"


def revoke(path: Path, name: str) -> None:
    """Remove a token from the file.

    Raises:
        TokenError: there is none of that name.
    """
    records = read_records(path)
    kept = [record for record in records if record.name != name]
    if len(kept) == len(records):
        raise TokenError(f"there is no token named {name!r}")
    write_records(path, kept)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class TokenBook:
    """The tokens of a file, reread when it changes. A file that cannot be read lets nobody in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Any = None
        self._records: dict[str, TokenRecord] = {}

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        except OSError:
            seen = None
        if seen != self._seen or seen is None:
            try:
                self._records = {record.id: record for record in read_records(self._path)}
            except TokenError:
                self._records = {}
            self._seen = seen

    def check(self, token: str) -> Principal | None:
        """Return whose token this is, or null."""
        self._refresh()
        parts = token.split("_", 2)
        identifier, secret = (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "drk" else ("", token)
        record = self._records.get(identifier)
        same = hmac.compare_digest(_digest(secret), record.sha256 if record else _NOTHING)
        if record is None or not same or (record.expires_at is not None and record.expires_at < time.time()):
            return None
        return Principal(record.name, frozenset(record.scopes), record.open_limit, record.per_minute)
