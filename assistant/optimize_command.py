"""``drk optimize TARGET``: find, verify and hand over faster kernels for a user's module or function.

Only wires: options become settings and a plan, events become lines, the answer becomes text or JSON and an exit code.
``--resume`` goes on with a run: ``drk optimize --resume`` (the latest) or ``drk optimize --resume RUN``. Ctrl-C, or a
terminate signal, ends the search and keeps the best so far; a second Ctrl-C ends at once, and the run can be resumed.

Left out: several targets in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.apply import apply_artefact
from drk.assistant.atomic_write import write_atomically
from drk.assistant.console import Console, Progress, console_from
from drk.assistant.errors import UsageError
from drk.assistant.events import Event
from drk.assistant.gym_address import open_gym
from drk.assistant.model_options import (
    BaseUrl,
    BuiltinFirst,
    FromFile,
    Hint,
    MaxCost,
    MaxGpuSeconds,
    ModelOption,
    model_settings,
    proposer_for,
    settings_from_json,
    settings_json,
)
from drk.assistant.optimize import Answer, Plan, begin_run, recorded_source
from drk.assistant.optimize import optimize as search_and_write
from drk.assistant.optimize_plan import as_plan, gym_settings, plan_for, profiled_plan
from drk.assistant.proposers import Proposer, opened
from drk.assistant.replay import read_recording
from drk.assistant.runs import ADVICE, LATEST, Run, open_run
from drk.assistant.search import Advice
from drk.assistant.settings import Settings, load_settings
from drk.assistant.summary import event_line, progress_text, summary
from drk.assistant.task_building import Autocast, Captured, InitTexts, InputTexts, IsFactory, TaskOptions, Trains
from drk.gym.schema import Candidate

SAMPLES = 4
_KEPT = ("device", "target", "sandbox", "seeds", "turns", "max_time_s", "model")


def optimize(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(help="model.py, model.py:Class, ...; with --resume a run too.")
    ] = None,
    inputs: InputTexts = None,
    init: InitTexts = None,
    mode: Annotated[Literal["eval", "train"], typer.Option(help="The module's mode.")] = "eval",
    train: Trains = False,
    factory: IsFactory = None,
    capture: Captured = "",
    autocast: Autocast = "",
    state_dict: Annotated[Path | None, typer.Option(help="Trained weights for the reference.")] = None,
    precision: Annotated[str | None, typer.Option(help="match, strict, tf32 or bf16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda:N or interpret.")] = None,
    arch: Annotated[str | None, typer.Option("--target", help="GPU to compile for without one, as sm_90.")] = None,
    turns: Annotated[int | None, typer.Option(help="Propose-judge turns at most.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, max=64, help="Candidates in each turn (default 4).")] = None,
    max_time: Annotated[float | None, typer.Option("--max-time", help="Budget in seconds.")] = None,
    model: Annotated[str | None, typer.Option(help="builtin, openai:NAME, a checkpoint's folder, replay:FILE.")] = None,
    base_url: BaseUrl = None,
    model_option: ModelOption = None,
    builtin_first: BuiltinFirst = None,
    hint: Hint = None,
    from_file: FromFile = None,
    max_cost: MaxCost = None,
    max_gpu_seconds: MaxGpuSeconds = None,
    seeds: Annotated[int | None, typer.Option(help="Secret input draws.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="strict, standard or basic.")] = None,
    runs_dir: Annotated[Path | None, typer.Option(help="Where run folders go (default .drk/runs).")] = None,
    write: Annotated[bool, typer.Option("--write", help="Apply the artefact to your file.")] = False,
    from_profile: Annotated[
        bool, typer.Option("--from-profile", help="What a profile calls hottest (TARGET: its id, or a target of it).")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run (the latest, or TARGET's).")] = False,
    gym: Annotated[str | None, typer.Option(help="Have the gym server at this URL judge (DRK_GYM_URL).")] = None,
    events: Annotated[Literal["jsonl"] | None, typer.Option(help="Stream events to stdout.")] = None,
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print the result.")] = "text",
    out_file: Annotated[Path | None, typer.Option("-o", "--output", help="Also write the result's JSON here.")] = None,
) -> None:
    """Find, verify and hand over faster Triton kernels for TARGET.

    Nothing in your sources changes without --write. Exits 0 when optimised or unmeasured (no GPU), 1 when nothing was
    won, 2 when nothing could be judged, 130 when interrupted (the best so far is kept).

    \b
    Examples:
      drk optimize model.py                     the file's module, inputs from example_inputs or get_inputs
      drk optimize model.py:Net --input 'x=f32[128,1024]' --init dim=1024
      drk optimize model.py --write             and apply the result to your file
      drk optimize --from-profile               the module that the latest drk profile calls hottest
      drk optimize --resume                     go on with the latest run
    """
    flags = _flags(precision, device, arch, turns, max_time, model, seeds, sandbox, runs_dir)
    asked: dict[str, Any] = {"inputs": inputs or [], "init": init or [], "mode": mode, "factory": factory}
    asked |= {"capture": capture, "autocast": autocast, "train": train}
    told = _Told(base_url, model_option or (), builtin_first, hint or (), from_file or (), max_cost, max_gpu_seconds)
    _run(
        ctx,
        _Request(
            target, flags, asked, state_dict, samples, from_profile, resume, write, events, output, out_file, told, gym
        ),
    )


@dataclass(frozen=True)
class _Told:
    """What the command line says about models, advice and money; null where it says nothing."""

    base_url: str | None
    options: Sequence[str]
    builtin_first: bool | None
    hints: Sequence[str]
    files: Sequence[Path]
    max_cost_usd: float | None
    max_gpu_s: float | None

    def resolve(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return what holds, as a run's configuration keeps it: ``kept`` is of an earlier start, and flags win."""
        known = settings_from_json(kept.get("model_settings", {}))
        settings = known
        if not kept or self.base_url or self.options or self.max_cost_usd is not None:
            cost = known.max_cost_usd if self.max_cost_usd is None else self.max_cost_usd
            settings = model_settings(self.base_url or known.base_url, self.options, cost, known=known)
        return {
            "model_settings": settings_json(settings),
            "builtin_first": kept.get("builtin_first") if self.builtin_first is None else self.builtin_first,
            "max_gpu_s": kept.get("max_gpu_s") if self.max_gpu_s is None else self.max_gpu_s,
            "hints": [*kept.get("hints", ()), *self.hints],
        }

    def candidates(self) -> tuple[Candidate, ...]:
        """Read the user's own candidates."""
        return tuple(one for path in self.files for one in read_recording(path))


@dataclass(frozen=True)
class _Request:
    """The command line: ``flags`` override settings, ``asked`` says how to read the target."""

    target: str | None
    flags: Mapping[str, Any]
    asked: Mapping[str, Any]
    state_dict: Path | None
    samples: int | None
    from_profile: bool
    resume: bool
    write: bool
    events: Literal["jsonl"] | None
    output: Literal["text", "json"]
    out_file: Path | None
    told: _Told
    gym: str | None


def _flags(*values: Any) -> dict[str, Any]:
    """Name the flags that override settings; null means not given."""
    names = ("precision", "device", "target", "turns", "max_time_s", "model", "seeds", "sandbox", "runs_dir")
    return dict(zip(names, values, strict=True))


def _run(ctx: typer.Context, request: _Request) -> None:
    settings = load_settings(request.flags).settings
    console = console_from(ctx, color=settings.color)
    if request.resume:
        given = {name: request.flags[name] for name in _KEPT}
        run, plan, settings = _resume(request.target, settings, given, request.samples)
        told = request.told.resolve({**run.config, **(run.advice or {})})
        run.write(ADVICE, (json.dumps(told, indent=1) + "\n").encode())
    elif request.target is None and not request.from_profile:
        raise UsageError("no target is named", help="drk optimize model.py, or model.py:Class")
    else:
        samples = request.samples or SAMPLES
        if request.from_profile:
            target, plan = profiled_plan(console, request.target, settings, samples)
        else:
            target = request.target or ""
            options = TaskOptions(target, **request.asked, state_dict=request.state_dict)
            plan = plan_for(options, settings, samples, tell=console.info)
        told = request.told.resolve({})
        _proposer(settings, told)  # what is wrong with it is told before anything is written
        config = {"target": target, **request.asked, "samples": samples, "settings": _kept(settings), **told}
        run = begin_run(plan, settings.runs_dir, config)
    plan = _with_told(plan, told, request.told.candidates())
    answer = _search(console, plan, run, settings, _proposer(settings, told), request)
    if request.out_file is not None:
        _write_output(request.out_file, answer)
    _print_answer(console, answer, request.events, request.output)
    if request.write:
        _write_to_source(console, answer)
    raise typer.Exit(answer.outcome.exit_code)


def _with_told(plan: Plan, told: Mapping[str, Any], candidates: tuple[Candidate, ...]) -> Plan:
    limits = {"max_cost_usd": told["model_settings"]["max_cost_usd"], "max_gpu_s": told["max_gpu_s"]}
    advice = Advice(tuple(told["hints"]), candidates)
    return replace(plan, budget=replace(plan.budget, **limits), advice=advice)


def _proposer(settings: Settings, told: Mapping[str, Any]) -> Proposer:
    model = settings_from_json(told["model_settings"])
    return proposer_for(settings.model, model, builtin_first=told["builtin_first"])


def _kept(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in _KEPT}


def _resume(
    target: str | None, settings: Settings, given: Mapping[str, Any], samples: int | None
) -> tuple[Run, Plan, Settings]:
    """Open the run and bring its own settings back; flags given now win."""
    run = open_run(settings.runs_dir, target or LATEST)
    config = run.config
    kept = config.get("settings", {})
    values = {name: kept[name] for name in _KEPT if name in kept and given[name] is None}
    settings = replace(settings, **values)
    samples = samples or config.get("samples", SAMPLES)
    plan = as_plan(run.task(), recorded_source(run), settings, samples, list(config.get("measure_words", [])))
    return run, plan, settings


def _search(
    console: Console,
    plan: Plan,
    run: Run,
    settings: Settings,
    proposer: Proposer,
    request: _Request,
) -> Answer:
    total = plan.budget.turns * plan.budget.samples

    async def work() -> Answer:
        stop = asyncio.Event()
        with stopping(stop, console), console.progress(f"optimising {plan.task.target}", total) as progress:
            reporter = _Reporter(console, progress, request.events)
            async with opened(proposer), open_gym(gym_settings(settings), request.gym) as gym:
                return await search_and_write(plan, run, gym, proposer, emit=reporter.tell, stop=stop)

    return asyncio.run(work())


@contextlib.contextmanager
def stopping(stop: asyncio.Event, console: Console) -> Iterator[None]:
    """Set ``stop`` on the first SIGINT or SIGTERM; the second one has its usual effect."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        console.info("stopping; the best so far is kept (again to end at once)")
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class _Reporter:
    """Turns events into lines on stderr, or into JSON lines on stdout."""

    def __init__(self, console: Console, progress: Progress, events: Literal["jsonl"] | None) -> None:
        self._console = console
        self._progress = progress
        self._events = events
        self._judged = 0

    def tell(self, event: Event) -> None:
        """Show one event."""
        if self._events == "jsonl":
            self._console.result_json(event, indent=None)
            return
        if event["event"] == "judging":
            self._progress.update(progress_text(event), done=self._judged)
        elif event["event"] == "judged":
            self._judged += 1
            self._progress.update(done=self._judged)
        line = event_line(event)
        if line:
            self._progress.event(line)


def _print_answer(console: Console, answer: Answer, events: str | None, output: str) -> None:
    if events == "jsonl":
        console.result_json({"schema_version": 1, "event": "result", "result": answer.result}, indent=None)
    elif output == "json":
        console.result_json(answer.result)
    else:
        console.result(summary(answer.outcome, answer.result, where=Path.cwd()))


def _write_output(path: Path, answer: Answer) -> None:
    try:
        write_atomically(path, (answer.run.folder / "result.json").read_bytes())
    except OSError as error:
        raise UsageError(f"cannot write {path}", cause=error.strerror or str(error)) from error


def _write_to_source(console: Console, answer: Answer) -> None:
    if not answer.result.get("artefact"):
        console.warn("nothing was written: there is no artefact")
        return
    applied = apply_artefact(answer.run)
    written = ", ".join(path.name for path in applied.written)
    console.info(f"changed {applied.file}, wrote {written}; undo: drk restore {shlex.quote(str(applied.file))}")
