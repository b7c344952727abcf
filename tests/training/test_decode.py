"""Decoding over a static cache says what plain sampling says, whatever the rows, and sees weights that change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the train extra")

from decode_parts import make_model

from drk.training import decode_model
from drk.training.decode import Decoder, context_of, difference
from drk.training.decode_model import TorchOperations, why_not
from drk.training.sampling import Prompt, Sampled, sample

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
STOP = frozenset([2, 7])
CHECK = Path(__file__).parents[1] / "support" / "decode_kernels_check.py"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors are slower on several threads, much slower where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts(count: int = 7, most: int = 28) -> list[Prompt]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    lengths[0] = 1
    return [
        Prompt(
            tuple(torch.randint(8, 60, (n,), generator=generator).tolist()), seed=100 + i, max_new_tokens=most - i % 20
        )
        for i, n in enumerate(lengths)
    ]


def equal(found: list[Sampled], wanted: list[Sampled]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.ids == other.ids
        assert one.cut == other.cut
        assert one.logps == pytest.approx(other.logps, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "key_heads", "temperature"), [("qwen3", 4, 0.0), ("qwen3", 2, 1.0), ("llama", 1, 0.7)]
)
def test_answers_are_those_of_plain_sampling(kind: str, key_heads: int, temperature: float) -> None:
    model = make_model(kind, key_heads=key_heads)
    assert why_not(model) == ""
    wanted = sample(model, prompts(), temperature=temperature, stop_ids=STOP, pad_id=0)
    found = Decoder(graphs=False).sample(model, prompts(), temperature=temperature, stop_ids=STOP)
    equal(found, wanted)
    assert len({one.ids for one in found}) > 3


def test_waiting_prompts_take_the_rows_of_those_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from drk.training import decode, decode_queue

    monkeypatch.setattr(decode, "LEAST_ROWS", 2)
    monkeypatch.setattr(decode_queue, "LEAST_ROWS", 2)
    monkeypatch.setattr(decode_queue, "PREFILL_TOKENS", 40)
    model = make_model()
    many = prompts(21)
    wanted = sample(model, many, temperature=1.0, stop_ids=STOP, pad_id=0)
    decoder, heard = Decoder(rows=8, graphs=False), {}
    found = decoder.sample(model, many, temperature=1.0, stop_ids=STOP, heard=heard.__setitem__)
    equal(found, wanted)
    assert [heard[number] for number in range(21)] == found
    assert list(heard) != sorted(heard)  # in the order in which they end
    facts = decoder.stats.facts()
    assert (facts["answers"], facts["tokens"]) == (21, sum(len(one.ids) for one in found))
    assert facts["prompt_tokens"] == sum(len(one.ids) for one in many)
    # three batches one after the other would take about three times the longest answer
    assert facts["steps"] < 2.5 * max(len(one.ids) for one in found)


def test_a_decoder_serves_one_call_after_the_other() -> None:
    model, decoder = make_model(), Decoder(graphs=False)
    for most, temperature in ((20, 1.0), (70, 0.0), (6, 1.0)):
        wanted = sample(model, prompts(5, most), temperature=temperature, stop_ids=STOP, pad_id=0)
        equal(decoder.sample(model, prompts(5, most), temperature=temperature, stop_ids=STOP), wanted)
    decoder.release()
    other = make_model("llama")
    wanted = sample(other, prompts(5), temperature=0.0, stop_ids=frozenset(), pad_id=0)
    equal(decoder.sample(other, prompts(5), temperature=0.0, stop_ids=frozenset()), wanted)
    assert all(one.cut for one in wanted)


def test_short_memory_gives_fewer_rows_and_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "_rows_that_fit", lambda *_: 3)
    made: list[int] = []
    make_cache = decode_model.Forward.make_cache

    def counted(self: Any, rows: int, context: int) -> Any:
        made.append(rows)
        return make_cache(self, rows, context)

    monkeypatch.setattr(decode_model.Forward, "make_cache", counted)
    model, decoder = make_model(), Decoder(rows=5, graphs=False)
    wanted = sample(model, prompts(), temperature=1.0, stop_ids=STOP, pad_id=0)
    for _ in range(2):
        equal(decoder.sample(model, prompts(), temperature=1.0, stop_ids=STOP), wanted)
    assert made == [3]


def test_weights_changed_in_place_are_seen() -> None:
    model, decoder = make_model(), Decoder(graphs=False)
    before = decoder.sample(model, prompts(), temperature=0.0, stop_ids=STOP)
    train_a_little(model)
    after = decoder.sample(model, prompts(), temperature=0.0, stop_ids=STOP)
    equal(after, sample(model, prompts(), temperature=0.0, stop_ids=STOP, pad_id=0))
    assert [one.ids for one in before] != [one.ids for one in after]


def train_a_little(model: Any) -> None:
    with torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ids = torch.randint(8, 60, (4, 30), device=next(model.parameters()).device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def test_what_it_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "activation" in why_not(make_model(hidden_act="gelu"))
    assert "biases" in why_not(make_model("llama", attention_bias=True))
    assert "window" in why_not(make_model(use_sliding_window=True, sliding_window=8, max_window_layers=0))
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "rotary" in why_not(make_model("llama", rope_parameters=scaled))
    mixed = make_model()
    mixed.lm_head.weight = torch.nn.Parameter(mixed.lm_head.weight.double())
    assert "several types" in why_not(mixed)
    assert "neither" in why_not(torch.nn.Linear(2, 2))
    monkeypatch.setattr(decode_model, "LARGEST", 1000)
    assert "more than 1000 parameters" in why_not(make_model())


def test_rows_have_room_without_many_different_lengths() -> None:
    assert [context_of(n) for n in (3, 257, 2048, 2049, 5000)] == [256, 512, 2048, 4096, 6144]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_say_what_plain_sampling_says_before_and_after_an_update(temperature: float) -> None:
    model = make_model(head_dim=16).cuda()
    many = prompts(150, 100)
    decoder = Decoder(rows=64)
    before = decoder.sample(model, many, temperature=temperature, stop_ids=STOP)
    alike(before, sample(model, many, temperature=temperature, stop_ids=STOP, pad_id=0))
    assert decoder.stats.kernel_fault == ""
    graphs = decoder.stats.graphs
    assert graphs >= 2, decoder.stats.cause
    train_a_little(model)
    after = decoder.sample(model, many, temperature=temperature, stop_ids=STOP)
    alike(after, sample(model, many, temperature=temperature, stop_ids=STOP, pad_id=0))
    assert decoder.stats.graphs == graphs
    assert [one.ids for one in before] != [one.ids for one in after]


def alike(found: list[Sampled], wanted: list[Sampled]) -> None:
    """Nearly all tokens are equal: other sums may turn a close choice, and all that follows it."""
    same = [one for one, other in zip(found, wanted, strict=True) if one.ids == other.ids]
    assert len(same) >= 0.97 * len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if one.ids == other.ids:
            assert one.logps == pytest.approx(other.logps, abs=1e-4)


def test_the_kernels_compute_what_torch_does() -> None:
    """Under the interpreter, in a process of its own: that is a switch for a whole process."""
    done = subprocess.run(
        [sys.executable, str(CHECK)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout.decode().strip() == "alike", done.stderr.decode()[-2000:]


@pytest.mark.parametrize("dtype", ["*fp32", "*bf16"])
def test_the_kernels_compile_for_a_gpu(dtype: str) -> None:
    """To machine code, which the interpreter does not need: what it allows may be no Triton."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_triton

    from drk.training import decode_kernels

    sizes = {"HEADS": 6, "KEY_HEADS": 3, "SIZE": 64, "NORM": True, "HALF": 32, "HAS_DELTA": True, "LANE": 64}
    numbers = {"width": "i32", "context": "i32", "eps": "fp32", "scale": "fp32", "positions": "*i64"}
    for name, block in (("add_norm", 512), ("rotate", 0), ("attend", 64), ("gated", 1024)):
        kernel = getattr(decode_kernels, f"{name}_kernel")
        values = {**sizes, "BLOCK": block}
        signature = {one: "constexpr" if one in values else numbers.get(one, dtype) for one in kernel.arg_names}
        constants = {(place,): values[one] for place, one in enumerate(kernel.arg_names) if one in values}
        made = compile_triton(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
        assert made.asm["cubin"]


def test_other_results_than_torchs_are_told() -> None:
    class Wrong(TorchOperations):
        def gated(self, both: torch.Tensor) -> torch.Tensor:
            return both.chunk(2, dim=-1)[0]

    model = make_model()
    assert difference(model, TorchOperations()) == ""
    assert "differ from torch" in difference(model, Wrong())
