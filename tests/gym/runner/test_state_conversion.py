from __future__ import annotations

import os
import pickle

import pytest
import torch

from drk.gym.runner.failures import LoadFailure
from drk.gym.runner.state_conversion import read_pickled_state


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


STATE = {"weight": torch.arange(6.0).reshape(2, 3).t(), "steps": torch.tensor(3)}


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
@pytest.mark.parametrize("zipped", [True, False])
def test_forms(tmp_path, wrap, zipped):
    torch.save(wrap(STATE), tmp_path / "weights.pt", _use_new_zipfile_serialization=zipped)
    found = dict(read_pickled_state(tmp_path / "weights.pt"))
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[key], value) and found[key].is_contiguous() for key, value in STATE.items())


def test_modules_own_state(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    assert [key for key, _ in read_pickled_state(tmp_path / "weights.pt")] == list(module.state_dict())


def test_code_in_a_pickle_is_not_run(tmp_path):
    made = tmp_path / "made"
    with (tmp_path / "weights.pt").open("wb") as file:
        pickle.dump({"weight": Attack(str(made))}, file, protocol=2)
    with pytest.raises(LoadFailure) as caught:
        read_pickled_state(tmp_path / "weights.pt")
    assert not made.exists()
    assert "save_file" in caught.value.help


@pytest.mark.parametrize(
    "content", [{"epoch": 3}, [torch.ones(1)], {}, {"weight": torch.eye(2).to_sparse()}, {1: torch.ones(1)}]
)
def test_files_without_a_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(LoadFailure):
        read_pickled_state(tmp_path / "weights.pt")


@pytest.mark.parametrize("data", [b"", b"nonsense", b"PK\x03\x04broken"])
def test_files_that_are_no_pickles(tmp_path, data):
    (tmp_path / "weights.pt").write_bytes(data)
    with pytest.raises(LoadFailure, match=r"weights\.pt"):
        read_pickled_state(tmp_path / "weights.pt")
