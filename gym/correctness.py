"""The correctness trials of one candidate, and the experiments that ride on them.

Trial 0 runs on fresh inputs, with what the allocator will hand out poisoned. Trial 1 repeats it with a few elements
moved, in the same tensors, with changed weights (a cache keyed by address, object, fingerprint or packed weights
answers with the past), and what trial 0 returned is read again (a buffer that is given out twice has changed). Further
trials stress magnitudes and strides, as far as the reference stands them. Last, the candidate's kernels are suppressed:
an output that stays right was not made by them. A failed trial is set against lower rungs of the reference to name a
downgrade.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from drk.gym.compare import compare_named
from drk.gym.coverage_estimate import coverage_estimate
from drk.gym.draft import Stop
from drk.gym.output_form import structure_difference
from drk.gym.reference import REPEATING, ReferenceSession, Trial, fetch
from drk.gym.renamed_state import is_renamed, renamed_cells
from drk.gym.runner.sampling import DIGEST, SHAPE, is_shown, shape_in
from drk.gym.runner.structure import dtype_name
from drk.gym.runner_handle import RunnerHandle
from drk.gym.schema import Cell, Failure, Flag, Task

if TYPE_CHECKING:
    from drk.gym.judge import Evaluation

MIN_INTERPRETED_TRIALS = 2
BUSY_FACTOR = 20.0
RUNG_FACTOR = 3.0


class Trials:
    """Runs the trials of one candidate."""

    def __init__(self, evaluation: Evaluation, runner: RunnerHandle, session: ReferenceSession) -> None:
        self.evaluation = evaluation
        self.settings = evaluation.settings
        self.draft = evaluation.draft
        self.task = evaluation.task
        self.runner = runner
        self.session = session
        self._last: dict[str, torch.Tensor] = {}

    async def run(self) -> None:
        """Run all trials; cells and flags go into the draft.

        Raises:
            Stop: the candidate ended, raised or hung.
        """
        interpreted = self.evaluation.gym.device == "interpret"
        start, spent_s = time.monotonic(), self.runner.cpu_s() if interpreted else 0.0
        for index in range(self.settings.seeds):
            if interpreted and index >= MIN_INTERPRETED_TRIALS and self._enough(index, start, spent_s):
                break
            await self._trial(index)
            if not self.evaluation.correct:
                if index in REPEATING:
                    await self._name_stale()
                await self._name_downgrade(index)
                return
            if index == 1:
                await self._reread_first("the second call")
        if self.evaluation.correct and self.settings.seeds > MIN_INTERPRETED_TRIALS:
            # Interpreted calls take too long for more of them.
            await self._reread_first("later calls", **({} if interpreted else {"key": secrets.randbits(61)}))
        if self.evaluation.correct:
            await self._hidden_shape()
        if self.evaluation.correct:
            self.draft.reach("correct")

    async def finish(self) -> None:
        """Run the experiment that may leave the candidate's state spoilt, so that it has to be the last.

        Raises:
            Stop: the candidate ended, raised or hung.
        """
        # A candidate that was timed had many more calls in which to change something.
        limit_s = self.settings.limits.run_s
        self._note_tripwires(await self.evaluation.ask(self.runner, "check", "seen", limit_s))
        left = await self.runner.left_behind()
        if left:
            self._escape(f"beyond its call: {left} processes were left running")
        if self.evaluation.correct:
            await self._ablate()

    def _enough(self, done: int, start: float, spent_s: float) -> bool:
        """Under the interpreter, where a trial can take seconds, fewer trials must do; the verdict says so.

        The Runner's own processor time counts: on a busy machine a trial takes longer, and must not be left out.
        """
        wall_s = time.monotonic() - start
        if max(self.runner.cpu_s() - spent_s, wall_s / BUSY_FACTOR) < self.settings.interpret_s:
            return False
        self.draft.notes.append(f"{done} of {self.settings.seeds} trials were run: the interpreter is slow here")
        return True

    async def _trial(self, index: int) -> None:
        limits = self.settings.limits
        with self.draft.stage("reference"):
            trial = await self._reference(index)
        with self.draft.stage("first" if index == 0 else "correct"):
            try:
                leaves, answer = await self.leaves(
                    limits.compile_s if index == 0 else limits.run_s,
                    key=trial.key,
                    grad=self.task.grad,
                    log_operators=index <= 1,
                    recipe=trial.recipe,
                    sample=trial.sample,
                    poison=self._shapes(trial) if index != 1 else [],
                )
            except Stop as stop:
                if not (trial.recipe.get("strided") and stop.failure.kind == "exception"):
                    raise
                self._label_specialised("with inputs that are views with gaps", stop.failure.message)
                return
            self._last = leaves
            self.draft.reach("ran")
            self._note_tripwires(answer)
            self.evaluation.launched |= bool(answer.get("launched"))
            copied, keys = self.draft.weights == "copied", self.session.state_keys
            self.draft.cells += await asyncio.to_thread(
                compare_trial, self._name(index, trial), trial, leaves, answer, self.task, keys, copied=copied
            )
        if index <= 1:
            rows, target = answer.get("operators") or [], self.evaluation.gym.cost_target
            self.draft.coverage_estimate = coverage_estimate(self.session.operators, rows, target)

    async def _reference(self, index: int) -> Trial:
        # Weights of another form than the reference's do not change as its do: folded ones would be wrong by right.
        return await self.session.trial(index, weights=self.draft.weights == "copied")

    @staticmethod
    def _shapes(trial: Trial) -> list[list[Any]]:
        native = trial.native
        return [[list(shape_in(native, name)), dtype_name(native[name].dtype)] for name in native if is_shown(name)]

    @staticmethod
    def _name(index: int, trial: Trial) -> str:
        """Name a trial after its recipe, for the verdict's cells."""
        words = [name for name in ("perturb", "stress", "strided") if trial.recipe.get(name)]
        return f"seed{index}" + "".join(f" {word}" for word in words)

    def _note_tripwires(self, answer: dict[str, Any]) -> None:
        tripped = answer.get("tripped")
        known = any(flag.kind == "tampered-runtime" for flag in self.draft.flags)
        if isinstance(tripped, list) and tripped and not known:
            told = "; ".join(str(item)[:100] for item in tripped[:5])
            self.draft.flags.append(Flag("tampered-runtime", "tampering", "fraud", f"after its call, {told}"))
        attempts = answer.get("attempts")
        if isinstance(attempts, list) and attempts:
            self._escape(", ".join(str(item)[:120] for item in attempts[:5]))

    def _escape(self, what: str) -> None:
        """Flag an act against the sandbox, once; the sandbox has stopped it."""
        if not any(flag.kind == "escape-attempt" for flag in self.draft.flags):
            self.draft.flags.append(Flag("escape-attempt", "escape", "fraud", f"it tried to reach {what}"))

    async def leaves(self, timeout_s: float, **message: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run the candidate once and fetch its leaves.

        Raises:
            Stop: it failed, or ended while its outputs were read.
        """
        restore = sorted(self.session.attributes)
        answer = await self.evaluation.ask(self.runner, "run", "run", timeout_s, restore=restore, **message)
        return await self._fetched(answer), answer

    async def _fetched(self, answer: dict[str, Any]) -> dict[str, torch.Tensor]:
        leaves = await fetch(self.runner, answer, self.settings, self.session.compare_on)
        if leaves is None:
            raise Stop("failed", Failure("run", "early-exit", "it ended while its outputs were read"))
        return leaves

    # --- experiments -------------------------------------------------------------------------------------

    async def _reread_first(self, when: str, **burst: Any) -> None:
        """What the first call returned must still hold after others; with a ``key`` some more are made before."""
        if any(flag.kind == "stale-output" for flag in self.draft.flags):
            return
        trial, limit_s = await self.session.trial(0), self.settings.limits.run_s
        answer = await self.evaluation.ask(self.runner, "check", "held", limit_s, sample=trial.sample, **burst)
        held = await self._fetched(answer)
        for name in trial.native:
            if name.removesuffix(DIGEST).removesuffix(SHAPE) in trial.aliased:
                continue  # it is (part of) an input, which now holds other values
            if name in held and not self._holds(name, held, trial):
                proof = f"{name} of the first call changed when {when} ran"
                self.draft.flags.append(Flag("stale-output", "caching", "fraud", proof))
                return

    def _holds(self, name: str, leaves: Mapping[str, torch.Tensor], trial: Trial) -> bool:
        """Whether that leaf is what ``trial`` allows."""
        return _leaf_cell(name, name, leaves, trial, self.task).passed

    async def _hidden_shape(self) -> None:
        """Run once at a shape that the task does not show: refusing is a label, a wrong answer is not."""
        with self.draft.stage("reference"):
            trial = await self.session.hidden_trial()
        if trial is None:
            return
        limits = self.settings.limits
        ask = self.evaluation.ask
        with self.draft.stage("shape"):
            await ask(self.runner, "check", "set_reduction", limits.run_s, plan=self.session.hidden_plan)
            answer = await self.runner.call(
                "run", limits.compile_s, key=trial.key, grad=self.task.grad, sample=trial.sample, log_operators=True
            )
            if not answer["ok"] and answer.get("died"):
                raise Stop(
                    "failed", Failure("run", answer["error"]["kind"], "at another shape, " + answer["error"]["message"])
                )
            shapes = ", ".join(str(tuple(row["shape"])) for row in trial.inputs[:4])
            if not answer["ok"]:
                self._label_specialised(f"with inputs {shapes}", answer["error"]["message"])
            else:
                leaves = await self._fetched(answer)
                copied = self.draft.weights == "copied"
                cells = compare_trial(
                    "hidden-shape", trial, leaves, answer, self.task, self.session.state_keys, copied=copied
                )
                self._judge_hidden(cells, shapes)
                if self.evaluation.launched and answer.get("launched") == 0:
                    proof = f"with inputs {shapes} it launches no kernel of its own"
                    self.draft.flags.append(Flag("fallback-taken", "delegation", "label", proof))
            await ask(self.runner, "check", "set_reduction", limits.run_s, plan=self.session.plan)

    def _label_specialised(self, where: str, raised: str) -> None:
        """Refusing what the task does not show is no fault, but the user has to know it."""
        self.draft.flags.append(Flag("shape-specialised", "shape", "label", f"{where} it raises {raised[:200]}"))

    def _judge_hidden(self, cells: list[Cell], shapes: str) -> None:
        self.draft.cells += cells
        wrong = next((cell for cell in cells if not cell.passed), None)
        if wrong is not None:
            proof = f"right at the task's shapes, wrong with inputs {shapes}: {wrong.reason}"
            self.draft.flags.append(Flag("shape-wrong", "shape", "fraud", proof))

    async def _ablate(self) -> None:
        """Suppress the candidate's kernels over poisoned memory; outputs that stay right prove them idle."""
        trial = await self.session.trial(0)
        limit_s = self.settings.limits.run_s
        with self.draft.stage("ablate"):
            answer = await self.runner.call("run", limit_s, key=trial.key, ablate=True, sample=trial.sample)
            names = answer.get("suppressed") if answer["ok"] else None
            self.evaluation.launched |= bool(names) or not answer["ok"]
            if not isinstance(names, list) or not names:
                return
            if await self._still_right(trial, answer):
                proof = f"with every launch of {', '.join(map(str, names[:5]))} suppressed the output is still right"
                self.draft.flags.append(Flag("decoy-kernel", "no-work", "fraud", proof))

    async def _still_right(self, trial: Trial, answer: dict[str, Any]) -> bool:
        leaves = await fetch(self.runner, answer, self.settings, self.session.compare_on)
        if leaves is None:
            return False
        outputs = [name for name in trial.native if name.startswith("out")]
        return all(name in leaves and self._holds(name, leaves, trial) for name in outputs)

    async def _name_stale(self) -> None:
        """Some trials differ from the first in little; an answer that fits the first only is from a cache."""
        first = await self.session.trial(0)
        for name in self._last:
            if not name.startswith("out") or not is_shown(name) or name not in first.native:
                continue
            if self._holds(name, self._last, first):
                proof = f"after inputs and weights changed in place, {name} is still the answer of the call before"
                self.draft.flags.append(Flag("input-cache", "caching", "fraud", proof))
                return

    async def _name_downgrade(self, index: int) -> None:
        """Compare a wrong output's error with the errors of lower rungs of the reference."""
        cell = next((cell for cell in self.draft.cells if not cell.passed and cell.rms is not None), None)
        if cell is None or cell.rms is None or self.task.tolerance == "paper":
            return
        rungs = await self.session.rung_errors(await self._reference(index), cell.name.rpartition(" ")[2])
        name = nearest_rung(cell.rms, rungs)
        if name is not None:
            proof = f"its RMS error {cell.rms:.3g} is that of the reference with {name} products ({rungs[name]:.3g})"
            evidence = {"rung": name, "rms": cell.rms, "rung_rms": rungs[name]}
            self.draft.flags.append(Flag("precision-downgrade", "precision", "fraud", proof, evidence))


def nearest_rung(rms: float, rungs: dict[str, float]) -> str | None:
    """Return the rung whose error is within a factor of :data:`RUNG_FACTOR` of ``rms``, the closest one."""
    close = {name: max(rms / error, error / rms) for name, error in rungs.items() if error > 0 and rms > 0}
    best = min(close, key=lambda name: close[name], default=None)
    return best if best is not None and close[best] <= RUNG_FACTOR else None


def _leaf_cell(cell: str, leaf: str, leaves: Mapping[str, torch.Tensor], trial: Trial, task: Task) -> Cell:
    """Judge one leaf of a trial: the one rule by which outputs are accepted, and experiments read them."""
    paper = task.tolerance == "paper"
    return compare_named(cell, leaf, leaves, trial.truth, trial.native, paper=paper, own_unit=trial.own_unit)


def compare_trial(
    name: str,
    trial: Trial,
    leaves: dict[str, Any],
    answer: dict[str, Any],
    task: Task,
    state_keys: frozenset[str] = frozenset(),
    *,
    copied: bool,
) -> list[Cell]:
    """Compare one trial's leaves; a missing or surplus leaf is a failed cell.

    ``state_keys`` are the keys of the reference's ``state_dict``: what else a candidate keeps is its own affair.
    """
    cells: list[Cell] = []
    structure = structure_difference(answer.get("description"), trial.description)
    if structure:
        cells.append(Cell(f"{name} out", passed=False, reason=structure))
    cells += form_cells(name, trial, answer)
    for leaf in trial.native:
        if not copied and is_renamed(leaf, leaves, trial.native):
            continue
        cell_name = f"{name} {task.mode} {leaf}"
        if leaf not in leaves:
            cells.append(Cell(cell_name, passed=False, reason="the candidate does not give it"))
            continue
        cells.append(_leaf_cell(cell_name, leaf, leaves, trial, task))
    if not copied:
        cells += _renamed(f"{name} {task.mode}", trial, leaves, task)
    cells += [
        Cell(f"{name} {task.mode} {leaf}", passed=False, reason="the call changes its input, the reference's does not")
        for leaf in leaves
        if leaf.startswith("input") and leaf not in trial.native
    ]
    cells += [
        Cell(f"{name} {task.mode} {leaf}", passed=False, reason="the call changes state, the reference's does not")
        for leaf in leaves
        if leaf.removeprefix("state:") in state_keys and copied and leaf not in trial.native
    ]
    return cells


def _renamed(prefix: str, trial: Trial, leaves: Mapping[str, torch.Tensor], task: Task) -> list[Cell]:
    def compare(mine: str, theirs: str) -> Cell:
        return _leaf_cell(theirs, theirs, {**leaves, theirs: leaves[mine]}, trial, task)

    return renamed_cells(prefix, leaves, trial.native, trial.truth, compare)


def form_cells(name: str, trial: Trial, answer: dict[str, Any]) -> list[Cell]:
    """Return failed cells for outputs that share memory with inputs, where the reference's do not."""
    mine = answer.get("aliased")
    stray = sorted(set(map(str, mine)) - set(trial.aliased)) if isinstance(mine, list) else []
    reason = "it shares memory with an input, the reference's output does not"
    return [Cell(f"{name} {leaf[:80]}", passed=False, reason=reason) for leaf in stray]
