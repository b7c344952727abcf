"""``drk optimize --model nano`` as a user types it, in an empty folder: found by DRK_NANO, judged by the real gym."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nano_parts import write_nano

from drk.assistant.errors import UsageError
from drk.assistant.intake import resolve_target
from drk.assistant.llm.messages import Message
from drk.assistant.module_excerpt import module_excerpt
from drk.assistant.proposers import ProposeContext, make_proposer
from drk.gym.devices import device_facts

DRK = [sys.executable, "-c", "from drk.assistant.cli import main; main()"]
MODULE = '''\
"""A script of a user."""
import sys

import torch
from torch import nn


class Doubled(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def example_inputs():
    return (torch.randn(8, 16),)


if __name__ == "__main__":
    sys.exit(Doubled()(*example_inputs()).shape)
'''
ANSWER = '''\
"""relu_mul: mul = relu(x) * 2.0"""

import torch
from torch import nn
import triton
import triton.language as tl


@triton.jit
def relu_mul_kernel(
    x_ptr,
    out_mul_ptr,
    n_elements,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n_elements
    x = tl.load(x_ptr + index, mask=mask, other=0.0).to(tl.float32)
    mul = tl.where(x <= 0.0, 0.0, x) * 2.0
    tl.store(out_mul_ptr + index, mul, mask=mask)


def relu_mul(x):
    x = x.contiguous()
    out_mul = torch.empty_like(x)
    n_elements = out_mul.numel()
    relu_mul_kernel[(triton.cdiv(n_elements, 256),)](x, out_mul, n_elements, BLOCK=256, num_warps=4)
    return out_mul


class ModelNew(nn.Module):
    def forward(self, x):
        return relu_mul(x)
'''


def drk(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name != "DRK_NANO"}
    known |= {"XDG_DATA_HOME": str(folder / "data"), **environ}
    return subprocess.run([*DRK, *words], cwd=folder, env=known, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_a_learnt_answer_is_found_judged_and_handed_over(tmp_path: Path) -> None:
    source = tmp_path / "user" / "model.py"
    source.parent.mkdir()
    source.write_text(MODULE)
    asked = module_excerpt(resolve_target(str(source)))
    assert "script of a user" not in asked
    model = write_nano(tmp_path / "weights", [([Message("user", asked)], f"```python\n{ANSWER}```")])
    here = tmp_path / "empty"
    here.mkdir()
    words = ("optimize", str(source), "--model", "nano", "--device", "interpret", "--seeds", "1", "--samples", "2")
    done = drk(here, *words, "--model-option", "temperature=0", "--format", "json", DRK_NANO=str(model))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "unmeasured"
    best = result["best"]["candidate"]
    assert best["proposer"] == "nano"
    assert best["source"].strip() == ANSWER.strip()
    # one turn of nano alone, ended by a right answer that leaves nothing to torch
    assert [turn["index"] for turn in result["turns"]] == [1]
    assert result["spending"]["calls"] == 2


def test_without_weights_it_says_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    done = drk(tmp_path, "optimize", "model.py", "--model", "nano", DRK_NANO=str(tmp_path / "absent"))
    assert done.returncode == 2
    assert "DRK_NANO names no model" in done.stderr
    assert "DRK_NANO=FOLDER drk optimize" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


async def test_a_module_that_does_not_fit_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    body = "".join(f"        x = x + {number}.0\n" for number in range(900))
    (tmp_path / "model.py").write_text(MODULE.replace("        return torch", f"{body}        return torch"))
    proposer = make_proposer(f"nano:{write_nano(tmp_path / 'weights', [([Message('user', 'x')], 'y')])}")
    await proposer.start()
    context = ProposeContext(resolve_target(str(tmp_path / "model.py")), None, device_facts("sm_90"))
    with pytest.raises(UsageError, match="the task alone takes about"):
        await proposer.propose(context)
