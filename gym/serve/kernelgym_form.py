"""KernelGYM's request and response forms, and the translation to ours and back. Field names and defaults are theirs.

Where their answers are bugs, ours are right: a known ``task_id`` with other code is judged anew; tuple and dict
outputs, NaN and dropout are compared properly; a candidate whose process dies is told so at once. What they ignore
(``num_warmup``, ``device_preference``, ``uuid``, ``resources``, ...) is accepted and ignored. The number of trials and
pairs is the server's; ``metadata`` says what was used. ``correctness`` is always checked. The workflow
``kernel_simple`` and inline cases are not supported and refused. docs/gym-service.md has the whole table.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drk.gym.schema import RUNGS, Candidate, Task, UserFunction
from drk.gym.serve.bodies import REFERENCE
from drk.gym.serve.settings import TimingWish

TaskName = Annotated[str, Field(min_length=1, max_length=100)]
KGYM_REFERENCE = (
    REFERENCE + "\n\ndef get_inputs():\n    return [torch.randn(64, 128)]\n\n\ndef get_init_inputs():\n    return []\n"
)
_CODES = {"syntax-error": "SYNTAX_ERROR", "import-error": "IMPORT_ERROR", "timeout": "TIMEOUT_ERROR"}
_STAGES = {
    "parse": "SYNTAX_ERROR",
    "load": "INSTANTIATION_ERROR",
    "compile": "COMPILATION_ERROR",
    "run": "RUNTIME_ERROR",
    "check": "CORRECTNESS_ERROR",
    "host": "SYSTEM_ERROR",
}
DECOYS = {"decoy-kernel", "no-own-kernel", "compile-wrap"}
COMPILE_NAMES = {"compile", "torch_compile", "torch-compile"}


class EvaluationRequest(BaseModel):
    """KernelGYM's request; fields that have no effect there or here are accepted."""

    model_config = ConfigDict(extra="ignore")

    task_id: Annotated[TaskName, Field(examples=["relu-1"])]
    reference_code: Annotated[str, Field(min_length=10, max_length=100_000, examples=[KGYM_REFERENCE])]
    kernel_code: Annotated[
        str, Field(min_length=10, max_length=100_000, examples=[REFERENCE.replace("Model", "ModelNew")])
    ]
    toolkit: str | None = None
    backend_adapter: str | None = None
    backend: Literal["cuda", "triton"] = "triton"
    num_correct_trials: Annotated[int, Field(ge=1, le=20)] = 5
    num_perf_trials: Annotated[int, Field(ge=1, le=1000)] = 100
    num_warmup: int = 3
    timeout: Annotated[int, Field(ge=10, le=3600)] = 300
    priority: Literal["low", "normal", "high"] = "normal"
    device_preference: str | None = None
    force_refresh: bool = False
    entry_point: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")] = "Model"
    reference_backend: str | None = None
    enable_profiling: bool | None = None
    enable_triton_detection: bool | None = None
    measure_performance: bool | None = None
    run_performance: bool | None = None
    run_correctness: bool | None = None
    run_triton_detection: bool | None = None
    verbose_errors: bool | None = None
    workflow: str | None = None
    cases: Any = None
    cases_code: str | None = None

    @property
    def timing(self) -> TimingWish:
        """Whether speed is to be measured, and against which baselines: theirs is eager unless they ask for compile."""
        if self.measure_performance is False or self.run_performance is False:
            return False
        return True if self.reference_backend in COMPILE_NAMES else "eager"

    def task(self) -> Task:
        """Return the task that the reference code means."""
        return Task(
            name=self.task_id,
            files={"reference.py": self.reference_code},
            entry="reference.py",
            target=self.entry_point,
            init=UserFunction("get_init_inputs"),
            inputs=UserFunction("get_inputs"),
        )

    def candidate(self) -> Candidate:
        """Return the candidate; its class gets the name ``ModelNew``, in a line after the last so that lines stay."""
        source = self.kernel_code
        if self.entry_point != "Model":
            source = source.rstrip("\n") + f"\n\n\nModelNew = {self.entry_point}New\n"
        return Candidate(source, proposer="kernelgym")


class BatchRequest(BaseModel):
    """Several evaluations."""

    model_config = ConfigDict(extra="ignore")

    batch_id: TaskName
    tasks: Annotated[list[EvaluationRequest], Field(min_length=1, max_length=100)]


class WorkflowRequest(BaseModel):
    """A workflow's submission; only ``kernelbench`` is supported."""

    model_config = ConfigDict(extra="ignore")

    workflow: Annotated[str, Field(examples=["kernelbench"])]
    payload: Annotated[
        dict[str, Any],
        Field(examples=[{"reference_code": KGYM_REFERENCE, "kernel_code": REFERENCE.replace("Model", "ModelNew")}]),
    ]
    task_id: TaskName | None = None
    force_refresh: bool = False


def stamp(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC, or null."""
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def response_of(task_id: str, result: dict[str, Any], reference_backend: str | None = None) -> dict[str, Any]:
    """Return our result in KernelGYM's form. Figures that were not measured are null; failures are theirs (-1, 0)."""
    verdict = result["verdict"]
    common = {
        "task_id": task_id,
        "submitted_at": stamp(result["submitted_at"]),
        "completed_at": stamp(result["finished_at"]),
        "processing_time": result["run_s"],
    }
    if verdict is None:
        return {**common, **_without_verdict(result)}
    error = verdict["error"]
    rung = RUNGS.index(verdict["reached"]) if verdict["reached"] else -1
    kinds = {flag["kind"] for flag in verdict["flags"]}
    fraud = any(flag["severity"] == "fraud" for flag in verdict["flags"])
    code = None
    if error is not None:
        code = _CODES.get(error["kind"]) or _STAGES.get(error["stage"], "UNKNOWN_ERROR")
    compiled = rung >= RUNGS.index("compiled") or (error is not None and error["stage"] in {"run", "check", "time"})
    return {
        **common,
        "status": _status(verdict, compiled, code),
        "compiled": compiled,
        "correctness": verdict["correct"],
        "decoy_kernel": fraud or bool(kinds & DECOYS),
        **_speed(verdict, reference_backend),
        "metadata": _metadata(result, verdict),
        "error_message": error["message"] if error else None,
        "error_code": code,
    }


def _status(verdict: dict[str, Any], compiled: bool, code: str | None) -> str:
    if code == "TIMEOUT_ERROR":
        return "timeout"
    if verdict["status"] == "error" or not compiled:
        return "failed"
    return "completed"


def _without_verdict(result: dict[str, Any]) -> dict[str, Any]:
    error = result["error"] or {}
    deadline = error.get("code") in {"queue-deadline", "run-deadline"}
    code = "TIMEOUT_ERROR" if deadline else "SYSTEM_ERROR" if error.get("infrastructure") else "VALIDATION_ERROR"
    return {
        "status": "timeout" if deadline else "failed",
        "compiled": False,
        "correctness": False,
        "decoy_kernel": False,
        "reference_runtime": -1.0,
        "kernel_runtime": -1.0,
        "speedup": 0.0,
        "metadata": {"drk": {"error": error}},
        "error_message": error.get("message"),
        "error_code": code,
    }


def _speed(verdict: dict[str, Any], reference_backend: str | None) -> dict[str, Any]:
    if verdict["status"] != "accepted":
        return {"reference_runtime": -1.0, "kernel_runtime": -1.0, "speedup": 0.0}
    baseline = "compile" if reference_backend in COMPILE_NAMES else "eager"
    reference = verdict["baselines_ms"].get(baseline)
    ratio = (verdict["speedups"] or {}).get(baseline)
    return {
        "reference_runtime": reference["median"] if reference else None,
        "kernel_runtime": verdict["latency_ms"]["median"] if verdict["latency_ms"] else None,
        "speedup": ratio["value"] if ratio else None,
    }


def _metadata(result: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    owned = [row for row in verdict["kernels"] if row["owned"]]
    times = [row["time_us"] for row in verdict["kernels"] if row["time_us"] is not None]
    facts = verdict["environment"]
    error = verdict["error"] or {}
    found = {
        "hardware": facts.get("gpu"),
        "gpu_name": facts.get("gpu"),
        "device": facts.get("device"),
        "num_correct_trials": len({cell["name"] for cell in verdict["cells"]}),
        "num_custom_kernels": len(owned),
        "num_total_kernels": len(verdict["kernels"]),
        "custom_kernel_cuda_time_in_profiling_us": sum(row["time_us"] or 0.0 for row in owned) if times else None,
        "total_kernel_run_time_in_profiling_us": sum(times) if times else None,
        "time_coverage": verdict["coverage"],
        "profiling": {"kernels": [{"name": row["name"], "cuda_time_us": row["time_us"]} for row in verdict["kernels"]]},
        "cached": result["cached"],
        "drk": verdict,
    }
    if error.get("stage") in {"run", "check"} and error.get("kind") != "wrong-output":
        found["runtime_error"] = error["message"]
    elif error.get("stage") in {"parse", "load", "compile"}:
        found["compilation_error"] = error["message"]
    return found
