"""``drk data tasks|trajectories|export|pairs|tokenizer|leaks``: task sets, judged demonstrations, pairs, leakage.

Files are JSONL (:mod:`drk.training.dataset`). Generation is seeded: the same command writes the same tasks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.console import console_from
from drk.assistant.errors import ExitCode
from drk.assistant.gym_address import open_gym
from drk.assistant.model_options import BaseUrl, MaxCost, ModelOption, model_settings
from drk.assistant.proposers import make_proposer, opened
from drk.training.train_command import print_facts, training_errors

app = typer.Typer(help="Make and check training data.", no_args_is_help=True, add_completion=False)

Format = Annotated[Literal["text", "json"], typer.Option("--format", help="How to print the result.")]
Out = Annotated[Path, typer.Option("--out", help="The JSONL file to write.")]


@app.command("tasks")
def tasks(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    out: Out,
    count: Annotated[int, typer.Option(min=1, help="How many tasks.")] = 256,
    family: Annotated[list[str] | None, typer.Option(help="A family; repeatable (default: all).")] = None,
    held_out_family: Annotated[list[str] | None, typer.Option(help="Never in the train split; repeatable.")] = None,
    split: Annotated[Literal["train", "held-out"], typer.Option(help="Which side of the split to write.")] = "train",
    seed: Annotated[int, typer.Option(help="The generator's seed.")] = 0,
    rows: Annotated[int, typer.Option(help="Leading size of the inputs (0: drawn, sized for GPUs).")] = 0,
    output: Format = "text",
) -> None:
    """Write distinct tasks of one split, families in turn."""
    with training_errors():
        from drk.training.dataset import write_tasks
        from drk.training.tasks import draw_tasks

        drawn = draw_tasks(
            count,
            families=family or (),
            seed=seed,
            rows=rows,
            split=split,
            held_out_families=held_out_family or (),
        )
        write_tasks(out, drawn)
    families: dict[str, int] = {}
    for task in drawn:
        families[task.family] = families.get(task.family, 0) + 1
    facts = {"file": str(out), "tasks": len(drawn), "compositions": len({t.signature for t in drawn}), **families}
    print_facts(console_from(ctx), facts, as_json=output == "json")


@app.command("trajectories")
def trajectories(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="TASKS", help="A file of drk data tasks.")],
    out: Out,
    model: Annotated[str, typer.Option(help="A proposer, as builtin or openai:NAME; default: planted faults.")] = "",
    base_url: BaseUrl = None,
    model_option: ModelOption = None,
    max_cost: MaxCost = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns at most.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each task, by a proposer.")] = 1,
    keep: Annotated[Literal["all", "solved", "improved"], typer.Option(help="Which to write.")] = "all",
    min_speedup: Annotated[float, typer.Option(min=0, help="Lower bound that the best turn must reach.")] = 0.0,
    fault_share: Annotated[float, typer.Option(min=0, max=1, help="Share that begins with a planted fault.")] = 0.6,
    seed: Annotated[int, typer.Option(help="What is drawn.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cuda:N or interpret.")] = "auto",
    parallel: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 2,
    gym: Annotated[str | None, typer.Option(help="Have the gym server at this URL judge (DRK_GYM_URL).")] = None,
    output: Format = "text",
) -> None:
    """Solve TASKS turn by turn, each judged by the gym: planted faults with repairs, or a proposer's own episodes.

    A proposer's runs are kept beside the file (FILE.runs), and the same command goes on with them.
    """
    with training_errors():
        from drk.gym.settings import GymSettings
        from drk.training.dataset import read_tasks, write_demonstrations
        from drk.training.proposer_trajectories import EpisodePlan, filtered
        from drk.training.trajectories import DemonstrationPlan

        settings = GymSettings(device=device, seeds=2, parallel=parallel, offline_compile=False)
        tasks = read_tasks(source)
        if model:
            share = None if max_cost is None else max_cost / max(len(tasks) * samples, 1)
            judging = {"seeds": settings.seeds, "sandbox": settings.sandbox}
            episodes = EpisodePlan(turns, samples, parallel, max_cost_usd=share, judging=judging)
            proposer = make_proposer(model, model_settings(base_url, model_option or (), max_cost))
            found = asyncio.run(_propose(tasks, proposer, episodes, settings, gym, out))
        else:
            plan = DemonstrationPlan(turns=turns, fault_share=fault_share, seed=seed)
            found = asyncio.run(_collect(tasks, plan, settings, gym, parallel))
        kept = filtered(found.demonstrations, keep, min_speedup=min_speedup)
        written = write_demonstrations(out, kept)
    accepted = [turn.verdict.accepted for one in kept for turn in one.turns]
    facts: dict[str, Any] = {"file": str(out), "demonstrations": written, "turns": len(accepted)}
    facts |= {"accepted_turns": sum(accepted), "left_out": len(found.demonstrations) - written}
    print_facts(console_from(ctx), facts | {"without": found.without or "none"}, as_json=output == "json")


async def _collect(tasks: Any, plan: Any, settings: Any, url: str | None, parallel: int) -> Any:
    from drk.training.trajectories import collect_demonstrations

    async with open_gym(settings, url) as gym:
        return await collect_demonstrations(gym, tasks, plan, parallel=parallel)


async def _propose(tasks: Any, proposer: Any, plan: Any, settings: Any, url: str | None, out: Path) -> Any:
    from drk.training.proposer_trajectories import collect_episodes

    async with opened(proposer), open_gym(settings, url) as gym:
        return await collect_episodes(gym, tasks, proposer, plan, out.with_name(f"{out.name}.runs"))


@app.command("export")
def export(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="DEMONSTRATIONS", help="A file of drk data trajectories.")],
    out: Annotated[Path, typer.Option("--out", help="A .jsonl file, or the folder of a Hugging Face data set.")],
    templates: Annotated[str, typer.Option(help="full, bare, or a folder of prompt templates.")] = "full",
    keep: Annotated[Literal["all", "solved", "improved"], typer.Option(help="Which to write.")] = "all",
    min_speedup: Annotated[float, typer.Option(min=0, help="Lower bound that the best turn must reach.")] = 0.0,
    output: Format = "text",
) -> None:
    """Write DEMONSTRATIONS as plain conversations (messages), for other trainers."""
    with training_errors():
        from drk.training.dataset import read_demonstrations
        from drk.training.export import export_demonstrations
        from drk.training.proposer_trajectories import filtered

        read = read_demonstrations(source)
        written = export_demonstrations(filtered(read, keep, min_speedup=min_speedup), out, templates=templates)
    facts: dict[str, Any] = {"written": str(out), "conversations": written, "left_out": len(read) - written}
    print_facts(console_from(ctx), facts, as_json=output == "json")


@app.command("leaks")
def leaks(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="TASKS", help="A file of drk data tasks.")],
    folder: Annotated[Path, typer.Argument(help="The evaluation's Python files.")],
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Share of 5-token runs that counts as a leak.")] = 0.6,
    output: Format = "text",
) -> None:
    """Compare TASKS with an evaluation's files; exits 1 when a task is too much like one of them."""
    with training_errors():
        from drk.training.dataset import leaks as find_leaks
        from drk.training.dataset import read_tasks

        read = read_tasks(source)
        found = find_leaks(read, folder, threshold=threshold)
    lines = [f"{leak.task} is like {leak.file} ({leak.overlap:.0%})" for leak in found]
    facts: dict[str, Any] = {"tasks": len(read), "leaks": len(found), "found": lines}
    print_facts(console_from(ctx), facts, as_json=output == "json")
    if found:
        raise typer.Exit(ExitCode.NOT_ACCEPTED)


@app.command("pairs")
def pairs(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="The folder of shards to write; what is there is kept.")],
    shards: Annotated[int, typer.Option(min=1, help="How many shards.")] = 4,
    shard_pairs: Annotated[int, typer.Option(min=1, help="Pairs in a shard.")] = 512,
    workers: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    family: Annotated[list[str] | None, typer.Option(help="A family; repeatable (default: all).")] = None,
    multi_turn: Annotated[float, typer.Option(min=0, max=1, help="Share with a wrong or lazy first turn.")] = 0.4,
    seed: Annotated[int, typer.Option(help="The generator's seed.")] = 0,
    rows: Annotated[int, typer.Option(help="Above 0: small sizes, for judging on a CPU.")] = 0,
    output: Format = "text",
) -> None:
    """Write pairs of conversation and answer in bulk, by the builtin compiler; goes on where it stopped."""
    with training_errors():
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        from drk.training.pairs import StreamPlan, write_shard

        plan = StreamPlan(tuple(family or ()), seed, rows, multi_turn)
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            jobs = [
                pool.submit(write_shard, out, plan, worker=number, workers=shards, pairs=shard_pairs)
                for number in range(shards)
            ]
            written = [job.result() for job in jobs]
    facts: dict[str, Any] = {
        "folder": str(out),
        "shards": len(written),
        "pairs": shards * shard_pairs,
        "size_bytes": sum(path.stat().st_size for path in written),
    }
    print_facts(console_from(ctx), facts, as_json=output == "json")


@app.command("tokenizer")
def tokenizer(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="PAIRS", help="A folder of drk data pairs.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    vocabulary: Annotated[int, typer.Option(min=512, help="Entries at most.")] = 4096,
    phrases: Annotated[int, typer.Option(min=0, help="Lines and blocks that become one token, at most.")] = 1024,
    context_tokens: Annotated[int, typer.Option(min=64, help="The model's context.")] = 2048,
    output: Format = "text",
) -> None:
    """Train a byte-level tokenizer on PAIRS and say how long prompts and answers are in it."""
    with training_errors():
        from drk.training.documents import document_of
        from drk.training.pairs import read_pairs
        from drk.training.scratch import pair_tokenizer

        found = list(read_pairs(source))
        made = pair_tokenizer(found, vocabulary=vocabulary, phrases=phrases, context_tokens=context_tokens)
        made.save_pretrained(out)
        kept = [one for one in (document_of(pair, made, context=10**9) for pair in found[:2048]) if one is not None]
    lengths = sorted(len(one.ids) for one in kept)
    answers = sorted(len(one.ids) - one.answer_at for one in kept)
    facts: dict[str, Any] = {
        "folder": str(out),
        "entries": len(made),
        "pairs": len(found),
        "tokens": {"p50": lengths[len(lengths) // 2], "p99": lengths[int(len(lengths) * 0.99)]},
        "answer_tokens": {"p50": answers[len(answers) // 2], "p99": answers[int(len(answers) * 0.99)]},
        "fit_in_context": sum(length <= context_tokens for length in lengths) / len(lengths),
    }
    print_facts(console_from(ctx), facts, as_json=output == "json")
