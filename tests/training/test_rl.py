"""The whole path: rollouts, the real gym under the interpreter, updates, checkpoints, resume, several processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_scripts import load_script

pytest.importorskip("trl", reason="needs the train extra")

from safetensors.torch import load_file

from drk.assistant.proposers import ProposeContext, is_model, make_proposer, opened
from drk.gym.devices import device_facts
from drk.training.arms import CURVES
from drk.training.config import load_config
from drk.training.rl import Trained, TrainingGym, gym_settings, load_tasks, step_sizes, task_order, train_rl
from drk.training.training_report import CHARTS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

# what a step took, and how many of its verdicts were new: a run that keeps another's verdicts judges none anew
SPENT = ("time", "step_time", "epoch", "seconds", "gym/")
NANO = ("run.validate_every=4", "tasks.held_out=1", "run.save_every=2")


def train(folder: Path, *overrides: str) -> tuple[Trained, list[dict[str, float]]]:
    """Run the recipe ``nano-cpu`` in ``folder``; return the outcome and what was reported."""
    reported: list[dict[str, float]] = []
    config = load_config("nano-cpu", [f"run.output_dir={json.dumps(str(folder))}", *overrides])
    return train_rl(config, lambda _, numbers: reported.append(numbers)), reported


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(SPENT)} for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(600)  # some 40 s on two idle cores
def test_nano_cpu_trains_and_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, told = train(tmp_path / "whole", "run.steps=4", *NANO)
    assert (whole.steps, whole.resumed_at) == (4, 0)
    reported = [step for step in told if "loss" in step]
    assert len(reported) == 4
    assert [step["validation/left_out"] for step in told if "loss" not in step] == [0]
    assert all(torch.isfinite(torch.tensor(step["loss"])) for step in reported)
    assert max(step["reward/mean"] for step in reported) > 0
    assert max(step["grad_norm"] for step in reported) > 0
    assert all(step["keep/mrs"] == 1.0 and step["mismatch/abs_delta"] < 1e-4 for step in reported)

    (tmp_path / "cut").mkdir()
    # the same random model, and the same verdicts: the gym draws its inputs in secret, so that figures in its feedback
    # differ from one process to the next
    (tmp_path / "cut" / "verdicts").symlink_to(tmp_path / "whole" / "verdicts")
    (tmp_path / "cut" / "initial").symlink_to(tmp_path / "whole" / "initial")
    first, _ = train(tmp_path / "cut", "run.steps=2", *NANO)
    assert first.steps == 2
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')  # what a kill leaves
    (tmp_path / "cut" / "checkpoints" / "checkpoint-3").mkdir()
    (tmp_path / "cut" / "validation.jsonl").write_text('{"step": 4, "tasks": 9}\n')
    second, _ = train(tmp_path / "cut", "run.steps=4", *NANO)
    assert (second.steps, second.resumed_at) == (4, 2)
    left, right = weights(whole.final), weights(second.final)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    (validated,) = metrics(tmp_path / "whole", "validation.jsonl")
    assert (validated["step"], validated["tasks"], validated["unusable"]) == (4, 1, 0)
    assert {"correct/turn_1", "correct/best", "reward/turn_1", "hack_rate/best"} <= set(validated)
    assert metrics(tmp_path / "cut", "validation.jsonl") == [validated]
    check_names(reported[-1])
    asyncio.run(check_proposer(whole.folder / "checkpoints" / "checkpoint-4"))
    assert (whole.final / "drk_model.json").is_file()
    turns = [json.loads(line) for line in (tmp_path / "whole" / "turns.0.jsonl").read_text().splitlines()]
    assert {turn["step"] for turn in turns} == {1, 2, 3, 4}
    assert {"accepted", "failed"} <= {turn["status"] for turn in turns}


async def check_proposer(folder: Path) -> None:
    """Ask what was saved as ``drk optimize --model FOLDER`` does: with the prompts of training, in its context."""
    assert is_model(str(folder))
    task = load_tasks(load_config("nano-cpu"))[0].task
    async with opened(make_proposer(str(folder))) as proposer:
        found = await proposer.propose(ProposeContext(task, None, device_facts("sm_90"), limit=1))
    assert len(found) == 1


def check_names(step: dict[str, float]) -> None:
    """Hold the names that the study and the report look for to what a real run wrote."""
    # the recipe takes two turns, the study three
    wanted = {name.replace("turn_3", "turn_2") for name in CURVES}
    wanted |= set(load_script("bench_train").METRICS)
    assert wanted <= set(step), wanted - set(step)
    needs_gpu = {"Fast@1 by turn", "Fast@1.2 by turn", "Coverage"}
    for chart in CHARTS:
        found = any(key == name or key.startswith(name) for key in step for name in chart.names)
        assert found or chart.title in needs_gpu, chart.title


PROCESS = """
import sys, torch
from pathlib import Path
import datasets, transformers
sys.path.insert(0, sys.argv[2])
from policy_parts import MadeUp, make_tasks
from drk.assistant.proposers import ProposeContext, is_model, make_proposer, opened
from drk.gym.devices import device_facts
from drk.training.config import load_config
from drk.training.rl import trainer_arguments
from drk.training.run_folder import RunFolder
from drk.training.trainer import TurnLevelTrainer
import os

folder, world = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
settings = load_config("nano-cpu", ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "run.save_every=0",
    "run.steps=1", "optimizer.max_grad_norm=1e9", "rejection.mrs=false", "rejection.width=0.0",
    f"optimizer.micro_batches={2 // world}"])
run = RunFolder(folder / f"run{world}", main=False)
run.open(settings)

class Keep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        grads = []
        for p in model.parameters():
            g = p.grad
            grads.append(g.full_tensor() if hasattr(g, "full_tensor") else g.clone())
        if state.is_world_process_zero:
            torch.save(grads, folder / f"gradient{sys.argv[3]}.pt")

trainer = TurnLevelTrainer(
    tasks=make_tasks(2), collect=MadeUp(), settings=settings,
    model=transformers.AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
    args=trainer_arguments(settings, run, world),
    train_dataset=datasets.Dataset.from_list([{"prompt": f"task-{i}", "task_index": i} for i in (0, 1)]),
    processing_class=transformers.AutoTokenizer.from_pretrained(folder / "policy", padding_side="left"),
    callbacks=[Keep()],
)
trainer.train()
"""


def launch(folder: Path, name: str, *launcher: str) -> list[torch.Tensor]:
    """Run one step under ``launcher`` and return the whole gradient."""
    script = folder / "process.py"
    script.write_text(PROCESS)
    support = str(Path(__file__).resolve().parents[1] / "support")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": "",
                   "ACCELERATE_USE_CPU": "true"}  # fmt: skip
    command = [sys.executable, *launcher, str(script), str(folder), support, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[torch.Tensor] = torch.load(folder / f"gradient{name}.pt")
    return found


COMMON = ("-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
          "--dynamo_backend", "no", "--main_process_port", "0")  # fmt: skip
LAUNCHERS = {
    "ddp": (*COMMON, "--cpu"),
    "fsdp2": (*COMMON, "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
              "--fsdp_transformer_layer_cls_to_wrap", "Qwen3DecoderLayer"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_give_the_first_gradient_of_one(tmp_path: Path, way: str) -> None:
    from policy_parts import make_policy

    make_policy(tmp_path / "policy")
    alone = launch(tmp_path, "alone")
    together = launch(tmp_path, way, *LAUNCHERS[way])
    assert len(alone) == len(together)
    size = max(float(grad.abs().max()) for grad in alone)
    assert size > 1e-3
    for one, two in zip(alone, together, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5 * size)


def test_the_order_of_tasks_is_fixed_by_the_seed_and_grows_at_its_end() -> None:
    short, long = task_order(5, 12, 3), task_order(5, 40, 3)
    assert long[:12] == short
    assert sorted(long[:5]) == [0, 1, 2, 3, 4]
    assert task_order(5, 12, 4) != short


def test_a_training_gym_keeps_a_reference_for_each_task() -> None:
    settings = gym_settings(load_config("nano", ["gym.sessions=40", "gym.timing=false", "gym.run_s=7"]).gym)
    assert TrainingGym(settings, 40).sessions_at_once == 40
    assert TrainingGym(settings, 0).sessions_at_once == max(4, settings.parallel)
    assert (settings.timing.enabled, settings.limits.run_s, settings.hidden_shape) == (False, 7.0, True)


def test_uneven_steps_are_refused() -> None:
    from drk.training.errors import OptionError

    config = load_config("nano-cpu", ["rollout.samples_per_prompt=3", "optimizer.micro_batches=4"])
    with pytest.raises(OptionError, match="6 samples"):
        step_sizes(config, 1)


def test_held_out_tasks_are_others() -> None:
    config = load_config("nano-cpu", ["tasks.count=30", "tasks.held_out=5", "tasks.families=[]"])
    train_set, held_out = load_tasks(config), load_tasks(config, held_out=True)
    assert len(held_out) == 5
    assert {task.signature for task in train_set}.isdisjoint(task.signature for task in held_out)
