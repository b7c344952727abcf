"""The API process: ``python -m drk.gym.serve.server``. Settings come from its parent, by environment.

Uvicorn with its pure-Python HTTP/1.1 parser (the deadline for headers is built on it), one event loop. Start several
processes behind a balancer for more; they share everything through Redis.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys

import uvicorn
from fastapi import FastAPI

from drk.gym.sandbox import protect_process
from drk.gym.sandbox.syscalls import PR_SET_PDEATHSIG, prctl
from drk.gym.serve.api import create_app
from drk.gym.serve.limits import protocol_with_deadline
from drk.gym.serve.records import configure_logging
from drk.gym.serve.settings import SWITCH_S, ServeSettings, take_from_environment

SHUTDOWN_S = 5
BACKLOG = 4096


def main() -> None:
    """Entry point of the process."""
    settings = take_from_environment(ServeSettings)
    protect_process()
    if settings.parent:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != settings.parent:
            return
    configure_logging("api")
    sys.setswitchinterval(SWITCH_S)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection for each waiting request
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol_with_deadline(settings.header_s),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    Server(config, app).run()


class Server(uvicorn.Server):
    """Uvicorn's server, but requests that wait for a job are answered when it ends: with the job, not its result."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wake who waits, then end as usual."""
        self._app.state.desk.feed.close()
        await super().shutdown(sockets)


if __name__ == "__main__":
    main()
