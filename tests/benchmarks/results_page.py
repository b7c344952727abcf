"""Tables for benchmarks, and the pages under docs/results that are made from their JSON.

python tests/benchmarks/results_page.py docs/results/examples-h200.json > docs/results/examples-h200.md
"""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def stamp() -> dict[str, Any]:
    """Return when and how this was run."""
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "command": shlex.join(["python", *sys.argv])}


def cell_text(value: Any) -> str:
    """Format one value."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of rows that share their keys."""
    if not rows:
        return "(nothing)"
    heads = list(rows[0])
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(cell_text(row.get(head)) for head in heads) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def page(name: str, data: dict[str, Any]) -> str:
    """Return the page for one results file."""
    environment = data.get("environment") or {}
    told = ", ".join(f"{key} {value}" for key, value in environment.items() if isinstance(value, str | int | float))
    parts = [f"# {data.get('title') or name}", ""]
    parts += [f"Run on {data.get('date')}: `{data.get('command')}`", ""]
    if told:
        parts += [f"Environment: {told}.", ""]
    parts += [table(data["rows"]), ""]
    parts += [f"- {note}" for note in data.get("notes", [])]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    source = Path(sys.argv[1])
    sys.stdout.write(page(source.stem, json.loads(source.read_text())))
