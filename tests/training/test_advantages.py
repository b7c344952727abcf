"""Returns and advantages against golden numbers, algebraic identities and exact expectations."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drk.training.advantages import AdvantageOptions, group_sizes, reward_to_go, turn_advantages
from drk.training.errors import NotFiniteError, OptionError, ShapeError

CASES = json.loads((Path(__file__).parents[1] / "golden" / "paper-algorithms.json").read_text())["cases"]
GOLDEN = [name for name, case in CASES.items() if case["kind"] == "advantage"]
ESTIMATORS = {
    "trloo": ("trloo", None, AdvantageOptions()),
    "grpo": ("grpo", None, AdvantageOptions()),
    "erloo": ("rloo", None, AdvantageOptions(singleton="return")),
    "erloo_norm": ("rloo", None, AdvantageOptions(scale="group_std")),
    "turn_independent_grpo": ("grpo", 0.0, AdvantageOptions(group="prompt")),
    "reinforce": ("reinforce", None, AdvantageOptions()),
}


def close(left, right):
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in GOLDEN for name in CASES[case]["outputs"]], ids=lambda value: value
)
def test_advantages_equal_the_golden_numbers(case, name):
    given_, wanted = CASES[case]["inputs"], CASES[case]["outputs"][name]
    estimator, gamma, options = ESTIMATORS[name]
    tokens = torch.tensor(given_["response_mask"])
    rows = len(given_["turn_reward"])
    found = turn_advantages(
        torch.tensor(given_["turn_reward"], dtype=torch.float32),
        prompt=given_["prompt_group"],
        sample=[row // given_["max_turns"] for row in range(rows)],
        turn=given_["turn_index"],
        mask=torch.tensor(given_["loss_mask"]),
        estimator=estimator,
        gamma=given_["gamma"] if gamma is None else gamma,
        options=options,
    )
    close(found[:, None] * tokens, torch.tensor(wanted["advantage_matrix"]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] == "returns"])
def test_returns_equal_the_golden_numbers(name):
    inputs = CASES[name]["inputs"]
    rewards = torch.tensor(inputs["turn_reward"])
    rows = range(len(rewards))
    found = reward_to_go(
        rewards,
        sample=[row // inputs["max_turns"] for row in rows],
        turn=[row % inputs["max_turns"] + 1 for row in rows],
        gamma=inputs["gamma"],
    )
    close(found, torch.tensor(CASES[name]["outputs"]["returns"]))


@pytest.mark.parametrize(
    ("name", "estimator", "scale"),
    [("trajectory_rloo", "rloo", "none"), ("trajectory_grpo_std", "grpo", "group_std")],
)
def test_single_turn_estimators_equal_the_golden_numbers(name, estimator, scale):
    inputs = CASES[name]["inputs"]
    rewards = torch.tensor(inputs["token_level_rewards"]).sum(1)
    rows = len(rewards)
    found = turn_advantages(
        rewards,
        prompt=inputs["prompt_group"],
        sample=range(rows),
        turn=[1] * rows,
        mask=torch.ones(rows),
        estimator=estimator,
        options=AdvantageOptions(scale=scale),
    )
    close(found, torch.tensor(CASES[name]["outputs"]["advantage_matrix"])[:, 0])


def test_rewards_of_rejected_rows_count_and_those_of_masked_rows_do_not():
    common = {"prompt": [0] * 4, "sample": [0, 0, 1, 1], "turn": [1, 2, 1, 2]}
    rewards = torch.tensor([0.0, 4.0, 0.0, 1.0])
    stay = torch.tensor([1, 0, 1, 1])
    rejected = turn_advantages(rewards, mask=torch.ones(4), keep=stay, **common)
    masked = turn_advantages(rewards, mask=stay, **common)
    assert rejected.tolist() == [3.0, 0.0, -3.0, -3.0]  # returns 4 4 1 1; row 1 is still row 3's baseline
    assert masked.tolist() == [-1.0, 0.0, 1.0, 1.0]  # returns 0 - 1 1; row 3 is alone


def test_rejected_rows_can_leave_the_baseline():
    rewards = torch.tensor([6.0, 1.0, 3.0])
    keep = torch.tensor([False, True, True])
    common = {"prompt": [0] * 3, "sample": [0, 1, 2], "turn": [1] * 3, "mask": torch.ones(3), "keep": keep}
    inside = turn_advantages(rewards, **common)
    outside = turn_advantages(rewards, options=AdvantageOptions(rejected_in_baseline=False), **common)
    assert inside.tolist() == [0.0, 1.0 - 4.5, 3.0 - 3.5]
    assert outside.tolist() == [0.0, -2.0, 2.0]


def test_a_lone_row_gets_its_return_or_nothing():
    common = {"prompt": ["a", "b"], "sample": [0, 0], "turn": [1, 1], "mask": torch.ones(2)}
    rewards = torch.tensor([2.0, 5.0])
    assert turn_advantages(rewards, **common).tolist() == [2.0, 5.0]
    assert turn_advantages(rewards, options=AdvantageOptions(singleton="zero"), **common).tolist() == [0.0, 0.0]


def test_batch_std_standardises_live_rows_only():
    found = turn_advantages(
        torch.tensor([1.0, 3.0, 100.0, 8.0]),
        prompt=[0] * 4,
        sample=range(4),
        turn=[1, 1, 1, 1],
        mask=torch.tensor([1, 1, 0, 1]),
        options=AdvantageOptions(scale="batch_std"),
    )
    live = found[[0, 1, 3]]
    assert found[2] == 0
    close(live.mean(), torch.tensor(0.0))
    close(live.std(), torch.tensor(1.0))


def test_a_missing_turn_is_a_turn_with_reward_zero():
    returns = reward_to_go(torch.tensor([1.0, 8.0]), sample=[0, 0], turn=[1, 4], gamma=0.5)
    assert returns.tolist() == [2.0, 8.0]


def test_sample_numbers_may_start_again_in_each_prompt():
    found = turn_advantages(
        torch.tensor([1.0, 3.0, 5.0, 9.0]), prompt=[0, 0, 1, 1], sample=[0, 1, 0, 1], turn=[0] * 4, mask=torch.ones(4)
    )
    assert found.tolist() == [-2.0, 2.0, -4.0, 4.0]


def test_an_unjudged_reward_must_be_masked():
    common = {"prompt": [0, 0], "sample": [0, 1], "turn": [1, 1]}
    rewards = torch.tensor([math.nan, 1.0])
    assert turn_advantages(rewards, mask=torch.tensor([0, 1]), **common).tolist() == [0.0, 1.0]
    with pytest.raises(NotFiniteError):
        turn_advantages(rewards, mask=torch.ones(2), **common)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"estimator": "ppo"}, OptionError),
        ({"gamma": 1.5}, OptionError),
        ({"prompt": [0]}, ShapeError),
        ({"turn": [1, -2]}, ShapeError),
        ({"turn": [1.0, 2.0]}, ShapeError),
        ({"mask": torch.ones(2, 1)}, ShapeError),
        ({"sample": [0, 0], "turn": [1, 1]}, ShapeError),
    ],
)
def test_misfits_are_named(change, error):
    arguments = {"prompt": [0, 0], "sample": [0, 1], "turn": [1, 1], "mask": torch.ones(2)} | change
    with pytest.raises(error):
        turn_advantages(torch.ones(2), **arguments)


def test_group_sizes_count_live_rows():
    found = group_sizes(prompt=[0, 0, 0, 1, 1], turn=[1, 1, 2, 1, -1], mask=torch.tensor([1, 1, 1, 0, 1]))
    assert found.tolist() == [2, 2, 1, 0, 0]


@st.composite
def batches(draw):
    """Rows of several prompts, samples and turns, some padding, some masked."""
    rows = []
    for prompt in range(draw(st.integers(1, 3))):
        for sample in range(draw(st.integers(1, 4))):
            for turn in range(draw(st.integers(1, 3))):
                reward = draw(st.floats(-4, 4, width=16))
                rows.append((reward, prompt, sample, turn, draw(st.integers(0, 4)) > 0))
    order = draw(st.permutations(range(len(rows))))
    rows = [rows[index] for index in order]
    reward, prompt, sample, turn, mask = zip(*rows, strict=True)
    return torch.tensor(reward, dtype=torch.float64), {
        "prompt": list(prompt),
        "sample": list(sample),
        "turn": list(turn),
        "mask": torch.tensor(mask),
    }


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([0.0, 0.5, 1.0]))
def test_trloo_is_the_return_less_the_mean_of_the_others(batch, gamma):
    rewards, ids = batch
    found = turn_advantages(rewards, **ids, gamma=gamma)
    counted = rewards * ids["mask"]
    rows = range(len(rewards))
    for row in rows:
        own = [
            (other, ids["turn"][other] - ids["turn"][row])
            for other in rows
            if ids["prompt"][other] == ids["prompt"][row] and ids["sample"][other] == ids["sample"][row]
        ]
        returns = {row: sum(gamma**gap * counted[other] for other, gap in own if gap >= 0)}
        others = [
            other
            for other in rows
            if other != row
            and ids["mask"][other]
            and (ids["prompt"][other], ids["turn"][other]) == (ids["prompt"][row], ids["turn"][row])
        ]
        for other in others:
            returns[other] = sum(
                gamma ** (ids["turn"][later] - ids["turn"][other]) * counted[later]
                for later in rows
                if (ids["prompt"][later], ids["sample"][later]) == (ids["prompt"][other], ids["sample"][other])
                and ids["turn"][later] >= ids["turn"][other]
            )
        baseline = sum(returns[other] for other in others) / len(others) if others else 0.0
        wanted = float(returns[row] - baseline) if ids["mask"][row] else 0.0
        assert float(found[row]) == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_grpo_is_trloo_shrunk_by_self_inclusion(batch):
    rewards, ids = batch
    sizes = group_sizes(prompt=ids["prompt"], turn=ids["turn"], mask=ids["mask"])
    trloo, grpo = (turn_advantages(rewards, **ids, estimator=name) for name in ("trloo", "grpo"))
    factor = torch.where(sizes > 1, 1 - 1 / sizes.clamp(min=1), torch.ones(()))  # alone: both give the return
    close(grpo, (trloo * factor).to(torch.float64))


@settings(max_examples=60, deadline=None)
@given(batches(), st.randoms(use_true_random=False), st.sampled_from(["trloo", "grpo", "rloo", "reinforce"]))
def test_the_order_of_rows_does_not_matter(batch, random, estimator):
    rewards, ids = batch
    order = list(range(len(rewards)))
    random.shuffle(order)
    moved = {name: [ids[name][index] for index in order] for name in ("prompt", "sample", "turn")}
    found = turn_advantages(rewards[order], **moved, mask=ids["mask"][order], estimator=estimator)
    close(found, turn_advantages(rewards, **ids, estimator=estimator)[order])


@settings(max_examples=60, deadline=None)
@given(batches(), st.floats(-3, 3, width=16), st.sampled_from(["trloo", "grpo", "rloo"]))
def test_a_constant_added_to_a_group_cancels(batch, shift, estimator):
    rewards, ids = batch
    options = AdvantageOptions(singleton="zero")
    close(
        turn_advantages(rewards + shift, **ids, estimator=estimator, gamma=0.0, options=options),
        turn_advantages(rewards, **ids, estimator=estimator, gamma=0.0, options=options),
    )


LOGITS = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
PAYS = torch.tensor([1.0, 0.0, 2.5], dtype=torch.float64)


def expected_gradient(estimator, samples):
    """Exact expectation over all joint draws of a one-turn softmax policy; each joint draw is one prompt."""
    chance = LOGITS.softmax(0)
    draws = torch.tensor(list(itertools.product(range(3), repeat=samples)))
    found = turn_advantages(
        PAYS[draws].flatten(),
        prompt=torch.arange(len(draws)).repeat_interleave(samples),
        sample=torch.arange(samples).repeat(len(draws)),
        turn=torch.zeros(draws.numel(), dtype=torch.int64),
        mask=torch.ones(draws.numel()),
        estimator=estimator,
    ).reshape(draws.shape)
    score = torch.eye(3, dtype=torch.float64)[draws] - chance  # gradient of log pi
    return (chance[draws].prod(1)[:, None] * (found[:, :, None] * score).mean(1)).sum(0)


def true_gradient():
    chance = LOGITS.softmax(0)
    return chance * (PAYS - (chance * PAYS).sum())


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_trloo_is_unbiased_and_grpo_is_not(samples):
    torch.testing.assert_close(expected_gradient("trloo", samples), true_gradient(), atol=1e-12, rtol=1e-12)
    shrunk = (1 - 1 / samples) * true_gradient()
    torch.testing.assert_close(expected_gradient("grpo", samples), shrunk, atol=1e-12, rtol=1e-12)


def two_turn_expectation(options, samples=3):
    """Exact E[gradient] where action 0 of the first turn ends the sample, so that late groups vary in size."""
    first, second = torch.tensor([0.2, 0.8]), torch.tensor([0.6, 0.4])
    paths = [(0.0, (0, None)), (1.0, (1, 0)), (3.0, (1, 1))]
    chance = [first[0], first[1] * second[0], first[1] * second[1]]
    total = torch.zeros(2, dtype=torch.float64)
    rewards, prompt, sample, turn, score, weight = [], [], [], [], [], []
    for number, joint in enumerate(itertools.product(range(3), repeat=samples)):
        probability = float(torch.stack([chance[path] for path in joint]).prod())
        for index, path in enumerate(joint):
            pay, (one, two) = paths[path]
            ends = [(0, one, first, 0.5 if two is None else 0.0)]
            if two is not None:
                ends.append((1, two, second, pay))
            for number_of_turn, action, policy, reward in ends:
                rewards.append(reward)
                prompt.append(number)
                sample.append(index)
                turn.append(number_of_turn)
                score.append((1.0 if action == 1 else 0.0) - float(policy[1]))
                weight.append(probability / samples)
    found = turn_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        prompt=prompt,
        sample=sample,
        turn=turn,
        mask=torch.ones(len(rewards)),
        options=options,
    )
    for advantage, when, slope, share in zip(found.tolist(), turn, score, weight, strict=True):
        total[when] += share * advantage * slope
    # J = p0 0.5 + p1 (q0 1 + q1 3); one logit a turn, the action's second one.
    value = 0.6 * 1 + 0.4 * 3
    return total, torch.tensor([0.2 * 0.8 * (value - 0.5), 0.8 * 0.6 * 0.4 * 2.0], dtype=torch.float64)


def test_two_turns_with_unequal_groups_are_unbiased_only_if_lone_rows_teach():
    found, truth = two_turn_expectation(AdvantageOptions(singleton="return"))
    torch.testing.assert_close(found, truth, atol=1e-7, rtol=1e-6)
    found, truth = two_turn_expectation(AdvantageOptions(singleton="zero"))
    torch.testing.assert_close(found[0], truth[0], atol=1e-7, rtol=1e-6)
    assert 0.5 * truth[1] < found[1] < 0.99 * truth[1]


def test_simulated_gradients_agree_with_the_exact_one():
    generator = torch.Generator().manual_seed(7)
    prompts, samples = 40_000, 4
    chance = LOGITS.softmax(0)
    draws = torch.multinomial(chance, prompts * samples, replacement=True, generator=generator)
    found = turn_advantages(
        PAYS[draws],
        prompt=torch.arange(prompts).repeat_interleave(samples),
        sample=torch.arange(samples).repeat(prompts),
        turn=torch.ones_like(draws),
        mask=torch.ones(len(draws)),
    )
    terms = (found[:, None] * (torch.eye(3, dtype=torch.float64)[draws] - chance)).reshape(prompts, samples, 3).mean(1)
    error = terms.std(0) / math.sqrt(prompts)
    assert bool(((terms.mean(0) - true_gradient()).abs() < 4 * error).all())
    assert float(true_gradient().abs().max()) > 20 * float(error.max())  # the test can tell (1 - 1/4) apart
