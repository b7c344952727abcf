from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save, save_file

from drk.assistant.errors import TargetError
from drk.assistant.state_file import SAFETENSORS_TYPES, build_blob, merge_blobs, prefix_keys, read_state


def test_keys_are_renamed_and_values_kept(tmp_path):
    weights = {"a.weight": torch.randn(3, 4), "b": torch.arange(5), "c": torch.zeros(0, dtype=torch.bfloat16)}
    save_file(weights, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    loaded = load(read_state(tmp_path / "weights.safetensors"))
    assert set(loaded) == {"state.a.weight", "state.b", "state.c"}
    assert all(torch.equal(loaded[f"state.{key}"], value) for key, value in weights.items())


def test_relative_paths_start_from_the_given_folder(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    assert load(read_state(tmp_path.__class__("weights.safetensors"), tmp_path))["state.a"] == 1


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "cut off"),
        (b"\xff" * 8, "cut off"),
        (b"\x02" + b"\0" * 7 + b"[]", "no JSON object"),
        (b"\x02" + b"\0" * 7 + b"{x", "no JSON"),
        (b"\x08" + b"\0" * 7 + b'{"a":{}}', "no data_offsets"),
        (b"\x1e" + b"\0" * 7 + b'{"a":{"data_offsets":[0,1000]}', "no JSON"),
        (b"\x1f" + b"\0" * 7 + b'{"a":{"data_offsets":[0,1000]}}', "outside"),
    ],
)
def test_malformed_files(data, told):
    with pytest.raises(TargetError, match=told) as caught:
        prefix_keys(data, "weights.safetensors")
    assert caught.value.kind == "state-dict"


def test_pickled_files_need_a_converter(tmp_path):
    path = tmp_path / "weights.pt"
    path.write_bytes(b"pickled")
    with pytest.raises(TargetError) as caught:
        read_state(path)
    assert "save_file" in caught.value.help
    blob = read_state(path, convert=lambda file: save({"a": torch.full((1,), len(file.read_bytes()))}))
    assert load(blob)["state.a"].item() == 7


def test_missing_file(tmp_path):
    with pytest.raises(TargetError, match="does not exist"):
        read_state(tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", sorted(SAFETENSORS_TYPES))
def test_built_blobs_are_read_by_the_library(name):
    tensor = torch.tensor([[0, 1, 1]]).to(getattr(torch, name))
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    loaded = load(build_blob([("a", name, (1, 3), raw), ("b", name, (0,), b"")]))
    assert loaded["a"].dtype == tensor.dtype
    assert torch.equal(loaded["a"], tensor)


def test_blobs_are_merged():
    both = load(merge_blobs(save({"a": torch.ones(3)}, metadata={"x": "y"}), save({"b": torch.arange(4)})))
    assert torch.equal(both["a"], torch.ones(3))
    assert torch.equal(both["b"], torch.arange(4))
    assert merge_blobs(None, b"x") == merge_blobs(b"x", None) == b"x"
    assert merge_blobs(None, None) is None


@pytest.mark.parametrize("row", [("a", "complex64", (1,), b"12345678"), ("a", "float32", (2,), b"1234")])
def test_rows_that_make_no_blob(row):
    with pytest.raises(TargetError):
        build_blob([row])
