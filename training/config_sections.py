"""The sections of a training configuration: frozen dataclasses with their defaults, and nothing else.

Read and checked by :mod:`drk.training.config`. Times are in seconds unless a name says minutes, sizes in tokens, rows
or gigabytes by name. A setting that is not here cannot be set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RunSection:
    """Where a run goes and how long it is. ``save_every`` and ``validate_every`` are in optimizer steps; 0: never.

    ``minutes`` above 0 ends ``sft`` and ``rl`` after the step in which that much time has passed since the start.
    """

    output_dir: str = ".drk/train"
    seed: int = 0
    steps: int = 300
    minutes: float = 0.0
    save_every: int = 10
    keep_checkpoints: int = 3
    validate_every: int = 0
    tensorboard: bool = False
    min_free_gb: float = 1.0


@dataclass(frozen=True)
class ModelSection:
    """What is trained: a folder (``path``), or a small model made here (``init = "tiny"``; its sizes follow)."""

    path: str = ""
    init: Literal["checkpoint", "tiny"] = "checkpoint"
    dtype: Literal["float32", "bfloat16"] = "float32"
    context_tokens: int = 18432
    lora_rank: int = 0
    lora_alpha: int = 32
    gradient_checkpointing: bool = False
    layers: int = 2
    width: int = 32
    heads: int = 2


@dataclass(frozen=True)
class TasksSection:
    """Tasks: a JSONL file of ``drk data tasks``, or drawn by the generator (``count`` over ``families``).

    ``least_elements`` above 0 draws tasks only whose largest input has so many: below a million elements or so the
    launch decides, not the kernel.
    """

    path: str = ""
    families: tuple[str, ...] = ()
    count: int = 64
    seed: int = 0
    rows: int = 0
    least_elements: int = 0
    held_out: int = 0
    held_out_families: tuple[str, ...] = ()


@dataclass(frozen=True)
class PromptSection:
    """How a conversation is made. ``templates`` is ``full``, ``bare`` (short; for small models) or a folder."""

    templates: str = "full"
    policy: Literal["append-all", "top-w", "best-window"] = "append-all"


@dataclass(frozen=True)
class RolloutSection:
    """How trajectories are sampled.

    ``backend`` ``generate`` samples in this process, in waves of all live trajectories; ``continuous`` by continuous
    batching of transformers, each trajectory on its own (a run does not repeat then); ``vllm`` asks a server
    at ``url`` (``/v1/completions``, token ids in and out, ``--logprobs-mode processed_logprobs``).
    ``wave_share`` below 1 lets ``generate`` sample as soon as that share of the live trajectories waits, while the
    others are judged. ``group_sizes`` ``unequal`` gives every second prompt 2 samples and the next one the rest: for
    studies.
    """

    backend: Literal["generate", "continuous", "vllm"] = "generate"
    url: str = "http://127.0.0.1:8000/v1"
    served_model: str = "policy"
    prompts_per_step: int = 16
    samples_per_prompt: int = 16
    group_sizes: Literal["equal", "unequal"] = "equal"
    turns: int = 3
    max_new_tokens: int = 8192
    temperature: float = 1.0
    concurrency: int = 64
    batch_rows: int = 256
    wave_share: float = 1.0
    trajectory_timeout_s: float = 1800.0
    empty_attempts: int = 3


@dataclass(frozen=True)
class GymSection:
    """How answers are judged. A fault of the host is retried for ``patience_s``, then its trajectory is left out.

    ``url`` names a served gym (its token: DRK_GYM_TOKEN in the environment); empty: one in this process.
    A step in which more than ``max_fault_share`` of the trajectories were left out stops the run.
    ``sessions`` references are kept at least: with as many as there are tasks, none is loaded twice. ``max_pairs``,
    ``min_pairs`` and ``timing_s`` bound what timing takes, ``compile_s`` a candidate's first call, ``run_s`` each later
    one and ``total_s`` all of them: a candidate that hangs holds its step up for as long. ``hidden_shape`` judges each
    candidate at a shape that the task does not show, too. ``cache_dir`` holds verdicts (``cache``) and references'
    times for several runs; empty: the run's own folder.
    """

    url: str = ""
    device: str = "auto"
    sandbox: Literal["strict", "standard", "basic"] = "standard"
    seeds: int = 5
    parallel: int = 2
    timing: bool = True
    min_pairs: int = 20
    max_pairs: int = 200
    timing_s: float = 3.0
    compile_s: float = 120.0
    run_s: float = 60.0
    total_s: float = 300.0
    compile_baseline: bool = False
    hidden_shape: bool = True
    sessions: int = 0
    offline_compile: bool = False
    patience_s: float = 120.0
    max_fault_share: float = 0.5
    cache: bool = False
    cache_dir: str = ""


@dataclass(frozen=True)
class RewardSection:
    """The reward (:mod:`drk.gym.reward`). ``proxy`` pays the coverage estimate where there is no GPU.

    ``speed`` ``timed`` is what the gym timed in pairs; ``device`` is the ratio of device times by the profiler
    (:mod:`drk.training.device_speed`), for gyms without timing: several times as many candidates a minute.

    For ablations: ``pay_coverage`` false leaves out what coverage adds (PR), ``pay_dishonest`` pays right results that
    the gym proved to be fraud, as a trainer without honesty checks would.
    """

    form: Literal["paper", "recipe", "weighted", "ladder"] = "paper"
    speed: Literal["timed", "device"] = "timed"
    baseline: Literal["eager", "compile", "max_autotune", "cuda_graph", "headline"] = "eager"
    cap: float = 3.0
    floor: float = 0.0
    bound: Literal["low", "value"] = "low"
    proxy: bool = False
    pay_coverage: bool = True
    pay_dishonest: bool = False


@dataclass(frozen=True)
class AdvantageSection:
    """The estimator (:mod:`drk.training.advantages`)."""

    estimator: Literal["trloo", "grpo", "rloo", "reinforce"] = "trloo"
    gamma: float = 1.0
    singleton: Literal["return", "zero"] = "zero"
    rejected_in_baseline: bool = False
    scale: Literal["none", "group_std", "batch_std"] = "none"


@dataclass(frozen=True)
class RejectionSection:
    """PRS, MRS and the rules of :mod:`drk.training.rejection`; ``last_turn_std`` 0 is off."""

    prs: Literal["off", "draw", "soft"] = "draw"
    threshold: float = 0.3
    width: float = 0.1
    pooling: Literal["turn", "geometric"] = "turn"
    mrs: bool = True
    level: Literal["trajectory", "turn"] = "trajectory"
    low: float = 0.999
    high: float = 1.001
    token_veto: float = 1e-4
    void_turns: bool = False
    last_turn_std: float = 0.0


@dataclass(frozen=True)
class OptimizerSection:
    """The update. ``divisor`` is what summed token losses are divided by: live tokens, or planned rows x 1000."""

    learning_rate: float = 1e-6
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    micro_batches: int = 1
    divisor: Literal["tokens", "planned"] = "tokens"
    clip_low: float = 0.2
    clip_high: float = 0.28


@dataclass(frozen=True)
class SftSection:
    """Supervised fine-tuning on trajectories (JSONL of ``drk data trajectories``)."""

    path: str = ""
    learn: Literal["accepted", "all", "last"] = "accepted"
    epochs: float = 4.0
    batch_rows: int = 64
    micro_batches: int = 1
    learning_rate: float = 1e-6
    max_tokens: int = 18432


@dataclass(frozen=True)
class ScratchSection:
    """A small model from nothing (``drk train scratch``): its shape, its tokenizer, and how it is trained.

    With ``sft.path`` set it is trained by ``drk train sft`` on those demonstrations. Else it is trained packed: on the
    shards of ``drk data pairs`` in ``pairs`` (a folder), on pairs that ``workers`` processes write while it trains, or
    on both; ``renamers`` more processes say the shards' pairs again under other names. ``minutes`` above 0 ends
    training by the clock, with the schedule of the learning rate; ``phrases`` are whole lines and blocks that become
    one token each. ``texts`` pairs train the tokenizer and measure the loss.
    """

    layers: int = 8
    width: int = 384
    heads: int = 6
    hidden: int = 1024
    vocabulary: int = 4096
    phrases: int = 1024
    tokenizer: str = ""
    texts: int = 2048
    pairs: str = ""
    workers: int = 0
    renamers: int = 0
    families: tuple[str, ...] = ()
    rows: int = 0
    multi_turn: float = 0.4
    batch_tokens: int = 65536
    minutes: float = 0.0
    muon_learning_rate: float = 0.02
    learning_rate: float = 3e-3
    warmup_steps: int = 60
    compile: bool = True
    held_out_pairs: int = 64
