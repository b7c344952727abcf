"""``drk train report``: a run's curves as one self-contained HTML file, drawn as inline SVG, offline, without scripts.

Reads ``metrics.jsonl`` and, where the run validated, ``validation.jsonl``. A curve that the run has no figures for is
left out; a null breaks the line. The figures are those of training: rewards on training tasks with sampled answers, and
one sample a held-out task; no benchmark. Figures and settings are escaped.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drk.training.errors import TrainingError

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 200, 56, 26
COLOURS = ("#1f5fa8", "#b3541e", "#2e7d4f", "#7a3f9d", "#555555")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Chart:
    """A title, and the metrics whose names begin so (or are so), one line each."""

    title: str
    names: tuple[str, ...]
    note: str = ""


CHARTS = (
    Chart("Reward by turn", ("reward/turn_", "reward/mean"), "on training tasks, sampled answers"),
    Chart("Correct and honest, by turn", ("correct/turn_",)),
    Chart("Fast@1 by turn", ("fast@1/turn_",), "over the reward's baseline"),
    Chart("Fast@1.2 by turn", ("fast@1.2/turn_",)),
    Chart("Kept rows", ("keep/mrs", "keep/prs", "keep/all"), "shares of live rows"),
    Chart("Hack rate", ("hack_rate",)),
    Chart("Coverage", ("coverage/mean",), "measured share of device time in own kernels"),
    Chart("Sampler against trainer", ("mismatch/abs_delta",), "mean absolute difference of log-probabilities"),
    Chart("Entropy", ("entropy",), "nats a token"),
    Chart("Gradient norm", ("grad_norm",)),
    Chart("Loss", ("loss",)),
    Chart("Trajectories left out", ("trajectories/",), "shares, by reason"),
    Chart("Seconds a step", ("step_time", "time/rollout_s", "time/sampling_s")),
)
HELD_OUT_CHARTS = (
    Chart("Held out: correct", ("correct/",), "one sample a task, at each turn and best of history"),
    Chart("Held out: Fast@1", ("fast@1/",)),
    Chart("Held out: Fast@1.2", ("fast@1.2/",)),
    Chart("Held out: reward by turn", ("reward/turn_",)),
    Chart("Held out: hack rate", ("hack_rate/",)),
    Chart("Held out: loss", ("loss/held_out",), "of packed training"),
)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.

    Raises:
        TrainingError: there are none.
    """
    path = folder / "metrics.jsonl"
    rows = _read_lines(path)
    if not rows:
        raise TrainingError(f"{path} is empty: no step was made yet")
    return rows


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise TrainingError(f"nothing to report on in {path}: {error}", help="name a run's folder") from error


def read_validation(folder: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a run's validations; where there are none, those metrics that measured a held-out loss.

    Raises:
        TrainingError: a line is broken.
    """
    path = folder / "validation.jsonl"
    if path.is_file():
        return _read_lines(path)
    return [row for row in rows if "loss/held_out" in row]


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run's folder and return its path.

    Raises:
        TrainingError: there are no metrics.
    """
    path, config, rows = folder / "report.html", folder / "config.toml", read_metrics(folder)
    settings = config.read_text(encoding="utf-8") if config.is_file() else ""
    path.write_text(render_report(folder.name, rows, settings, read_validation(folder, rows)), encoding="utf-8")
    return path


def render_report(
    name: str, rows: Sequence[dict[str, Any]], config: str = "", held_out: Sequence[dict[str, Any]] = ()
) -> str:
    """Return the page; ``held_out`` are the validations' lines."""
    drawn = [_chart(chart, rows) for chart in CHARTS] + [_chart(chart, held_out) for chart in HELD_OUT_CHARTS]
    charts = "\n".join(text for text in drawn if text)
    last = rows[-1]
    facts = ", ".join(
        f"{title} {last[key]:.4g}"
        for title, key in (("reward", "reward/mean"), ("loss", "loss"), ("gradient norm", "grad_norm"))
        if isinstance(last.get(key), (int, float))
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}: training report</title>
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width">
<style>body{{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:64em;padding:0 1em;color:#222}}
figure{{display:inline-block;margin:0 1em 1.5em 0;vertical-align:top}}figcaption{{font-weight:600}}
small{{color:#555;font-weight:400}}pre{{background:#f5f5f5;padding:1em;overflow:auto}}</style></head><body>
<h1>{html.escape(name)}</h1>
<p>{len(rows)} steps, to step {int(last.get("step", len(rows)))}. At the last step: {html.escape(facts)}.
Figures are of training tasks and sampled answers; they are no benchmark.</p>
{charts}
<details><summary>Configuration</summary><pre>{html.escape(config)}</pre></details>
</body></html>
"""


def _chart(chart: Chart, rows: Sequence[dict[str, Any]]) -> str:
    keys = {key for row in rows for key, value in row.items() if isinstance(value, (int, float))}
    chosen = sorted(
        key for key in keys if any(key == name or (name[-1] in "_/" and key.startswith(name)) for name in chart.names)
    )
    if not chosen:
        return ""
    values = [float(row[key]) for row in rows for key in chosen if isinstance(row.get(key), (int, float))]
    low, high = min(values), max(values)
    if low >= 0 and low < high / 2:
        low = 0.0
    high = high if high > low else low + 1.0
    steps = [int(row.get("step", place)) for place, row in enumerate(rows, 1)]
    lines = [_line(rows, steps, key, (low, high), COLOURS[i % len(COLOURS)]) for i, key in enumerate(chosen)]
    legend = " ".join(
        f'<span style="color:{COLOURS[i % len(COLOURS)]}">&#9632; {html.escape(key.rpartition("/")[2])}</span>'
        for i, key in enumerate(chosen)
    )
    note = f" <small>{html.escape(chart.note)}</small>" if chart.note else ""
    return (
        f"<figure><figcaption>{html.escape(chart.title)}{note}</figcaption>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{html.escape(chart.title)}">'
        f"{_axes(low, high, steps)}{''.join(lines)}</svg><br><small>{legend}</small></figure>"
    )


def _axes(low: float, high: float, steps: Sequence[int]) -> str:
    floor = HEIGHT - BOTTOM
    return (
        f'<path d="M{LEFT} 8V{floor}H{WIDTH - 8}" fill="none" stroke="#999"/>'
        f'<text x="{LEFT - 6}" y="16" text-anchor="end" font-size="12">{high:.3g}</text>'
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end" font-size="12">{low:.3g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 8}" font-size="12">step {steps[0]}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end" font-size="12">{steps[-1]}</text>'
    )


def _line(
    rows: Sequence[dict[str, Any]], steps: Sequence[int], key: str, span: tuple[float, float], colour: str
) -> str:
    """Return one curve; steps without a figure break it, and a lone point is drawn as a dot."""
    low, high = span
    wide, floor = WIDTH - 8 - LEFT, HEIGHT - BOTTOM
    path, pen = [], "M"
    for step, row in zip(steps, rows, strict=True):
        value = row.get(key)
        if not isinstance(value, (int, float)):
            pen = "M"
            continue
        x = LEFT + wide * (step - steps[0]) / max(steps[-1] - steps[0], 1)
        y = floor - (floor - 8) * (value - low) / (high - low)
        path.append(f"{pen}{x:.1f} {y:.1f}" + ("h.1" if pen == "M" else ""))
        pen = "L"
    return f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="2" stroke-linecap="round"/>'
