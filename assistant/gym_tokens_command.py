"""``drk gym token create|list|revoke``: who may use a gym server on this machine, for what, and how much.

A token is printed once and kept only as a hash (:mod:`drk.gym.serve.tokens`). A running server notices changes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from drk.assistant.console import console_from, format_table
from drk.gym.serve.tokens import (
    DEFAULT_SCOPES,
    OPEN_LIMIT,
    PER_MINUTE,
    SCOPES,
    create,
    read_records,
    revoke,
)

app = typer.Typer(help="Make, list or revoke tokens for a gym server.", no_args_is_help=True, add_completion=False)

TokensFile = Annotated[Path | None, typer.Option("--tokens", help="Tokens file.")]
Format = Annotated[Literal["text", "json"], typer.Option("--format", help="How to print.")]


def default_tokens_file() -> Path:
    """Return the tokens file: below ``$XDG_CONFIG_HOME``, or the platform's place for settings."""
    if os.environ.get("XDG_CONFIG_HOME"):
        return Path(os.environ["XDG_CONFIG_HOME"]) / "drk" / "gym-tokens.json"
    import platformdirs

    return Path(platformdirs.user_config_dir("drk")) / "gym-tokens.json"


@app.command("create")
def create_command(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose token: the owner of its jobs.")],
    scope: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(SCOPES)}; repeatable. Default: evaluate, profile.")
    ] = None,
    open_limit: Annotated[int, typer.Option(min=1, help="Jobs that it may have open.")] = OPEN_LIMIT,
    per_minute: Annotated[int, typer.Option(min=1, help="Jobs that it may submit in a minute.")] = PER_MINUTE,
    days: Annotated[float | None, typer.Option(min=0, help="How long it is valid; default: for ever.")] = None,
    tokens: TokensFile = None,
    output: Format = "text",
) -> None:
    """Make a token and print it: it is shown only now."""
    console = console_from(ctx)
    text = create(
        tokens or default_tokens_file(),
        name,
        scope or DEFAULT_SCOPES,
        open_limit=open_limit,
        per_minute=per_minute,
        days=days,
    )
    if output == "json":
        console.result_json({"schema_version": 1, "name": name, "token": text})
    else:
        console.result(text)


@app.command("list")
def list_command(ctx: typer.Context, tokens: TokensFile = None, output: Format = "text") -> None:
    """List tokens, without their secrets."""
    console = console_from(ctx)
    records = read_records(tokens or default_tokens_file())
    if output == "json":
        rows = [{"name": r.name, "scopes": list(r.scopes), "expires_at": r.expires_at} for r in records]
        console.result_json({"schema_version": 1, "tokens": rows})
    elif records:
        cells = [
            [r.name, ",".join(r.scopes), str(r.open_limit), str(r.per_minute), _day(r.created_at), _day(r.expires_at)]
            for r in records
        ]
        header = ["name", "scopes", "open", "a minute", "created", "expires"]
        console.result(format_table(cells, header=header, right=[2, 3]))
    else:
        console.info("no tokens")


@app.command("revoke")
def revoke_command(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose token.")],
    tokens: TokensFile = None,
) -> None:
    """Make a token worthless."""
    revoke(tokens or default_tokens_file(), name)
    console_from(ctx).info(f"revoked {name}")


def _day(seconds: float | None) -> str:
    return "never" if seconds is None else time.strftime("%Y-%m-%d", time.gmtime(seconds))
