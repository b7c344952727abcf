"""Trials' recipes, the steadiness of a stressed reference, and errors that a person reads."""

from __future__ import annotations

import pytest
import torch

from drk.gym.errors import HostError
from drk.gym.reference import Trial, candidate_files, recipe_for, reference_error, steady, task_meta
from drk.gym.schema import Candidate, Task

TASK = Task("t", {"pkg/model.py": "x = 1\n"}, "pkg/model.py", "Model", tensors=b"blob")


def test_second_trial_repeats_the_first_in_place() -> None:
    keys = [11, 22, 33]
    assert recipe_for(0, keys) == (11, {})
    key, recipe = recipe_for(1, keys)
    assert key == 11 and recipe["in_place"] and recipe["perturb"] and recipe["weights"] > 1
    assert recipe_for(2, keys)[0] == 33 and "stress" in recipe_for(2, keys)[1]
    key, other = recipe_for(3, [*keys, 44])
    assert key == 11 and other["strided"] and other["perturb"] != recipe_for(1, [*keys, 44])[1]["perturb"]


@pytest.mark.parametrize(("change", "held"), [(1.0, True), (1.01, False), (float("inf"), False)])
def test_steady(change: float, held: bool) -> None:
    truth = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert steady(Trial(1, {"out": (truth * change).float()}, {"out": truth}, {}, {})) is held


def test_errors_point_into_the_users_file() -> None:
    error = {"kind": "exception", "message": "boom", "file": "src/pkg/model.py", "line": 7, "help": ""}
    found = reference_error(error, TASK)
    assert (found.file, found.line, found.kind) == ("pkg/model.py", 7, "reference-exception") and found.help
    with pytest.raises(HostError):
        reference_error({**error, "kind": "protocol"}, TASK)


def test_runners_get_no_sources_in_their_meta() -> None:
    meta = task_meta(TASK)
    assert "files" not in meta and "tensors" not in meta and meta["entry"] == "pkg/model.py"
    files = candidate_files(TASK, Candidate("y = 2\n"))
    assert files == {"src/pkg/model.py": b"x = 1\n", "tensors.safetensors": b"blob", "candidate.py": b"y = 2\n"}
