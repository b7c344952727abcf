"""Continuous batching of transformers as the sampler: log-probabilities, cancelling, changed weights, LoRA."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_parts import make_policy

pytest.importorskip("trl", reason="needs the train extra")

import transformers

from drk.training import continuous_backend
from drk.training.backends import SamplerUnavailable
from drk.training.continuous_backend import ContinuousBackend
from drk.training.errors import OptionError
from drk.training.sampling import Prompt, Sampled

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
STOPS = frozenset([2])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("continuous"))


@pytest.fixture
def model(policy: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)


def make(model: Any, temperature: float = 0.7, rows: int = 4) -> ContinuousBackend:
    return ContinuousBackend(
        lambda: model, temperature=temperature, stop_ids=STOPS, pad_id=0, context_tokens=64, rows=rows
    )


async def ask(backend: ContinuousBackend, count: int, tokens: int = 6) -> list[tuple[Prompt, Sampled]]:
    prompts = [Prompt((5, 6, 7, 8, 5 + number), number, tokens) for number in range(count)]
    answers = await asyncio.gather(*(backend.generate(prompt) for prompt in prompts))
    return list(zip(prompts, answers, strict=True))


def full_logps(model: Any, prompt: Prompt, answer: Sampled, temperature: float) -> torch.Tensor:
    """Return the answer's log-probabilities by one forward call without a cache."""
    ids = torch.tensor([[*prompt.ids, *answer.ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(prompt.ids) - 1 :, 0]


async def test_log_probabilities_are_those_of_the_distribution_that_was_sampled(model: Any) -> None:
    model.train()
    backend = make(model)
    found = await ask(backend, 9)  # more than fit at a time
    await backend.settle()
    assert model.training
    assert backend.busy_s > 0
    model.eval()
    for prompt, answer in found:
        assert 1 <= len(answer.ids) <= 6
        assert answer.cut == (answer.ids[-1] not in STOPS)
        expected = full_logps(model, prompt, answer, 0.7)
        torch.testing.assert_close(torch.tensor(answer.logps), expected, atol=1e-5, rtol=1e-5)
    assert len({answer.ids for _, answer in found}) > 4


async def test_each_collection_samples_with_the_weights_of_its_time(model: Any) -> None:
    backend = make(model, temperature=0.0)
    before = await ask(backend, 3)
    await backend.settle()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    after = await ask(backend, 3)
    await backend.close()
    model.eval()
    assert [answer.ids for _, answer in after] != [answer.ids for _, answer in before]
    for prompt, answer in after:
        torch.testing.assert_close(
            torch.tensor(answer.logps), full_logps(model, prompt, answer, 1.0), atol=1e-5, rtol=1e-5
        )


async def test_who_is_cut_off_does_not_hold_the_others_up(model: Any) -> None:
    endless = ContinuousBackend(
        lambda: model, temperature=1.0, stop_ids=frozenset([1]), pad_id=0, context_tokens=256, rows=2
    )
    hanging = asyncio.create_task(endless.generate(Prompt((5, 6), 0, 240)))
    await asyncio.sleep(0.05)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    short = await endless.generate(Prompt((5, 7), 0, 2))
    assert len(short.ids) <= 2
    await endless.close()
    await endless.close()  # nothing is left to end


async def test_adapters_are_sampled_from(model: Any) -> None:
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    backend = make(adapted, temperature=1.0)
    found = await ask(backend, 2)
    await backend.settle()
    adapted.eval()
    for prompt, answer in found:
        torch.testing.assert_close(
            torch.tensor(answer.logps), full_logps(adapted, prompt, answer, 1.0), atol=1e-5, rtol=1e-5
        )


async def test_a_failure_inside_the_library_is_a_fault_of_the_sampler(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    backend = make(model)
    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(SamplerUnavailable, match="out of memory"):
        await backend.generate(Prompt((5, 6), 0, 4))
    await backend.close()


def test_a_library_without_log_probabilities_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(continuous_backend.configuration_utils, "ContinuousBatchingConfig")
    with pytest.raises(OptionError, match="no log-probabilities"):
        make(model)
