from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the train extra")

import torch
from decode_parts import make_model

from drk.training import backends
from drk.training.backends import SamplerUnavailable, WaveBackend
from drk.training.decode import Decoder
from drk.training.sampling import Prompt, Sampled


class Model:
    training = True

    def __init__(self) -> None:
        self.modes: list[bool] = []

    def eval(self) -> None:
        self.training = False

    def train(self, mode: bool) -> None:
        self.training = mode


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Replace sampling by an echo, and keep the seeds of each batch."""
    seen: list[list[int]] = []

    def echo(model: Any, prompts: Any, **_: Any) -> list[Sampled]:
        assert not model.training
        if any(prompt.seed == 666 for prompt in prompts):
            raise RuntimeError("out of memory")
        seen.append([prompt.seed for prompt in prompts])
        return [Sampled(prompt.ids, (0.0,) * len(prompt.ids), False) for prompt in prompts]

    monkeypatch.setattr(backends, "sample", echo)
    return seen


def make(model: Model, batch_rows: int = 10) -> WaveBackend:
    return WaveBackend(lambda: model, temperature=1.0, stop_ids=frozenset(), pad_id=0, batch_rows=batch_rows)


async def test_half_a_wave_is_sampled_while_the_others_are_away(batches: list[list[int]]) -> None:
    model = Model()
    backend = make(model)
    backend.share = 0.5
    backend.begin(5)
    early = [asyncio.create_task(backend.generate(Prompt((seed,), seed, 1))) for seed in (3, 2)]
    await asyncio.sleep(0.05)
    assert batches == []
    early.append(asyncio.create_task(backend.generate(Prompt((1,), 1, 1))))
    assert [answer.ids for answer in await asyncio.gather(*early)] == [(3,), (2,), (1,)]
    assert batches == [[1, 2, 3]]
    for _ in range(3):
        backend.leave()
    last = [asyncio.create_task(backend.generate(Prompt((seed,), seed, 1))) for seed in (5, 4)]
    assert [answer.ids for answer in await asyncio.gather(*last)] == [(5,), (4,)]
    await backend.close()


async def test_a_wave_waits_for_every_live_trajectory(batches: list[list[int]]) -> None:
    model = Model()
    backend = make(model)
    backend.begin(3)
    first = [asyncio.create_task(backend.generate(Prompt((seed,), seed, 1))) for seed in (9, 4)]
    await asyncio.sleep(0.05)
    assert batches == []
    third = asyncio.create_task(backend.generate(Prompt((7,), 7, 1)))
    answers = await asyncio.gather(*first, third)
    assert [answer.ids for answer in answers] == [(9,), (4,), (7,)]
    assert batches == [[4, 7, 9]]
    assert model.training
    await backend.close()


async def test_who_leaves_is_not_waited_for(batches: list[list[int]]) -> None:
    backend = make(Model())
    backend.begin(2)
    waiting = asyncio.create_task(backend.generate(Prompt((1,), 1, 1)))
    await asyncio.sleep(0.02)
    backend.leave()
    assert (await waiting).ids == (1,)
    assert batches == [[1]]


async def test_who_was_cut_off_while_waiting_is_left_out(batches: list[list[int]]) -> None:
    backend = make(Model())
    backend.begin(2)
    gone = asyncio.create_task(backend.generate(Prompt((1,), 1, 1)))
    await asyncio.sleep(0.02)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    backend.leave()
    assert (await backend.generate(Prompt((2,), 2, 1))).ids == (2,)
    assert batches == [[2]]


async def test_large_waves_are_split_and_a_failed_part_fails_alone(batches: list[list[int]]) -> None:
    backend = make(Model(), batch_rows=2)
    backend.begin(3)
    tasks = [asyncio.create_task(backend.generate(Prompt((seed,), seed, 1))) for seed in (1, 2, 666)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert batches == [[1, 2]]
    assert isinstance(answers[2], SamplerUnavailable)
    assert "out of memory" in str(answers[2])


async def test_where_nobody_knows_how_many_will_ask_nobody_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[int]] = []

    def slow(model: Any, prompts: Any, **_: Any) -> list[Sampled]:
        seen.append([prompt.seed for prompt in prompts])
        time.sleep(0.2 if len(seen) == 1 else 0)
        return [Sampled(prompt.ids, (0.0,), False) for prompt in prompts]

    monkeypatch.setattr(backends, "sample", slow)
    backend = make(Model())
    backend.begin(0)
    first = asyncio.create_task(backend.generate(Prompt((1,), 1, 1)))
    await asyncio.sleep(0.05)
    later = [asyncio.create_task(backend.generate(Prompt((seed,), seed, 1))) for seed in (3, 2)]
    await asyncio.gather(first, *later)
    assert seen == [[1], [2, 3]]  # one batch at a time; what waits meanwhile is the next


async def test_weights_do_not_change_while_a_wave_of_somebody_cut_off_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling, go_on = threading.Event(), threading.Event()

    def held(model: Any, prompts: Any, **_: Any) -> list[Sampled]:
        sampling.set()
        assert go_on.wait(60)
        return [Sampled(prompt.ids, (0.0,), False) for prompt in prompts]

    monkeypatch.setattr(backends, "sample", held)
    model, entered = Model(), []
    context = contextlib.ExitStack()
    context.callback(entered.append, "left")
    backend = WaveBackend(lambda: model, temperature=1.0, stop_ids=frozenset(), pad_id=0, context=lambda: context)
    backend.begin(1)
    asked = asyncio.create_task(backend.generate(Prompt((1,), 1, 1)))
    assert await asyncio.to_thread(sampling.wait, 60)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    backend.leave()
    settling = asyncio.create_task(backend.settle())
    await asyncio.sleep(0.05)
    assert not settling.done()
    assert not model.training
    go_on.set()
    await settling
    assert model.training
    assert entered == ["left"]  # the surrounding context, autocast in a run


async def test_answers_of_a_decoder_are_given_as_they_end_or_with_their_wave() -> None:
    gone_on, seen = threading.Event(), []

    class Slow(Decoder):
        def sample(self, model: Any, prompts: Any, *, temperature: float, stop_ids: Any, heard: Any = None) -> Any:
            seen.append(len(prompts))
            answers = [Sampled(prompt.ids, (0.0,), False) for prompt in prompts]
            heard(0, answers[0])
            assert gone_on.wait(60)
            return answers

    held = list[int]()

    @contextlib.asynccontextmanager
    async def beside() -> AsyncIterator[None]:
        held.append(len(seen))
        yield
        held.append(len(seen))

    for early in (True, False):
        gone_on.clear()
        model = make_model()
        backend = WaveBackend(
            lambda model=model: model, temperature=1.0, stop_ids=frozenset(), pad_id=0, batch_rows=1,
            decoder=Slow(graphs=False), beside=beside if early else None,
        )  # fmt: skip
        backend.begin(2)
        first, second = (asyncio.create_task(backend.generate(Prompt((seed,), seed, 1))) for seed in (1, 2))
        done, _ = await asyncio.wait([first], timeout=60 if early else 0.3)
        assert bool(done) == early
        assert not second.done()
        gone_on.set()
        assert [one.ids for one in await asyncio.gather(first, second)] == [(1,), (2,)]
        assert backend.facts()["decoder"]
        await backend.close()
    assert seen == [2, 2]  # the decoder splits waves itself
    assert held == [0, 1]  # about the sampling


async def test_what_the_decoder_cannot_sample_is_sampled_without_it(batches: list[list[int]]) -> None:
    def reason(model: Any, context: Any = contextlib.nullcontext, **settings: Any) -> WaveBackend:
        return WaveBackend(
            lambda: model, temperature=1.0, stop_ids=frozenset(), pad_id=0, context=context, decoder=Decoder(**settings)
        )

    under_autocast = reason(make_model(), lambda: torch.autocast("cpu", dtype=torch.bfloat16), graphs=False)
    odd = reason(torch.nn.Linear(1, 1), graphs=False)
    for backend, why in ((under_autocast, "autocast"), (odd, "neither"), (reason(make_model()), "not on a GPU")):
        backend.begin(1)
        assert (await backend.generate(Prompt((3,), 3, 1))).ids == (3,)
        facts = backend.facts()
        assert not facts["decoder"]
        assert why in facts["why_not"]
    assert batches == [[3]] * 3
