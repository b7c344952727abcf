"""The nano model's study, step by step: data, SFT from nothing, RL arms, evaluation, test-time scaling, model card.

    python tests/benchmarks/bench_nano.py data  --out nano [--shards 16] [--workers 16]
    python tests/benchmarks/bench_nano.py sft   --out nano [--minutes 5] [--workers 14]
    python tests/benchmarks/bench_nano.py rl    --out nano --arm trloo|grpo|grpo-unequal|no-pr|... --seed 0 --steps 40
    python tests/benchmarks/bench_nano.py compare --out nano
    python tests/benchmarks/bench_nano.py eval  --out nano [--model FOLDER] [--samples 1] [--temperature 0]
    python tests/benchmarks/bench_nano.py stts  --out nano [--model FOLDER] [--turns 12]
    python tests/benchmarks/bench_nano.py card  --out nano
    python tests/benchmarks/bench_nano.py pack   --model FOLDER --to nano/ship
    python tests/benchmarks/bench_nano.py unpack --from nano/ship --to MODEL
    python tests/benchmarks/bench_nano.py export --out nano --model FOLDER --to models/nano

Every step writes its figures to OUT/results/NAME.json and may be run again: what is complete is not done twice, and
training goes on at its last whole checkpoint. ``--minutes`` ends a step by the clock. All arms start from the same SFT
checkpoint (OUT/sft/final). ``--dry-run`` uses tiny sizes and the interpreter: the path, not the figures. Without a GPU
speeds are not measured and say so (null). Needs the ``train`` extra.

``sft`` and ``rl`` leave what they made in OUT/ship as well (the latest one), packed in at most four small files;
``export`` writes the 8-bit form that ``drk optimize --model nano`` reads, with the card, and measures what rounding
changed.

``rl`` rewards speed by device time of the profile (``--speed device``) or by few timed pairs; ``eval`` times in full.
Curves are kept every few steps; ``compare`` puts all arms side by side at equal steps.

With groups of one size GRPO is TRLOO times a constant, which Adam removes; ``trloo-unequal`` and ``grpo-unequal``
compare them where every second prompt has 2 samples and the next one 14, ``grpo-std`` is GRPO with its usual division.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drk.assistant.llm.messages import Message
from drk.training.arms import ARMS, FAMILIES, ArmRecord, arms_table, earlier_curve, gpu_settings, write_comparison
from drk.training.config import TrainConfig, load_config
from drk.training.documents import document_of, shard_documents
from drk.training.evaluate_policy import file_tasks, measure
from drk.training.model_card import write_card
from drk.training.pairs import PairStream, StreamPlan, read_pairs, write_shard
from drk.training.prompting import answer_text
from drk.training.rl import train_rl
from drk.training.run_folder import RunFolder
from drk.training.scratch import pair_tokenizer, train_scratch
from drk.training.ship import export_error, export_nano, pack_checkpoint, unpack_checkpoint
from drk.training.tasks import draw_tasks
from drk.training.train_command import quiet_libraries

HANDWRITTEN = Path(__file__).parents[1] / "fixtures" / "handwritten"
TINY: dict[str, Any] = {
    "model.context_tokens": 1024, "scratch.layers": 2, "scratch.width": 64, "scratch.heads": 2, "scratch.hidden": 128,
    "scratch.batch_tokens": 4096, "scratch.families": ["pointwise"], "scratch.rows": 8, "scratch.held_out_pairs": 2,
    "scratch.warmup_steps": 2, "scratch.compile": False, "run.min_free_gb": 0.1,
}  # fmt: skip


def settings(options: argparse.Namespace, values: dict[str, Any]) -> TrainConfig:
    """Return the recipe ``nano`` with this study's values, and tiny ones in a dry run."""
    gpu = torch.cuda.is_available() and not options.dry_run
    timed = gpu and not options.untimed
    base: dict[str, Any] = {
        "gym.device": "auto" if gpu else "interpret", "gym.timing": timed, "gym.parallel": 12 if gpu else 2,
        "gym.seeds": 2 if gpu else 1, "reward.proxy": not timed, "run.seed": options.seed,
        "rollout.max_new_tokens": 8 if options.dry_run else 1024,
    }  # fmt: skip
    chosen = base | (TINY if options.dry_run else {}) | values
    return load_config("nano", [f"{name}={json.dumps(value)}" for name, value in chosen.items()])


def keep(options: argparse.Namespace, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Write a step's figures and return them."""
    path = options.out / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    whole = {"step": name, "dry_run": options.dry_run, "device": device, "torch": torch.__version__, **facts}
    path.write_text(json.dumps(_plain(whole), indent=1) + "\n")
    return whole


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def data(options: argparse.Namespace) -> dict[str, Any]:
    """Write shards and the tokenizer."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    begun, folder = time.monotonic(), options.out / "pairs"
    plan = (
        StreamPlan(("pointwise",), 0, 8, dresses=4, reservoir=2) if options.dry_run else StreamPlan(seed=options.seed)
    )
    shards, size = (1, 24) if options.dry_run else (options.shards, 512)
    if options.dry_run:
        write_shard(folder, plan, worker=0, workers=1, pairs=size)
    else:
        with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(write_shard, folder, plan, worker=i, workers=shards, pairs=size) for i in range(shards)]
            for job in jobs:
                job.result()
    seconds = time.monotonic() - begun
    pairs = list(read_pairs(folder))
    vocabulary, phrases = (1024, 200) if options.dry_run else (4096, 1024)
    some = pairs[:: max(1, len(pairs) // 8192)]
    tokenizer = pair_tokenizer(some, vocabulary=vocabulary, phrases=phrases, context_tokens=2048)
    tokenizer.save_pretrained(options.out / "tokenizer")
    kept = list(shard_documents(folder, tokenizer, context=2048))  # beside the shards, so that training need not wait
    found = (document_of(pair, tokenizer, context=10**9) for pair in pairs[:1024])
    lengths = sorted(len(one.ids) for one in found if one is not None)
    facts = {"pairs": len(pairs), "seconds": seconds, "pairs_per_s": len(pairs) / max(seconds, 1e-9)}
    facts |= {"compositions": len({pair.signature for pair in pairs}), "vocabulary": len(tokenizer)}
    shares = {"lazy_share": sum(pair.lazy for pair in pairs) / len(pairs), "tokens_p50": lengths[len(lengths) // 2]}
    return keep(options, "data", facts | shares | {"too_long": kept.count(None)})


def sft(options: argparse.Namespace) -> dict[str, Any]:
    """Train from nothing on the shards, and on pairs written meanwhile."""
    values = {
        "run.output_dir": str(options.out / "sft"), "run.steps": 2 if options.dry_run else options.steps,
        "run.save_every": 1 if options.dry_run else 500, "scratch.tokenizer": str(options.out / "tokenizer"),
        "scratch.pairs": str(options.out / "pairs"), "scratch.workers": 0 if options.dry_run else options.workers,
        "scratch.renamers": 1 if options.dry_run else options.renamers,
        "scratch.minutes": 0.0 if options.dry_run else options.minutes,
        "model.dtype": "bfloat16" if torch.cuda.is_available() and not options.dry_run else "float32",
    }  # fmt: skip
    steps: list[dict[str, float]] = []
    begun = time.monotonic()
    done = train_scratch(settings(options, values), lambda _, numbers: steps.append(numbers))
    made = options.out / "sft" / "steps.json"  # absent where the whole run was there before
    facts = json.loads(made.read_text()) if made.is_file() else {}
    facts |= done.facts() | {"seconds": time.monotonic() - begun, "last": steps[-1] if steps else {}}
    keep(options, "sft", facts)
    return keep(options, "sft", facts | _packed(done.final, options.out / "ship"))


def rl(options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm from the SFT checkpoint; its curve is written every few steps."""
    name = f"rl-{options.arm}-{options.seed}"
    tiny = options.dry_run
    values = {
        "run.output_dir": str(options.out / name), "run.steps": 1 if tiny else options.steps,
        "run.minutes": options.minutes, "run.save_every": 1 if tiny else 20, "run.validate_every": 0,
        "model.path": str(options.model or options.out / "sft" / "final"), "tasks.families": list(FAMILIES),
        "tasks.count": 2 if tiny else options.tasks, "tasks.rows": 8 if tiny else 0, "tasks.held_out": 0,
        "rollout.prompts_per_step": 2 if tiny else 8, "rollout.samples_per_prompt": 3 if tiny else 8,
        "rollout.turns": 1 if tiny else options.turns, "optimizer.micro_batches": 1 if tiny else 4,
        "optimizer.learning_rate": options.rate, "rollout.empty_attempts": 1 if tiny else 3,
    }  # fmt: skip
    if torch.cuda.is_available() and not tiny and not options.untimed:
        values |= gpu_settings(options.out / "judged", tasks=options.tasks, speed=options.speed)
    values |= ARMS[options.arm]
    if tiny:
        values["tasks.families"] = ["pointwise"]
    begun = time.monotonic()
    record = ArmRecord(options.arm, options.seed, lambda facts: keep(options, name, facts))
    config = settings(options, values)
    if RunFolder(Path(config.run.output_dir), main=False).last_checkpoint() is not None:
        record.curve = earlier_curve(options.out / "results" / f"{name}.json")
    done = train_rl(config, record.report)
    speed = values.get("reward.speed", "not measured")
    facts = {"seconds": time.monotonic() - begun, "whole": True, "speed": speed, "rate": options.rate}
    facts = record.facts() | done.facts() | facts
    keep(options, name, facts)
    return keep(options, name, facts | _packed(done.final, options.out / "ship"))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Write a table over all arms that were run, at equal steps."""
    compared = write_comparison(options.out / "results")
    print(arms_table(compared), flush=True)
    return {"steps": compared["steps"], "arms": list(compared["arms"])}


SETS = ("in-distribution", "held-out", "long-chain", "handwritten")


def _sets(options: argparse.Namespace) -> dict[str, Any]:
    rows, count = (8, 1) if options.dry_run else (0, options.count)
    families = ("pointwise",) if options.dry_run else ()
    drawn = {
        "in-distribution": draw_tasks(count, families=families, seed=9001, rows=rows),
        "held-out": draw_tasks(count, families=families, seed=9002, rows=rows, split="held-out"),
        "long-chain": draw_tasks(count, families=("long-chain",), seed=9003, rows=rows),
    }
    sets: dict[str, Any] = {name: [one.task for one in tasks] for name, tasks in drawn.items()}
    written = file_tasks(HANDWRITTEN)
    sets["handwritten"] = written[:1] if options.dry_run else written
    wanted = options.sets or list(sets)
    return {name: sets[name] for name in wanted}


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a checkpoint on tasks like those trained on, on held-out ones, on longer ones, on hand-written ones."""
    model = options.model or options.out / "sft" / "final"
    turns = 1 if options.dry_run else options.turns
    config = settings(options, {"model.path": str(model), "rollout.turns": turns, "run.output_dir": str(options.out)})
    begun, label = time.monotonic(), options.label or model.parent.name
    facts: dict[str, Any] = {"model": str(model), "samples": options.samples, "temperature": options.temperature}
    sets: dict[str, Any] = {}
    rows: dict[str, Any] = {}

    def tell(name: str, one: Any) -> None:
        """Write what is there: a step that is cut off keeps it."""
        sets[name], rows[name] = one.figures, [_row(each) for each in one.trajectories]
        seconds = time.monotonic() - begun
        keep(options, f"eval-{label}", facts | {"sets": sets, "seconds": seconds, "rows": rows})
        print(json.dumps(_plain({name: one.figures})), flush=True)

    measure(
        config,
        _sets(options),
        samples=options.samples,
        temperature=options.temperature,
        minutes=options.minutes,
        tell=tell,
        say=_say,
    )
    seconds = time.monotonic() - begun
    return keep(options, f"eval-{label}", facts | {"sets": sets, "seconds": seconds, "rows": rows})


def _say(line: str) -> None:
    print(line, flush=True)


def _row(one: Any) -> dict[str, Any]:
    turns = [{"correct": t.score.correct, "speedup": t.score.speedup, "hacked": t.score.hacked} for t in one.turns]
    return {"task": one.item.task.name, "ending": one.ending, "turns": turns}


def stts(options: argparse.Namespace) -> dict[str, Any]:
    """Measure 1 to ``turns`` turns on the hand-written set, by each policy of history."""
    model = options.model or options.out / "sft" / "final"
    options.sets = ["handwritten"]
    sets = _sets(options)
    found = {}
    for policy in ("append-all", "top-w"):
        values = {"model.path": str(model), "prompt.policy": policy, "run.output_dir": str(options.out)}
        config = settings(options, values | {"rollout.turns": 2 if options.dry_run else options.turns})
        part = measure(config, sets, temperature=options.temperature or 1.0, minutes=options.minutes, say=_say)
        found[policy] = {name: one.figures for name, one in part.items()}
        keep(options, f"stts-{options.label or model.parent.name}", {"model": str(model), "policies": found})
    return keep(options, f"stts-{options.label or model.parent.name}", {"model": str(model), "policies": found})


def card(options: argparse.Namespace) -> dict[str, Any]:
    """Write the model card from the results."""
    path = write_card(options.out / "results", options.out / "README.md")
    return {"card": str(path)}


def _packed(model: Path, ship: Path) -> dict[str, Any]:
    return {"ship": {str(path): path.stat().st_size for path in pack_checkpoint(model, ship)}}


def pack(options: argparse.Namespace) -> dict[str, Any]:
    """Pack a checkpoint into few small files."""
    return _packed(options.model or options.out / "sft" / "final", options.to or options.out / "ship")


def unpack(options: argparse.Namespace) -> dict[str, Any]:
    """Make a checkpoint's folder again from packed files."""
    packed, to = options.packed or options.out / "ship", options.to or options.out / "model"
    return {"model": str(unpack_checkpoint(packed, to))}


def export(options: argparse.Namespace) -> dict[str, Any]:
    """Write the form that is shipped, and measure on fresh pairs what rounding changed."""
    model, to = options.model or options.out / "sft" / "final", options.to or options.out / "nano"
    facts = export_nano(model, to)
    families, count = (("pointwise",), 2) if options.dry_run else ((), 32)
    pairs = itertools.islice(PairStream(StreamPlan(families, 9004, 8, dresses=2, reservoir=count // 2 + 1)), count)
    texts = [([Message(role, text) for role, text in one.messages], answer_text(one.answer)) for one in pairs]
    facts = keep(options, "export", {"model": str(model), **facts, "rounding": asdict(export_error(model, to, texts))})
    write_card(options.out / "results", to / "README.md")
    return facts


STEPS = {
    "data": data, "sft": sft, "rl": rl, "compare": compare, "eval": evaluate, "stts": stts, "card": card, "pack": pack,
    "unpack": unpack, "export": export,
}  # fmt: skip


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="The nano model's study.")
    parser.add_argument("step", choices=list(STEPS))
    parser.add_argument("--out", type=Path, default=Path("nano"), help="The study's folder.")
    parser.add_argument("--to", type=Path, help="Where pack, unpack and export write.")
    parser.add_argument("--from", dest="packed", type=Path, help="The packed files to unpack.")
    parser.add_argument("--model", type=Path, help="A checkpoint's folder (default: OUT/sft/final).")
    parser.add_argument("--label", default="", help="Names the result of eval and stts.")
    parser.add_argument("--arm", choices=list(ARMS), default="trloo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="Ends the step by the clock.")
    parser.add_argument("--steps", type=int, default=6000, help="Optimizer steps at most.")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--renamers", type=int, default=4, help="Processes that say shards' pairs under other names.")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--count", type=int, default=64, help="Generated tasks in each set of eval.")
    parser.add_argument("--sets", nargs="+", choices=SETS, help="Sets of eval, in this order (default: all).")
    parser.add_argument("--tasks", type=int, default=32, help="Tasks that rl trains on; their references stay loaded.")
    parser.add_argument("--rate", type=float, default=1e-4, help="The learning rate of rl.")
    parser.add_argument(
        "--speed", choices=["device", "timed"], default="device", help="How rl measures speed on a GPU."
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--untimed", action="store_true", help="Judge correctness only: no speeds, and much sooner.")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run one step and print its figures."""
    options = parse()
    with quiet_libraries():
        facts = STEPS[options.step](options)
    facts = {key: value for key, value in facts.items() if key not in ("rows", "curve")}
    print(json.dumps(_plain(facts), indent=1))


if __name__ == "__main__":
    main()
