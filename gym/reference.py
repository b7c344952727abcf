"""The Judge's view of one task's Reference Runner: weights, truth and the reference's own outputs, trial by trial.

A session is kept while it is used, since every candidate for the same task needs the same truth. Keys and the
constructor seed are secrets of the Judge, drawn per session; a candidate's process learns a key only at the moment its
inputs are drawn, and never sees an expected value.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

import torch

from drk.gym.arena import Arena
from drk.gym.compare import error_stats
from drk.gym.compile_baseline import CompileBaseline
from drk.gym.errors import HostError, ProtocolError, TaskError
from drk.gym.mutants import passing_mutants
from drk.gym.runner import transfer
from drk.gym.runner.rungs import RUNGS
from drk.gym.runner.sampling import is_shown
from drk.gym.runner_handle import RunnerHandle
from drk.gym.schema import Candidate, Task
from drk.gym.settings import GymSettings
from drk.gym.wire import task_to_json

_HOST_KINDS = {"protocol"}
REDRAWS = 2
HIDDEN_ELEMENTS = 2**18
WEIGHTS_FACTOR = 1.125
REPEATING = (1, 3)
"""Trials that differ from the first in a few elements."""
TF32_UNIT = 2.0**-11
WHOLE_ELEMENTS = 2**22
SAMPLED_ABOVE = 2**21
SAMPLE_ELEMENTS = 2**20
STEADY_RMS = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


def task_meta(task: Task) -> dict[str, Any]:
    """Return the task as a Runner sees it: everything but the sources and tensors, which lie in its scratch folder."""
    meta = task_to_json(task)
    del meta["files"], meta["tensors"]
    return meta


def task_files(task: Task) -> dict[str, bytes]:
    """Return the files of a Runner's scratch folder."""
    files = {f"src/{path}": text.encode("utf-8", "surrogatepass") for path, text in task.files.items()}
    if task.tensors is not None:
        files["tensors.safetensors"] = task.tensors
    return files


def candidate_files(task: Task, candidate: Candidate) -> dict[str, bytes]:
    """Return the scratch files of a Candidate Runner."""
    return {**task_files(task), "candidate.py": candidate.source.encode("utf-8", "surrogatepass")}


@dataclass
class Trial:
    """One key's results on the comparison device: leaves of the reference and of the float64 truth, by name."""

    key: int
    native: dict[str, torch.Tensor]
    truth: dict[str, torch.Tensor]
    description: dict[str, Any]
    strides: dict[str, list[int]]
    inputs: list[dict[str, Any]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    aliased: tuple[str, ...] = ()
    sample: dict[str, Any] = field(default_factory=dict)
    own_unit: float = 0.0


def recipe_for(index: int, keys: list[int]) -> tuple[int, dict[str, Any]]:
    """Return key and recipe of trial ``index`` (see :mod:`drk.gym.runner.recipes`).

    Trial 1 repeats the first with a few elements moved, in the same tensors, with changed weights: whoever answers from
    a cache of addresses, objects, fingerprints or packed weights is wrong there. Trial 3 repeats it with other elements
    moved, since a fingerprint of some elements may have met the first ones by chance, and as views with gaps. Trials 2
    and 4 stress magnitudes.
    """
    recipes: dict[int, dict[str, Any]] = {
        1: {"perturb": keys[-1] ^ 0x5BD1E995, "in_place": True, "weights": WEIGHTS_FACTOR},
        2: {"stress": {"kind": "heavy-tail", "factor": 100.0, "share": 0.02}},
        3: {"perturb": keys[-1] ^ 0x2545F491, "strided": True},
        4: {"stress": {"kind": "offset", "value": 1000.0}},
    }
    recipe = recipes.get(index, {})
    return keys[0 if index in REPEATING else index], {**recipe, "key": keys[index]} if recipe else {}


class ReferenceSession:
    """Holds the Reference Runner of one task; one command at a time goes to it."""

    def __init__(self, task: Task, settings: GymSettings, handle: RunnerHandle, device: str, compare_on: str) -> None:
        self.task = task
        self.settings = settings
        self.handle = handle
        self.device = device
        self.compare_on = compare_on
        self.lock = asyncio.Lock()
        self.seed = secrets.randbits(31)
        self.keys = [secrets.randbits(62) for _ in range(settings.seeds)]
        self.sample_seed = secrets.randbits(62)
        self.peak_bytes = 0
        self.plan: dict[str, Any] | None = None
        self.hidden_plan: dict[str, Any] | None = None
        self._hidden: Trial | None = None
        self.weights = Arena("drk-weights")
        self.weight_layout: list[dict[str, Any]] = []
        self.weight_bytes = 0
        self.baseline: CompileBaseline | None = None
        self.best_low = 0.0
        self.warm: dict[str, dict[str, Any]] = {}
        self.strain = 0.0
        self._trials: dict[tuple[int, bool], Trial] = {}
        self.untold: list[str] = []
        self.users = 0
        self.operators: list[Any] = []
        self.attributes: set[tuple[str, str]] = set()
        self.stateful = False

    async def prepare(self) -> None:
        """Load the user's module, plan the reduction of its inputs where interpreted, and copy its weights out.

        Raises:
            TaskError: the reference cannot be loaded or run.
        """
        limits = self.settings.limits
        await self._ask("load", limits.load_s, **self.load_message())
        if self.device == "cpu":
            self.plan = await self._plan(self.settings.interpret_elements)
            await self._ask("set_reduction", limits.run_s, plan=self.plan)
        elif self.settings.hidden_shape:
            self.hidden_plan = await self._plan(HIDDEN_ELEMENTS)
        answer = await self._ask("state_out", limits.run_s)
        self.weight_layout = answer["layout"]
        self.weight_bytes = transfer.check_layout(self.weight_layout, limits.memory_bytes)
        self.weights.reserve(self.weight_bytes)
        await self._ask("write", limits.run_s, fds=(self.weights.fd,))
        self.weights.seal()

    def load_message(self) -> dict[str, Any]:
        """Return what tells a Reference Runner to load the task's module."""
        return {
            "meta": task_meta(self.task),
            "device": self.device,
            "seed": self.seed,
            "precision": self.task.precision,
        }

    async def _plan(self, elements: int) -> dict[str, Any] | None:
        answer = await self._ask("plan_reduction", self.settings.limits.compile_s, key=self.keys[0], elements=elements)
        return answer["plan"] or None

    async def hidden_trial(self) -> Trial | None:
        """Return a trial at a shape that the task does not show, or None when the module allows no other.

        Raises:
            TaskError: the reference fails.
        """
        if self.hidden_plan is None:
            return None
        async with self.lock:
            if self._hidden is None:
                limit_s = self.settings.limits.run_s
                await self._ask("set_reduction", limit_s, plan=self.hidden_plan)
                try:
                    self._hidden = await self._run_trial(secrets.randbits(62), {}, self.sample(None))
                finally:
                    await self._ask("set_reduction", limit_s, plan=self.plan)
            return self._hidden

    async def trial(self, index: int, *, weights: bool = True) -> Trial:
        """Return trial ``index``, run at first use; without ``weights`` those stay as they are, whatever the recipe.

        Raises:
            TaskError: the reference fails on these inputs, in its own dtype or in float64.
        """
        key, recipe = recipe_for(index, self.keys)
        if not weights:
            recipe = {name: value for name, value in recipe.items() if name != "weights"}
        which = index, "weights" in recipe
        async with self.lock:
            if which not in self._trials:
                self._trials[which] = await self._run_recipe(key, recipe, self.sample(index))
            return self._trials[which]

    async def settle_keys(self) -> None:
        """Draw the keys again until the inputs can tell wrong outputs, at most :data:`REDRAWS` times.

        Raises:
            TaskError: the reference fails.
        """
        for _ in range(1 + REDRAWS):
            first = await self.trial(0)
            second = await self.trial(1) if self.settings.seeds > 1 else None
            self.untold = passing_mutants(first.native, first.truth, second.native if second is not None else None)
            if not self.untold:
                return
            self.keys = [secrets.randbits(62) for _ in self.keys]
            self._trials.clear()

    def sample(self, index: int | None) -> dict[str, Any]:
        """Return how large leaves of a trial are shown: more of the first two, which others are held against."""
        above = WHOLE_ELEMENTS if index in (0, 1) else SAMPLED_ABOVE
        return {"seed": self.sample_seed, "above": above, "elements": SAMPLE_ELEMENTS}

    async def _run_recipe(self, key: int, recipe: dict[str, Any], sample: dict[str, Any]) -> Trial:
        """Run a trial; where the reference itself does not stand a stress or strides, run a plain one instead."""
        mild = {name: value for name, value in recipe.items() if name not in ("stress", "strided")}
        try:
            trial = await self._run_trial(key, recipe, sample)
        except TaskError:
            if mild == recipe or not self.alive:
                raise
            return await self._run_trial(key, {}, sample)
        if mild != recipe and not steady(trial):
            return await self._run_trial(key, {}, sample)
        return trial

    async def _run_trial(self, key: int, recipe: dict[str, Any], sample: dict[str, Any]) -> Trial:
        shown = {name: value for name, value in recipe.items() if name != "in_place"}
        grad = self.task.grad
        native_answer, native = await self._leaves(
            key=key, variant=self._rung(), grad=grad, log_operators=not self.operators, recipe=shown, sample=sample
        )
        self.attributes |= {(str(part), str(name)) for part, name in native_answer.get("attributes") or []}
        self.stateful |= bool(self.attributes) or any(name.startswith(("state:", "input")) for name in native)
        self.operators = self.operators or native_answer.get("operators") or []
        _, truth = await self._leaves(key=key, variant="float64", grad=grad, recipe=shown, sample=sample)
        missing = sorted(set(native) - set(truth))
        if missing:
            raise TaskError(f"in float64 the module gives no {missing[0]}: its outputs depend on the dtype")
        strides = dict(zip(native, native_answer["strides"], strict=True))
        aliased = tuple(str(name) for name in native_answer.get("aliased") or [])
        described, inputs = native_answer["description"], native_answer["inputs"]
        own_unit = TF32_UNIT if native_answer.get("tf32_convolutions") and uses_convolutions(self.operators) else 0.0
        return Trial(key, native, truth, described, strides, inputs, recipe, aliased, sample, own_unit)

    def _rung(self) -> str:
        """Return the variant that stands for the reference: its own, or the rung that the policy allows."""
        if self.task.precision == "bf16" or (self.task.precision == "tf32" and self.device == "cpu"):
            return self.task.precision
        return "native"

    async def rung_errors(self, trial: Trial, leaf: str) -> dict[str, float]:
        """Return the RMS error of one output leaf with the reference's products on each lower rung.

        A rung that changes nothing (no products, or the reference stands there already) is left out.
        """
        found: dict[str, float] = {}
        if leaf not in trial.native or not trial.native[leaf].is_floating_point():
            return found
        own = error_stats(trial.native[leaf], trial.truth[leaf]).rms
        async with self.lock:
            for rung in RUNGS:
                recipe = {name: value for name, value in trial.recipe.items() if name != "in_place"}
                asked: dict[str, Any] = {"key": trial.key, "recipe": recipe, "sample": trial.sample}
                _, leaves = await self._leaves(**asked, variant=rung, grad=False)
                error = error_stats(leaves[leaf], trial.truth[leaf]).rms if leaf in leaves else 0.0
                if error > 2 * own:
                    found[rung] = error
        return found

    async def _leaves(self, **message: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        limits = self.settings.limits
        answer = await self._ask("run", limits.compile_s, **message)
        self.peak_bytes = max(self.peak_bytes, int(answer.get("peak_bytes") or 0))
        leaves = await fetch(self.handle, answer, self.settings, self.compare_on)
        if leaves is None:
            raise TaskError("the reference's outputs could not be read")
        return answer, leaves

    async def _ask(
        self, command: str, timeout_s: float, *, fds: tuple[int, ...] = (), **message: Any
    ) -> dict[str, Any]:
        answer = await self.handle.call(command, timeout_s, fds=fds, **message)
        if not answer["ok"]:
            raise reference_error(answer["error"], self.task)
        return answer

    async def ask(self, command: str, timeout_s: float, **message: Any) -> dict[str, Any]:
        """Send one command to the Runner, in turn.

        Raises:
            TaskError: the reference failed.
        """
        async with self.lock:
            return await self._ask(command, timeout_s, **message)

    @property
    def state_keys(self) -> frozenset[str]:
        """The keys of the reference's ``state_dict``."""
        return frozenset(str(row["name"]) for row in self.weight_layout)

    @property
    def alive(self) -> bool:
        """Whether the Runner can still answer."""
        return self.handle.stopped_for is None

    async def close(self) -> None:
        """End the Runner and give the weights' memory back."""
        if self.baseline is not None:
            await self.baseline.close()
        await self.handle.close()
        self.weights.close()
        self._trials.clear()


def usable(started: asyncio.Task[ReferenceSession]) -> bool:
    """Say whether a task that is done brought a session whose Runner still answers."""
    return not started.cancelled() and started.exception() is None and started.result().alive


def uses_convolutions(operators: list[Any]) -> bool:
    """Whether logged operators (rows of :mod:`drk.gym.runner.operators`) hold a convolution of float32 tensors."""
    return any(
        "conv" in str(row.get("op")) and any(dtype == "float32" for _, dtype in row.get("operands") or [])
        for row in operators
    )


def steady(trial: Trial) -> bool:
    """Whether the reference itself holds under a stress: finite where the truth is, and near it."""
    for name, leaf in trial.native.items():
        if name.startswith("out") and leaf.is_floating_point() and is_shown(name):
            stats = error_stats(leaf, trial.truth[name])
            if stats.bad or stats.rms > STEADY_RMS.get(leaf.dtype, 1e-3):
                return False
    return True


def reference_error(error: dict[str, Any], task: Task) -> TaskError:
    """Turn a Runner's failure into the error that a person reads."""
    if error["kind"] in _HOST_KINDS:
        raise HostError(f"the reference's process misbehaved: {error['message']}")
    file = error["file"].removeprefix("src/")
    return TaskError(
        f"the reference cannot be judged: {error['message']}",
        kind=f"reference-{error['kind']}",
        file=file or task.entry,
        line=error["line"],
        help=error["help"] or _REFERENCE_HELP.get(error["kind"], "run the file by itself to see the fault"),
    )


_REFERENCE_HELP = {
    "timeout": "importing or running the file takes too long; move work below `if __name__ == '__main__':`",
    "out-of-memory": "use smaller inputs, or raise the memory limit",
    "exit": "the file ends the program when it is imported; move that below `if __name__ == '__main__':`",
}


async def fetch(
    handle: RunnerHandle, answer: dict[str, Any], settings: GymSettings, device: str
) -> dict[str, torch.Tensor] | None:
    """Bring the leaves that ``answer`` announces into the Judge's memory; None when the Runner died on the way.

    Raises:
        ProtocolError: the layout is inconsistent, too large, or the memory shorter than announced.
    """
    limits = settings.limits
    size = transfer.check_layout(answer.get("layout"), limits.output_bytes)
    handle.arena.reserve(size)
    written = await handle.call("write", limits.run_s)
    if not written["ok"]:
        return None
    leaves: dict[str, torch.Tensor] = {}
    for row in answer["layout"]:
        name = str(row["name"])
        if name in leaves:
            raise ProtocolError(f"two outputs are called {name[:80]}")
        leaves[name] = await asyncio.to_thread(transfer.read_tensor, handle.arena.fd, row, device)
    return leaves
