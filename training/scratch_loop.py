"""The packed training loop of small models: Muon on matrices, AdamW on the rest, a schedule by steps or by the clock.

A step takes ``scratch.batch_tokens`` tokens in rows of ``model.context_tokens``; layers are compiled on a GPU, and run
in bfloat16 under autocast where ``model.dtype`` says so. The loss is a mean over the answers' tokens. Every
``run.save_every`` steps a whole checkpoint is written (weights, optimizers, step); the same command goes on from it.
Where torch has no Muon, AdamW takes all weights.

Honest limits: one process; a resumed run draws other documents than the uninterrupted one would have.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from drk.training.config import TrainConfig
from drk.training.documents import document_of
from drk.training.errors import TrainingError
from drk.training.live_table import Report
from drk.training.model_facts import write_model_facts
from drk.training.packing import (
    IGNORED,
    Attention,
    Batch,
    Document,
    choose_attention,
    fill_rows,
    pack,
    packed_loss,
    set_attention,
    static_loss,
)
from drk.training.pair_source import PairSource, sample_pairs
from drk.training.rl import Trained
from drk.training.run_folder import RunFolder, append_line, disk_errors, step_of
from drk.training.step_graph import GraphedStep, StaticBatch, capture_graph, own_stream

STEP_FACTS = "steps.json"
"""Beside ``final``: the attention that was used, and whether steps were a CUDA graph (:meth:`PackedTrainer.facts`)."""
LAST_SHARE = 0.1
"""The learning rate ends at this share of its peak."""


@dataclass
class Optimizers:
    """Muon for matrices and AdamW for the rest, stepped together."""

    parts: list[torch.optim.Optimizer]
    peaks: list[float]

    def weights(self) -> list[Tensor]:
        """Return all that is trained."""
        return [one for part in self.parts for group in part.param_groups for one in group["params"]]

    def scaled_step(self, share: Tensor) -> None:
        """Make one step at ``share`` (0-d) of the peak rates, with gradients kept: what a CUDA graph can hold.

        A step of AdamW and Muon is linear in the learning rate, decoupled weight decay too. So the step is made at the
        peak, and ``share`` of its way is kept.
        """
        for optimizer, peak in zip(self.parts, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak
        weights = self.weights()
        with torch.no_grad():
            before = [one.clone() for one in weights]
            for optimizer in self.parts:
                optimizer.step()
            torch._foreach_sub_(weights, before)
            torch._foreach_mul_(weights, share)
            torch._foreach_add_(weights, before)

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Take saved states; what depends on the device (``capturable``) stays as it is here."""
        for optimizer, state in zip(self.parts, states, strict=True):
            for mine, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                saved |= {key: mine[key] for key in ("capturable", "foreach", "fused") if key in mine}
            optimizer.load_state_dict(state)

    def step(self, share: float) -> None:
        """Make one step at ``share`` of the peak learning rates."""
        for optimizer, peak in zip(self.parts, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def make_optimizers(model: Any, *, muon_rate: float, rate: float, weight_decay: float) -> Optimizers:
    """Return the optimizers of ``model``: matrices inside layers go to Muon where torch has it."""
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and ".layers." in name]
    chosen = {id(one) for one in matrices}
    rest = [one for one in model.parameters() if id(one) not in chosen]
    muon = getattr(torch.optim, "Muon", None)
    graphs = next(model.parameters()).is_cuda
    options: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": weight_decay, "capturable": graphs}
    adam = torch.optim.AdamW(rest if muon is not None else model.parameters(), **options)
    adam._warned_capturable_if_run_uncaptured = True  # steps before capturing are meant
    if muon is None:
        return Optimizers([adam], [rate])
    return Optimizers([muon(matrices, lr=muon_rate, weight_decay=weight_decay), adam], [muon_rate, rate])


@dataclass(frozen=True)
class Schedule:
    """The learning rate's share of its peak: a linear warm-up, then a cosine to :data:`LAST_SHARE`."""

    steps: int
    warmup_steps: int
    minutes: float

    def progress(self, step: int, elapsed_s: float) -> float:
        """Return how much of the training is over, 0 to 1: by steps, or by the clock where minutes are given."""
        by_steps = step / self.steps
        return min(1.0, max(by_steps, elapsed_s / (60 * self.minutes)) if self.minutes else by_steps)

    def share(self, step: int, elapsed_s: float) -> float:
        """Return the learning rate's share at ``step``."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress(step, elapsed_s)))
        return warm * (LAST_SHARE + (1 - LAST_SHARE) * cosine)


def batches(documents: Iterator[Document], context: int, *, tokens: int, pad: int) -> Iterator[Batch]:
    """Yield packed batches of about ``tokens`` tokens; their shape is always the same."""
    rows = max(1, tokens // context)
    waiting: list[Document] = []
    while True:
        total = sum(len(one.ids) for one in waiting)
        while total < rows * context:
            waiting.append(next(documents))
            total += len(waiting[-1].ids)
        layout = fill_rows([len(one.ids) for one in waiting], context)
        # the fullest rows are taken; what is left begins the next batch
        layout.sort(key=lambda row: -sum(len(waiting[i].ids) for i in row))
        taken = [i for row in layout[:rows] for i in row]
        yield pack([waiting[i] for i in taken], context, pad=pad, rows=rows)
        gone = set(taken)
        waiting = [one for i, one in enumerate(waiting) if i not in gone]


class PackedTrainer:
    """Holds a run's model, optimizers and clock."""

    def __init__(self, config: TrainConfig, initial: Path, folder: RunFolder, report: Report) -> None:
        self.config, self.folder, self._report = config, folder, report
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(initial)
        last = folder.last_checkpoint()
        self.step = step_of(last) if last is not None else 0
        self.resumed_at = self.step
        self.model = transformers.AutoModelForCausalLM.from_pretrained(last or initial, dtype=torch.float32)
        self.model.to(self.device).train()
        self.attention: Attention = choose_attention(self.device) if self._half() else "mask"
        set_attention(self.model, self.attention)
        scratch = config.scratch
        self.optimizers = make_optimizers(
            self.model,
            muon_rate=scratch.muon_learning_rate,
            rate=scratch.learning_rate,
            weight_decay=config.optimizer.weight_decay,
        )
        self.schedule = Schedule(config.run.steps, scratch.warmup_steps, scratch.minutes)
        self.spent_s = 0.0
        rows = max(1, scratch.batch_tokens // config.model.context_tokens)
        self.static = StaticBatch(rows, config.model.context_tokens, self.device)
        graphs = self.device.type == "cuda" and self.attention == "varlen"
        self.graphed = GraphedStep(self._whole_step, self.static, capture=capture_graph) if graphs else None
        if last is not None:
            self._load(last)
        if self.device.type == "cuda" and scratch.compile:
            for layer in self.model.model.layers:
                layer.compile()

    def _half(self) -> bool:
        return self.config.model.dtype == "bfloat16"

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self._half() else contextlib.nullcontext()

    def train(self, source: PairSource, held_out: Sequence[Document]) -> None:
        """Train to the end of the schedule.

        Raises:
            TrainingError: the loss is not finite.
        """
        with own_stream(self.device):
            self._train(source, held_out)

    def _train(self, source: PairSource, held_out: Sequence[Document]) -> None:
        context, run = self.config.model.context_tokens, self.config.run
        stream = batches(source.documents(), context, tokens=self.config.scratch.batch_tokens, pad=self._pad())
        begun = time.monotonic() - self.spent_s
        batch = next(stream)
        while self.schedule.progress(self.step, self.spent_s) < 1:
            share = self.schedule.share(self.step, self.spent_s)
            loss, norm = self._launch(batch, share)
            numbers = _batch_figures(batch) | {"rate_share": share}
            batch = next(stream)  # packed while the GPU computes
            numbers |= self._finish(loss, norm)
            self.spent_s = time.monotonic() - begun
            self.step += 1
            counts = source.counts
            numbers |= {"data/fresh": counts.fresh, "data/renamed": counts.renamed}
            numbers |= {"data/used": counts.used, "data/too_long": counts.too_long}
            numbers["time_s"] = round(self.spent_s, 2)
            last = self.schedule.progress(self.step, self.spent_s) >= 1
            if held_out and (last or (run.validate_every and self.step % run.validate_every == 0)):
                numbers["loss/held_out"] = self.measure(held_out)
            append_line(self.folder.metrics, {"step": self.step, **numbers})
            self._report(self.step, numbers)
            if run.save_every and (self.step % run.save_every == 0 or last):
                self.save_checkpoint()

    def _pad(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def _launch(self, batch: Batch, share: float) -> tuple[Tensor, Tensor]:
        """Start one step and return its loss and gradient norm, which a GPU may still be computing."""
        if self.graphed is not None:
            return self.graphed(batch, share)
        with self._autocast():
            loss = packed_loss(self.model, batch.to(self.device), self.attention) / max(batch.answer_tokens, 1)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        if torch.isfinite(loss) and torch.isfinite(norm):
            self.optimizers.step(share)
        return loss.detach(), norm

    def _whole_step(self, batch: Batch, share: Tensor) -> tuple[Tensor, Tensor]:
        """Make one step without asking the device for anything: the form that a CUDA graph can hold."""
        weights = self.optimizers.weights()
        for one in weights:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        torch._foreach_zero_([one.grad for one in weights if one.grad is not None])
        with self._autocast():
            loss = static_loss(self.model, batch, self.attention) / (batch.labels != IGNORED).sum().clamp(min=1)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(weights, self.config.optimizer.max_grad_norm, foreach=True)
        self.optimizers.scaled_step(share)
        return loss.detach(), norm

    def _finish(self, loss: Tensor, norm: Tensor) -> dict[str, float]:
        """Wait for a step and return its figures.

        Raises:
            TrainingError: the loss is not finite. The weights are then spoilt; the last checkpoint is not.
        """
        value, length = torch.stack([loss.float(), norm.float()]).tolist()
        if not math.isfinite(value) or not math.isfinite(length):
            raise TrainingError(f"the loss is {value} at step {self.step}", help="lower scratch.muon_learning_rate")
        graph = self.graphed is not None and self.graphed.replays
        return {"loss": value, "grad_norm": length, "graph": int(graph)}

    def facts(self) -> dict[str, Any]:
        """Return how the steps were made: attention, whether by a CUDA graph, and why not."""
        graph = self.graphed
        none = "no CUDA device" if self.device.type != "cuda" else f"attention by {self.attention}"
        if graph is None:
            return {"attention": self.attention, "graph": 0, "graph_cause": none}
        return {"attention": self.attention, "graph": int(graph.replays), "graph_cause": graph.cause}

    @torch.inference_mode()
    def measure(self, documents: Sequence[Document]) -> float:
        """Return the mean loss over the answers' tokens of ``documents``."""
        self.model.eval()
        total, count = 0.0, 0
        context = self.config.model.context_tokens
        for start in range(0, len(documents), 16):
            batch = pack(documents[start : start + 16], context, pad=self._pad())
            with self._autocast():
                total += float(packed_loss(self.model, batch.to(self.device), self.attention))
            count += batch.answer_tokens
        self.model.train()
        return total / max(count, 1)

    def save(self, path: Path) -> None:
        """Save weights and tokenizer as a plain folder."""
        name = self.model.config._attn_implementation
        self.model.config._attn_implementation = "sdpa"  # the name used here is known to nobody else
        self.model.save_pretrained(path)
        self.model.config._attn_implementation = name
        self.tokenizer.save_pretrained(path)
        write_model_facts(path, self.config)

    def save_checkpoint(self) -> None:
        """Write a whole checkpoint and forget old ones."""
        run = self.config.run
        self.folder.need_space(16 * sum(one.numel() for one in self.model.parameters()), run.min_free_gb)
        path = self.folder.checkpoints / f"checkpoint-{self.step}"
        self.save(path)
        states = [one.state_dict() for one in self.optimizers.parts]
        torch.save({"optimizers": states, "spent_s": self.spent_s}, path / "optimizers.pt")
        self.folder.mark_complete(self.step, self.config)
        self.folder.forget_old(run.keep_checkpoints)

    def _load(self, path: Path) -> None:
        saved = torch.load(path / "optimizers.pt", map_location=self.device, weights_only=True)
        self.optimizers.load(saved["optimizers"])
        self.spent_s = float(saved["spent_s"])


def _batch_figures(batch: Batch) -> dict[str, float]:
    return {"tokens/filled": float((batch.owner >= 0).float().mean()), "tokens/answer": batch.answer_tokens}


def train_packed(config: TrainConfig, initial: Path, report: Report) -> Trained:
    """Train the model in ``initial`` on packed pairs; goes on at the last whole checkpoint.

    Raises:
        TrainingError: with what to do.
    """
    folder = RunFolder(Path(config.run.output_dir))
    folder.open(config)
    with contextlib.closing(folder), disk_errors(folder.path):
        folder.remove_incomplete()
        trainer = PackedTrainer(config, initial, folder, report)
        folder.cut_after(trainer.step)
        context, seed = config.model.context_tokens, config.run.seed
        held_out = [
            document
            for pair in sample_pairs(config.scratch, seed, config.scratch.held_out_pairs, held_out=True)
            if (document := document_of(pair, trainer.tokenizer, context=context)) is not None
        ]
        source_seed = seed + trainer.step  # a resumed run goes on with other structures
        with PairSource(config.scratch, initial, trainer.tokenizer, context=context, seed=source_seed) as source:
            trainer.train(source, held_out)
        final = folder.path / "final"
        trainer.save(final)
        (folder.path / STEP_FACTS).write_text(json.dumps(trainer.facts(), indent=1) + "\n", encoding="utf-8")
        return Trained(folder.path, final, trainer.step, trainer.resumed_at)
