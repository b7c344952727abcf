"""Names that editors see: the source of our diagnostics, kinds of code actions, commands.

They stand apart from the code behind them, so that the server can announce all of it before any of it is imported
(:mod:`drk.lsp.server`).
"""

from __future__ import annotations

SOURCE = "drk"
REWRITE = "refactor.rewrite.drk"
KINDS = (
    *(f"{REWRITE}.{name}" for name in ("fuse", "apply", "restore", "diff", "resume", "cancel")),
    "source.drk.profile",
    "source.drk.openReport",
    "quickfix",
)
COMMANDS = (
    "drk.optimize",
    "drk.resume",
    "drk.profile",
    "drk.cancel",
    "drk.apply",
    "drk.restore",
    "drk.diff",
    "drk.openReport",
    "drk.status",
)
