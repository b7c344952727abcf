"""Steps for a CUDA graph: optimizers, loss and bounds are those of plain steps; failure is survived."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the train extra")

import torch
import transformers
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from drk.training.config import load_config
from drk.training.packing import Batch, Document, pack, packed_loss, set_attention, static_loss
from drk.training.scratch_loop import Optimizers, PackedTrainer, make_optimizers
from drk.training.step_graph import GraphedStep, StaticBatch, capture_graph, own_stream

SHARES = (0.25, 1.0, 0.5, 0.125, 0.75, 0.3)


def make_model(width: int = 32) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=50, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=width // 2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def make_batch(seed: int, rows: int = 4, context: int = 32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 14, (6,), generator=generator).tolist()
    found = [Document(tuple(torch.randint(0, 50, (n,), generator=generator).tolist()), n // 2) for n in lengths]
    return pack(found, context, pad=0, rows=rows)


def fake_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert window_size == (-1, 0)
    count = query.shape[0]
    owner = torch.bucketize(torch.arange(count), cu_seq_q, right=True)
    mask = (owner[:, None] == owner[None]) & torch.ones(count, count, dtype=torch.bool).tril()
    heads = [one.transpose(0, 1).float()[None] for one in (query, key, value)]
    found = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale)[0]
    return found.transpose(0, 1).to(query.dtype)


def optimizers_of(model: Any) -> Optimizers:
    return make_optimizers(model, muon_rate=0.02, rate=0.003, weight_decay=0.1)


def test_a_scaled_step_is_a_plain_step_at_the_scheduled_rate() -> None:
    plain = make_model()
    scaled = copy.deepcopy(plain)
    left, right = optimizers_of(plain), optimizers_of(scaled)
    for number, share in enumerate(SHARES):
        generator = torch.Generator().manual_seed(number)
        for one, other in zip(left.weights(), right.weights(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        left.step(share)
        right.scaled_step(torch.tensor(share))
        for one, other in zip(left.weights(), right.weights(), strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_states_are_taken_from_another_device_s_checkpoint() -> None:
    model = make_model()
    left, right = optimizers_of(model), optimizers_of(model)
    for one in left.weights():
        one.grad = torch.ones_like(one)
    left.step(1.0)
    states = copy.deepcopy([one.state_dict() for one in left.parts])
    states[-1]["param_groups"][0]["capturable"] = True
    right.load(states)
    assert right.parts[-1].param_groups[0]["capturable"] is False
    right.scaled_step(torch.tensor(0.5))


@torch.no_grad()
def test_fixed_shapes_and_repeated_bounds_change_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen)
    model = make_model()
    static = StaticBatch(4, 32, torch.device("cpu"))
    wanted = [float(packed_loss(model, make_batch(seed), "mask")) for seed in range(3)]
    assert [float(static_loss(model, make_batch(seed), "mask")) for seed in range(3)] == pytest.approx(wanted, rel=1e-5)
    set_attention(model, "varlen")
    for seed, loss in enumerate(wanted):
        assert static.take(make_batch(seed))
        # attention is in bfloat16 there
        assert float(static_loss(model, static.batch, "varlen")) == pytest.approx(loss, rel=5e-3)
        packed = packed_loss(model, make_batch(seed), "varlen")
        assert float(static_loss(model, static.batch, "varlen")) == pytest.approx(float(packed), rel=1e-5)
    assert not static.take(make_batch(0, rows=5))
    many = pack([Document((1, 2), 1)] * 60, 32, pad=0, rows=4)
    assert not static.take(many)


class NoHostReads(TorchDispatchMode):
    """Fails where the host would read a value from the device, or learn a size from values: no graph can hold that."""

    names = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "unique2", "equal"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "_index_put_impl_") and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        assert name not in self.names and not by_mask, f"{name} asks the device"
        return func(*args, **(kwargs or {}))


def test_a_whole_step_asks_the_device_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward, clipping and both optimizers in the forms that a GPU runs."""
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen)
    adam = sys.modules["torch.optim.adam"]  # torch.optim hides its modules
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    model = make_model()
    set_attention(model, "varlen")
    optimizers = optimizers_of(model)
    for group in optimizers.parts[-1].param_groups:
        group |= {"capturable": True, "foreach": True}
    trainer = SimpleNamespace(
        model=model,
        attention="varlen",
        optimizers=optimizers,
        config=load_config("nano"),
        _autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    static = StaticBatch(4, 32, torch.device("cpu"))
    before = [one.detach().clone() for one in optimizers.weights()]
    for seed in range(2):
        assert static.take(make_batch(seed))
        with NoHostReads():
            loss, norm = PackedTrainer._whole_step(trainer, static.batch, torch.tensor(0.5))
    assert torch.isfinite(loss)
    assert norm > 0
    assert all(not torch.equal(one, was) for one, was in zip(optimizers.weights(), before, strict=True))
    with pytest.raises(AssertionError, match="asks the device"), NoHostReads():
        float(loss)


def test_what_cannot_be_captured_goes_on_and_says_why() -> None:
    made: list[float] = []

    def step(batch: Batch, share: Tensor) -> tuple[Tensor, Tensor]:
        made.append(float(share))
        return batch.ids.float().sum(), share.clone()

    def refuse(call: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphed = GraphedStep(step, StaticBatch(4, 32, torch.device("cpu")), capture=refuse)
    for number in range(5):
        batch = make_batch(number)
        loss, _ = graphed(batch, number / 8)
        assert float(loss) == float(batch.ids.sum())
    assert made == [number / 8 for number in range(5)]
    assert not graphed.replays
    assert "not permitted" in graphed.cause


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_gives_the_losses_of_steps_made_one_by_one() -> None:
    device = torch.device("cuda")

    def losses(*, graph: bool) -> list[float]:
        model = make_model(128).to(device)
        set_attention(model, "varlen")
        optimizers = optimizers_of(model)

        def step(batch: Batch, share: Tensor) -> tuple[Tensor, Tensor]:
            for one in optimizers.weights():
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad.zero_()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = static_loss(model, batch, "varlen") / 30
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(optimizers.weights(), 1.0)
            optimizers.scaled_step(share)
            return loss.detach(), norm

        found = []
        with own_stream(device):
            graphed = GraphedStep(step, StaticBatch(4, 32, device), capture=capture_graph)
            for number in range(20):
                if not graph:
                    graphed.cause = "not wanted"
                found.append(float(graphed(make_batch(number % 4), SHARES[number % 6])[0]))
        assert graphed.replays == graph, graphed.cause
        return found

    wanted = losses(graph=False)
    assert wanted[-1] < wanted[0]
    assert losses(graph=True) == pytest.approx(wanted, rel=2e-2)
