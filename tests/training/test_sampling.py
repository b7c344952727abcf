from __future__ import annotations

from typing import Any

import pytest
import torch
from policy_parts import make_policy

pytest.importorskip("transformers", reason="needs the train extra")

import transformers

from drk.training.sampling import Prompt, sample

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
STOP = frozenset([2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_policy(tmp_path_factory.mktemp("policy"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts() -> list[Prompt]:
    return [Prompt(tuple(range(5, 7 + i)), seed=100 + i, max_new_tokens=6) for i in range(8)]


def test_a_row_does_not_depend_on_its_batch(model: Any) -> None:
    together = sample(model, prompts(), temperature=1.0, stop_ids=STOP, pad_id=0)
    for prompt, row in zip(prompts(), together, strict=True):
        (alone,) = sample(model, [prompt], temperature=1.0, stop_ids=STOP, pad_id=0)
        assert alone.ids == row.ids
        assert alone.logps == pytest.approx(row.logps, abs=1e-5)
    assert len({row.ids for row in together}) > 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_a_full_forward_pass(model: Any, temperature: float) -> None:
    for prompt, row in zip(
        prompts(), sample(model, prompts(), temperature=temperature, stop_ids=STOP, pad_id=0), strict=True
    ):
        ids = torch.tensor([[*prompt.ids, *row.ids]])
        with torch.no_grad():
            logps = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, dim=-1)
        chosen = logps.gather(1, ids[0, 1:, None]).squeeze(1)[len(prompt.ids) - 1 :]
        assert row.logps == pytest.approx(chosen.tolist(), abs=1e-5)


def test_an_answer_ends_at_a_stop_token_or_its_limit(model: Any) -> None:
    rows = sample(model, [Prompt((5, 6), seed, 12) for seed in range(40)], temperature=1.0, stop_ids=STOP, pad_id=0)
    assert any(row.cut for row in rows)
    assert any(not row.cut for row in rows)
    for row in rows:
        assert row.cut == (row.ids[-1] != 2)
        assert 2 not in row.ids[:-1]
        assert len(row.ids) == 12 if row.cut else len(row.ids) <= 12
        assert len(row.logps) == len(row.ids)


def test_draws_follow_the_models_distribution(model: Any) -> None:
    count = 4000
    rows = sample(
        model, [Prompt((5, 6, 7), seed, 1) for seed in range(count)], temperature=1.0, stop_ids=STOP, pad_id=0
    )
    with torch.no_grad():
        expected = torch.softmax(model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1], dim=-1)
    seen = torch.bincount(torch.tensor([row.ids[0] for row in rows]), minlength=len(expected)) / count
    # four standard errors
    assert bool(((seen - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt() + 1e-4).all())


def test_temperature_zero_takes_the_most_likely(model: Any) -> None:
    (row,) = sample(model, [Prompt((5, 6, 7), 0, 1)], temperature=0.0, stop_ids=STOP, pad_id=0)
    with torch.no_grad():
        assert row.ids[0] == int(model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())
