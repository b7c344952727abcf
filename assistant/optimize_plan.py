"""What ``drk optimize`` is to do, from the command line or a stored profile: a :class:`drk.assistant.optimize.Plan`.

Here a target's text, its task and the command that measures a candidate on a machine with a GPU come together; the
user's file is read before and after, so that task and recorded source are the same text.

Left out: reading a run's own plan again (:mod:`drk.assistant.optimize_command` does, for ``--resume``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from drk.assistant.artefact import SourceFile
from drk.assistant.budget import Budget
from drk.assistant.console import Console
from drk.assistant.errors import TargetError
from drk.assistant.intake import locate, split_target
from drk.assistant.optimize import Plan
from drk.assistant.profile_choice import choose_profiled
from drk.assistant.settings import Settings
from drk.assistant.task_building import TaskOptions, build_task
from drk.gym.schema import Task
from drk.gym.settings import GymSettings, Timing

MAX_PARALLEL = 4
CORES_EACH = 4
"""One candidate's process compiles on a core while the GPU runs, beside the reference's two processes and this one."""


def plan_for(options: TaskOptions, settings: Settings, samples: int, *, tell: Callable[[str], None]) -> Plan:
    """Return the plan for a target; ``tell`` is told what was left out.

    Raises:
        TargetError: the target cannot be used, or its file changes meanwhile.
        UsageError: an option is wrong.
        drk.gym.errors.TaskError: the user's code failed where it had to be run.
    """
    file, _ = split_target(options.target)
    path = locate(file, None)
    data = path.read_bytes()
    precision, tolerance = settings.precision, settings.tolerance
    task = build_task(options, gym_settings(settings), precision=precision, tolerance=tolerance, tell=tell)
    if path.read_bytes() != data:
        raise TargetError("the file changes while it is read", file=file, help="save it, and run the command again")
    source = SourceFile(_root_of(path, task), task.entry, data)
    return as_plan(task, source, settings, samples, _verify_words(options, settings, str(path), file))


def _verify_words(options: TaskOptions, settings: Settings, path: str, file: str) -> list[str]:
    """Return the command line that judges a candidate on a GPU."""
    words = ["drk", "verify", path + options.target[len(file) :], "{candidate}", "--device", "cuda:0"]
    for name, texts in (("--input", options.inputs), ("--init", options.init)):
        for text in texts:
            words += [name, text]
    for name, value, usual in (
        ("--precision", settings.precision, "match"),
        ("--tolerance", settings.tolerance, "float64"),
        ("--mode", options.mode, "eval"),
        ("--capture", options.capture, ""),
        ("--autocast", options.autocast, ""),
    ):
        words += [name, value] if value != usual else []
    words += ["--train"] if options.train else []
    if options.factory is not None:
        words.append("--factory" if options.factory else "--no-factory")
    return words + (["--state-dict", str(options.state_dict.resolve())] if options.state_dict else [])


def profiled_plan(console: Console, name: str | None, settings: Settings, samples: int) -> tuple[str, Plan]:
    """Return the target of a stored profile and the plan for it."""
    chosen = choose_profiled(name)
    share = f"{100 * chosen.share:.0f} % of the time in profile {chosen.profile}"
    console.info(f"{chosen.target}: {share}, called with {chosen.kind.text}")
    if chosen.other_kinds:
        console.warn(f"it is also called in {chosen.other_kinds} other ways, which are not looked at")
    task = replace(chosen.task, precision=settings.precision, tolerance=settings.tolerance)
    return chosen.target, as_plan(task, chosen.source(), settings, samples, chosen.verify_words())


def _root_of(path: Path, task: Task) -> Path:
    """Return the folder that the task's entry is relative to."""
    return path.resolve().parents[len(Path(task.entry).parts) - 1]


def as_plan(task: Task, source: SourceFile | None, settings: Settings, samples: int, words: list[str]) -> Plan:
    """Return the plan for a task under ``settings``; ``words`` is the command that measures a candidate."""
    return Plan(
        task=task,
        source=source,
        budget=Budget(settings.turns, samples, settings.max_time_s),
        target=settings.target,
        judging={"seeds": settings.seeds, "sandbox": settings.sandbox, "target": settings.target},
        cache_dir=settings.cache_dir,
        measure_words=words,
    )


def gym_settings(settings: Settings) -> GymSettings:
    """Return the gym's part of the settings; candidates are judged together where there are cores for it."""
    return GymSettings(
        device=settings.device,
        target=settings.target,
        sandbox=settings.sandbox,
        seeds=settings.seeds,
        parallel=max(2, min(MAX_PARALLEL, (os.cpu_count() or 1) // CORES_EACH)),
        timing=Timing(best_only=True),
    )
