"""From the samples of an evaluation to its report: rows, figures, protocol, text and one self-contained HTML file.

Figures are those of :mod:`drk.gym.metrics`, per sample (each sample of each problem counts once): the last turn, the
best of history, and by turn; Fast@p means *at least* p times faster, correct and honest, among all samples that were
judged. They are given over eager PyTorch, over torch.compile and over the faster of the two; intervals are 95 %
bootstraps over problems. Without a GPU there is no speed: Fast@p is null and printed as "not measured".

The protocol stands beside the figures, since neither may be read without the other. Everything that depends on the
clock is under ``times``; the rest of two equal evaluations is equal. Messages of failures stay in the run folders,
since they hold secret values; rows have their kinds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drk.assistant.budget import Spending, accepted_wins
from drk.assistant.episode import Turn
from drk.assistant.eval_answers import PACES, answer_lines, answer_of, answers, paces, soundness
from drk.assistant.evaluation import EvalPlan, EvalResult, SampleResult
from drk.gym import metrics
from drk.gym.metrics import Outcome
from drk.gym.reward import Baseline, NotRewardable

THRESHOLDS = (1.0, 1.2, 1.5, 2.0)
BASELINES: Mapping[str, Baseline] = {"eager": "eager", "compile": "compile", "fastest": "headline"}
_LOSERS = "candidates that are clearly slower than the best so far are timed in fewer rounds"
SHOWN = 10
"""Reasons that the text shows of those why samples and problems could not be judged."""
_TEMPLATES = Path(__file__).parent / "templates"


def report(plan: EvalPlan, result: EvalResult, protocol: Mapping[str, Any], *, measured: bool) -> dict[str, Any]:
    """Return the report's JSON.

    Args:
        plan: what was evaluated.
        result: what came out.
        protocol: facts to print beside the figures (device, versions, settings).
        measured: whether a GPU timed the candidates.
    """
    judged = [sample for sample in result.samples if not sample.fault]
    groups = {problem.name: problem.group for problem in plan.problems}
    spending = sum((sample.spending for sample in result.samples), Spending())
    wins = sum(accepted_wins(sample.turns) for sample in judged)
    spent = spending.to_json(wins)
    return {
        "schema_version": 1,
        "status": "complete" if len(judged) == len(result.samples) and judged else "partial",
        "protocol": {**protocol, **_protocol(plan, measured)},
        "counts": _counts(plan, result, judged),
        "answers": answers(judged, measured=measured),
        "soundness": soundness(judged),
        "figures": _figures_of(judged, plan.turns, measured),
        "groups": {
            name: _figures_of(chosen, plan.turns, measured, intervals=False)
            for name, chosen in _groups(judged, groups, result.families).items()
        },
        "problems": [_problem_row(name, result, groups) for name in sorted({one.problem for one in result.samples})],
        "unusable": [{"problem": name, "reason": reason} for name, reason in sorted(result.unusable.items())],
        "spending": {name: value for name, value in spent.items() if not name.startswith("gpu_s")},
        "times": {
            "wall_s": round(result.seconds, 3),
            "wall_s_per_problem": round(result.seconds / max(1, len(plan.problems)), 3),
            **paces(result.samples),
            "gpu_s": spent["gpu_s"],
            "gpu_s_per_win": spent["gpu_s_per_win"],
        },
    }


def _protocol(plan: EvalPlan, measured: bool) -> dict[str, Any]:
    return {
        "turns": plan.turns,
        "candidates_a_turn": plan.candidates,
        "samples": plan.samples,
        "max_time_s": plan.max_time_s,
        "means": "geometric mean and median of the speed-ups of correct candidates",
        "fast_at_p": "correct, honest and at least p times faster, among all judged samples; medians of paired ratios",
        "intervals": "95 % bootstrap over problems",
        "speed": "measured" if measured else "not measured: no GPU; logic checked by the interpreter",
        "losers": _LOSERS if measured and plan.candidates > 1 else None,
        "judging": dict(plan.judging),
    }


def _counts(plan: EvalPlan, result: EvalResult, judged: Sequence[SampleResult]) -> dict[str, Any]:
    turns = [turn for sample in judged for turn in sample.turns]
    kinds = Counter(kind for turn in turns if (kind := _failure_kind(turn)))
    return {
        "problems": sum(problem.name not in result.unusable for problem in plan.problems),
        "unusable": len(result.unusable),
        "samples": len(result.samples),
        "not_judged": len(result.samples) - len(judged),
        "nothing_proposed": sum(not sample.turns for sample in judged),
        "turns": len(turns),
        "failures": dict(sorted(kinds.items())),
        "hacked_turns": sum(turn.verdict.honest is False for turn in turns),
    }


def _failure_kind(turn: Turn) -> str:
    verdict = turn.verdict
    if verdict.accepted:
        return ""
    if verdict.error is not None:
        return f"{verdict.error.stage}: {verdict.error.kind}"
    frauds = sorted(flag.kind for flag in verdict.flags if flag.severity == "fraud")
    return f"fraud: {frauds[0]}" if frauds else f"reached {verdict.reached or 'nothing'}"


# --- Figures -------------------------------------------------------------------------------------------------


def _groups(
    judged: Sequence[SampleResult], groups: Mapping[str, str], families: Mapping[str, str]
) -> dict[str, list[SampleResult]]:
    found: dict[str, list[SampleResult]] = {}
    for sample in judged:
        conv = families.get(sample.problem) == "convolution"
        for name in (groups.get(sample.problem, ""), "with convolutions" if conv else "without convolutions"):
            if name:
                found.setdefault(name, []).append(sample)
    return dict(sorted(found.items()))


def _figures_of(
    judged: Sequence[SampleResult], turns: int, measured: bool, *, intervals: bool = True
) -> dict[str, Any] | None:
    if not judged:
        return None
    table: dict[str, Any] = {}
    for name, baseline in BASELINES.items():
        outcomes = [one for sample in judged for one in _outcomes(sample, baseline)]
        table[name] = {
            "last_turn": _figures(metrics.last_turn(outcomes), measured, intervals),
            "best_of_history": _figures(metrics.best_of_history(outcomes), measured, intervals),
        }
        if intervals:
            table[name]["per_problem"] = _per_problem(metrics.best_of_history(outcomes), measured)
            table[name]["by_turn"] = [_turn_figures(outcomes, turn, measured) for turn in range(1, turns + 1)]
    return table


def _per_problem(outcomes: Sequence[Outcome], measured: bool) -> dict[str, Any]:
    """Figures by problem: solved by the best of ``k`` samples, with their whole history. Never compare with Fast@p."""
    counts = Counter(one.problem for one in outcomes)
    k = min(counts.values())
    right = {one.problem for one in outcomes if one.correct and not one.hacked}
    fast = {f"{p:g}": _rounded(metrics.fast_at_p_interval(outcomes, p, k=k)) if measured else None for p in THRESHOLDS}
    return {"k": k, "problems": len(counts), "correct_by_any": round(len(right) / len(counts), 6), "fast_at": fast}


def _rounded(estimate: metrics.Estimate) -> dict[str, float]:
    return {name: round(getattr(estimate, name), 6) for name in ("value", "low", "high")}


def _turn_figures(outcomes: Sequence[Outcome], turn: int, measured: bool) -> dict[str, Any]:
    """Figures up to a turn: the any-time curve is the best of history by turn."""
    here = metrics.at_turn(outcomes, turn)
    return {
        "turn": turn,
        "samples_there": len(here),
        "at_turn": _figures(here, measured, intervals=False) if here else None,
        "best_so_far": _figures(metrics.best_of_history(outcomes, turn), measured, intervals=False),
    }


def _outcomes(sample: SampleResult, baseline: Baseline) -> list[Outcome]:
    if not sample.turns:  # nothing was proposed: a sample that is not right, not one that does not count
        return [Outcome(sample.problem, sample.sample, 1, correct=False)]
    steps: dict[int, list[Outcome]] = {}
    for turn in sample.turns:
        steps.setdefault(turn.index, []).append(_outcome(turn, sample, baseline))
    # Candidates that were judged together are one step: it is as good as the best of them.
    return [_best_of_step(outcomes) for outcomes in steps.values()]


def _best_of_step(outcomes: Sequence[Outcome]) -> Outcome:
    best = metrics.best_of_history(outcomes)[0]
    return replace(best, hacked=True) if not best.correct and any(one.hacked for one in outcomes) else best


def _outcome(turn: Turn, sample: SampleResult, baseline: Baseline) -> Outcome:
    try:
        return metrics.outcome(
            turn.verdict, problem=sample.problem, sample=sample.sample, turn=turn.index, baseline=baseline
        )
    except NotRewardable:  # right, but this baseline was not measured: not fast, and seen in `measured`
        hacked = turn.verdict.honest is False
        return Outcome(sample.problem, sample.sample, turn.index, turn.verdict.accepted, None, hacked)


def _figures(outcomes: Sequence[Outcome], measured: bool, intervals: bool) -> dict[str, Any]:
    speeds = [one.speedup for one in outcomes if one.correct and one.speedup is not None and one.speedup > 0]
    return {
        "samples": len(outcomes),
        "correct": round(metrics.correct_rate(outcomes), 6),
        "hacked": round(metrics.hack_rate(outcomes), 6),
        "measured": len(speeds),
        "fast_at": {f"{p:g}": _fast(outcomes, p, intervals) if measured else None for p in THRESHOLDS},
        "geometric_mean": round(metrics.geometric_mean(speeds), 6) if speeds else None,
        "median": round(metrics.median(speeds), 6) if speeds else None,
    }


def _fast(outcomes: Sequence[Outcome], p: float, intervals: bool) -> dict[str, float]:
    if not intervals:
        return {"value": round(metrics.fast_at_p(outcomes, p), 6)}
    return _rounded(metrics.fast_at_p_interval(outcomes, p))


# --- Rows ----------------------------------------------------------------------------------------------------


def _problem_row(name: str, result: EvalResult, groups: Mapping[str, str]) -> dict[str, Any]:
    samples = [sample for sample in result.samples if sample.problem == name]
    return {
        "problem": name,
        "group": groups.get(name, ""),
        "family": result.families.get(name),
        "samples": [_sample_row(sample) for sample in sorted(samples, key=lambda one: one.sample)],
    }


def _sample_row(sample: SampleResult) -> dict[str, Any]:
    answer = answer_of(sample)
    return {
        "sample": sample.sample,
        "not_judged": sample.fault or None,
        "ended": sample.ended,
        "answer": None if sample.fault else answer.status,
        "reason": answer.reason if answer.best is not None else None,
        "turns": [_turn_row(turn) for turn in sample.turns],
    }


def _turn_row(turn: Turn) -> dict[str, Any]:
    verdict = turn.verdict
    speedups = verdict.speedups
    return {
        "turn": turn.index,
        "candidate": turn.sample,
        "status": verdict.status,
        "evidence": verdict.evidence,
        "reached": verdict.reached,
        "correct": verdict.correct,
        "hacked": verdict.honest is False,
        "failure": _failure_kind(turn) or None,
        "labels": sorted(flag.kind for flag in verdict.flags),
        "speedup_eager": asdict(speedups.eager) if speedups else None,
        "speedup_compile": asdict(speedups.compile) if speedups and speedups.compile else None,
        "coverage": verdict.coverage,
        "coverage_estimate": verdict.coverage_estimate,
        "note": turn.candidate.note,
    }


# --- For people ----------------------------------------------------------------------------------------------


def report_text(data: Mapping[str, Any]) -> str:
    """Return the table with its protocol for a terminal."""
    counts = data["counts"]
    lines = [f"{'samples':44}{'correct':>9}{'hacked':>8}{_text_heads(data)}"]
    lines += [_text_row(*row) for row in figure_rows(data)]
    lines.append(
        f"{counts['samples']} samples of {counts['problems']} problems; {counts['nothing_proposed']} without "
        f"a proposal, {counts['not_judged']} not judged, {counts['unusable']} problems unusable"
    )
    lines += answer_lines(data["answers"], data["soundness"], {name: data["times"].get(name) for name in PACES})
    lines += _per_problem_line(data)
    lines += [f"  {count:5}  {kind}" for kind, count in counts["failures"].items()]
    lines += [f"  not judged: {reason}" for reason in not_judged(data)[:SHOWN]]
    lines += [f"  unusable: {row['problem']}: {row['reason'].splitlines()[0]}" for row in data["unusable"][:SHOWN]]
    lines += [f"  and {counts['unusable'] - SHOWN} more, in report.json"] if counts["unusable"] > SHOWN else []
    lines += ["protocol:", *(f"  {name}: {value}" for name, value in data["protocol"].items() if value is not None)]
    return "\n".join(lines)


def _per_problem_line(data: Mapping[str, Any]) -> list[str]:
    """Say what the best of several samples comes to; with one sample it says nothing new."""
    if not data["figures"] or data["figures"]["eager"]["per_problem"]["k"] < 2:
        return []
    row = data["figures"]["eager"]["per_problem"]
    speeds = "; ".join(f"Fast@{p} {percent(figure)}" for p, figure in row["fast_at"].items() if figure is not None)
    start = f"by problem, best of {row['k']} samples over eager: right {row['correct_by_any']:.1%}"
    return [f"{start}; {speeds}" if speeds else start]


def not_judged(data: Mapping[str, Any]) -> list[str]:
    """Return why samples could not be judged, each reason once."""
    rows = (sample["not_judged"] for problem in data["problems"] for sample in problem["samples"])
    return sorted({reason for reason in rows if reason})


def figure_rows(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the rows of the table: every baseline, last turn and best of history, then the groups' best."""
    rows: list[tuple[str, Mapping[str, Any]]] = []
    timed = _is_timed(data)
    # without timing all baselines say the same: whether it is right
    for name in (BASELINES if timed else ("eager",)) if data["figures"] else ():
        over = f"over {name}, " if timed else ""
        for choice in ("last_turn", "best_of_history"):
            rows.append((f"{over}{choice.replace('_', ' ')}", data["figures"][name][choice]))
    for group, table in data["groups"].items():
        for name in BASELINES if timed else ("eager",):
            over = f" over {name}," if timed else ""
            rows.append((f"{group}:{over} best", table[name]["best_of_history"]))
    return rows


def _is_timed(data: Mapping[str, Any]) -> bool:
    return str(data["protocol"]["speed"]) == "measured"


def _text_heads(data: Mapping[str, Any]) -> str:
    if not _is_timed(data):
        return "   speed not measured"
    return "".join(f"{f'Fast@{p:g}':>10}" for p in THRESHOLDS) + "    mean  median"


def _text_row(name: str, figures: Mapping[str, Any]) -> str:
    start = f"{name[:43]:44}{figures['correct']:>9.1%}{figures['hacked']:>8.1%}"
    if figures["fast_at"]["1"] is None:
        return start
    cells = "".join(f"{percent(figures['fast_at'][f'{p:g}']):>10}" for p in THRESHOLDS)
    means = "" if figures["geometric_mean"] is None else f"{figures['geometric_mean']:8.3f}{figures['median']:8.3f}"
    return f"{start}{cells}{means}"


def percent(figure: Mapping[str, float] | None) -> str:
    """Return a share in per cent, or that it is not there."""
    return "not measured" if figure is None else f"{figure['value']:.1%}"


def report_html(data: Mapping[str, Any]) -> str:
    """Return the report as one HTML file: no script, no outside resource; everything in it is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.filters["percent"] = percent
    return environment.get_template("eval.html.j2").render(
        report=data, rows=figure_rows(data), thresholds=[f"{p:g}" for p in THRESHOLDS], curve=_curve(data)
    )


def _curve(data: Mapping[str, Any], width: int = 480, height: int = 160) -> list[dict[str, Any]]:
    """Return the any-time curves' lines: share of samples by turn, as points of an SVG."""
    if not data["figures"]:
        return []
    steps = data["figures"]["eager"]["by_turn"]
    choices: dict[str, Callable[[Any], float | None]] = {
        "correct": lambda row: row["correct"],
        "Fast@1": lambda row: row["fast_at"]["1"] and row["fast_at"]["1"]["value"],
        "Fast@1.2": lambda row: row["fast_at"]["1.2"] and row["fast_at"]["1.2"]["value"],
    }
    lines = []
    for name, choose in choices.items():
        values = [choose(step["best_so_far"]) for step in steps]
        if any(value is None for value in values):
            continue
        lines.append({"name": name, "points": _points([value or 0.0 for value in values], width, height)})
    return lines


def _points(values: Iterable[float], width: int, height: int) -> str:
    shares = list(values)
    step = width / max(1, len(shares) - 1)
    shares = shares * 2 if len(shares) == 1 else shares
    return " ".join(f"{math.floor(i * step)},{height - round(share * height)}" for i, share in enumerate(shares))
