from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.verdict_cache import VerdictCache
from drk.gym.errors import HostError, ZygoteError
from drk.gym.reward import NotRewardable
from drk.gym.schema import Candidate, Failure, Flag, Interval, Speedups, Task, Verdict
from drk.training.config import GymSection, RewardSection
from drk.training.scoring import PatientJudge, read_answer, score

TASK = Task("t", {"model.py": ""}, "model.py", "Model")
RIGHT = Verdict("accepted", "interpreter", "correct", correct=True, honest=None, coverage_estimate=0.5)
FAST = Verdict(
    "accepted",
    "gpu",
    "measured",
    correct=True,
    honest=True,
    speedups=Speedups(Interval(2.1, 2.0, 2.2, 50)),
    headline="eager",
    coverage=0.8,
)
FAULT = Verdict("error", "gpu", None, correct=False, honest=None, error=Failure("host", "gpu", "fell off the bus"))
SECTION = GymSection(patience_s=5.0)


class Judge:
    """Answers from a list; an exception in it is raised. The last one goes on for ever."""

    def __init__(self, *answers: Verdict | Exception, delay_s: float = 0.0) -> None:
        self.answers = answers
        self.delay_s = delay_s
        self.calls = 0

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        if isinstance(answer, Exception):
            raise answer
        return answer


def patient(judge: Judge, **options: Any) -> PatientJudge:
    return PatientJudge(judge, options.pop("section", SECTION), pause_s=0.01, **options)


async def test_faults_of_the_host_are_asked_again() -> None:
    judge = Judge(ZygoteError("died"), FAULT, RIGHT)
    one = patient(judge)
    assert await one.verdict(TASK, Candidate("x")) == RIGHT
    assert (judge.calls, one.retries) == (3, 2)


async def test_patience_ends_and_the_cause_is_told() -> None:
    one = patient(Judge(FAULT), section=GymSection(patience_s=0.1))
    with pytest.raises(HostError, match="fell off the bus"):
        await one.verdict(TASK, Candidate("x"))
    assert one.retries >= 2


async def test_an_answer_without_a_candidate_needs_no_gym() -> None:
    judge = Judge(RIGHT)
    verdict = await patient(judge).verdict(TASK, read_answer("no code here", cut=False, mark="1"))
    assert (verdict.status, verdict.correct, judge.calls) == ("failed", False, 0)
    assert score(verdict, RewardSection()).reward == 0.0


async def test_the_cache_judges_once_also_in_another_process(tmp_path: Path) -> None:
    judge = Judge(RIGHT, delay_s=0.05)
    one = patient(judge, cache=VerdictCache(tmp_path, {"seeds": 1}))
    answers = await asyncio.gather(*(one.verdict(TASK, Candidate("x")) for _ in range(5)))
    assert answers == [RIGHT] * 5
    other = patient(judge, cache=VerdictCache(tmp_path, {"seeds": 1}))
    assert await other.verdict(TASK, Candidate("x")) == RIGHT
    assert judge.calls == 1
    await other.verdict(TASK, Candidate("y"))
    assert judge.calls == 2


async def test_a_failed_evaluation_is_not_kept(tmp_path: Path) -> None:
    judge = Judge(ZygoteError("died"), ZygoteError("died"), RIGHT)
    one = patient(judge, cache=VerdictCache(tmp_path, {}), section=GymSection(patience_s=0.0))
    with pytest.raises(ZygoteError):
        await one.verdict(TASK, Candidate("x"))
    with pytest.raises(ZygoteError):
        await one.verdict(TASK, Candidate("x"))
    assert await one.verdict(TASK, Candidate("x")) == RIGHT


def test_scores() -> None:
    fast = score(FAST, RewardSection())
    assert (fast.reward, fast.correct, fast.coverage, fast.speedup) == (pytest.approx(3.8), True, 0.8, 2.0)
    logic = score(RIGHT, RewardSection(proxy=True))
    assert logic.reward == pytest.approx(1.5)
    assert math.isnan(logic.coverage)
    assert math.isnan(logic.speedup)
    fraud = Flag("no-op", "no-work", "fraud", "ablation")
    hacked = score(replace(FAST, status="rejected", correct=False, honest=False, flags=(fraud,)), RewardSection())
    assert (hacked.reward, hacked.hacked, hacked.correct) == (0.0, True, False)
    with pytest.raises(NotRewardable):
        score(FAULT, RewardSection())


@pytest.mark.parametrize(
    ("form", "share"), [("paper", 0.8), ("recipe", 0.4), ("weighted", 0.4), ("ladder", 0.0)], ids=str
)
def test_without_pay_for_coverage_the_form_pays_just_that_less(form: Any, share: float) -> None:
    whole, less = (score(FAST, RewardSection(form=form, pay_coverage=paid)) for paid in (True, False))
    assert whole.reward - less.reward == pytest.approx(share)
    assert replace(whole, reward=less.reward) == less  # what rejection sees is the same
    bare = replace(FAST, coverage=0.0)
    assert score(bare, RewardSection(form=form)).reward == pytest.approx(less.reward)
    proxy = [score(RIGHT, RewardSection(proxy=True, pay_coverage=paid)).reward for paid in (True, False)]
    assert proxy == [pytest.approx(1.5), pytest.approx(1.0)]


def test_fraud_is_paid_only_where_an_ablation_asks_for_it_and_stays_fraud() -> None:
    fraud = Flag("no-op", "no-work", "fraud", "ablation")
    caught = replace(FAST, status="rejected", honest=False, flags=(fraud,))
    strict, lenient = (score(caught, RewardSection(pay_dishonest=paid)) for paid in (False, True))
    assert (strict.reward, strict.correct, strict.hacked) == (0.0, False, True)
    assert lenient.reward == pytest.approx(score(FAST, RewardSection()).reward)
    assert (lenient.correct, lenient.hacked) == (False, True)  # metrics and Fast@p still say so
    wrong = replace(caught, correct=False)
    assert score(wrong, RewardSection(pay_dishonest=True)).reward == 0.0  # wrong is not paid either way
    honest = [score(FAST, RewardSection(pay_dishonest=paid)) for paid in (False, True)]
    assert honest[0] == honest[1]


def test_answers_are_read_as_the_assistant_reads_them() -> None:
    good = read_answer("Here:\n```python\nclass ModelNew:\n    pass\n```\n", cut=False, mark="a")
    assert good.source == "class ModelNew:\n    pass\n"
    assert read_answer("nothing", cut=False, mark="a") != read_answer("nothing", cut=False, mark="b")
