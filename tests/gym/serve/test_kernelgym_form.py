"""KernelGYM's form and ours: what a request asks for, and how a verdict reads in their words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from drk.gym.serve.jobs import Fault, Outcome
from drk.gym.serve.kernelgym_form import EvaluationRequest, response_of

REQUEST = {"task_id": "t", "reference_code": "class Model: ...", "kernel_code": "class ModelNew: ..."}
INTERVAL = {"value": 2.0, "low": 1.9, "high": 2.1, "pairs": 40}
WRONG_OUTPUT = {"stage": "check", "kind": "wrong-output", "message": "m"}
VERDICT: dict[str, Any] = {
    "status": "accepted",
    "reached": "measured",
    "correct": True,
    "flags": [],
    "error": None,
    "kernels": [
        {"name": "root", "owned": True, "time_us": 30.0},
        {"name": "vendor", "owned": False, "time_us": 10.0},
    ],
    "cells": [{"name": "draw 0 out"}, {"name": "draw 1 out"}],
    "coverage": 0.75,
    "environment": {"gpu": "NVIDIA H200", "device": "cuda:0"},
    "baselines_ms": {"eager": {"median": 0.2}, "compile": {"median": 0.15}},
    "latency_ms": {"median": 0.1},
    "speedups": {"eager": INTERVAL, "compile": {**INTERVAL, "value": 1.5}},
}


def answered(backend: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return the response to a job whose verdict differs from an accepted one by ``changes``."""
    result = Outcome("done", verdict={**VERDICT, **changes}).to_json({"id": "j"}, "w", 1.0)
    return response_of("t", result, backend)


@pytest.mark.parametrize(
    ("fields", "timing"),
    [
        ({}, "eager"),
        ({"reference_backend": "eager"}, "eager"),
        ({"reference_backend": "torch_compile"}, True),
        ({"reference_backend": "compile", "measure_performance": False}, False),
        ({"run_performance": False}, False),
    ],
)
def test_what_is_timed_is_what_they_time(fields, timing) -> None:
    assert EvaluationRequest(**{**REQUEST, **fields}).timing == timing


def test_unknown_fields_are_ignored_and_bounds_are_theirs() -> None:
    assert EvaluationRequest(**REQUEST, uuid="u", resources={"gpu": 1}).timeout == 300
    for wrong in ({"kernel_code": "short"}, {"timeout": 9}, {"num_correct_trials": 21}, {"entry_point": "a b"}):
        with pytest.raises(ValidationError):
            EvaluationRequest(**{**REQUEST, **wrong})


def test_speed_is_told_against_the_baseline_that_was_asked_for() -> None:
    found = answered()
    assert (found["status"], found["compiled"], found["correctness"], found["decoy_kernel"]) == (
        "completed",
        True,
        True,
        False,
    )
    assert (found["reference_runtime"], found["kernel_runtime"], found["speedup"]) == (0.2, 0.1, 2.0)
    compiled = answered("torch-compile")
    assert (compiled["reference_runtime"], compiled["speedup"]) == (0.15, 1.5)
    without = answered("compile", speedups={"eager": INTERVAL, "compile": None}, baselines_ms={"eager": {"median": 1}})
    assert (without["reference_runtime"], without["speedup"]) == (None, None), "null, never another baseline's"
    metadata = found["metadata"]
    assert (metadata["num_custom_kernels"], metadata["num_total_kernels"], metadata["time_coverage"]) == (1, 2, 0.75)
    assert metadata["custom_kernel_cuda_time_in_profiling_us"] == 30.0


@pytest.mark.parametrize(
    ("changes", "status", "code", "decoy"),
    [
        ({"flags": [{"kind": "clock-mismatch", "severity": "fraud"}], "status": "rejected"}, "completed", None, True),
        ({"flags": [{"kind": "no-own-kernel", "severity": "label"}]}, "completed", None, True),
        (
            {
                "status": "rejected",
                "correct": False,
                "error": {"stage": "check", "kind": "wrong-output", "message": "m"},
            },
            "completed",
            "CORRECTNESS_ERROR",
            False,
        ),
        (
            {"status": "failed", "reached": None, "error": {"stage": "parse", "kind": "syntax-error", "message": "m"}},
            "failed",
            "SYNTAX_ERROR",
            False,
        ),
        (
            {"status": "failed", "reached": None, "error": {"stage": "run", "kind": "timeout", "message": "m"}},
            "timeout",
            "TIMEOUT_ERROR",
            False,
        ),
    ],
)
def test_ends_have_their_words(changes, status, code, decoy) -> None:
    found = answered(**changes)
    assert (found["status"], found["error_code"], found["decoy_kernel"]) == (status, code, decoy)
    if changes.get("status", "accepted") != "accepted":
        assert (found["kernel_runtime"], found["speedup"]) == (-1.0, 0.0)


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (Fault("queue-deadline", "m", True), "timeout", "TIMEOUT_ERROR"),
        (Fault("killed-worker", "m", True), "failed", "SYSTEM_ERROR"),
        (Fault("reference-raised", "m", False), "failed", "VALIDATION_ERROR"),
    ],
)
def test_no_verdict_is_no_statement_about_the_kernel(fault, status, code) -> None:
    result = Outcome("failed", fault=fault).to_json({"id": "j"}, "", 1.0)
    found = response_of("t", result)
    assert (found["status"], found["error_code"], found["correctness"]) == (status, code, False)
    assert found["metadata"]["drk"]["error"]["code"] == fault.code
