"""Validation while training: the policy on held-out tasks, by ``drk eval``'s own function and figures.

Every ``run.validate_every`` steps the policy stands before :func:`drk.assistant.evaluation.evaluate` as a proposer,
with the prompts and the sampler of training, one sample a task and ``rollout.turns`` turns. A line goes to
``validation.jsonl``; the whole report, protocol and all, to ``validation/step-N/report.json``, with the latest
validation's runs beside it. Draws are those of a fixed seed, so that two lines differ by the policy. The first process
does it alone; the others wait. A vLLM server answers with the weights that it was sent before the step.

What could not be judged counts in no figure and is counted as ``left_out``; a gym that is down costs this validation,
never the run: the line then says why. Honest limits: one sample a task, at the temperature of training; an answer that
repeats an earlier one ends its episode, as in ``drk eval``. For published figures use ``drk eval`` on a checkpoint.
"""

from __future__ import annotations

import json
import shutil
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from drk.assistant.errors import DrkError, EnvironmentFault
from drk.assistant.eval_report import report as eval_report
from drk.assistant.evaluation import EvalPlan, EvalResult, Problem, evaluate
from drk.assistant.optimize import OptimizeGym
from drk.assistant.proposers import ProposeContext
from drk.gym.errors import HostError
from drk.gym.reward import NotRewardable
from drk.gym.schema import Candidate, Verdict
from drk.gym.settings import LEAST_SESSIONS
from drk.training.backends import PolicyBackend, SamplerUnavailable
from drk.training.config import RewardSection, TrainConfig
from drk.training.live_table import Report
from drk.training.prompting import Prompter, PromptTooLong
from drk.training.rollout import row_seed
from drk.training.run_folder import RunFolder, append_line
from drk.training.sampling import Prompt
from drk.training.scoring import read_answer, score
from drk.training.tasks import TrainingTask

SEED = 7_777_777
FOLDER = "validation"
_BASELINES = {"eager": "eager", "compile": "compile", "headline": "fastest"}


class PolicyProposer:
    """The policy as a proposer: the prompts of rollouts, one answer a turn, draws by task and turn."""

    name = "policy"
    ordered = False

    def __init__(self, backend: PolicyBackend, prompter: Prompter, tokenizer: Any, max_new_tokens: int) -> None:
        self.backend = backend
        self._prompter = prompter
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return the policy's answer; none where the conversation leaves no room for one.

        Raises:
            EnvironmentFault: the sampler failed.
        """
        try:
            ids = self._prompter.prompt_ids(context.task, context.history)
        except PromptTooLong:
            return []
        name = context.task.name
        seed = row_seed(SEED, zlib.crc32(name.encode()), context.turn)
        try:
            answer = await self.backend.generate(Prompt(ids, seed, self._max_new_tokens))
        except SamplerUnavailable as error:
            raise EnvironmentFault(error.message, kind="sampler", help=error.help) from error
        text = self._tokenizer.decode(list(answer.ids), skip_special_tokens=True)
        return [read_answer(text, cut=answer.cut, mark=f"{name} turn {context.turn}")]


class Validation(TrainerCallback):  # type: ignore[misc] # the library has no types
    """Evaluates on held-out tasks every so many steps, writes a line and tells ``report``.

    ``run`` runs a coroutine in the event loop that the gym lives in.
    """

    def __init__(
        self,
        tasks: Sequence[TrainingTask],
        gym: OptimizeGym,
        proposer: PolicyProposer,
        config: TrainConfig,
        folder: RunFolder,
        run: Callable[[Coroutine[Any, Any, EvalResult]], EvalResult],
        report: Report,
    ) -> None:
        self._gym = gym
        self._proposer = proposer
        self._config = config
        self._folder = folder
        self._run = run
        self._report = report
        self._plan = EvalPlan(
            problems=tuple(Problem(one.task.name, one.family, one.task) for one in tasks),
            turns=config.rollout.turns,
            workers=LEAST_SESSIONS,
            problems_at_once=LEAST_SESSIONS,
            max_time_s=config.rollout.trajectory_timeout_s,
            judging={"gym": asdict(config.gym)},
            cache_dir=folder.path if config.gym.cache else None,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Validate when it is due."""
        if state.global_step % self._config.run.validate_every:
            return
        step, begun = state.global_step, time.monotonic()
        place, outages = self._make_place(step), self._proposer.backend.outages
        try:
            result = self._run(self._evaluate(place))
        except (HostError, DrkError) as error:
            facts: dict[str, Any] = {"not_done": str(error)[:300]}
        else:
            facts = self._facts(result, step, place)
            if self._proposer.backend.outages > outages:  # a server that came back has other weights
                facts = {"not_done": "the sampler was away meanwhile"}
        facts["seconds"] = round(time.monotonic() - begun, 3)
        append_line(self._folder.validation, {"step": step, **facts})
        numbers = {f"validation/{name}": value for name, value in facts.items() if isinstance(value, (int, float))}
        self._report(step, numbers)

    def _make_place(self, step: int) -> Path:
        """Return the folder of this step, empty but for references that were looked at; older runs are removed."""
        whole = self._folder.path / FOLDER
        for runs in whole.glob("step-*/runs"):
            shutil.rmtree(runs, ignore_errors=True)
        place = whole / f"step-{step}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (whole / "problems").mkdir(exist_ok=True)
        (place / "problems").symlink_to("../problems")
        return place

    async def _evaluate(self, place: Path) -> EvalResult:
        backend = self._proposer.backend
        backend.begin(0)
        try:
            return await evaluate(self._plan, place, self._gym, self._proposer)
        finally:
            await backend.settle()

    def _facts(self, result: EvalResult, step: int, place: Path) -> dict[str, Any]:
        section = self._config.rollout
        protocol: dict[str, Any] = {
            "step": step,
            "sampler": section.backend,
            "temperature": section.temperature,
            "split": "held-out",
        }
        protocol |= {"templates": self._config.prompt.templates, "policy": self._config.prompt.policy}
        protocol |= {"device": self._gym.device_facts}
        measured = self._config.gym.timing and self._gym.device_facts.get("gpu") is not None
        whole = eval_report(self._plan, result, protocol, measured=measured)
        (place / "report.json").write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")
        return line_of(whole, self._config.reward) | reward_by_turn(result, self._config.reward)


def line_of(whole: dict[str, Any], section: RewardSection) -> dict[str, Any]:
    """Return a report's main figures, flat: shares at each turn (of the samples that reached it) and for the best."""
    counts = whole["counts"]
    facts: dict[str, Any] = {"tasks": counts["samples"] + counts["unusable"]}
    facts |= {"left_out": counts["not_judged"], "unusable": counts["unusable"]}
    if whole["figures"] is None:
        return facts
    figures = whole["figures"][_BASELINES.get(section.baseline, "eager")]
    for row in figures["by_turn"]:
        if row["at_turn"] is not None:
            facts |= _shares(row["at_turn"], f"turn_{row['turn']}")
    return facts | _shares(figures["best_of_history"], "best")


def _shares(figures: dict[str, Any], name: str) -> dict[str, Any]:
    shares = {f"correct/{name}": figures["correct"], f"hack_rate/{name}": figures["hacked"]}
    fast = {f"fast@{p}/{name}": one["value"] for p, one in figures["fast_at"].items() if one is not None}
    return shares | fast


def reward_by_turn(result: EvalResult, section: RewardSection) -> dict[str, float]:
    """Return the mean reward at each turn, over the turns that were taken; faults of the host are left out."""
    rewards: dict[int, list[float]] = {}
    for sample in result.samples:
        for turn in sample.turns if not sample.fault else ():
            value = _reward(turn.verdict, section)
            if value is not None:
                rewards.setdefault(turn.index, []).append(value)
    return {f"reward/turn_{turn}": sum(values) / len(values) for turn, values in sorted(rewards.items())}


def _reward(verdict: Verdict, section: RewardSection) -> float | None:
    try:
        return score(verdict, section).reward
    except NotRewardable:
        return None
