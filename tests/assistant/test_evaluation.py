"""Evaluations with a scripted gym: figures, resuming, faults, and the report's forms."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drk.assistant.errors import UsageError
from drk.assistant.eval_report import report, report_html, report_text
from drk.assistant.evaluation import EvalPlan, EvalResult, evaluate, find_problems
from drk.assistant.llm.messages import ModelFault
from drk.assistant.proposers import make_proposer
from drk.gym.errors import HostError, TaskError
from drk.gym.kernels import ReferenceKernel, ReferenceProfile
from drk.gym.schema import Candidate, Flag, Task

PROBLEM = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) + {number}
def get_inputs():
    return [torch.randn(4, 4)]
def get_init_inputs():
    return []
"""


def source(number: int, turn: int) -> str:
    return f"class ModelNew:\n    number, turn = {number}, {turn}\n"


@dataclass
class Scripted:
    """Verdicts by problem number and turn: the table's rows are turns, ``None`` is a refusal."""

    table: dict[tuple[int, int], Any]
    verdicts: Any
    gpu: str | None = "NVIDIA H200"
    evaluated: int = 0
    broken: str = ""
    profiled: int = 0

    @property
    def device_facts(self) -> dict[str, Any]:
        return {"device": "cuda:0" if self.gpu else "interpret", "gpu": self.gpu}

    async def inspect(self, task: Task) -> Any:
        if task.name == self.broken:
            raise TaskError("the reference fails")

    async def capture(self, task: Task) -> dict[str, Any]:
        raise TaskError("cannot be captured")

    async def kernels(self, task: Task) -> ReferenceProfile:
        self.profiled += 1
        return ReferenceProfile(self.gpu or "", (ReferenceKernel("relu", 1, 2.0, 1.0),))

    async def evaluate(self, task: Task, candidate: Candidate) -> Any:
        self.evaluated += 1
        space: dict[str, Any] = {}
        exec(candidate.source, space)
        found = self.table.get((space["ModelNew"].number, space["ModelNew"].turn))
        if found == "hack":
            flag = Flag("cached-result", "caching", "fraud", "ablation")
            return replace(self.verdicts.refused(), correct=True, honest=False, flags=(flag,), error=None)
        if found is None:
            return self.verdicts.refused(evidence="gpu" if self.gpu else "interpreter")
        return self.verdicts.accepted(found if self.gpu else None)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Four problems in two groups, and recordings of two turns for each."""
    for number in range(4):
        file = tmp_path / "suite" / f"level{1 + number // 2}" / f"p{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PROBLEM.format(number=number))
        rows = [json.dumps({"source": source(number, turn), "note": f"turn {turn}"}) for turn in (1, 2)]
        place = tmp_path / "recorded" / f"level{1 + number // 2}.p{number}.jsonl"
        place.parent.mkdir(exist_ok=True)
        place.write_text("\n".join(rows) + "\n")
    return tmp_path / "suite"


TABLE = {(0, 1): 1.1, (0, 2): 1.5, (1, 1): 2.0, (1, 2): None, (2, 1): None, (2, 2): "hack", (3, 1): None, (3, 2): 0.7}


def plan_of(suite: Path, **changes: Any) -> EvalPlan:
    problems, unusable = find_problems(suite)
    return replace(EvalPlan(problems, unusable, turns=2, workers=3), **changes)


async def go(plan: EvalPlan, folder: Path, gym: Any) -> tuple[EvalResult, dict[str, Any]]:
    recorded = folder.parent / "recorded"
    result = await evaluate(plan, folder, gym, make_proposer(f"replay:{recorded}"))
    return result, report(plan, result, {"proposer": "replay"}, measured=gym.gpu is not None)


async def test_a_problems_kernels_are_measured_once_for_all_its_samples(suite: Path, verdicts: Any) -> None:
    class Reading:
        """Notes what it is told, and has nothing to offer."""

        name, ordered, reads_hotspots = "reading", False, True
        told: ClassVar[list[Any]] = []

        async def propose(self, context: Any) -> list[Candidate]:
            self.told.append(context.hotspots)
            return []

    gym = Scripted({}, verdicts)
    plan = plan_of(suite, samples=2)
    for _ in range(2):  # the second goes on with what the first kept
        await evaluate(plan, suite.parent / "out", gym, Reading())
        assert gym.profiled == 4
    assert {found.rows[0].name for found in Reading.told} == {"relu"}
    assert len(Reading.told) == 16
    without = Scripted({}, verdicts, gpu=None)
    await evaluate(plan, suite.parent / "out-cpu", without, Reading())
    assert (without.profiled, Reading.told[-1].rows) == (0, ())


def test_problems_are_found_by_folder_list_and_subset(suite: Path) -> None:
    (suite / "level1" / "broken.py").write_text("def f(:\n")
    (suite / "_private.py").write_text("")
    problems, unusable = find_problems(suite)
    assert [one.name for one in problems] == ["level1.p0", "level1.p1", "level2.p2", "level2.p3"]
    assert [one.group for one in problems] == ["level1", "level1", "level2", "level2"]
    assert [one.task.name for one in problems] == [one.name for one in problems]
    assert list(unusable) == ["level1.broken"]
    few, _ = find_problems(suite, limit=2)
    assert [one.name for one in few] == ["level1.p1"]  # and the broken one
    listed = suite / "list.txt"
    listed.write_text("# mine\nlevel2/p3.py:Model\n\nlevel1/p0.py\n")
    assert [one.name for one in find_problems(listed)[0]] == ["level1.p0", "level2.p3.py-Model"]
    with pytest.raises(UsageError, match="no problems at"):
        find_problems(suite / "absent")
    (suite / "empty").mkdir()
    with pytest.raises(UsageError, match="there are no problems"):
        find_problems(suite / "empty")


def test_odd_files_are_problems_or_have_a_reason(tmp_path: Path) -> None:
    without_init = PROBLEM.format(number=1).split("def get_init_inputs")[0]
    files = {
        "level 1/1_Square_matrix multiplication_.py": without_init,
        "level 1/100_Ünïcode-näme (copy).py": PROBLEM.format(number=1),
        "level 1/3.dotted.name.py": PROBLEM.format(number=1),
        "level 1/4_no_inputs.py": without_init.split("def get_inputs")[0],
        "level 1/5_empty.py": "",
        "level 1/6_syntax.py": "class Model(:\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "level 1/7_bytes.py").write_bytes(b"\xff\xfe\x00")
    problems, unusable = find_problems(tmp_path)
    assert sorted(one.name.removeprefix("level 1.") for one in problems) == [
        "100_Ünïcode-näme (copy)",
        "1_Square_matrix multiplication_",
        "3.dotted.name",
    ]
    assert {one.group for one in problems} == {"level 1"}
    assert {name.removeprefix("level 1."): bool(reason) for name, reason in unusable.items()} == dict.fromkeys(
        ("4_no_inputs", "5_empty", "6_syntax", "7_bytes"), True
    )


async def test_figures(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    _, data = await go(plan_of(suite), tmp_path / "out", Scripted(TABLE, verdicts))
    assert data["status"] == "complete"
    last, best = (data["figures"]["compile"][name] for name in ("last_turn", "best_of_history"))
    # last turns over torch.compile: 1.6, refused, hacked, 0.8; best: 1.6, 2.1, none, 0.8
    assert (last["correct"], last["hacked"], last["measured"]) == (0.5, 0.25, 2)
    assert {p: row["value"] for p, row in last["fast_at"].items()} == {"1": 0.25, "1.2": 0.25, "1.5": 0.25, "2": 0.0}
    assert best["correct"] == 0.75
    assert {p: row["value"] for p, row in best["fast_at"].items()} == {"1": 0.5, "1.2": 0.5, "1.5": 0.5, "2": 0.25}
    assert best["geometric_mean"] == pytest.approx((1.6 * 2.1 * 0.8) ** (1 / 3), abs=1e-6)
    assert best["median"] == pytest.approx(1.6)
    assert best["fast_at"]["1"]["low"] <= 0.5 <= best["fast_at"]["1"]["high"]
    turns = data["figures"]["compile"]["by_turn"]
    assert [row["best_so_far"]["fast_at"]["1"]["value"] for row in turns] == [0.5, 0.5]
    assert [row["at_turn"]["hacked"] for row in turns] == [0.0, 0.25]
    assert set(data["groups"]) == {"level1", "level2", "without convolutions"}
    assert data["groups"]["level1"]["eager"]["best_of_history"]["fast_at"]["2"]["value"] == 1.0
    assert data["counts"]["failures"] == {"check: mismatch": 3, "fraud: cached-result": 1}
    assert data["counts"]["hacked_turns"] == 1


async def test_the_best_of_several_samples_is_told_by_problem(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    class Drawing:
        """Sample 0 plays turn 1 of the table, sample 1 turn 2: told apart by the run's folder."""

        name, ordered = "drawing", False

        async def propose(self, context: Any) -> list[Candidate]:
            number, sample = int(context.task.name[-1]), int(context.folder.parent.name[-1])
            return [Candidate(source(number, sample + 1))]

    plan = plan_of(suite, turns=1, samples=2)
    result = await evaluate(plan, tmp_path / "out", Scripted(TABLE, verdicts), Drawing())
    data = report(plan, result, {"proposer": "drawing"}, measured=True)
    # over torch.compile: 1.2 and 1.6; 2.1 and refused; refused and hacked; refused and 0.8
    assert data["figures"]["compile"]["best_of_history"]["fast_at"]["1.2"]["value"] == pytest.approx(3 / 8)
    row = data["figures"]["compile"]["per_problem"]
    assert (row["k"], row["problems"], row["correct_by_any"]) == (2, 4, 0.75)
    assert {p: figure["value"] for p, figure in row["fast_at"].items()} == {"1": 0.5, "1.2": 0.5, "1.5": 0.5, "2": 0.25}
    assert "by problem, best of 2 samples over eager: right 75.0%" in report_text(data)


async def test_without_a_gpu_speed_is_not_measured(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    _, data = await go(plan_of(suite), tmp_path / "out", Scripted(TABLE, verdicts, gpu=None))
    best = data["figures"]["eager"]["best_of_history"]
    assert best["correct"] == 0.75
    assert set(best["fast_at"].values()) == {None}
    assert best["geometric_mean"] is None
    text = report_text(data)
    assert "speed not measured" in text
    assert "Fast@1" not in text.split("protocol:")[0]


async def test_equal_evaluations_are_equal_apart_from_times(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    texts = []
    for name in ("a", "b"):
        _, data = await go(plan_of(suite, workers=1 + (name == "b")), tmp_path / name, Scripted(TABLE, verdicts))
        data.pop("times")
        texts.append(json.dumps(data))
    assert texts[0] == texts[1]


async def test_it_goes_on_where_it_was_cut(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    plan = plan_of(suite)
    gym = Scripted(TABLE, verdicts)
    _, whole = await go(plan, tmp_path / "out", gym)
    assert gym.evaluated == 8
    # as a kill leaves it: one sample without its last verdict, one without anything
    (first,) = (tmp_path / "out/runs/level1.p0-0").glob("2*/verdicts/002.json")
    first.unlink()
    for file in (tmp_path / "out/runs/level2.p3-0").glob("2*/verdicts/*.json"):
        file.unlink()
    again_gym = Scripted(TABLE, verdicts)
    _, again = await go(plan, tmp_path / "out", again_gym)
    assert again_gym.evaluated == 3
    for data in (whole, again):
        data.pop("times")
    assert whole == again


async def test_faults_are_listed_and_count_in_no_figure(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    (tmp_path / "recorded" / "level2.p2.jsonl").unlink()
    gym = Scripted(TABLE, verdicts, broken="level2.p3")
    _, data = await go(plan_of(suite), tmp_path / "out", gym)
    assert data["status"] == "partial"
    assert data["unusable"] == [{"problem": "level2.p3", "reason": "the reference fails"}]
    assert data["counts"]["not_judged"] == 1
    assert data["figures"]["eager"]["last_turn"]["samples"] == 2
    assert "holds no recording for level2.p2" in report_text(data)


async def test_a_proposer_that_fails_at_once_makes_no_figures(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    class Broken:
        name, ordered = "broken", False

        async def propose(self, context: Any) -> list[Candidate]:
            raise ModelFault("no model")

    plan = plan_of(suite, samples=2)
    result = await evaluate(plan, tmp_path / "out", Scripted({}, verdicts), Broken())
    data = report(plan, result, {"proposer": "broken"}, measured=True)
    assert (data["status"], data["figures"], data["counts"]["not_judged"]) == ("partial", None, 8)
    assert "no model" in report_html(data)


async def test_nothing_proposed_counts_as_not_right(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    class Silent:
        name, ordered = "silent", False

        async def propose(self, context: Any) -> list[Candidate]:
            return []

    plan = plan_of(suite)
    result = await evaluate(plan, tmp_path / "out", Scripted({}, verdicts), Silent())
    data = report(plan, result, {"proposer": "silent"}, measured=True)
    assert data["counts"]["nothing_proposed"] == 4
    assert data["figures"]["eager"]["best_of_history"]["fast_at"]["1"]["value"] == 0.0


async def test_the_html_stands_alone_and_escapes(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    _, data = await go(plan_of(suite), tmp_path / "out", Scripted(TABLE, verdicts))
    data["protocol"]["proposer"] = "<script>alert(1)</script>"
    data["problems"][0]["problem"] = '"><img src=x>'
    text = report_html(data)
    seen: list[tuple[str, dict[str, Any]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            seen.append((tag, dict(attrs)))

    Reader().feed(text)
    tags = {tag for tag, _ in seen}
    assert not tags & {"script", "img", "link", "iframe", "object"}
    assert {"svg", "polyline", "table"} <= tags
    assert all("http" not in str(value) for _, attrs in seen for value in attrs.values())
    assert "default-src 'none'" in text
    assert len(text) < 100_000
    assert "50.0%" in text


async def test_no_more_problems_are_open_than_the_gym_keeps(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    class Counting(Scripted):
        open: ClassVar[set[str]] = set()
        most: ClassVar[int] = 0

        async def inspect(self, task: Task) -> Any:
            self.open.add(task.name)
            Counting.most = max(Counting.most, len(self.open))

        async def evaluate(self, task: Task, candidate: Candidate) -> Any:
            await asyncio.sleep(0)
            verdict = await super().evaluate(task, candidate)
            if candidate.source.endswith(", 2\n"):  # the last of its problem
                self.open.discard(task.name)
            return verdict

    plan = plan_of(suite, workers=8, problems_at_once=2)
    await go(plan, tmp_path / "out", Counting(TABLE, verdicts))
    assert Counting.most == 2


async def test_twenty_problems_replayed_are_equal_bit_for_bit(tmp_path: Path, verdicts: Any) -> None:
    for number in range(20):
        (tmp_path / "suite").mkdir(exist_ok=True)
        (tmp_path / "suite" / f"q{number:02d}.py").write_text(PROBLEM.format(number=number))
        place = tmp_path / "recorded" / f"q{number:02d}"
        place.mkdir(parents=True)
        for turn in (1, 2, 3):
            (place / f"{turn}.py").write_text(source(number, turn))
    table = {(n, t): 1 + ((n * 7 + t * 3) % 10) / 10 for n in range(20) for t in (1, 2, 3) if (n + t) % 3}
    texts = []
    for name, workers in (("a", 1), ("b", 7)):
        plan = plan_of(tmp_path / "suite", turns=3, workers=workers)
        _, data = await go(plan, tmp_path / name, Scripted(table, verdicts))
        assert data["counts"]["samples"] == 20
        assert data["counts"]["turns"] == 60
        data.pop("times")
        texts.append(json.dumps(data).encode())
    assert texts[0] == texts[1]


# --- Candidates judged together ------------------------------------------------------------------------------


class Ordered:
    """Offers four candidates in each of four turns, best expected first; their numbers tell which."""

    name, ordered = "ordered", True

    def __init__(self) -> None:
        self.asked = 0

    async def propose(self, context: Any) -> list[Candidate]:
        self.asked += 1
        number, start = int(context.task.name[-1]), len(context.history)
        return [Candidate(source(number, start + place + 1)) for place in range(context.limit)]


@dataclass
class Together(Scripted):
    """Counts how many candidates it judges at the same time; ``begun`` are those that were asked for."""

    at_once: int = 4
    under_way: int = 0
    most: int = 0

    async def evaluate(self, task: Task, candidate: Candidate) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            return await super().evaluate(task, candidate)
        finally:
            self.under_way -= 1


STEPS = {(0, 2): 1.3, (0, 4): 1.1, (0, 5): 1.2, (1, 1): 0.8, (1, 6): 1.5, (1, 9): 1.4}
"""Problem 0: the second of the first turn is best; problem 1: the second of the second turn; 2 and 3: none is right."""


async def test_candidates_of_a_turn_are_judged_together_until_a_turn_brings_nothing_better(
    suite: Path, tmp_path: Path, verdicts: Any
) -> None:
    gym = Together(STEPS, verdicts)
    plan = plan_of(suite, turns=4, candidates=4, workers=1)
    result = await evaluate(plan, tmp_path / "out", gym, Ordered())
    assert gym.most == 4
    by_problem = {sample.problem[-1]: sample for sample in result.samples}
    assert {name: len(sample.turns) for name, sample in by_problem.items()} == {"0": 8, "1": 12, "2": 16, "3": 16}
    assert by_problem["0"].ended == "nothing after turn 1 was better"
    data = report(plan, result, {"proposer": "ordered"}, measured=True)
    # a turn counts as the best of its candidates
    rows = data["figures"]["compile"]["by_turn"]
    assert [row["best_so_far"]["fast_at"]["1.2"]["value"] for row in rows] == [0.25, 0.5, 0.5, 0.5]
    assert data["counts"]["samples"] == 4
    assert data["answers"]["optimised"] == 2 and data["answers"]["failed"] == 2
    assert data["answers"]["geometric_mean"] == pytest.approx((1.4 * 1.6) ** 0.25, abs=1e-6)
    assert data["soundness"]["first"]["right"] == 0.25
    assert data["protocol"]["candidates_a_turn"] == 4
    assert "answers: 2 optimised, 2 failed; over the fastest baseline" in report_text(data)


async def test_what_is_slower_than_the_fastest_baseline_is_no_win(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    plan = plan_of(suite, turns=1, candidates=2)
    slow = {(number, turn): 0.7 for number in range(4) for turn in (1, 2)}
    result = await evaluate(plan, tmp_path / "out", Together(slow, verdicts), Ordered())
    data = report(plan, result, {}, measured=True)
    assert data["figures"]["eager"]["best_of_history"]["fast_at"]["2"]["value"] == 1.0  # 2.5 times eager
    assert (data["answers"]["no-win"], data["answers"]["optimised"]) == (4, 0)
    assert data["answers"]["geometric_mean"] == data["answers"]["median"] == 1.0
    assert {sample["answer"] for problem in data["problems"] for sample in problem["samples"]} == {"no-win"}


async def test_an_interrupted_evaluation_judges_nothing_twice(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    stop = asyncio.Event()

    class Stopping(Together):
        ended = 0

        async def evaluate(self, task: Task, candidate: Candidate) -> Any:
            verdict = await super().evaluate(task, candidate)
            Stopping.ended += 1
            if Stopping.ended == 3:
                stop.set()
            return verdict

    plan, proposer = plan_of(suite, turns=4, candidates=4, workers=2), Ordered()
    first = await evaluate(plan, tmp_path / "out", Stopping(STEPS, verdicts), proposer, stop=stop)
    assert first.interrupted
    assert {sample.fault for sample in first.samples} == {"interrupted"}
    kept = len(list((tmp_path / "out").glob("runs/*/2*/verdicts/*.json")))
    gym = Together(STEPS, verdicts)
    again = await evaluate(plan, tmp_path / "out", gym, proposer)
    assert kept >= 3 and gym.evaluated == 8 + 12 + 16 + 16 - kept
    whole = await evaluate(plan, tmp_path / "whole", Together(STEPS, verdicts), Ordered())
    data, expected = (report(plan, one, {}, measured=True) for one in (again, whole))
    data.pop("times")
    expected.pop("times")
    assert data == expected


async def test_the_time_of_a_problem_counts_from_the_look_at_its_reference(
    suite: Path, tmp_path: Path, verdicts: Any
) -> None:
    class Hanging(Scripted):
        async def inspect(self, task: Task) -> Any:
            await asyncio.sleep(60.0 if task.name.endswith("p0") else 0.0)

    plan = plan_of(suite, max_time_s=1.0, turns=1)
    result = await evaluate(plan, tmp_path / "out", Hanging(STEPS, verdicts), Ordered())
    assert [sample.fault for sample in result.samples] == ["looking at the reference took all of the 1 s", "", "", ""]
    assert result.samples[1].pace is not None
    assert result.samples[1].pace.first_verdict_s is not None


async def test_a_host_that_fails_at_one_problem_does_not_end_the_others(
    suite: Path, tmp_path: Path, verdicts: Any
) -> None:
    class Failing(Scripted):
        failing: ClassVar[list[str]] = ["level1.p1"]

        async def inspect(self, task: Task) -> Any:
            if task.name in self.failing:
                raise HostError("the reference's process misbehaved")

    result = await evaluate(plan_of(suite, turns=1), tmp_path / "out", Failing(STEPS, verdicts), Ordered())
    data = report(plan_of(suite), result, {}, measured=True)
    assert (data["status"], data["counts"]["not_judged"], data["counts"]["samples"]) == ("partial", 1, 4)
    assert "the reference's process misbehaved" in report_text(data)
    Failing.failing += ["level1.p0", "level2.p2", "level2.p3"]  # a gym that is down
    with pytest.raises(HostError, match="misbehaved"):
        await evaluate(plan_of(suite, turns=1), tmp_path / "down", Failing(STEPS, verdicts), Ordered())


async def test_the_time_to_the_first_win_is_told(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    plan = plan_of(suite, turns=1, candidates=4)
    result = await evaluate(plan, tmp_path / "out", Together(STEPS, verdicts), Ordered())
    paces = {sample.problem[-1]: sample.pace for sample in result.samples}
    assert all(pace is not None and pace.first_verdict_s is not None for pace in paces.values())
    assert [name for name, pace in paces.items() if pace is not None and pace.first_win_s is not None] == ["0"]
    times = report(plan, result, {}, measured=True)["times"]
    assert (times["first_win_s"]["count"], times["first_verdict_s"]["count"], times["end_s"]["count"]) == (1, 4, 4)
