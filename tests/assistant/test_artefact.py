"""The artefact: what it holds, and that it works in a process of its own, without drk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from warm_python import WarmPython

from drk.assistant.artefact import SourceFile, build_artefact
from drk.assistant.artefact_record import ArtefactError, constants
from drk.assistant.episode import Turn
from drk.gym.graph import Graph, Pack, Parameter, Placeholder, Ref, TensorMeta, graph_from_json
from drk.gym.schema import Call, Candidate, Nested, Scalar, Task, TensorSpec, UserFunction


@pytest.fixture
def written(project: Path, silu_task: Task, silu_candidate: Candidate, silu_graph: Any, verdicts: Any) -> Path:
    """A run folder with the artefact of the good candidate."""
    run = project / ".drk" / "runs" / "one"
    run.mkdir(parents=True)
    source = SourceFile(project, "model.py", (project / "model.py").read_bytes())
    turn = Turn(1, silu_candidate, verdicts.accepted())
    built = build_artefact(silu_task, turn, graph_from_json(silu_graph), source, run, [[33, 96]])
    (run / built.module_name).write_bytes(built.module)
    (run / built.test_name).write_bytes(built.test)
    (run / built.diff_name).write_bytes(built.diff)
    (run / "edited.py").write_bytes(built.edited)
    return run


Script = Callable[..., str]


@pytest.fixture
def script(written: Path, warm_python: WarmPython, warm_interpreting_python: WarmPython) -> Script:
    """Run code that has imported torch, the user's module and the artefact; return what it prints."""

    def go(code: str, *, interpret: bool = True) -> str:
        head = (
            f"import sys; sys.path[:0] = [{str(written)!r}, {str(written.parents[2])!r}]\n"
            "import copy, torch, model, model_kernels as k\n"
            "x = torch.randn(64, 96)\n"
        )
        done = (warm_interpreting_python if interpret else warm_python).run(["-c", head + code], written)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return go


def test_its_own_test_passes_under_the_interpreter(written: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONPATH")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_model_kernels.py"]
    done = subprocess.run(command, cwd=written, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed, 1 skipped" in done.stdout


def test_without_a_gpu_it_falls_back_and_says_why(script: Script) -> None:
    out = script(
        "m = model.ScaledSilu(96).eval(); want = m(x); k.optimize(m); got = m(x)\n"
        "print(torch.equal(want, got), k.stats(m))",
        interpret=False,
    )
    assert out.startswith("True")
    assert "'fallback_calls': 1" in out
    assert "not on a CUDA device" in out


def test_training_still_works(script: Script) -> None:
    out = script(
        "m = k.optimize(model.ScaledSilu(96).eval()); m(x).sum().backward()\n"
        "print(m.weight.grad is not None, k.stats(m)['reasons'])",
    )
    assert out.startswith("True")
    assert "gradients are needed" in out


GUARDED = {
    "m.train()": "train mode",
    "x = x.double(); m.double()": "float64[64, 96]",
    "x = torch.randn(96, 64).t()": "memory layout",
    "x = torch.randn(8, 8, 96)": "[8, 8, 96]",
    "x = x[:0]": "empty",
    "m.weight = torch.nn.Parameter(torch.ones(1))": "float32[1]",
    "m.register_module('extra', torch.nn.Linear(1, 1))": "part of the model was replaced",
    "torch.set_autocast_enabled('cpu', True)": "autocast",
}


def test_guard(script: Script) -> None:
    code = (
        "import contextlib\n"
        f"for change in {list(GUARDED)!r}:\n"
        "    m = model.ScaledSilu(96).eval(); plain = copy.deepcopy(m); k.optimize(m)\n"
        "    outs = []\n"
        "    for one in (m, plain):\n"
        "        scope = {'m': one, 'x': torch.linspace(-3, 3, 64 * 96).view(64, 96), 'torch': torch}\n"
        "        torch.manual_seed(0); exec(change, scope)\n"
        "        with torch.no_grad(): outs.append(one(scope['x']))\n"
        "    torch.set_autocast_enabled('cpu', False)\n"
        "    print(torch.equal(*outs), k.stats(m)['kernel_calls'], list(k.stats(m)['reasons']))\n"
    )
    lines = script(code).splitlines()
    assert len(lines) == len(GUARDED)
    for line, (change, reason) in zip(lines, GUARDED.items(), strict=True):
        assert line.startswith("True 0 ["), (change, line)
        assert reason in line, (change, line)


def test_another_configuration_is_left_alone(script: Script) -> None:
    out = script(
        "m = k.optimize(model.ScaledSilu(96, gain=3.0).eval())\n"
        "with torch.no_grad(): m(x)\n"
        "print(k.stats(m)['kernel_calls'], k.stats(m)['disabled'])",
    )
    assert out == "0 gain is 3.0 here and 2.0 where it was verified"


def test_copies_pickles_and_new_batch_sizes_use_the_kernels(script: Script) -> None:
    out = script(
        "import io\n"
        "m = k.optimize(model.ScaledSilu(96).eval()); c = copy.deepcopy(m)\n"
        "b = io.BytesIO(); torch.save(m, b); b.seek(0); p = torch.load(b, weights_only=False)\n"
        "with torch.no_grad():\n"
        "    c.weight.mul_(3); want = k.restore(copy.deepcopy(c))(x[:5])\n"
        "    plain = k.restore(copy.deepcopy(m))(x)\n"
        "    ok = torch.allclose(c(x[:5]), want, atol=1e-5), torch.allclose(p(x), plain, atol=1e-5)\n"
        "    m(x)\n"
        "print(ok, [k.stats(one)['kernel_calls'] for one in (m, c, p)])",
    )
    assert out == "(True, True) [1, 1, 1]"


def test_under_compile_and_export_the_kernels_are_one_operator(script: Script) -> None:
    out = script(
        "def close(a, b): return torch.allclose(a, b, atol=1e-5)\n"
        "m = k.optimize(model.ScaledSilu(96).eval()); plain = k.restore(copy.deepcopy(m))\n"
        "with torch.no_grad():\n"
        "    compiled = torch.compile(m, backend='aot_eager', fullgraph=True)\n"
        "    print(close(plain(x), compiled(x)), k.stats(m)['operator_calls'])\n"
        "    m.weight.mul_(2); plain.weight.mul_(2)\n"
        "    print(close(plain(x), compiled(x)), k.stats(m)['operator_calls'])\n"
        "    print(close(plain(x[:7]), compiled(x[:7])), k.stats(m)['operator_calls'])\n"
        "    program = torch.export.export(m, (x,))\n"
        "    print(close(plain(x), program.module()(x)), k.stats(m)['operator_calls'])\n"
        "    print([str(n.target) for n in program.graph.nodes if n.op == 'call_function'][0])\n"
        "    torch.library.opcheck(k._registered, ([x], [m.weight, m.shift]))\n"
        "    with torch.autocast('cpu', torch.bfloat16): compiled(x)\n"
        "compiled(x).sum().backward()\n"
        "print(m.weight.grad is not None, k.stats(m)['kernel_calls'])\n",
    )
    lines = out.splitlines()
    assert lines[:4] == ["True 1", "True 2", "True 3", "True 4"]
    assert lines[4].startswith("drk.scaledsilu_")
    assert lines[5] == "True 0"


NORM = """
import torch
from torch import nn

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls.add_(1)
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        y = x * self.weight
        return {"y": y, "top": y[:2], "same": x}
"""

NORM_CANDIDATE = NORM.replace("class Norm", "class ModelNew")


def test_the_operator_changes_buffers_and_returns_memory_of_its_own(
    tmp_path: Path, verdicts: Any, warm_interpreting_python: WarmPython
) -> None:
    (tmp_path / "norm.py").write_text(NORM)
    task = Task("norm", {"norm.py": NORM}, "norm.py", "Norm", inputs=Call((TensorSpec((6, 4)),)), mode="train")
    run = tmp_path / "run"
    run.mkdir()
    code = CAPTURE.replace("ScaledSilu(96).eval()", "Norm()").replace("64, 96", "6, 4")
    captured = warm_interpreting_python.run(["-c", code, str(tmp_path / "norm.py")], tmp_path)
    graph = graph_from_json(json.loads(captured.stdout))
    source = SourceFile(tmp_path, "norm.py", NORM.encode())
    built = build_artefact(task, Turn(1, Candidate(NORM_CANDIDATE), verdicts.accepted()), graph, source, run)
    (run / built.module_name).write_bytes(built.module)
    script_text = (
        "import copy, torch, norm, norm_kernels as k\n"
        "m = k.optimize(norm.Norm()); plain = norm.Norm(); x = torch.randn(6, 4)\n"
        "with torch.no_grad():\n"
        "    compiled = torch.compile(m, backend='aot_eager', fullgraph=True)\n"
        "    for _ in range(3): got, want = compiled(x), plain(x)\n"
        "print(all(torch.equal(got[key], want[key]) for key in want), list(got))\n"
        "print(torch.allclose(m.mean, plain.mean), int(m.calls), k.stats(m)['operator_calls'])\n"
    )
    done = warm_interpreting_python.run(["-c", script_text], run, PYTHONPATH=f"{tmp_path}:{run}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True ['y', 'top', 'same']", "True 3 3"]


def test_a_kernel_that_raises_is_put_aside(written: Path, script: Script) -> None:
    file = written / "model_kernels.py"
    file.write_text(file.read_text().replace("cols = x.shape[1]", "raise RuntimeError('no launch')"))
    out = script(
        "m = k.optimize(model.ScaledSilu(96).eval())\n"
        "with torch.no_grad(): same = torch.equal(m(x), k.restore(copy.deepcopy(m))(x)); m(x)\n"
        "print(same, k.stats(m)['fallback_calls'], k.stats(m)['disabled'])",
    )
    assert out == "True 2 the kernels failed: RuntimeError: no launch"


def test_the_edit_decorates_the_class(written: Path, script: Script) -> None:
    diff = (written / "model.diff").read_text()
    added = [line for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == ["+from model_kernels import optimized", "+@optimized"]
    (written / "user.py").write_bytes((written / "edited.py").read_bytes())
    out = script(
        "import user\nm = user.ScaledSilu(96).eval()\n"
        "class Sub(user.ScaledSilu): pass\n"
        "with torch.no_grad(): m(x)\n"
        "print(k.stats(m)['kernel_calls'], k.stats(Sub(96))['optimized'], user.ScaledSilu.__name__)",
    )
    assert out == "1 False ScaledSilu"


def test_refusals_name_the_reason(
    project: Path, silu_task: Task, silu_candidate: Candidate, silu_graph: Any, verdicts: Any
) -> None:
    source = SourceFile(project, "model.py", (project / "model.py").read_bytes())
    graph = graph_from_json(silu_graph)

    def build(task: Task = silu_task, candidate: Candidate = silu_candidate, graph: Any = graph, **facts: Any) -> None:
        build_artefact(task, Turn(1, candidate, verdicts.accepted(**facts)), graph, source, project)

    with pytest.raises(ArtefactError, match="could not be captured"):
        build(graph=None)
    with pytest.raises(ArtefactError, match="does not say what x is"):
        build(graph=replace(graph, placeholders=()))
    with pytest.raises(ArtefactError, match="other names"):
        build(weights="seeded")
    with pytest.raises(ArtefactError, match="constructor takes tensors"):
        build(task=replace(silu_task, init=Call((TensorSpec((2,)),))))
    with pytest.raises(ArtefactError, match="defines restore"):
        build(candidate=Candidate(silu_candidate.source + "\ndef restore(): pass\n"))


def test_inputs_and_arguments_from_the_users_functions(
    project: Path,
    silu_task: Task,
    silu_candidate: Candidate,
    silu_graph: Any,
    verdicts: Any,
    warm_interpreting_python: WarmPython,
) -> None:
    text = (project / "model.py").read_text() + "\n\ndef get_init_inputs():\n    return [96]\n"
    (project / "model.py").write_text(text)
    task = replace(
        silu_task,
        files={"model.py": text},
        init=UserFunction("get_init_inputs"),
        inputs=UserFunction("example_inputs"),
    )
    source = SourceFile(project, "model.py", text.encode())
    run = project / "run"
    run.mkdir()
    turn = Turn(1, silu_candidate, verdicts.accepted())
    built = build_artefact(task, turn, graph_from_json(silu_graph), source, run)
    (run / built.module_name).write_bytes(built.module)
    (run / built.test_name).write_bytes(built.test)
    done = warm_interpreting_python.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", built.test_name], run)
    assert done.returncode == 0, done.stdout + done.stderr


CAPTURE = """
import importlib.util, json, sys, torch
from drk.gym.runner.capture import capture
spec = importlib.util.spec_from_file_location("model", sys.argv[1])
user = importlib.util.module_from_spec(spec)
spec.loader.exec_module(user)
print(json.dumps(capture(user.ScaledSilu(96).eval(), [torch.randn(64, 96)], {})))
"""

FUNCTION = """
import torch

def gated(x, y, scale=2.0):
    return torch.relu(x) * y * scale

def use():
    return gated(torch.ones(4, 8), torch.ones(4, 8))
"""

FUNCTION_CANDIDATE = """
import torch
import triton
import triton.language as tl
from torch import nn

@triton.jit
def gated_kernel(x, y, out, scale, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    value = tl.load(x + index, mask=mask)
    tl.store(out + index, tl.maximum(value, 0.0) * tl.load(y + index, mask=mask) * scale, mask=mask)

class ModelNew(nn.Module):
    def forward(self, x, y, scale=2.0):
        out = torch.empty_like(x)
        gated_kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, scale, x.numel(), BLOCK=256)
        return out
"""


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_function_is_replaced_in_place(
    tmp_path: Path, verdicts: Any, warm_interpreting_python: WarmPython, wrapped: bool
) -> None:
    file = tmp_path / "ops.py"
    file.write_text(FUNCTION)
    spec = TensorSpec((40, 96))
    task = Task("gated", {"ops.py": FUNCTION}, "ops.py", "gated", "function", inputs=Call((spec, spec)))
    meta = TensorMeta((40, 96), "float32", (96, 1))
    # functions are captured through a module whose forward takes *args, or under their own signature
    paths = ["args[0]", "args[1]"] if wrapped else ["x", "y"]
    values = tuple(Pack("input", (path,)) for path in paths)
    signature = (
        (Parameter("args", "var_positional", False, None, True, Pack("tuple", values)),)
        if wrapped
        else tuple(
            Parameter(name, "positional_or_keyword", False, None, True, value)
            for name, value in zip("xy", values, strict=True)
        )
    )
    placeholders = tuple(Placeholder(f"p{n}", "input", path, meta) for n, path in enumerate(paths))
    graph = Graph("export", False, signature, (), placeholders, (), Ref("p0"))  # whose form is the result's
    run = tmp_path / "run"
    run.mkdir()
    source = SourceFile(tmp_path, "ops.py", FUNCTION.encode())
    built = build_artefact(task, Turn(1, Candidate(FUNCTION_CANDIDATE), verdicts.accepted()), graph, source, run)
    assert b"@optimized\ndef gated" in built.edited
    assert b'("x", ("tensor", torch.float32, (40, 96), torch.contiguous_format, (0,)))' in built.module
    for name, data in ((built.module_name, built.module), (built.test_name, built.test)):
        (run / name).write_bytes(data)
    (run / "edited.py").write_bytes(built.edited)
    done = warm_interpreting_python.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", built.test_name], run)
    assert done.returncode == 0, done.stdout + done.stderr
    code = (
        "import edited, torch, ops_kernels as k\n"
        "x = torch.randn(40, 96); y = edited.gated(x, y=x); z = edited.gated(x, x, 3.0)\n"
        "print(torch.allclose(y, torch.relu(x) * x * 2), torch.allclose(z, torch.relu(x) * x * 3))\n"
        "print(k.stats(edited.gated), k.restore(edited.gated)(x, x).shape)"
    )
    out = warm_interpreting_python.run(["-c", code], run, PYTHONPATH=str(tmp_path))
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("True True")
    assert "'kernel_calls': 1, 'operator_calls': 0, 'fallback_calls': 1" in out.stdout
    assert "called with (x, y, scale)" in out.stdout


def test_the_constants_can_be_read(silu_task: Task, silu_graph: Any, verdicts: Any) -> None:
    graph = graph_from_json(silu_graph)
    both = constants(silu_task, graph, verdicts.accepted(), [[33, 96]])
    assert both["_ARGUMENTS"] == '(\n    ("x", ("tensor", torch.float32, (64, 96), torch.contiguous_format, (0,))),\n)'
    assert both["_FREE_SIZES"] == "{64: 33}"
    assert constants(silu_task, graph, verdicts.accepted())["_FREE_SIZES"] == "{64: 64}"
    init = Call((Scalar(float("inf")), Nested("dict", (Scalar("a"), Nested("tuple", (Scalar(1),))), ("k", "t"))))
    assert constants(replace(silu_task, init=init), graph, verdicts.accepted())["_INIT_ARGS"] == (
        '(float("inf"), {"k": "a", "t": (1,)})'
    )
