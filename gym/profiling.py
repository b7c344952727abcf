"""Which kernels a correct candidate launches, and how much of the device time is its own (coverage, DESIGN 4.3).

On a GPU the Runner's profiler is asked; under the interpreter there are launches, and no times.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from drk.gym.kernels import merge_kernels
from drk.gym.runner_handle import RunnerHandle

if TYPE_CHECKING:
    from drk.gym.judge import Evaluation

PROFILE_RUNS = 5


async def measure_interpreted(evaluation: Evaluation, runner: RunnerHandle) -> None:
    """Without a GPU: note the launches that the interpreter saw beside what offline compilation found."""
    answer = await evaluation.ask(runner, "profile", "kernels", evaluation.settings.limits.run_s)
    evaluation.draft.kernels = merge_kernels(evaluation.draft.kernels, answer.get("kernels"))


async def profile_kernels(evaluation: Evaluation, runner: RunnerHandle) -> None:
    """Measure which kernels the device time goes to, and the candidate's own share of it (coverage)."""
    keys = [secrets.randbits(62) for _ in range(PROFILE_RUNS)]
    with evaluation.draft.stage("profile"):
        answer = await evaluation.ask(runner, "profile", "profile", evaluation.settings.limits.run_s, keys=keys)
    evaluation.draft.kernels = merge_kernels([], answer.get("kernels"))
    share = answer.get("coverage")
    if isinstance(share, int | float) and 0.0 <= share <= 1.0:
        evaluation.draft.coverage = float(share)
