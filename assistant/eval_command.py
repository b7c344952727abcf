"""``drk eval WHERE``: how often, and by how much, a proposer makes problems faster (Fast@p), with its protocol.

WHERE is a folder of files in KernelBench form (or of anything that ``drk optimize`` takes), or a list with one target a
line. The evaluation's folder holds ``config.json``, one run for each sample, ``report.json`` and ``report.html``;
``--resume`` goes on with it. Builtin makes no first turn here unless asked to: a model is to be measured alone.

Builtin's candidates hardly depend on one another's verdicts: :data:`drk.assistant.evaluation.CANDIDATES` of them are
judged together in each turn. ``--max-cost`` is shared out evenly among all samples, so that it holds whatever runs in
parallel; what one sample leaves is not given to another. Exit codes: 0 complete, 2 where samples could not be judged,
130 when interrupted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.atomic_write import write_atomically
from drk.assistant.console import Console, console_from
from drk.assistant.errors import ExitCode, UsageError
from drk.assistant.eval_answers import answer_of
from drk.assistant.eval_report import report, report_html, report_text
from drk.assistant.evaluation import (
    CANDIDATES,
    SUBSET,
    EvalPlan,
    EvalResult,
    SampleResult,
    evaluate,
    find_problems,
)
from drk.assistant.gym_address import open_gym
from drk.assistant.model_options import (
    BaseUrl,
    BuiltinFirst,
    MaxCost,
    ModelOption,
    model_settings,
    proposer_for,
    settings_from_json,
    settings_json,
)
from drk.assistant.optimize_command import stopping
from drk.assistant.proposers import Proposer, opened
from drk.assistant.runs import ignore_folder
from drk.assistant.settings import Settings, load_settings
from drk.gym.settings import GymSettings, Timing

_FLAGS = ("model", "turns", "device", "target", "precision", "tolerance", "max_time_s", "seeds", "sandbox")
"""Settings that an evaluation keeps, in the order of its options."""
Output = Literal["text", "json"]


def evaluate_command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    where: Annotated[Path, typer.Argument(help="A folder of problems, or a list with one target a line.")],
    proposer: Annotated[
        str | None, typer.Option(help="builtin, openai:NAME, a checkpoint's folder, replay:PATH.")
    ] = None,
    base_url: BaseUrl = None,
    model_option: ModelOption = None,
    builtin_first: BuiltinFirst = None,
    max_cost: MaxCost = None,
    turns: Annotated[int | None, typer.Option(help="Turns of each sample.")] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, max=64, help="Candidates of each turn, judged together (builtin 4, else 1).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=256, help="Independent samples of each problem.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Samples under way at once.")] = 4,
    limit: Annotated[int | None, typer.Option(min=1, help="So many problems, evenly spread, always the same.")] = None,
    subset: Annotated[bool, typer.Option("--subset", help=f"The fixed subset: --limit {SUBSET}.")] = False,
    device: Annotated[str | None, typer.Option(help="auto, cuda:N or interpret.")] = None,
    arch: Annotated[str | None, typer.Option("--target", help="GPU to compile for without one, as sm_90.")] = None,
    precision: Annotated[str | None, typer.Option(help="match, strict, tf32 or bf16.")] = None,
    tolerance: Annotated[str | None, typer.Option(help="float64, or paper for published tables.")] = None,
    max_time: Annotated[float | None, typer.Option("--max-time", help="Budget of each sample in seconds.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Secret input draws.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="strict, standard or basic.")] = None,
    gym: Annotated[str | None, typer.Option(help="Have the gym server at this URL judge (DRK_GYM_URL).")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The evaluation's folder (default .drk/evals/TIME).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the evaluation in --out, or the latest.")
    ] = False,
    output: Annotated[Output, typer.Option("--format", help="How to print the report.")] = "text",
) -> None:
    """Measure a proposer on many problems: correct, Fast@p, hacks, by turn.

    \b
    Examples:
      drk eval problems/ --proposer builtin --turns 4 --workers 8
      drk eval problems/ --proposer openai:NAME --base-url http://127.0.0.1:8000/v1 --turns 3 --samples 8
    """
    given = (proposer, turns, device, arch, precision, tolerance, max_time, seeds, sandbox)
    settings = load_settings(dict(zip(_FLAGS, given, strict=True))).settings
    asked = {
        "where": str(where.resolve()),
        "samples": samples,
        "candidates": candidates,
        "limit": SUBSET if subset else limit,
        "builtin_first": bool(builtin_first),
        "model_settings": settings_json(model_settings(base_url, model_option or (), max_cost)),
        **{name: getattr(settings, name) for name in _FLAGS},
    }
    place = _place(settings, folder, asked, resume=resume)
    request = _Request(place, json.loads((place / "config.json").read_text()), workers, output, gym)
    raise typer.Exit(_evaluate(console_from(ctx, color=settings.color), request, settings))


@dataclass(frozen=True)
class _Request:
    folder: Path
    config: Mapping[str, Any]
    workers: int
    output: Output
    gym: str | None = None


def _place(settings: Settings, folder: Path | None, asked: Mapping[str, Any], *, resume: bool) -> Path:
    """Make the evaluation's folder with its configuration, or find the one to go on with.

    Raises:
        UsageError: there is nothing to resume, or the folder is in use, or problems or proposer differ.
    """
    evals = settings.runs_dir.parent / "evals"
    if resume:
        found = [folder] if folder else sorted((one.parent for one in evals.glob("*/config.json")), reverse=True)[:1]
        if not found or not (found[0] / "config.json").is_file():
            raise UsageError(f"there is no evaluation in {folder or evals}", help="drk eval WHERE begins one")
        kept = json.loads((found[0] / "config.json").read_text())
        for name in ("where", "model"):
            if kept[name] != asked[name] and not (name == "model" and asked[name] == Settings().model):
                raise UsageError(f"{found[0]} is an evaluation of {kept[name]}, not of {asked[name]}")
        return found[0]
    place = folder or evals / datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    if (place / "config.json").exists():
        raise UsageError(f"{place} holds an evaluation already", help="--resume goes on with it; or another --out")
    find_problems(Path(asked["where"]), limit=1)  # what is wrong is told before anything is written
    proposer_for(asked["model"], settings_from_json(asked["model_settings"]), builtin_first=asked["builtin_first"])
    if folder is None:
        ignore_folder(evals.parent)
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / "config.json", (json.dumps(asked, indent=1, default=str) + "\n").encode())
    return place


def _evaluate(console: Console, request: _Request, settings: Settings) -> int:
    """Run the evaluation as its configuration says, write and print the report, and return the exit code."""
    config = request.config
    settings = replace(settings, **{name: config[name] for name in _FLAGS})
    plan = _plan(config, settings, request.workers)
    model = settings_from_json(config["model_settings"])
    model = replace(model, max_cost_usd=plan.max_cost_usd)
    proposer = proposer_for(settings.model, model, builtin_first=config["builtin_first"])
    # An evaluation that began before there was the option has one candidate a turn.
    candidates = config.get("candidates", 1) or (CANDIDATES if proposer.ordered else 1)
    gym_settings = GymSettings(
        device=settings.device,
        target=settings.target,
        sandbox=settings.sandbox,
        seeds=settings.seeds,
        parallel=max(request.workers, candidates),
        timing=Timing(best_only=candidates > 1),
    )

    async def work() -> tuple[EvalPlan, EvalResult, dict[str, Any]]:
        stop, total = asyncio.Event(), len(plan.problems) * plan.samples
        with stopping(stop, console), console.progress("evaluating", total) as progress:
            done = 0

            def tell(sample: SampleResult) -> None:
                nonlocal done
                done += 1
                progress.update(f"{sample.problem} sample {sample.sample + 1}", done=done)
                progress.event(_line(sample))

            async with opened(proposer), open_gym(gym_settings, request.gym) as gym:
                fitted = replace(plan, candidates=candidates, problems_at_once=gym.sessions_at_once)
                found = await evaluate(fitted, request.folder, gym, proposer, tell=tell, stop=stop)
                return fitted, found, gym.device_facts

    plan, result, facts = asyncio.run(work())
    data = report(plan, result, _protocol(settings, proposer, facts), measured=facts.get("gpu") is not None)
    write_atomically(request.folder / "report.json", (json.dumps(data, indent=1) + "\n").encode())
    write_atomically(request.folder / "report.html", report_html(data).encode())
    if request.output == "json":
        console.result_json(data)
    else:
        console.result(report_text(data))
    console.info(f"report: {request.folder / 'report.html'}")
    if result.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if data["status"] == "complete" else ExitCode.USAGE


def _plan(config: Mapping[str, Any], settings: Settings, workers: int) -> EvalPlan:
    tasks = {"precision": settings.precision, "tolerance": settings.tolerance}
    problems, unusable = find_problems(Path(config["where"]), limit=config["limit"], settings=tasks)
    if not problems:
        name, reason = next(iter(unusable.items()))
        raise UsageError(f"none of the {len(unusable)} problems can be used", cause=f"{name}: {reason}")
    cost = config["model_settings"]["max_cost_usd"]
    return EvalPlan(
        problems,
        unusable,
        turns=settings.turns,
        samples=config["samples"],
        workers=workers,
        max_time_s=settings.max_time_s,
        max_cost_usd=None if cost is None else cost / (len(problems) * config["samples"]),
        target=settings.target,
        judging={"seeds": settings.seeds, "sandbox": settings.sandbox, "target": settings.target},
        cache_dir=settings.cache_dir,
    )


def _protocol(settings: Settings, proposer: Proposer, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "proposer": proposer.name,
        "endpoint": getattr(proposer, "endpoint", None),
        "device": facts.get("gpu") or "none (interpreter)",
        "precision": settings.precision,
        "tolerance": settings.tolerance,
        "baselines": "eager and torch.compile at equal precision",
        **{name: _version(name) for name in ("drk", "torch", "triton")},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _line(sample: SampleResult) -> str:
    """Return the line that stays for a sample that is done."""
    if sample.fault:
        return f"{sample.problem}  not judged: {sample.fault}"
    if not sample.turns:
        return f"{sample.problem}  nothing proposed"
    answer = answer_of(sample)
    taken = "" if sample.pace is None else f"  ({sample.pace.end_s:.0f} s)"
    if len(sample.turns) > 1 or answer.best is not None:
        reason = answer.reason if answer.best is not None else f"none of {len(sample.turns)} candidates was accepted"
        return f"{sample.problem}  {answer.status}: {reason}{taken}"
    return f"{sample.problem}  {sample.turns[0].verdict.status}{taken}"
