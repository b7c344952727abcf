"""``drk lsp``: the language server, over standard input and output or TCP. Editors start it; people rarely do.

Standard output carries the protocol alone: whatever else would be written there goes to standard error. TCP listens on
this machine only and serves one editor: whoever may connect can start jobs in your name.
"""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from drk.assistant.console import GlobalOptions
from drk.assistant.errors import UsageError
from drk.lsp.server import create_server

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def lsp(
    ctx: typer.Context,
    tcp: Annotated[int | None, typer.Option(min=0, max=65535, help="Listen on this port instead of stdin.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; this machine only.")] = "127.0.0.1",
    stdio: Annotated[bool, typer.Option("--stdio", help="Speak over stdin and stdout (the default).")] = False,
) -> None:
    """Show hotspots and verified kernels in editors that speak the Language Server Protocol.

    docs/editors.md says how to set up VS Code, Neovim and Emacs. -v logs to stderr.
    """
    if tcp is not None and stdio:
        raise UsageError("--tcp and --stdio exclude each other")
    verbosity = ctx.obj.verbosity if isinstance(ctx.obj, GlobalOptions) else 0
    logging.basicConfig(level=[logging.WARNING, logging.INFO, logging.DEBUG][min(max(verbosity, 0), 2)])
    if tcp is None:
        serve_stdio()
    elif host in LOOPBACK:
        logging.getLogger("pygls.server").setLevel(logging.INFO)  # it says the port
        create_server().start_tcp(host, tcp)
    else:
        raise UsageError(f"drk lsp listens on this machine only, not on {host}", help="--host 127.0.0.1")


def serve_stdio() -> None:
    """Serve one editor over stdin and stdout until it leaves."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    create_server().start_io(stdout=out)
