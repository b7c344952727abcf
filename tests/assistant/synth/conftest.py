"""Fixtures: capture a module, run emitted code under the interpreter, compare with float64."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drk.gym.graph import graph_from_json
from drk.gym.runner.capture import capture

WORKER = Path(__file__).with_name("interpreter_worker.py")


class Interpreter:
    """A process that runs emitted modules with TRITON_INTERPRET=1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0
        environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(root / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, source, state, calls):
        """Outputs (list of tensors) of each call, or AssertionError with the worker's traceback."""
        folder = self.root / f"case{self.count}"
        self.count += 1
        folder.mkdir()
        (folder / "candidate.py").write_text(source)
        torch.save({"state": state, "calls": calls}, folder / "request.pt")
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer == "ok", f"{answer}\n{source}"
        return torch.load(folder / "outputs.pt", weights_only=True)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=20)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory):
    worker = Interpreter(tmp_path_factory.mktemp("interpreter"))
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def graph_of():
    """Capture a module and parse what came over the wire."""

    def make(module, *args):
        return graph_from_json(json.loads(json.dumps(capture(module, args))))

    return make


@pytest.fixture(scope="session")
def errors():
    """(error, reference's own error): RMS against float64, relative to the truth's RMS, worst output first."""

    def measure(module, args, outputs):
        with torch.no_grad():
            reference = module(*args)
            exact = copy.deepcopy(module).double()
            truth = exact(*(item.double() if item.is_floating_point() else item for item in args))
        pack = [item if isinstance(item, tuple) else (item,) for item in (reference, truth)]
        rows = []
        for own, true, got in zip(*pack, outputs, strict=True):
            assert got.dtype == own.dtype, "dtype"
            assert got.shape == own.shape, "shape"
            scale = true.double().square().mean().sqrt().item() + 1e-30
            rows.append(tuple((item.double() - true).square().mean().sqrt().item() / scale for item in (got, own)))
        return max(rows)

    return measure
