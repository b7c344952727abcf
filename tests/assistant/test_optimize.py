"""The flow with a scripted gym: statuses, resuming, interruption, and kill -9 at random moments."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.artefact import SourceFile
from drk.assistant.budget import Budget
from drk.assistant.errors import EnvironmentFault
from drk.assistant.optimize import Answer, Plan, begin_run, optimize, recorded_source
from drk.assistant.replay import ReplayProposer
from drk.assistant.runs import Run
from drk.gym.errors import TaskError
from drk.gym.schema import Candidate, Task


class Scripted:
    """Proposes the given candidates turn by turn; counts how often it is asked."""

    name = "scripted"

    def __init__(self, *turns: Sequence[str], ordered: bool = False) -> None:
        self.turns = turns
        self.ordered = ordered
        self.asked = 0

    async def propose(self, context: Any) -> list[Candidate]:
        self.asked += 1
        done = len({turn.index for turn in context.history})
        return [Candidate(source, "scripted") for source in (self.turns[done] if done < len(self.turns) else [])]


@pytest.fixture
def plan(project: Path, silu_task: Task, tmp_path: Path) -> Plan:
    source = SourceFile(project, "model.py", (project / "model.py").read_bytes())
    return Plan(silu_task, source, cache_dir=tmp_path / "cache", measure_words=["drk", "verify", "a b", "{candidate}"])


@pytest.fixture
def run(plan: Plan, tmp_path: Path) -> Run:
    return begin_run(plan, tmp_path / "runs", {"target": "model.py"})


async def go(plan: Plan, run: Run, gym: Any, proposer: Any, stop: asyncio.Event | None = None) -> tuple[Answer, list]:
    events: list[dict[str, Any]] = []
    answer = await optimize(plan, run, gym, proposer, emit=events.append, stop=stop)
    return answer, events


async def test_without_a_gpu_it_is_unmeasured(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any, silu_candidate: Candidate
) -> None:
    good = silu_candidate.source
    gym = make_gym({"# bad": verdicts.refused(), good: verdicts.accepted()})
    answer, events = await go(plan, run, gym, Scripted(["# bad"], [good]))
    result = json.loads((run.folder / "result.json").read_text())
    assert result == json.loads(json.dumps(answer.result))
    assert result["status"] == "unmeasured"
    assert "not measured" in result["reason"]
    assert result["best"]["candidate"]["source"] == good
    assert result["best"]["verdict"]["speedups"] is None
    assert [turn["status"] for turn in result["turns"]] == ["rejected", "accepted"]
    assert result["estimate"]["coverage_estimate"] == 0.9
    assert 0 < result["estimate"]["least_bytes"] <= result["estimate"]["eager_bytes"]
    assert result["measure_command"] == f"drk verify 'a b' {run.folder}/candidates/002.py"
    assert all(Path(path).is_file() for path in result["artefact"].values())
    assert answer.outcome.exit_code == 0
    kinds = [event["event"] for event in events]
    assert kinds[:3] == ["started", "baseline", "captured"]
    assert kinds[-2:] == ["artefact", "finished"]
    assert [event for event in run.events() if event["event"] != "judging"] == [
        event for event in events if event["event"] != "judging"
    ]


async def test_nothing_in_the_users_folder_changes(
    project: Path, plan: Plan, run: Run, make_gym: Any, verdicts: Any, silu_candidate: Candidate
) -> None:
    before = {path: path.read_bytes() for path in project.rglob("*")}
    await go(plan, run, make_gym({silu_candidate.source: verdicts.accepted(1.5)}), Scripted([silu_candidate.source]))
    assert {path: path.read_bytes() for path in project.rglob("*")} == before


@pytest.mark.parametrize(
    ("low", "status", "says"),
    [(1.2, "optimised", "1.30x over compile"), (0.95, "no-win", "no significant"), (0.5, "no-win", "slower")],
)
async def test_statuses_with_a_gpu(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any, silu_candidate: Candidate, low: float, status: str, says: str
) -> None:
    gym = make_gym({silu_candidate.source: verdicts.accepted(low)}, device_facts={"device": "cuda:0", "gpu": "H200"})
    answer, _ = await go(plan, run, gym, Scripted([silu_candidate.source], ordered=True))
    assert answer.result["status"] == status
    assert says in answer.result["reason"]
    assert (answer.result["artefact"] is not None) == (status == "optimised")
    assert answer.result["estimate"] is None
    assert answer.result["measure_command"] is None
    assert answer.outcome.exit_code == (0 if status == "optimised" else 1)


async def test_failed_names_the_nearest(plan: Plan, run: Run, make_gym: Any, verdicts: Any) -> None:
    gym = make_gym({"# a": verdicts.refused(reached="loaded"), "# b": verdicts.refused("oops", "compiled")})
    answer, _ = await go(plan, run, gym, Scripted(["# a", "# b"]))
    assert answer.result["status"] == "failed"
    assert answer.result["best"] is None
    assert "none of 2 candidates" in answer.result["reason"]
    assert "reached compiled (oops: the outputs differ)" in answer.result["reason"]
    assert answer.outcome.exit_code == 1


async def test_no_proposal_is_no_win(plan: Plan, run: Run, make_gym: Any) -> None:
    answer, _ = await go(plan, run, make_gym({}), Scripted())
    assert (answer.result["status"], answer.result["best"]) == ("no-win", None)


async def test_turns_and_samples_are_limits(plan: Plan, run: Run, make_gym: Any, verdicts: Any) -> None:
    sources = [[f"# {turn}.{sample}" for sample in range(5)] for turn in range(5)]
    gym = make_gym({source: verdicts.refused() for turn in sources for source in turn})
    answer, _ = await go(replace(plan, budget=Budget(2, 3)), run, gym, Scripted(*sources))
    assert gym.evaluated == [source for turn in sources[:2] for source in turn[:3]]
    assert [(turn["index"], turn["sample"]) for turn in answer.result["turns"]] == [
        (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip


async def test_an_ordered_proposer_is_settled_by_the_first_accepted_without_a_gpu(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any
) -> None:
    gym = make_gym({"# a": verdicts.refused(), "# b": verdicts.accepted(), "# c": verdicts.accepted()})
    answer, _ = await go(plan, run, gym, Scripted(["# a", "# b", "# c"], ordered=True))
    assert gym.evaluated == ["# a", "# b"]
    assert answer.result["status"] == "unmeasured"


async def test_repeated_candidates_are_judged_once(plan: Plan, run: Run, make_gym: Any, verdicts: Any) -> None:
    gym = make_gym({"# a": verdicts.refused(), "# b": verdicts.refused()})
    await go(plan, run, gym, Scripted(["# a", "# a"], ["# a", "# b"], ["# b"]))
    assert gym.evaluated == ["# a", "# b"]


async def test_verdicts_are_kept_across_runs(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any, tmp_path: Path
) -> None:
    script = {"# a": verdicts.refused(), "# b": verdicts.accepted(1.4)}
    first = make_gym(script)
    await go(plan, run, first, Scripted(["# a", "# b"]))
    second, other = make_gym(script), begin_run(plan, tmp_path / "runs", {})
    answer, events = await go(plan, other, second, Scripted(["# a", "# b"]))
    assert len(first.evaluated) == 2
    assert second.evaluated == []
    assert [event["source"] for event in events if event["event"] == "judged"] == ["cache", "cache"]
    assert answer.result["status"] == "optimised"
    third = make_gym(script, device_facts={"device": "cuda:0", "gpu": "H200"})
    await go(plan, begin_run(plan, tmp_path / "runs", {}), third, Scripted(["# a", "# b"]))
    assert len(third.evaluated) == 2  # another device, another verdict


async def test_host_errors_are_tried_again_and_never_kept(plan: Plan, run: Run, make_gym: Any, verdicts: Any) -> None:
    broken = verdicts.refused("zygote-died", status="error")
    gym = make_gym({"# a": broken, "# b": verdicts.refused()})
    answer, events = await go(plan, run, gym, Scripted(["# a", "# b"]))
    assert gym.evaluated == ["# a", "# a", "# b"]
    assert len(answer.result["turns"]) == 1
    assert any("could not be judged: zygote-died" in event.get("text", "") for event in events)
    with pytest.raises(EnvironmentFault, match="no candidate could be judged"):
        await go(plan, begin_run(plan, run.folder.parent, {}), make_gym({"# c": broken}), Scripted(["# c"]))


async def test_what_only_a_gpu_can_judge_is_asked_once_and_said(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any
) -> None:
    gym = make_gym({"# a": verdicts.refused("program-budget", status="error")})
    with pytest.raises(EnvironmentFault, match="without a GPU") as caught:
        await go(plan, run, gym, Scripted(["# a"]))
    assert gym.evaluated == ["# a"]
    assert caught.value.kind == "needs-gpu"
    assert "--device cuda:0" in caught.value.help


async def test_an_uncapturable_module_goes_on_without_a_graph(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any
) -> None:
    gym = make_gym({"# a": verdicts.accepted()})

    async def capture(task: Task) -> dict[str, Any]:
        raise TaskError("it branches on data", kind="capture")

    gym.capture = capture
    answer, events = await go(plan, run, gym, Scripted(["# a"]))
    assert answer.result["status"] == "unmeasured"
    assert "could not be captured" in answer.result["artefact_reason"]
    assert [event["reason"] for event in events if event["event"] == "captured"] == ["it branches on data"]


async def test_stopping_keeps_the_best_and_resuming_ends_alike(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any, silu_candidate: Candidate
) -> None:
    good = silu_candidate.source
    script = {good: verdicts.accepted(1.2), "# b": verdicts.refused(), "# c": verdicts.accepted(1.1)}
    stop, gym, proposer = asyncio.Event(), make_gym(script), Scripted([good, "# b"], ["# c"])
    evaluate = gym.evaluate

    async def slow(task: Task, candidate: Candidate) -> Any:
        if candidate.source == "# b":
            asyncio.get_running_loop().call_soon(stop.set)
            await asyncio.sleep(60)
        return await evaluate(task, candidate)

    gym.evaluate = slow
    answer, _ = await go(plan, run, gym, proposer, stop)
    assert answer.outcome.interrupted
    assert answer.outcome.exit_code == 130
    assert answer.result["status"] == "optimised"
    assert answer.result["artefact"] is not None
    assert gym.evaluated == [good]

    again = make_gym(script)
    resumed, events = await go(replace(plan, source=recorded_source(run)), Run(run.folder), again, proposer)
    assert again.evaluated == ["# b", "# c"]
    assert again.inspected == 0
    assert proposer.asked == 3  # both turns once, and once more to learn that there is nothing else
    assert events[0]["resumed"]
    assert not resumed.outcome.interrupted
    assert len(resumed.result["turns"]) == 3
    judged = [event["number"] for event in run.events() if event["event"] == "judged"]
    assert judged == [1, 2, 3]


async def test_resumed_on_a_gpu_what_was_accepted_is_measured(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any, silu_candidate: Candidate
) -> None:
    good = silu_candidate.source
    proposer = Scripted(["# a", good], ordered=True)
    first, _ = await go(plan, run, make_gym({"# a": verdicts.refused(), good: verdicts.accepted()}), proposer)
    assert first.result["status"] == "unmeasured"
    gpu = make_gym({good: verdicts.accepted(1.5)}, device_facts={"device": "cuda:0", "gpu": "H200"})
    second, _ = await go(plan, Run(run.folder), gpu, proposer)
    assert gpu.evaluated == [good]  # the refused one stays refused
    assert second.result["status"] == "optimised"


async def test_stopping_before_anything_was_judged(plan: Plan, run: Run, make_gym: Any) -> None:
    stop = asyncio.Event()
    stop.set()
    gym = make_gym({})

    async def never(task: Task) -> Any:
        await asyncio.sleep(60)

    gym.inspect = never
    answer, _ = await go(plan, run, gym, Scripted(), stop)
    assert (answer.result["status"], answer.outcome.exit_code) == ("failed", 130)
    assert "interrupted" in answer.result["reason"]


async def test_time_is_a_limit(plan: Plan, run: Run, make_gym: Any, verdicts: Any) -> None:
    gym = make_gym({"# a": verdicts.refused()}, delay_s=60.0)
    answer, _ = await go(replace(plan, budget=Budget(max_time_s=0.2)), run, gym, Scripted(["# a"]))
    assert answer.result["status"] == "failed"
    assert "time budget" in answer.result["reason"]
    assert not answer.outcome.interrupted


async def test_a_task_error_reaches_the_caller(plan: Plan, run: Run, make_gym: Any) -> None:
    gym = make_gym({})

    async def broken(task: Task) -> Any:
        raise TaskError("forward raised", kind="forward-raised", file="model.py", line=3)

    gym.inspect = broken
    with pytest.raises(TaskError, match="forward raised"):
        await go(plan, run, gym, Scripted())
    assert run.result is None


DRIVER = """
import asyncio, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import conftest as parts
from drk.assistant.optimize import Plan, optimize, recorded_source
from drk.assistant.replay import ReplayProposer
from drk.assistant.runs import Run
from drk.assistant.budget import Budget
folder, candidates = Path(sys.argv[1]), Path(sys.argv[2])
sources = [json.loads(line)["source"] for line in candidates.read_text().splitlines()]
script = {s: parts.accepted(1.0 + i / 100) if i % 3 == 2 else parts.refused() for i, s in enumerate(sources)}
gym = parts.FakeGym(script, json.loads((candidates.parent / "graph.json").read_text()), delay_s=0.02, at_once=3)
run = Run(folder)
plan = Plan(run.task(), recorded_source(run), Budget(3, 4))
asyncio.run(optimize(plan, run, gym, ReplayProposer(candidates), emit=lambda event: None))
"""


def test_killed_at_any_moment_it_ends_alike(
    plan: Plan, tmp_path: Path, silu_graph: Any, silu_candidate: Candidate
) -> None:
    candidates = tmp_path / "c.jsonl"
    lines = [json.dumps({"source": f"{silu_candidate.source}\n# {number}\n"}) for number in range(12)]
    candidates.write_text("\n".join(lines))
    (tmp_path / "graph.json").write_text(json.dumps(silu_graph))

    def start(run: Run) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", DRIVER, str(run.folder), str(candidates), str(Path(__file__).parent)]
        return subprocess.Popen(words, stderr=subprocess.PIPE)

    def finish(run: Run) -> dict[str, Any]:
        process = start(run)
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()
        result = run.result
        assert result is not None
        return result

    whole = finish(begin_run(plan, tmp_path / "whole", {}))
    cut = begin_run(plan, tmp_path / "cut", {})
    chance = random.Random(7)
    for wanted in sorted(chance.sample(range(1, 40), 10)):  # kill when the journal has so many lines
        process = start(cut)
        while process.poll() is None and len(cut.events()) < wanted:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for file in cut.folder.rglob("*.json"):
            json.loads(file.read_text())  # no half-written file
    assert cut.result is None or cut.result == {**cut.result}
    resumed = finish(cut)
    for result in (whole, resumed):
        for key in ("run_dir", "artefact"):
            result.pop(key)
        for turn in result["turns"]:
            turn.pop("seconds")
        for key in ("gpu_s", "gpu_s_per_win"):
            result["spending"].pop(key)
    assert resumed == whole
    assert whole["status"] == "optimised"
    judged = [event["number"] for event in cut.events() if event["event"] == "judged"]
    assert sorted(set(judged)) == list(range(1, 13))


async def test_recorded_candidates_reach_the_artefact(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any, silu_candidate: Candidate, tmp_path: Path
) -> None:
    for name, source in (("1_fails", "# 1"), ("2_fixed", "# 2"), ("3_better", silu_candidate.source)):
        (tmp_path / "recorded").mkdir(exist_ok=True)
        (tmp_path / "recorded" / f"{name}.py").write_text(source)
    script = {"# 1": verdicts.refused(), "# 2": verdicts.accepted(1.05), silu_candidate.source: verdicts.accepted(1.5)}
    proposer = ReplayProposer(tmp_path / "recorded")
    answer, _ = await go(replace(plan, budget=Budget(3, 1)), run, make_gym(script), proposer)
    assert [turn["index"] for turn in answer.result["turns"]] == [1, 2, 3]
    assert answer.result["best"]["candidate"]["note"] == "3_better.py"
    assert answer.result["status"] == "optimised"
    assert answer.result["artefact"] is not None
