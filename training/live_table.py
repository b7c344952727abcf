"""How a person sees a run: a table that is redrawn on a terminal, a plain line a step elsewhere, nothing under ``-q``.

The table holds the last steps and the figures that matter most of those that a run has; above it stand the step, the
time since the start and, from the pace so far, the time left. What the libraries write meanwhile appears above it.
Steps are never lost: when the table closes, it stays with the last of them, and ``metrics.jsonl`` has them all.

Left out: curves (``drk train report``), and figures of the single process (one table, of the first process).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from drk.assistant.console import Console

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import ConsoleOptions
    from rich.table import Table

Report = Callable[[int, dict[str, float]], None]

PLAIN = (
    "loss", "reward/mean", "correct/turn_1", "keep/all", "grad_norm", "time/rollout_s", "step_time", "loss/held_out",
    "validation/correct/best", "validation/fast@1/best", "validation/left_out",
)  # fmt: skip
"""What a plain line shows, of what there is."""
COLUMNS = {
    "reward/mean": "reward", "correct/turn_1": "right, turn 1", "hack_rate": "hacked", "keep/all": "kept",
    "coverage/mean": "coverage", "mean_token_accuracy": "tokens right", "loss": "loss", "loss/held_out": "held out",
    "grad_norm": "gradient", "entropy": "entropy", "trajectories/fault_share": "lost", "step_time": "s a step",
    "validation/correct/best": "held out: right", "validation/fast@1/best": "held out: Fast@1",
}  # fmt: skip
"""Columns of the table by metric, in this order, where the shown steps have them."""
ROWS = 10


def plain_line(step: int, steps: int, numbers: Mapping[str, float]) -> str:
    """Return one step as a line; ``steps`` 0: nobody knows how many there will be."""
    shown = [f"{name} {numbers[name]:.4g}" for name in PLAIN if name in numbers]
    return f"step {step}{f'/{steps}' if steps else ''}  " + "  ".join(shown)


class StepTable:
    """The last steps, and what is said above them. ``clock`` gives seconds."""

    def __init__(self, steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._begun = clock()
        self._first = 0
        self._at = self._begun
        self._rows: dict[int, dict[str, float]] = {}

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the figures of a step; those of validation come later, for the same one."""
        if not self._rows:
            self._first, self._at = step, self._clock()
        self._rows[step] = {**self._rows.get(step, {}), **numbers}
        for old in sorted(self._rows)[:-ROWS]:
            del self._rows[old]

    def title(self) -> str:
        """Return what is known of the whole run."""
        spent = _duration(self._clock() - self._begun)
        if not self._rows:
            return f"{spent}, the first step is under way"
        step = max(self._rows)
        head = f"step {step}" + (f" of {self._steps}" if self._steps else "") + f", {spent}"
        # a resumed run begins at a later step, and the first one has the start in it
        if self._steps and step > self._first:
            left = (self._clock() - self._at) / (step - self._first) * (self._steps - step)
            head += f", about {_duration(left)} left" if step < self._steps else ", done"
        return head

    def columns(self, width: int) -> list[list[str]]:
        """Return columns of text, headers first: as many as fit into ``width``, and the step at least."""
        steps = sorted(self._rows)
        columns, used = [["step", *map(str, steps)]], 4
        for name, header in COLUMNS.items():
            if any(name in self._rows[step] for step in steps):
                column = [header, *(_figure(self._rows[step].get(name)) for step in steps)]
                used += max(map(len, column)) + 3
                if used > width:
                    break
                columns.append(column)
        return columns

    def __rich_console__(self, console: Terminal, options: ConsoleOptions) -> Iterator[str | Table]:
        """Give rich what it draws."""
        from rich import box
        from rich.table import Table

        yield self.title()
        if self._rows:
            columns = self.columns(options.max_width)
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="none")
            for column in columns:
                table.add_column(column[0], justify="right", no_wrap=True)
            for row in zip(*(column[1:] for column in columns), strict=True):
                table.add_row(*row)
            yield table


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _duration(seconds: float) -> str:
    whole = max(int(seconds), 0)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s" if minutes else f"{whole} s"


@contextlib.contextmanager
def step_reporter(console: Console, steps: int, *, main: bool = True) -> Iterator[Report]:
    """Give the function that tells a person about one step, for the time of a run.

    Args:
        console: where to speak; its terminal decides.
        steps: how many there will be, or 0.
        main: whether this process speaks; others of several say nothing.
    """
    if not main:
        yield _say_nothing
        return
    if not console.live:
        yield lambda step, numbers: console.info(plain_line(step, steps, numbers))
        return
    with _live(console, StepTable(steps)) as tell:
        yield tell


@contextlib.contextmanager
def _live(console: Console, table: StepTable) -> Iterator[Report]:
    from rich.console import Console as Terminal
    from rich.live import Live

    terminal = Terminal(file=console.stderr, force_terminal=True, no_color=True, highlight=False)
    with Live(table, console=terminal, auto_refresh=True, refresh_per_second=1, transient=False) as live:

        def tell(step: int, numbers: dict[str, float]) -> None:
            table.add(step, numbers)
            live.refresh()

        yield tell


def _say_nothing(step: int, numbers: dict[str, Any]) -> None:
    """Take a step's figures in a process that does not speak."""
