"""The contract with TRL: the trainer's gradient is turn-level REINFORCE, and nothing else reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from policy_parts import MadeUp

pytest.importorskip("trl", reason="needs the train extra")

import transformers
from trainer_parts import Gradients, build, relative_difference, settings_of

from drk.training.advantages import AdvantageOptions, turn_advantages
from drk.training.errors import EmptyBatchError
from drk.training.rollout import Clock
from drk.training.trainer import GymFaults, SamplerRestarted, TurnLevelTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


def run(
    folder: Path, collect: Any, *more: str, steps: int = 1, before_collect: Any = None
) -> tuple[TurnLevelTrainer, Gradients]:
    """Train ``steps`` steps on made-up turns."""
    gradients = Gradients()
    settings = settings_of(*more, steps=steps)
    trainer, place = build(folder, collect, settings, callbacks=[gradients], before_collect=before_collect)
    try:
        trainer.train()
    finally:
        place.close()
    return trainer, gradients


def reinforce_gradient(folder: Path, rows: list[Any]) -> dict[str, torch.Tensor]:
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
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_is_turn_level_reinforce(tmp_path: Path, micro_batches: int) -> None:
    collect = MadeUp()
    trainer, gradients = run(tmp_path, collect, f"optimizer.micro_batches={micro_batches}")
    assert 2 < sum(row.score.coverage == 0 for row in collect.rows) < len(collect.rows) - 2
    expected = reinforce_gradient(tmp_path, collect.rows)
    assert sum(float(grad.abs().sum()) for grad in expected.values()) > 0.1
    assert relative_difference(gradients.first, expected) < 1e-5
    weights = dict(trainer.model.named_parameters())
    assert any(not torch.equal(weights[name], before) for name, before in gradients.weights.items())


def test_a_rejected_row_has_no_effect(tmp_path: Path) -> None:
    _, left = run(tmp_path / "a", MadeUp())
    _, right = run(tmp_path / "b", MadeUp(change_rejected=3))
    assert left.first.keys() == right.first.keys()
    assert all(torch.equal(grad, right.first[name]) for name, grad in left.first.items())


def test_metrics_appear_and_every_turn_is_written_down(tmp_path: Path) -> None:
    collect = MadeUp()
    trainer, _ = run(tmp_path, collect, "run.tensorboard=true", steps=2)
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
    assert list((tmp_path / "run" / "checkpoints").rglob("events.out.tfevents.*"))


def test_the_planned_divisor_does_not_depend_on_rejection(tmp_path: Path) -> None:
    collect = MadeUp()
    _, by_tokens = run(tmp_path / "a", collect)
    _, planned = run(tmp_path / "b", MadeUp(), "optimizer.divisor=planned")
    tokens = sum(len(row.completion_ids) for row in collect.rows if row.score.coverage > 0)
    scaled = {name: grad * tokens / (1000 * 2 * 4 * 2) for name, grad in by_tokens.first.items()}
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


class Restarting(MadeUp):
    """Says for the first ``away`` collections that the sampler was away meanwhile."""

    def __init__(self, away: int) -> None:
        super().__init__()
        self.away = away

    def __call__(self, items: Any, *, seed: int) -> Any:
        found, clock = super().__call__(items, seed=seed)
        return found, Clock(clock.sampling_s, clock.judging_sum_s, outages=int(len(self.calls) <= self.away))


def test_what_a_restarted_sampler_said_is_not_trained_on_and_the_weights_are_sent_again(tmp_path: Path) -> None:
    sent: list[int] = []
    collect = Restarting(away=1)
    _, gradients = run(tmp_path, collect, before_collect=lambda trainer: sent.append(trainer.state.global_step))
    assert sent == [0, 0]
    assert [seed for _, seed in collect.calls] == [0, 1]
    # the gradient is that of the second collection alone
    assert relative_difference(gradients.first, reinforce_gradient(tmp_path, collect.rows)) < 1e-5
    journal = (tmp_path / "run" / "turns.0.jsonl").read_text().splitlines()
    assert len(journal) == len(collect.rows)


def test_a_sampler_that_is_away_again_and_again_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(SamplerRestarted, match="away in 3 collections"):
        run(tmp_path, Restarting(away=9), before_collect=lambda _: None)


def test_a_sampler_in_this_process_is_never_in_doubt(tmp_path: Path) -> None:
    collect = Restarting(away=1)
    run(tmp_path, collect)
    assert len(collect.calls) == 1


def test_unequal_groups_reach_the_collection(tmp_path: Path) -> None:
    collect = MadeUp()
    run(tmp_path, collect, "rollout.group_sizes=unequal")
    asked = [item.prompt for item in collect.calls[0][0]]
    assert sorted(asked.count(task) for task in (0, 1)) == [2, 6]
    assert [item.sample for item in collect.calls[0][0]] == list(range(8))
