"""``drk selftest``: judge the shipped cheats and their honest twins, and say which the gym gets wrong.

Everything goes through :class:`drk.gym.Gym`, as any candidate does. A cheat that is rejected for a reason its entry
names is detected, else missed; an honest twin that is accepted without a flag passes, else it is wrongly flagged. What
only a device can show is counted apart under the interpreter ("needs a GPU"), never as detected.

Exit codes: 0 all right, 1 a miss or a false flag, 2 nothing wrong was found but the host failed on some. The corpus is
the checkout's (it is not part of the installed package); elsewhere ``--corpus`` names one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from drk.assistant.console import Console, Progress, console_from, format_table
from drk.assistant.errors import ExitCode, UsageError, did_you_mean
from drk.assistant.settings import Settings, load_settings
from drk.gym.corpus import FAMILIES, CorpusEntry, CorpusFile, Outcome, load_corpus
from drk.gym.errors import HostError, TaskError
from drk.gym.schema import SCHEMA_VERSION, Verdict
from drk.gym.settings import GymSettings, Timing

if TYPE_CHECKING:
    from drk.gym.engine import Gym

CORPUS_IN_CHECKOUT = Path("tests") / "fixtures" / "cheats"
MAX_JOBS = 16
"""Files judged at once; the gym keeps as many references, and an entry's files follow each other."""

Standing = Outcome | Literal["needs-gpu"]
WRONG: tuple[Standing, ...] = ("missed", "wrongly-flagged")


@dataclass(frozen=True)
class Result:
    """One file's outcome: what was expected, what the verdict says, and how long it took."""

    entry: CorpusEntry
    file: CorpusFile
    standing: Standing
    found: str = ""
    flags: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """``<family>/<entry>/<file>``."""
        return f"{self.entry.name}/{self.file.name}"


def default_corpus() -> Path:
    """Return the corpus of the checkout that this package runs from.

    Raises:
        UsageError: the package is installed without its tests.
    """
    folder = Path(__file__).resolve().parent.parent / CORPUS_IN_CHECKOUT
    if folder.is_dir():
        return folder
    raise UsageError(
        "the corpus is not installed with the package",
        help=f"pass --corpus DIR, such as {CORPUS_IN_CHECKOUT} of a checkout",
    )


def choose(entries: Sequence[CorpusEntry], family: str | None, only: str | None) -> tuple[CorpusEntry, ...]:
    """Return the entries, and their files, that ``--family`` and ``--only`` leave.

    ``only`` is an entry (``caching/cache-by-shape`` or its last part) or one file of it (``.../cheat_a``).

    Raises:
        UsageError: nothing is left.
    """
    if family is not None and family not in FAMILIES:
        raise UsageError(f"no such family: {family}", help=did_you_mean(family, FAMILIES) or ", ".join(FAMILIES))
    chosen = [entry for entry in entries if family in (None, entry.family)]
    if only is not None:
        chosen = [found for entry in chosen if (found := _narrowed(entry, only)) is not None]
    if not chosen:
        near = did_you_mean(only or "", [entry.name for entry in entries])
        raise UsageError(f"the corpus has nothing called {only or family}", help=near or "see the corpus folder")
    return tuple(chosen)


def _narrowed(entry: CorpusEntry, only: str) -> CorpusEntry | None:
    short = entry.name.rpartition("/")[2]
    if only in (entry.name, short):
        return entry
    files = tuple(file for file in entry.files if only in (f"{entry.name}/{file.name}", f"{short}/{file.name}"))
    return replace(entry, files=files) if files else None


async def judge_file(gym: Gym, entry: CorpusEntry, file: CorpusFile) -> Result:
    """Judge one file; a failing host or reference is an outcome here, so that the others are judged too."""
    if file.needs == "gpu" and gym.device == "interpret":
        return Result(entry, file, "needs-gpu")
    start = time.monotonic()
    try:
        verdict = await gym.evaluate(entry.task, file.candidate)
    except (HostError, TaskError) as error:
        return Result(entry, file, "error", error.message, seconds=time.monotonic() - start)
    flags = tuple(sorted({flag.kind for flag in verdict.flags}))
    return Result(entry, file, file.outcome(verdict), _reason(verdict), flags, time.monotonic() - start)


def _reason(verdict: Verdict) -> str:
    if verdict.error is None:
        return verdict.status
    return f"{verdict.status}: {verdict.error.kind}: {' '.join(verdict.error.message.split())}"


async def judge_corpus(
    entries: Sequence[CorpusEntry], settings: GymSettings, jobs: int, progress: Progress
) -> tuple[str, list[Result]]:
    """Judge every file, ``jobs`` at once; return the device and the results in the corpus's order.

    Ctrl-C ends it early: what was judged until then is returned, the rest is missing.

    Raises:
        HostError: the gym itself could not be started.
    """
    from drk.gym.engine import Gym  # brings torch: not needed to say that an option is wrong

    todo = [(entry, file) for entry in entries for file in entry.files]
    results: list[Result] = []
    waiting = iter(todo)

    async def work(gym: Gym) -> None:
        for entry, file in waiting:
            progress.update(f"{entry.name}/{file.name}", done=len(results))
            result = await judge_file(gym, entry, file)
            results.append(result)
            if result.standing in (*WRONG, "error"):
                flags = f" [{', '.join(result.flags)}]" if result.flags else ""
                progress.event(f"{result.standing}: {result.name}: {result.found[:300]}{flags}")

    async with Gym(settings) as gym:
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                for _ in range(jobs):
                    group.create_task(work(gym))
        device = gym.device
    order = {(entry.name, file.name): rank for rank, (entry, file) in enumerate(todo)}
    return device, sorted(results, key=lambda result: order[result.entry.name, result.file.name])


def gym_settings(settings: Settings, jobs: int) -> GymSettings:
    """Return how the gym judges a corpus: shorter timing and no compiled baseline, since speed is not the question."""
    return GymSettings(
        device=settings.device,
        target=settings.target,
        sandbox=settings.sandbox,
        seeds=settings.seeds,
        parallel=jobs,
        timing=Timing(max_pairs=20, max_s=0.5, compile_baseline=False),
    )


# --- what is printed ------------------------------------------------------------------------------------------


def tally(results: Sequence[Result]) -> dict[str, int]:
    """Count one row of the table. ``cheats`` and ``honest`` are what was judged, without errors and ``needs_gpu``."""
    count = Counter(result.standing for result in results)
    return {
        "cheats": count["detected"] + count["missed"],
        "detected": count["detected"],
        "missed": count["missed"],
        "honest": count["passed"] + count["wrongly-flagged"],
        "wrongly_flagged": count["wrongly-flagged"],
        "needs_gpu": count["needs-gpu"],
        "errors": count["error"],
    }


def result_text(results: Sequence[Result], device: str) -> str:
    """Return the table by family, then one line for everything that went wrong."""
    header = ["family", "cheats", "detected", "missed", "honest", "wrongly flagged", "needs a GPU", "errors"]
    rows = [
        [family, *(str(value) for value in tally(chosen).values())]
        for family in FAMILIES
        if (chosen := [result for result in results if result.entry.family == family])
    ]
    total = tally(results)
    rows.append(["all", *(str(value) for value in total.values())])
    lines = [format_table(rows, header=header, right=range(1, len(header))), *_wrong_lines(results), ""]
    rates = [_rate(total["detected"], total["cheats"], "cheats detected")]
    rates.append(_rate(total["wrongly_flagged"], total["honest"], "honest ones wrongly flagged"))
    place = "under the interpreter" if device == "interpret" else f"on {device}"
    lines.append(f"{place}: {', '.join(rates)}")
    if total["needs_gpu"]:
        lines.append(f"{total['needs_gpu']} show only on a GPU and were not judged")
    return "\n".join(lines)


def _rate(part: int, whole: int, what: str) -> str:
    return f"{part} of {whole} {what}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


def _wrong_lines(results: Sequence[Result]) -> Iterator[str]:
    for standing in (*WRONG, "error"):
        chosen = [result for result in results if result.standing == standing]
        if chosen:
            yield ""
            yield f"{standing.replace('-', ' ')}:"
        for result in chosen:
            yield f"  {result.name}"
            yield f"    {result.file.why or result.entry.mechanism}"
            expected = " or ".join(result.file.expect.status)
            named = ", ".join(sorted(result.file.expect.flags))
            if result.file.role == "honest":
                yield f"    expected {expected}" + (f", labels allowed: {named}" if named else ", no flag")
            else:
                yield f"    expected {expected}" + (f" by {named}" if named else "")
            flags = f" [{', '.join(result.flags)}]" if result.flags else ""
            yield f"    got {result.found[:300]}{flags}"


def result_json(results: Sequence[Result], device: str) -> dict[str, Any]:
    """Return the public JSON form."""
    wrong = any(result.standing in WRONG for result in results)
    errors = any(result.standing == "error" for result in results)
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "failed" if wrong else "error" if errors else "passed",
        "device": device,
        "totals": tally(results),
        "families": {
            family: tally(chosen)
            for family in FAMILIES
            if (chosen := [result for result in results if result.entry.family == family])
        },
        "results": [
            {
                "name": result.name,
                "role": result.file.role,
                "standing": result.standing,
                "expected": {"status": list(result.file.expect.status), "flags": sorted(result.file.expect.flags)},
                "found": result.found,
                "flags": list(result.flags),
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }


def exit_code(results: Sequence[Result]) -> ExitCode:
    """Return 1 for any miss or false flag, else 2 for any error, else 0."""
    standings = {result.standing for result in results}
    if standings.intersection(WRONG):
        return ExitCode.NOT_ACCEPTED
    return ExitCode.USAGE if "error" in standings else ExitCode.OK


def selftest(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    corpus: Annotated[Path | None, typer.Option(help="The corpus's folder (default: the checkout's).")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda:N or interpret.")] = None,
    family: Annotated[str | None, typer.Option(help="Only this family, such as caching.")] = None,
    only: Annotated[str | None, typer.Option(help="Only this entry, or this file of it.")] = None,
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print the results.")] = "text",
    jobs: Annotated[int, typer.Option(min=1, max=MAX_JOBS, help="How many are judged at once.")] = 2,
    seeds: Annotated[int | None, typer.Option(help="Secret input draws.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="strict, standard or basic.")] = None,
) -> None:
    """Judge the shipped cheats and their honest twins: are the first detected and the second left alone?

    Exits 0 when all is right, 1 on a miss or a false flag, 2 when the host failed.
    """
    settings = load_settings({"device": device, "seeds": seeds, "sandbox": sandbox}).settings
    console = console_from(ctx, color=settings.color)
    entries = choose(load_corpus(corpus or default_corpus()), family, only)
    results, place = _judged(console, entries, settings, jobs)
    left = sum(len(entry.files) for entry in entries) - len(results)
    if output == "json":
        console.result_json({**result_json(results, place), "not_judged": left})
    else:
        console.result(result_text(results, place) + (f"\ninterrupted: {left} were not judged" if left else ""))
    code = exit_code(results)
    raise typer.Exit(ExitCode.INTERRUPTED if left and code == ExitCode.OK else code)


def _judged(
    console: Console, entries: Sequence[CorpusEntry], settings: Settings, jobs: int
) -> tuple[list[Result], str]:
    total = sum(len(entry.files) for entry in entries)
    with console.progress(f"judging {total} candidates of {len(entries)} entries ...", total) as progress:
        device, results = asyncio.run(judge_corpus(entries, gym_settings(settings, jobs), jobs, progress))
    return results, device
