"""Fixtures: capture a module, run emitted code under the interpreter, compare with float64."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm_python import WarmPython

sys.path.insert(0, str(Path(__file__).parent))

from drk.assistant.synth.propose import Variant, compile_graph, variants
from drk.gym.graph import graph_from_json
from drk.gym.runner.capture import capture

WORKER = Path(__file__).with_name("interpreter_worker.py")


class Interpreter:
    """A process that runs emitted modules with TRITON_INTERPRET=1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0
        self.state = {}
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment = {**os.environ, **one_thread, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(root / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, source, state, calls, *, gradients=False):
        """Outputs (list of tensors) of each call, or AssertionError with the worker's traceback.

        With ``gradients``: results and gradients by name, in train mode.
        """
        folder = self.root / f"case{self.count}"
        self.count += 1
        folder.mkdir()
        (folder / "candidate.py").write_text(source)
        torch.save({"state": state, "calls": calls, "gradients": gradients}, folder / "request.pt")
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer == "ok", f"{answer}\n{source}"
        self.state = torch.load(folder / "state.pt", weights_only=True)
        return torch.load(folder / "outputs.pt", weights_only=True)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
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
    """(error, reference's own error): RMS against float64 relative to the truth's RMS, for the worst output.

    The reference's is at least what rounding the result alone costs: in an output of few elements, which it may hit by
    luck, correspondingly more.
    """

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
            ours, theirs = (
                (item.double() - true.double()).square().mean().sqrt().item() / scale for item in (got, own)
            )
            luck = 1 + 2 / max(own.numel(), 1) ** 0.5
            rounding = 0.4 * luck * torch.finfo(own.dtype).eps if own.is_floating_point() else 0.0
            rows.append((ours, max(theirs, rounding)))
        return max(rows, key=lambda row: row[0] / max(row[1], 1e-30))

    return measure


@pytest.fixture(scope="session")
def check(interpreter, graph_of, errors):
    """Compile a module, run the result under the interpreter, hold its error to ``factor`` times the reference's.

    Returns what was compiled; ``kernels`` are the expected kernel names, ``calls`` further argument lists.
    """

    def run(module, *args, kernels=None, factor=2.0, variant=None, calls=()):
        module.eval()
        graph = graph_of(module, *args)
        compiled = compile_graph(graph, variant if isinstance(variant, Variant) else variants(graph)[variant or 0])
        if kernels is not None:
            assert [kernel.name for kernel in compiled.kernels] == list(kernels)
        every_call = [list(args), *calls]
        results = interpreter.run(compiled.source, module.state_dict(), every_call)
        for call, outputs in zip(every_call, results, strict=True):
            got, own = errors(module, call, outputs)
            assert got <= factor * own + 1e-9, f"error {got:.2e}, the reference's {own:.2e}\n{compiled.source}"
        return compiled

    return run


@pytest.fixture(scope="session")
def compiling_python():
    process = WarmPython("torch", "triton", "drk.gym.runner.remap", "drk.gym.runner.stub_driver")
    yield process
    process.close()


@pytest.fixture
def offline_compile(tmp_path, compiling_python):
    """Compile an emitted module's launches for sm_90 in a process of its own; the kernels' figures as dicts."""

    def run(source, shape, dtype="float32"):
        path = tmp_path / "emitted.py"
        path.write_text(source)
        worker = Path(__file__).with_name("compile_worker.py")
        arguments = [str(worker), str(path), json.dumps(shape), dtype]
        answer = compiling_python.run(arguments, tmp_path, TRITON_CACHE_DIR=str(tmp_path / "cache"))
        assert answer.returncode == 0, answer.stderr[-3000:]
        return json.loads(answer.stdout)

    return run
