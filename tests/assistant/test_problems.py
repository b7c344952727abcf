"""The development suite: every problem has the benchmark's form, runs on the meta device and is of a realistic size.

Nothing is allocated or computed: the shapes, the bytes and the floating-point operations come from PyTorch's meta
device. The time bound is a rough roofline of an H200 in eager mode (every operator reads its inputs and writes its
outputs once); whether a problem can be judged and made faster is measured elsewhere.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from drk.assistant.intake import resolve_target
from drk.gym.schema import UserFunction

ROOT = Path(__file__).resolve().parents[1] / "fixtures" / "problems"
FILES = sorted(ROOT.glob("level*/*.py"))
NAME = re.compile(r"(\d{3})_([a-z][a-z0-9_]*)\.py")
LEAST = {"level1": 35, "level2": 35, "level3": 20}
CONVOLUTION_SHARE = (0.5, 0.7)

BANDWIDTH_BYTES_PER_S = 4.0e12
FP32_FLOP_PER_S = 50e12
HALF_FLOP_PER_S = 600e12
LAUNCH_S = 4e-6
MAX_BYTES = 8 * 2**30


class Cost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that make new tensors, with their floating-point operations and the bytes that they move."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0
        self.flop = 0
        self.read_bytes = 0
        self.written_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count it, unless it only makes a view."""
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.launches += 1
            if func.overloadpacket in flop_registry:
                self.flop += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=made)
            self.read_bytes += size_bytes((args, kwargs))
            self.written_bytes += size_bytes(made)
        return made


def size_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a nested value, each counted as if it were dense."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def load(file: Path) -> types.ModuleType:
    """Import one problem under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"problem_{file.parent.name}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def label(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


@dataclass(frozen=True)
class MetaRun:
    """What one call on the meta device shows."""

    model: nn.Module
    inputs: list[Any]
    output: Any
    cost: Cost


def run_on_meta(file: Path) -> MetaRun:
    """Build the model and call it once in eval mode, on the meta device."""
    module = load(file)
    with torch.device("meta"), torch.no_grad():
        model = module.Model(*module.get_init_inputs()).eval()
        inputs = module.get_inputs()
        with Cost() as cost:
            output = model(*inputs)
    return MetaRun(model, inputs, output, cost)


def eager_time_s(run: MetaRun) -> float:
    """Return a rough lower bound of the eager time on an H200."""
    half = any(
        p.dtype in (torch.bfloat16, torch.float16) for p in tree_leaves(run.inputs) if isinstance(p, torch.Tensor)
    )
    peak = HALF_FLOP_PER_S if half else FP32_FLOP_PER_S
    moved = run.cost.read_bytes + run.cost.written_bytes
    return max(moved / BANDWIDTH_BYTES_PER_S + run.cost.flop / peak, run.cost.launches * LAUNCH_S)


@pytest.mark.parametrize("file", FILES, ids=label)
def test_problem_runs_on_meta_with_a_realistic_size(file: Path) -> None:
    run = run_on_meta(file)
    outputs = list(tensors(run.output))
    assert outputs
    assert all(out.device.type == "meta" for out in outputs)
    assert all(0 < out.numel() < 2**31 for out in outputs)
    kept = size_bytes(run.inputs) + size_bytes(list(run.model.state_dict().values()))
    assert kept + run.cost.written_bytes < MAX_BYTES
    assert 2e-5 <= eager_time_s(run) <= 2e-2


def form_faults(file: Path) -> list[str]:
    """Return what one file's text has against the benchmark's form."""
    text = file.read_text()
    tree = ast.parse(text)
    doc = ast.get_docstring(tree) or ""
    functions = {node.name: ast.unparse(node.args) for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = [ast.unparse(base) for base in classes["Model"].bases] if "Model" in classes else []
    imported = {
        (node.names[0].name if isinstance(node, ast.Import) else str(node.module)).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    checks = {
        "the file name is not NNN_name.py": NAME.fullmatch(file.name) is not None,
        "not 15 to 80 lines": 15 <= len(text.splitlines()) <= 80,
        "the docstring is not one line with a shape": "\n" not in doc and re.search(r"\(\d+,", doc) is not None,
        "get_inputs is missing or takes arguments": functions.get("get_inputs") == "",
        "get_init_inputs is missing or takes arguments": functions.get("get_init_inputs") == "",
        "Model does not derive from nn.Module": bases == ["nn.Module"],
        "it imports more than torch and the standard library": imported <= {"torch", "math", "itertools"},
    }
    return [f"{label(file)}: {fault}" for fault, good in checks.items() if not good]


def test_every_problem_has_the_benchmark_form() -> None:
    assert [fault for file in FILES for fault in form_faults(file)] == []


def test_a_file_of_another_form_is_told_apart(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text("import os\n\n\ndef get_inputs(count):\n    return [os.name] * count\n")
    assert len(form_faults(odd)) == 7


def test_intake_understands_every_problem() -> None:
    for file in FILES:
        task = resolve_target(str(file))
        assert (task.target, task.inputs, task.init) == (
            "Model",
            UserFunction("get_inputs"),
            UserFunction("get_init_inputs"),
        ), file


def test_names_and_sentences_are_unique_and_numbers_run_through() -> None:
    names = [NAME.fullmatch(file.name) for file in FILES]
    stems = [name.group(2) for name in names if name is not None]
    assert len(stems) == len(FILES) == len(set(stems))
    for level in LEAST:
        numbers = [int(file.name[:3]) for file in FILES if file.parent.name == level]
        assert numbers == list(range(1, len(numbers) + 1))
    sentences = [ast.get_docstring(ast.parse(file.read_text())) for file in FILES]
    assert len(set(sentences)) == len(sentences)


def test_levels_are_large_enough_and_balanced() -> None:
    for level, least in LEAST.items():
        assert len([file for file in FILES if file.parent.name == level]) >= least
    chains = [file for file in FILES if file.parent.name == "level2"]
    with_convolution = [file for file in chains if re.search(r"nn\.Conv(Transpose)?\dd", file.read_text())]
    low, high = CONVOLUTION_SHARE
    assert low <= len(with_convolution) / len(chains) <= high


def test_the_short_subset_names_twenty_problems() -> None:
    lines = [line for line in (ROOT / "short.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)) == 20
    assert {ROOT / line for line in lines} <= set(FILES)


def test_the_readme_counts_what_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    for level in LEAST:
        count = len([file for file in FILES if file.parent.name == level])
        assert f"| `{level}` | {count} |" in text
    assert f"{len(FILES)} problems" in text
