"""The contract with TRL: the trainer's gradient is turn-level REINFORCE, and nothing else reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from policy_parts import MadeUp, make_policy, make_tasks

pytest.importorskip("trl", reason="needs the train extra")

import datasets
import transformers

from drk.training.advantages import AdvantageOptions, turn_advantages
from drk.training.config import TrainConfig, load_config
from drk.training.errors import EmptyBatchError
from drk.training.rl import trainer_arguments
from drk.training.run_folder import RunFolder
from drk.training.trainer import GymFaults, TurnLevelTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

OVERRIDES = [
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.turns=2",
    "optimizer.max_grad_norm=1e9",
    "rejection.mrs=false",
    "rejection.width=0.0",
    "run.steps=2",
    "run.save_every=0",
]


class Gradients(transformers.TrainerCallback):
    """Keeps the first step's gradient, and the weights that it belongs to."""

    def __init__(self) -> None:
        self.first: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.first:
            self.first = [p.grad.detach().clone() for p in model.parameters()]
            self.weights = [p.detach().clone() for p in model.parameters()]


def run(folder: Path, collect: Any, *more: str, steps: int = 1) -> tuple[TurnLevelTrainer, Gradients, TrainConfig]:
    """Train ``steps`` steps on made-up turns."""
    settings = load_config("nano-cpu", [*OVERRIDES, *more, f"run.steps={steps}"])
    policy = make_policy(folder / "policy")
    run_folder = RunFolder(folder / "run")
    run_folder.open(settings)
    order = [0, 1] * steps
    gradients = Gradients()
    trainer = TurnLevelTrainer(
        tasks=make_tasks(2),
        collect=collect,
        settings=settings,
        journal=run_folder.journal,
        model=transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        args=trainer_arguments(settings, run_folder, 1),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"task-{i}", "task_index": i} for i in order]),
        processing_class=transformers.AutoTokenizer.from_pretrained(policy, padding_side="left"),
        callbacks=[gradients],
    )
    trainer.train()
    return trainer, gradients, settings


def reinforce_gradient(folder: Path, rows: list[Any]) -> list[torch.Tensor]:
    """Return the gradient of turn-level REINFORCE, row by row, without padding, groups or TRL."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    keep = torch.tensor([row.score.coverage > 0 for row in rows])
    advantages = turn_advantages(
        torch.tensor([row.score.reward for row in rows], dtype=torch.float64),
        prompt=[row.prompt for row in rows],
        sample=[row.sample for row in rows],
        turn=torch.tensor([row.turn for row in rows]),
        mask=torch.ones(len(rows)),
        keep=keep,
        options=AdvantageOptions(singleton="zero", rejected_in_baseline=False),
    )
    tokens = sum(len(row.completion_ids) for row, kept in zip(rows, keep.tolist(), strict=True) if kept)
    loss = torch.zeros(())
    for row, advantage, kept in zip(rows, advantages.tolist(), keep.tolist(), strict=True):
        if not kept:
            continue
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        logps = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
        chosen = logps.gather(1, ids[0, 1:, None]).squeeze(1)[len(row.prompt_ids) - 1 :]
        loss = loss - advantage * chosen.sum() / tokens
    loss.backward()
    return [p.grad for p in model.parameters()]


def relative_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    difference = sum(float((a - b).square().sum()) for a, b in zip(left, right, strict=True))
    return (difference / sum(float(b.square().sum()) for b in right)) ** 0.5


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_is_turn_level_reinforce(tmp_path: Path, micro_batches: int) -> None:
    collect = MadeUp()
    trainer, gradients, _ = run(tmp_path, collect, f"optimizer.micro_batches={micro_batches}")
    assert 2 < sum(row.score.coverage == 0 for row in collect.rows) < len(collect.rows) - 2
    expected = reinforce_gradient(tmp_path, collect.rows)
    assert sum(float(grad.abs().sum()) for grad in expected) > 0.1
    assert relative_difference(gradients.first, expected) < 1e-5
    changed = [
        bool((p.detach() != w).any()) for p, w in zip(trainer.model.parameters(), gradients.weights, strict=True)
    ]
    assert any(changed)


def test_a_rejected_row_has_no_effect(tmp_path: Path) -> None:
    _, left, _ = run(tmp_path / "a", MadeUp())
    _, right, _ = run(tmp_path / "b", MadeUp(change_rejected=3))
    assert all(torch.equal(a, b) for a, b in zip(left.first, right.first, strict=True))


def test_metrics_appear_and_every_turn_is_written_down(tmp_path: Path) -> None:
    collect = MadeUp()
    trainer, _, _ = run(tmp_path, collect, steps=2)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    for name in ("reward/mean", "reward/turn_1", "correct/turn_2", "keep/prs", "rows/live", "hack_rate", "entropy",
                 "grad_norm", "group/size_mean", "time/rollout_s", "trajectories/fault_share"):  # fmt: skip
        assert name in logged[0], name
    assert 0 < logged[0]["keep/prs"] < 1
    assert logged[0]["correct/turn_1"] == 1.0
    assert [seed for _, seed in collect.calls] == [0, 16]
    assert [item.sample for item in collect.calls[0][0]] == list(range(8))
    lines = (tmp_path / "run" / "turns.0.jsonl").read_text().splitlines()
    assert len(lines) > 2 * 8


def test_the_planned_divisor_does_not_depend_on_rejection(tmp_path: Path) -> None:
    collect = MadeUp()
    _, by_tokens, _ = run(tmp_path / "a", collect)
    _, planned, _ = run(tmp_path / "b", MadeUp(), "optimizer.divisor=planned")
    tokens = sum(len(row.completion_ids) for row in collect.rows if row.score.coverage > 0)
    scaled = [grad * tokens / (1000 * 2 * 4 * 2) for grad in by_tokens.first]
    assert relative_difference(planned.first, scaled) < 1e-5


def test_an_empty_batch_is_collected_again_and_then_stops(tmp_path: Path) -> None:
    collect = MadeUp()
    with pytest.raises(EmptyBatchError, match="3 collections"):
        # made-up log-probabilities are far from the model's: nothing passes the band
        run(tmp_path, collect, "rejection.mrs=true")
    assert [seed for _, seed in collect.calls] == [0, 1, 2]


def test_too_many_faults_stop_the_run(tmp_path: Path) -> None:
    from dataclasses import replace

    class Faulty(MadeUp):
        def __call__(self, items: Any, *, seed: int) -> Any:
            found, clock = super().__call__(items, seed=seed)
            return [replace(one, turns=(), ending="fault", cause="the gym is down") for one in found], clock

    with pytest.raises(GymFaults, match=r"8 of 8 trajectories.*the gym is down"):
        run(tmp_path, Faulty())
