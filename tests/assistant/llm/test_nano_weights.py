"""The 8-bit form of weights: what it keeps, how large it is, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nano_parts import random_tensors, tiny_config
from safetensors import safe_open
from safetensors.torch import save_file

from drk.assistant.llm.messages import ModelFault
from drk.assistant.llm.nano_weights import INT8_FILE, dequantized, quantized, read_weights, weights_file, write_int8


def test_each_row_has_its_own_scale_and_no_value_moves_by_more_than_half_of_it() -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(5, 70, generator=generator) * torch.tensor([[1e-6], [1.0], [300.0], [0.0], [2.0]])
    norm = torch.randn(70, generator=generator)
    stored = quantized({"a.weight": matrix, "norm": norm})
    assert stored["a.weight"].dtype == torch.int8
    assert stored["a.weight"].abs().max() == 127
    found = dequantized(stored, torch.float32)
    assert set(found) == {"a.weight", "norm"}
    assert torch.equal(found["norm"], norm)
    steps = matrix.abs().amax(dim=1, keepdim=True) / 127
    assert ((found["a.weight"] - matrix).abs() <= steps * 0.5001).all()
    assert torch.equal(found["a.weight"][3], torch.zeros(70))
    # values that the grid holds come back as they were
    assert torch.equal(quantized(found)["a.weight"], stored["a.weight"])


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        quantized({"a": torch.tensor([[1.0, float("nan")]])})


def test_a_file_keeps_a_tied_embedding_once_and_takes_a_byte_a_weight(tmp_path: Path) -> None:
    config = tiny_config(1000)
    tensors = random_tensors(config)
    tied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    size = write_int8(tmp_path / INT8_FILE, tied, config)
    matrices = sum(one.numel() for one in tensors.values() if one.dim() == 2)
    rows = sum(one.shape[0] for one in tensors.values() if one.dim() == 2)
    vectors = sum(one.numel() for one in tensors.values() if one.dim() == 1)
    exact = matrices + 4 * rows + 4 * vectors
    assert exact <= size <= exact + 8192  # names and metadata
    found = read_weights(tmp_path, torch.bfloat16, "cpu")
    assert set(found) == set(tensors)
    assert {one.dtype for one in found.values()} == {torch.bfloat16}
    with safe_open(tmp_path / INT8_FILE, framework="pt") as opened:
        said = opened.metadata()
    assert said == {
        "scheme": "per-row symmetric int8",
        "version": "1",
        "parameters": str(sum(one.numel() for one in tensors.values())),
        "model_type": "qwen3",
    }


@pytest.mark.parametrize(
    ("tensors", "said", "message"),
    [
        ({"a": torch.ones(2, 2)}, {"scheme": "per-row symmetric int8", "version": "2"}, "another format"),
        ({"a": torch.ones(2, 2, dtype=torch.int8)}, {"scheme": "per-row symmetric int8", "version": "1"}, "cannot be"),
    ],
)
def test_other_formats_and_missing_scales_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], said: dict[str, str], message: str
) -> None:
    save_file(tensors, tmp_path / INT8_FILE, said)
    with pytest.raises(ModelFault, match=message) as caught:
        read_weights(tmp_path, torch.float32, "cpu")
    assert caught.value.help


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    assert weights_file(tmp_path) is None
    with pytest.raises(ModelFault, match="no weights in"):
        read_weights(tmp_path, torch.float32, "cpu")
    (tmp_path / INT8_FILE).write_bytes(b"\x07" * 40)
    with pytest.raises(ModelFault, match="cannot be read"):
        read_weights(tmp_path, torch.float32, "cpu")
