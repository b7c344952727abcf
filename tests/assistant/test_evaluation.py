"""Evaluations with a scripted gym: figures, resuming, faults, and the report's forms."""

from __future__ import annotations

import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import pytest
from eval_parts import PROBLEM, Scripted, plan_of, source, write_suite

from drk.assistant.errors import UsageError
from drk.assistant.eval_report import report, report_html, report_text
from drk.assistant.evaluation import EvalPlan, EvalResult, evaluate, find_problems
from drk.assistant.llm.messages import ModelFault
from drk.assistant.proposers import make_proposer
from drk.gym.schema import Candidate, Task


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_suite(tmp_path)


TABLE = {(0, 1): 1.1, (0, 2): 1.5, (1, 1): 2.0, (1, 2): None, (2, 1): None, (2, 2): "hack", (3, 1): None, (3, 2): 0.7}


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
