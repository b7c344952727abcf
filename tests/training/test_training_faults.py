"""What goes wrong in long runs: each fault is waited for or stops the run, nothing is trained on it, and it resumes.

"The same command again" is the same settings on the same folder; the outcome is compared with a run without the fault.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs the train extra")

import transformers
from jumping_loop import JumpingLoop
from policy_parts import MadeUp, make_policy
from safetensors.torch import load_file
from trainer_parts import Sampled, build, settings_of

from drk.gym.engine import Gym
from drk.gym.errors import ZygoteError
from drk.gym.schema import Call, Candidate, Task, TensorSpec, Verdict
from drk.gym.settings import GymSettings
from drk.training import sampling
from drk.training.backend_choice import WeightSyncError, sync_served_weights
from drk.training.config import GymSection, RewardSection, TrainConfig
from drk.training.errors import EmptyBatchError, NotFiniteError
from drk.training.prompting import Prompter, PromptSettings
from drk.training.rl import Trained, run_trainer
from drk.training.rollout import Collector
from drk.training.run_folder import RunFolderError, disk_errors
from drk.training.scoring import PatientJudge
from drk.training.trainer import GymFaults, TurnLevelTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
STEPS = 2
Prepare = Callable[[TurnLevelTrainer], None]


def train(folder: Path, collect: Any, *overrides: str, prepare: Prepare = lambda _: None) -> Trained:
    """Train as ``drk train rl`` does, with every guard and a checkpoint each step; ``prepare`` plants the fault."""
    settings = settings_of("run.save_every=1", "optimizer.micro_batches=1", *overrides, steps=STEPS)
    trainer, run = build(folder, collect, settings, guarded=True)
    prepare(trainer)
    try:
        with disk_errors(run.path):
            return run_trainer(trainer, run)
    finally:
        run.close()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(left: Path, right: Path) -> bool:
    one, other = weights(left), weights(right)
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "run" / "checkpoints").glob("*/complete"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on made-up turns without any fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, MadeUp())
    return folder


def copy_policy(source: Path, folder: Path) -> None:
    shutil.copytree(source / "policy", folder / "policy")


def test_a_gradient_that_is_not_a_number_moves_no_weight(tmp_path: Path, undisturbed: Path) -> None:
    copy_policy(undisturbed, tmp_path)
    trained: list[Any] = []

    def poison(trainer: TurnLevelTrainer) -> None:
        trained.append(trainer.model)
        first = next(trainer.model.parameters())
        first.register_hook(lambda grad: grad * (float("nan") if trainer.state.global_step == 1 else 1.0))

    with pytest.raises(NotFiniteError, match="gradient of step 2 is not finite") as caught:
        train(tmp_path, MadeUp(), prepare=poison)
    assert "the same command" in caught.value.help
    good = weights(tmp_path / "run" / "checkpoints" / "checkpoint-1")
    state = trained[0].state_dict()
    assert all(torch.equal(state[name], value) for name, value in good.items())
    done = train(tmp_path, MadeUp())
    assert (done.resumed_at, done.steps) == (1, STEPS)
    assert same(done.final, undisturbed / "run" / "final")


class FillDisk(transformers.TrainerCallback):
    """Lets no file grow beyond 60 kB from the end of step 2 on, as a full disk would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_disk_that_fills_up_at_a_checkpoint_leaves_the_one_before(tmp_path: Path, undisturbed: Path) -> None:
    copy_policy(undisturbed, tmp_path)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(RunFolderError, match="no room for a checkpoint") as caught:
            train(tmp_path, MadeUp(), prepare=lambda trainer: trainer.add_callback(FillDisk()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "start the same command again" in caught.value.help
    assert checkpoints(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2").is_dir()  # cut short, and not resumed from
    done = train(tmp_path, MadeUp())
    assert done.resumed_at == 1
    assert same(done.final, undisturbed / "run" / "final")
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"]


class Straying(Sampled):
    """The sampler's log-probabilities are far off from step 2 on, so that MRS rejects every row, until it is mended."""

    def __init__(self, config: TrainConfig, *, mended: bool = False) -> None:
        super().__init__(config)
        self.mended = mended

    def __call__(self, items: Any, *, seed: int) -> Any:
        found, clock = super().__call__(items, seed=seed)
        if self.trainer.state.global_step < 1 or self.mended:
            return found, clock
        off = [
            replace(
                one, turns=tuple(replace(row, sampling_logps=(-9.0,) * len(row.sampling_logps)) for row in one.turns)
            )
            for one in found
        ]
        return off, clock


def test_a_batch_that_rejection_empties_makes_no_step(tmp_path: Path) -> None:
    settings = settings_of("rejection.mrs=true", steps=STEPS)
    collect = Straying(settings)
    with pytest.raises(EmptyBatchError, match="3 collections") as caught:
        train(tmp_path, collect, "rejection.mrs=true")
    assert "new run" in caught.value.help
    assert collect.trainer.state.global_step == 1
    state = collect.trainer.model.state_dict()
    good = weights(tmp_path / "run" / "checkpoints" / "checkpoint-1")
    assert all(torch.equal(state[name], value) for name, value in good.items())
    done = train(tmp_path, Straying(settings, mended=True), "rejection.mrs=true")
    assert (done.resumed_at, done.steps) == (1, STEPS)


# --- The gym -------------------------------------------------------------------------------------------------


class Backend:
    """Answers at once with tokens that the prompt and its seed decide."""

    busy_s, outages = 0.0, 0

    def begin(self, trajectories: int) -> None:
        """Wait for nobody."""

    def leave(self) -> None:
        """Wait for nobody."""

    async def generate(self, prompt: sampling.Prompt) -> sampling.Sampled:
        await asyncio.sleep(0)
        ids = tuple(5 + (prompt.seed >> shift) % 12 for shift in (0, 7, 14)[: 1 + prompt.seed % 3])
        return sampling.Sampled((*ids, 2), (-1.0,) * (len(ids) + 1), False)

    async def settle(self) -> None:
        """Nothing goes on."""

    async def close(self) -> None:
        """Nothing is held."""


class AwayJudge:
    """A gym that is away from its third call on for ``away_s`` seconds; what it pays is decided by the candidate."""

    def __init__(self, away_s: float) -> None:
        self.away_s = away_s
        self.calls = 0
        self.since = 0.0

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        now = asyncio.get_running_loop().time()
        self.calls += 1
        if self.calls == 3:
            self.since = now
        await asyncio.sleep(0.25)
        if self.since and self.since <= now < self.since + self.away_s:
            raise ZygoteError("the gym is down")
        right = sum(candidate.source.encode()) % 3 > 0
        cover = len(candidate.source) % 7 / 7
        status = "accepted" if right else "rejected"
        return Verdict(status, "interpreter", "ran", correct=right, honest=None, coverage_estimate=cover)  # type: ignore[arg-type]


def train_against(folder: Path, judge: AwayJudge, patience_s: float) -> tuple[Trained, PatientJudge]:
    """Train with a real collector around ``judge``, in a loop whose waiting takes no time."""
    if not (folder / "policy").is_dir():
        make_policy(folder / "policy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    settings = settings_of("reward.proxy=true", steps=STEPS)
    patient = PatientJudge(judge, GymSection(patience_s=patience_s))
    prompter = Prompter(tokenizer, PromptSettings("bare", "append-all", 256, 4))
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        collector = Collector(
            Backend(), patient, prompter, Spoken(tokenizer), settings.rollout, RewardSection(proxy=True)
        )
        done = train(
            folder, lambda items, *, seed: runner.run(collector.collect(items, seed=seed)), "reward.proxy=true"
        )
    return done, patient


class Spoken:
    """A tokenizer whose answers are files: its words in a fenced block with a class."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: list[int], **options: Any) -> str:
        words = self.tokenizer.decode(ids, **options).replace("\n", " ").replace("`", "")
        return f"```python\nclass ModelNew:\n    words = {words!r}\n```"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose gym was never away."""
    folder = tmp_path_factory.mktemp("judged")
    _, patient = train_against(folder, AwayJudge(0.0), 1.0)
    assert patient.retries == 0
    return folder


def test_a_gym_that_is_down_for_half_a_minute_is_waited_for(tmp_path: Path, judged: Path) -> None:
    copy_policy(judged, tmp_path)
    done, patient = train_against(tmp_path, AwayJudge(30.0), 120.0)
    assert patient.retries > 8
    assert done.steps == STEPS
    assert same(done.final, judged / "run" / "final")
    left, right = ((folder / "run" / "turns.0.jsonl").read_text() for folder in (tmp_path, judged))
    assert left == right


def test_a_gym_that_stays_away_stops_the_run_which_then_resumes(tmp_path: Path, judged: Path) -> None:
    copy_policy(judged, tmp_path)
    judge = AwayJudge(30.0)
    with pytest.raises(GymFaults, match=r"trajectories were lost to faults.*the gym is down") as caught:
        train_against(tmp_path, judge, 10.0)
    assert "start the same command again" in caught.value.help
    assert checkpoints(tmp_path) == []
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # no step was made on what little was judged
    done, _ = train_against(tmp_path, AwayJudge(0.0), 10.0)
    assert same(done.final, judged / "run" / "final")


RELU = (
    "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        {body}return torch.relu(x)\n"
)


async def test_a_killed_worker_of_the_gym_costs_a_retry_and_no_reward() -> None:
    call = Call((TensorSpec((8, 16)),))
    task = Task("relu", {"model.py": RELU.format(body="")}, "model.py", "Model", inputs=call)
    slow = Candidate(RELU.replace("Model", "ModelNew").format(body="__import__('time').sleep(1.5)\n        "))
    settings = GymSettings(device="interpret", sandbox="basic", seeds=1, offline_compile=False)
    async with Gym(settings) as gym:
        patient = PatientJudge(gym, GymSection(patience_s=120.0))
        running = asyncio.create_task(patient.verdict(task, slow))
        zygote = await gym._zygote("interpret")
        await asyncio.sleep(1.0)
        os.kill(zygote.process.pid, signal.SIGKILL)
        verdict = await running
    assert verdict.accepted, verdict
    assert patient.retries >= 1


# --- The vLLM server -----------------------------------------------------------------------------------------


def test_weights_that_cannot_be_sent_stop_the_run_with_a_message() -> None:
    def fail() -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(sync_weights=fail))
    with pytest.raises(WeightSyncError, match=r"could not be sent.*refused") as caught:
        sync_served_weights(trainer)
    assert "resumes at the last checkpoint" in caught.value.help
