"""Progress that the server starts itself, shown where the client shows it and never a reason to lose a job.

Every begun progress ends exactly once, with what came of it. A client may lack the capability, refuse the token, or not
answer: the job then runs without a bar, and its end is a message. Cancelling is the job table's business; here only the
token is known.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

if TYPE_CHECKING:
    from pygls.lsp.server import LanguageServer

ANSWER_LIMIT_S = 5.0


class JobProgress:
    """The progress of one job."""

    def __init__(self, server: LanguageServer) -> None:
        self._server = server
        self.token = str(uuid.uuid4())
        self.shown = False
        self._ended = False

    async def begin(self, title: str, message: str = "") -> None:
        """Ask the client for a bar and begin it; go on without one when it does not want to."""
        window = self._server.client_capabilities.window
        if window is None or not window.work_done_progress:
            return
        try:
            created = self._server.work_done_progress.create_async(self.token)
            await asyncio.wait_for(created, ANSWER_LIMIT_S)
        except (TimeoutError, JsonRpcException):
            return
        if self._ended:
            return
        self.shown = True
        value = lsp.WorkDoneProgressBegin(title=title, message=message, cancellable=True, percentage=0)
        self._server.work_done_progress.begin(self.token, value)

    def report(self, message: str, percentage: int | None = None) -> None:
        """Show where the job stands."""
        if self.shown and not self._ended:
            value = lsp.WorkDoneProgressReport(message=message, percentage=percentage, cancellable=True)
            self._server.work_done_progress.report(self.token, value)

    def end(self, message: str) -> None:
        """End the bar, once."""
        if self._ended:
            return
        self._ended = True
        if self.shown:
            self._server.work_done_progress.end(self.token, lsp.WorkDoneProgressEnd(message=message))
            self._server.work_done_progress.tokens.pop(self.token, None)
