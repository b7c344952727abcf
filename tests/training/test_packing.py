"""Packed training: rows hold what they should, packed losses are those of single documents, and a run learns."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the train extra")

import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from drk.assistant.llm.factory import FACTS, fitted, make_model
from drk.assistant.llm.messages import ModelFault
from drk.assistant.llm.model_settings import ModelSettings
from drk.training.config import load_config
from drk.training.documents import read_chunk, write_chunk
from drk.training.errors import TrainingError
from drk.training.packing import IGNORED, Document, choose_attention, fill_rows, pack, packed_loss
from drk.training.pair_source import PairSource
from drk.training.pairs import StreamPlan, write_shard
from drk.training.scratch import train_scratch
from drk.training.scratch_loop import Schedule, batches, make_optimizers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def documents(count: int) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 20, (count,), generator=generator).tolist()
    return [Document(tuple(torch.randint(0, 50, (n,), generator=generator).tolist()), n // 2) for n in lengths]


@given(st.lists(st.integers(1, 30), max_size=40))
def test_every_document_has_one_place_and_rows_are_not_overfull(lengths: list[int]) -> None:
    rows = fill_rows(lengths, 30)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 30 for row in rows)


def test_the_packed_loss_is_the_sum_of_single_documents(model: transformers.PreTrainedModel) -> None:
    found = documents(7)
    whole = packed_loss(model, pack(found, 32, pad=0, rows=8), "mask")
    single = sum(packed_loss(model, pack([one], len(one.ids), pad=0), "mask") for one in found)
    assert whole.item() == pytest.approx(single.item(), rel=1e-5)
    left = torch.autograd.grad(whole, model.model.layers[0].mlp.up_proj.weight)[0]
    right = torch.autograd.grad(single, model.model.layers[0].mlp.up_proj.weight)[0]
    assert torch.allclose(left, right, atol=1e-5)


def test_the_loss_is_that_of_the_library(model: transformers.PreTrainedModel) -> None:
    one = documents(1)[0]
    labels = torch.tensor([[IGNORED] * one.answer_at + list(one.ids[one.answer_at :])])
    wanted = model(input_ids=torch.tensor([one.ids]), labels=labels).loss * (len(one.ids) - one.answer_at)
    assert packed_loss(model, pack([one], 32, pad=0), "mask").item() == pytest.approx(wanted.item(), rel=1e-5)


def test_limits_are_told() -> None:
    assert choose_attention(torch.device("cpu")) == "mask"
    with pytest.raises(ValueError, match="longer than"):
        pack([Document((1,) * 9, 2)], 8, pad=0)
    with pytest.raises(ValueError, match="rows are needed"):
        pack([Document((1,) * 8, 2)] * 3, 8, pad=0, rows=2)


def test_batches_have_one_shape_and_lose_nothing() -> None:
    found = documents(60)
    made = list(itertools.islice(batches(iter(found), 32, tokens=96, pad=0), 4))
    assert {batch.ids.shape for batch in made} == {(3, 32)}
    assert all((batch.owner >= 0).float().mean() > 0.7 for batch in made)


def test_matrices_go_to_muon_and_the_rest_to_adam(model: transformers.PreTrainedModel) -> None:
    optimizers = make_optimizers(model, muon_rate=0.02, rate=0.003, weight_decay=0.01)
    assert [type(one).__name__ for one in optimizers.parts] == ["Muon", "AdamW"]
    held = sum(p.numel() for one in optimizers.parts for group in one.param_groups for p in group["params"])
    assert held == sum(p.numel() for p in model.parameters())


def test_the_schedule_warms_up_and_falls_by_steps_or_by_the_clock() -> None:
    by_steps, by_clock = Schedule(100, 10, 0.0), Schedule(100, 10, 1.0)
    assert by_steps.share(0, 0.0) == pytest.approx(0.1)
    assert by_steps.share(99, 0.0) < 0.11
    assert by_clock.progress(1, 30.0) == pytest.approx(0.5)
    assert by_clock.progress(1, 90.0) == 1.0


def test_writers_say_documents_in_bytes(tmp_path: Path) -> None:
    found = documents(3)
    with (tmp_path / "chunk").open("wb") as file:
        write_chunk(file, found, 4)
    with (tmp_path / "chunk").open("rb") as file:
        read, too_long = read_chunk(file) or ([], 0)
        assert [(tuple(x.ids), x.answer_at) for x in read] == [(x.ids, x.answer_at) for x in found]
        assert too_long == 4
        assert read_chunk(file) is None


def test_a_source_without_pairs_is_refused(tmp_path: Path) -> None:
    section = load_config("nano", ["scratch.workers=0"]).scratch
    with (
        pytest.raises(TrainingError, match="nothing to learn from"),
        PairSource(section, tmp_path, None, context=64, seed=0),
    ):
        pass


@pytest.mark.slow
def test_a_run_from_nothing_learns_resumes_and_is_taken_by_the_assistant(tmp_path: Path) -> None:
    """Shards and a writer feed a tiny model; its loss falls; its folder is what ``drk optimize --model`` asks for."""
    plan = StreamPlan(("pointwise",), seed=0, rows=8, dresses=4, reservoir=2)
    write_shard(tmp_path / "pairs", plan, worker=0, workers=1, pairs=24)
    values = {
        "run.output_dir": str(tmp_path / "run"), "run.steps": 12, "run.save_every": 6, "run.validate_every": 0,
        "run.min_free_gb": 0.1, "scratch.layers": 1, "scratch.width": 64, "scratch.heads": 2, "scratch.hidden": 96,
        "scratch.vocabulary": 900, "scratch.phrases": 200, "scratch.texts": 24, "scratch.workers": 1,
        "scratch.renamers": 1,
        "scratch.pairs": str(tmp_path / "pairs"), "scratch.families": ["pointwise"], "scratch.rows": 8,
        "scratch.batch_tokens": 2048, "scratch.held_out_pairs": 1, "scratch.warmup_steps": 2,
    }  # fmt: skip
    losses: list[float] = []
    config = load_config("nano", [f"{key}={json.dumps(value)}" for key, value in values.items()])
    done = train_scratch(config, lambda _, numbers: losses.append(numbers["loss"]))
    assert done.steps == len(losses) == 12
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert (tmp_path / "run/checkpoints/checkpoint-12/complete").is_file()
    assert not (tmp_path / "run/checkpoints/checkpoint-6").exists()
    assert train_scratch(config, lambda _, numbers: losses.append(numbers["loss"])).resumed_at == 12
    assert len(losses) == 12
    facts = json.loads((done.final / FACTS).read_text())
    sizes = {"context_tokens": 2048, "max_tokens": 1024}
    assert facts == {"templates": "templates", "policy": "append-all", "temperature": 1.0, **sizes}
    proposer = make_model(str(done.final), ModelSettings(max_tokens=4))
    assert proposer.name.endswith("final")
    asyncio.run(proposer.close())


def test_a_checkpoint_says_how_it_is_asked_and_the_user_wins(tmp_path: Path) -> None:
    (tmp_path / FACTS).write_text('{"templates": "templates", "context_tokens": 2048, "max_tokens": 700}')
    settings = fitted(ModelSettings(), f"transformers:{tmp_path}")
    assert (settings.context_tokens, settings.max_tokens) == (2048, 700)
    assert settings.templates == (tmp_path / "templates").resolve()
    assert fitted(ModelSettings(max_tokens=99), str(tmp_path)).max_tokens == 99
    assert fitted(ModelSettings(), "openai:gpt") == ModelSettings()
    (tmp_path / FACTS).write_text("{}")
    with pytest.raises(ModelFault, match="cannot be read"):
        fitted(ModelSettings(), str(tmp_path))
