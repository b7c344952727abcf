"""Bodies of the native API's requests, as pydantic models: what is accepted, within which bounds, with examples.

Tasks and candidates are checked by :mod:`drk.gym.wire`, like everywhere else; here they are JSON objects.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drk.gym.serve.settings import Priority, TimingWish

REFERENCE = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n"
TASK_EXAMPLE: dict[str, Any] = {
    "name": "relu",
    "files": {"model.py": REFERENCE},
    "entry": "model.py",
    "target": "Model",
    "inputs": {"kind": "call", "args": [{"kind": "tensor", "shape": [64, 128], "dtype": "float32"}]},
}
CANDIDATE_EXAMPLE: dict[str, Any] = {"source": REFERENCE.replace("Model", "ModelNew"), "proposer": "me"}

TaskBody = Annotated[dict[str, Any], Field(description="A Task bundle (docs/cli.md).", examples=[TASK_EXAMPLE])]
CandidateBody = Annotated[
    dict[str, Any], Field(description="Source text that defines ModelNew.", examples=[CANDIDATE_EXAMPLE])
]
DeviceClass = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", description="A GPU class such as h200.")]
Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$", description="The same key gives the same job.")]


class Strict(BaseModel):
    """Unknown fields are errors: a misspelt deadline must not be ignored."""

    model_config = ConfigDict(extra="forbid")


class Options(Strict):
    """What every submission may say."""

    priority: Priority = "normal"
    device_class: DeviceClass | None = None
    queue_deadline_s: Annotated[float, Field(gt=0, le=7 * 86400)] | None = None
    run_deadline_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    idempotency_key: Key | None = None
    timing: Annotated[TimingWish, Field(description="eager: without the torch.compile baseline.")] = True
    cache: bool = True


class EvaluationBody(Options):
    """One candidate on one task. ``wait_s``: how long the answer may be waited for (0: not at all)."""

    task: TaskBody
    candidate: CandidateBody
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 0.0


class ProfileBody(Options):
    """A task without a candidate: ``what`` to find out about its reference."""

    task: TaskBody
    what: Literal["profile", "inspection", "capture", "parts", "kernels"] = "profile"
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 0.0


class BatchItem(Strict):
    """One evaluation of a batch; ``task`` names one of the batch's tasks."""

    task: Annotated[str, Field(min_length=1, max_length=200)]
    candidate: CandidateBody


class BatchBody(Options):
    """Many evaluations; tasks are given once."""

    tasks: Annotated[dict[str, dict[str, Any]], Field(min_length=1, examples=[{"relu": TASK_EXAMPLE}])]
    items: Annotated[
        list[BatchItem], Field(min_length=1, examples=[[{"task": "relu", "candidate": CANDIDATE_EXAMPLE}]])
    ]


class DrainBody(Strict):
    """Whether new jobs are refused."""

    on: bool = True
