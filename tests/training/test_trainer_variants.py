"""The trainer with adapters, bfloat16 and gradient checkpointing: what is trained, by how much it differs, resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs the train extra")

import transformers
from policy_parts import MadeUp
from trainer_parts import Gradients, Sampled, build, relative_difference, settings_of

from drk.training.backend_choice import check_continuous, make_backend
from drk.training.errors import OptionError
from drk.training.rl import Trained, run_trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
LORA = ("model.lora_rank=4", "optimizer.learning_rate=0.05")


def first_gradient(folder: Path, *overrides: str) -> tuple[Any, Gradients]:
    """Make one step on made-up turns."""
    gradients = Gradients()
    trainer, run = build(folder, MadeUp(), settings_of(*overrides), callbacks=[gradients])
    trainer.train()
    run.close()
    return trainer, gradients


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the gradient in float32, without anything else."""
    return first_gradient(tmp_path_factory.mktemp("plain"))[1].first


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path: Path, plain: dict[str, torch.Tensor]) -> None:
    trainer, gradients = first_gradient(tmp_path, "model.gradient_checkpointing=true")
    assert trainer.model.is_gradient_checkpointing
    assert relative_difference(gradients.first, plain) < 1e-6


def test_bfloat16_is_autocast_around_float32_weights(tmp_path: Path, plain: dict[str, torch.Tensor]) -> None:
    trainer, gradients = first_gradient(tmp_path, "model.dtype=bfloat16")
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert 1e-4 < relative_difference(gradients.first, plain) < 0.05
    weights = dict(trainer.model.named_parameters())
    assert any(not torch.equal(weights[name], before) for name, before in gradients.weights.items())


def test_adapters_are_trained_and_nothing_else(tmp_path: Path, plain: dict[str, torch.Tensor]) -> None:
    trainer, gradients = first_gradient(tmp_path, *LORA, "model.gradient_checkpointing=true")
    assert gradients.first
    assert all("lora_" in name for name in gradients.first)
    # at the first step B is zero, so that only its gradient is not
    assert all(bool(one.any()) == ("lora_B" in name) for name, one in gradients.first.items())
    for name, parameter in trainer.model.named_parameters():
        same = torch.equal(parameter.detach(), gradients.weights[name])
        assert same == ("lora_B" not in name), name
    # the chain rule ties B's gradient to the whole matrix's: dL/dB = scale * dL/dW @ A^T
    scale = 32 / 4
    for name, found in gradients.first.items():
        if "lora_B" in name:
            whole = plain[name.removeprefix("base_model.model.").replace("lora_B.default.", "")]
            factor = gradients.weights[name.replace("lora_B", "lora_A")]
            torch.testing.assert_close(found, scale * whole @ factor.T, rtol=1e-3, atol=1e-5)


def adapted(folder: Path, steps: int, *overrides: str) -> Trained:
    settings = settings_of(*LORA, "run.save_every=2", *overrides, steps=steps)
    trainer, run = build(folder, MadeUp(), settings, guarded=True)
    try:
        return run_trainer(trainer, run)
    finally:
        run.close()


def test_adapters_resume_exactly_and_end_as_a_plain_model(tmp_path: Path) -> None:
    whole = adapted(tmp_path / "whole", 4)
    shutil.copytree(tmp_path / "whole" / "policy", tmp_path / "cut" / "policy")
    assert adapted(tmp_path / "cut", 2).steps == 2
    again = adapted(tmp_path / "cut", 4)
    assert (again.resumed_at, again.steps) == (2, 4)
    left, right = (transformers.AutoModelForCausalLM.from_pretrained(one.final) for one in (whole, again))
    for name, weight in left.state_dict().items():
        assert torch.equal(weight, right.state_dict()[name]), name
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "policy")
    assert left.state_dict().keys() == base.state_dict().keys()  # merged: no adapter is left
    moved = {name for name, weight in left.state_dict().items() if not torch.equal(weight, base.state_dict()[name])}
    assert moved and all("_proj" in name for name in moved)
    import peft

    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / "checkpoint-4"
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base.eval(), checkpoint)(input_ids=ids).logits
        torch.testing.assert_close(left.eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


VARIANTS = {
    "float32": ((), 1e-5),
    "float32, checkpointing": (("model.gradient_checkpointing=true",), 1e-5),
    "bfloat16": (("model.dtype=bfloat16",), 0.05),
    "bfloat16, lora, checkpointing": ((*LORA, "model.dtype=bfloat16", "model.gradient_checkpointing=true"), 0.05),
    "float32, continuous": (("rollout.backend=continuous",), 1e-5),
    "bfloat16, lora, continuous": ((*LORA, "model.dtype=bfloat16", "rollout.backend=continuous"), 0.05),
}


BY_DEFAULT = ("bfloat16, lora, checkpointing", "float32, continuous")
"""The others are left to ``-m long``: each setting stands in one of these, or in a test of its own."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in VARIANTS]
)
def test_sampler_and_trainer_see_the_same_policy(tmp_path: Path, name: str) -> None:
    overrides, limit = VARIANTS[name]
    steps = 1 if "continuous" in name else 2
    band = (
        "rejection.mrs=true",
        f"rejection.low={1 - limit}",
        f"rejection.high={1 + limit}",
        "optimizer.micro_batches=1",
    )
    settings = settings_of(*overrides, *band, "rollout.concurrency=4", "model.context_tokens=64", steps=steps)
    collect = Sampled(settings)
    trainer, run = build(tmp_path, collect, settings, guarded=True)
    trainer.train()
    run.close()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == steps
    for step in logged:
        assert step["keep/mrs"] == 1.0
        assert step["mismatch/abs_delta"] < limit
        assert step["grad_norm"] > 0
    assert trainer.model.training


def test_what_continuous_batching_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="autocast"):
        check_continuous(settings_of("rollout.backend=continuous", "model.dtype=bfloat16"), on_gpu=False)
    timed = ("rollout.backend=continuous", "gym.timing=true", "gym.device=auto")
    check_continuous(settings_of(*timed), on_gpu=False)
    check_continuous(settings_of(*timed, "gym.url=http://there"), on_gpu=True)
    check_continuous(settings_of(*timed, "gym.device=cuda:1"), on_gpu=True)
    with pytest.raises(OptionError, match="timed on"):
        check_continuous(settings_of(*timed), on_gpu=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(OptionError, match="spread over processes"):
        make_backend(settings_of(), frozenset([2]), 0, lambda: None)
