"""Many calls one after the other, each on fresh inputs: what a buffer that is handed out in turns does not survive."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from drk.gym.runner import execute

if TYPE_CHECKING:
    from drk.gym.runner.session import Session

CALLS, LIMIT_S = 12, 0.3


def call_often(session: Session, key: int) -> None:
    """Call the module on inputs drawn from ``key`` and the keys after it: :data:`CALLS` times, or for a moment."""
    start = time.monotonic()
    for index in range(CALLS):
        session.before_run()
        inputs = session.draw(key + index)
        execute.call(session.built, session.snapshot, inputs, session.options({"key": key + index}))
        if time.monotonic() - start > LIMIT_S:
            return
