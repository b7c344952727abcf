"""Which sampler a run gets, what it refuses, and how weights reach a server.

Refused, with what to do instead: sampling in the process where weights are spread over processes (FSDP: unequal
numbers of forward calls would hang), continuous batching beside the timing of kernels on one GPU (speeds that are
rewarded would be those of a shared GPU), and continuous batching under autocast (the library's cache has the weights'
dtype).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch

from drk.training.backends import PolicyBackend, WaveBackend
from drk.training.config import GymSection, TrainConfig
from drk.training.decode import Decoder
from drk.training.errors import OptionError, TrainingError
from drk.training.vllm_backend import VllmBackend


class WeightSyncError(TrainingError):
    """The weights could not be sent to the server that samples with them."""


def make_backend(
    config: TrainConfig,
    stops: frozenset[int],
    pad_id: int,
    trainer: Callable[[], Any],
    beside: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
) -> PolicyBackend:
    """Return the sampler that the settings name; ``trainer`` gives the trainer once there is one.

    ``beside`` surrounds what is sampled in this process; see :class:`drk.training.backends.WaveBackend`.

    Raises:
        OptionError: it cannot be used with the other settings, or here.
    """
    rollout = config.rollout
    if rollout.backend == "vllm":
        return _vllm(config, stops)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise OptionError(
            "weights are spread over processes by FSDP, so they cannot be sampled from in the process",
            help="rollout.backend = 'vllm', or DDP",
        )

    def model() -> Any:
        return trainer().accelerator.unwrap_model(trainer().model)

    if rollout.backend == "continuous":
        check_continuous(config, on_gpu=torch.cuda.is_available())
        from drk.training.continuous_backend import ContinuousBackend  # brings the library's continuous batching

        return ContinuousBackend(
            model,
            temperature=rollout.temperature,
            stop_ids=stops,
            pad_id=pad_id,
            context_tokens=config.model.context_tokens,
            rows=rollout.concurrency,
        )
    found = WaveBackend(
        model,
        temperature=rollout.temperature,
        stop_ids=stops,
        pad_id=pad_id,
        batch_rows=rollout.batch_rows,
        decoder=Decoder(rows=rollout.batch_rows),
        beside=beside,
        context=lambda: trainer().accelerator.autocast(),  # noqa: PLW0108 - there is no trainer yet
    )
    found.share = rollout.wave_share
    return found


def _vllm(config: TrainConfig, stops: frozenset[int]) -> VllmBackend:
    rollout = config.rollout
    return VllmBackend(
        rollout.url,
        rollout.served_model,
        temperature=rollout.temperature,
        stop_ids=stops,
        concurrency=rollout.concurrency,
        patience_s=config.gym.patience_s,
        timeout_s=rollout.trajectory_timeout_s,
    )


def check_continuous(config: TrainConfig, *, on_gpu: bool) -> None:
    """Refuse settings that continuous batching cannot serve.

    Raises:
        OptionError: which, and what to set instead.
    """
    if config.model.dtype == "bfloat16" and not config.model.lora_rank:
        raise OptionError(
            "continuous batching cannot sample from float32 weights under autocast",
            help="rollout.backend = 'generate', or model.dtype = 'float32', or LoRA",
        )
    if on_gpu and _times_here(config.gym):
        raise OptionError(
            "continuous batching would sample on the GPU that kernels are timed on",
            help="rollout.backend = 'generate', or gym.url, or another GPU by gym.device, or gym.timing = false",
        )


def _times_here(gym: GymSection) -> bool:
    rank = os.environ.get("LOCAL_RANK", "0")
    return gym.timing and not gym.url and gym.device in ("auto", f"cuda:{rank}")


def sync_served_weights(trainer: Any) -> None:
    """Send the weights to the vLLM server, by TRL's own means.

    Raises:
        WeightSyncError: the server is gone, or was started anew since TRL connected.
    """
    try:
        trainer.vllm_generation.sync_weights()
    except (OSError, RuntimeError) as error:  # HTTP and NCCL
        raise WeightSyncError(
            f"the weights could not be sent to the vLLM server: {str(error)[:300]}",
            help="start the server, then the same command again: it resumes at the last checkpoint",
        ) from error
