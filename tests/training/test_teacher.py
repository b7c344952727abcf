"""The teacher's answers: one capture for many texts, right answers, drawn choices."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from drk.training.answer_style import Reference, StyleError, nano_answer, target_class
from drk.training.dressing import CanonicalDress, Dress, redress
from drk.training.tasks import FAMILIES, TrainingTask, draw_task
from drk.training.teacher import Structure, capture_structure, capture_task, dressed, left_to_torch, teach

CHECK = """
import importlib.util, json, sys, torch
for path in sys.argv[1:]:
    case = json.loads(open(path).read())
    names = {}
    exec(case["reference"], names)
    torch.manual_seed(0)
    reference = names[case["target"]](*case["init"]).eval()
    open(path + ".py", "w").write(case["answer"])
    spec = importlib.util.spec_from_file_location("answer", path + ".py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    new = module.ModelNew(*case["init"]).eval()
    new.load_state_dict(reference.state_dict())
    inputs = names["get_inputs"]()
    with torch.no_grad():
        wanted, found = reference(*inputs), new(*inputs)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (wanted, found))):
        assert one.shape == other.shape and one.dtype == other.dtype, path
        tolerance = 1e-3 if one.dtype == torch.float32 else 2e-2
        assert torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance), path
"""


@pytest.fixture(scope="module")
def structures() -> dict[str, Structure]:
    return {family: capture_structure(family, 21, rows=4) for family in FAMILIES}


def case_of(task: TrainingTask, answer: str) -> dict:
    init = [one.value for one in task.task.init.args]
    source, target = task.task.files[task.task.entry], task.task.target
    return {"reference": source, "target": target, "init": init, "answer": answer}


@pytest.mark.slow
def test_answers_equal_the_reference(structures: dict[str, Structure], tmp_path: Path) -> None:
    """One lazy or fused answer of each family, run by Triton's interpreter in a process of its own."""
    for number, (family, structure) in enumerate(structures.items()):
        task, graph = dressed(structure, number)
        answer = teach(task, graph, random.Random(number), lazy=number % 2 == 1)
        (tmp_path / family).write_text(json.dumps(case_of(task, answer.source)))
    paths = [str(tmp_path / family) for family in structures]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *paths], env=environment, capture_output=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def test_another_dress_has_the_graph_that_a_capture_of_its_own_gives(structures: dict[str, Structure]) -> None:
    for family in ("pointwise", "linear", "row"):
        task, graph = dressed(structures[family], 3)
        again = json.loads(capture_task(task))
        assert [node.name for node in graph.nodes] == [node["name"] for node in again["nodes"]]
        assert [item.path for item in graph.placeholders] == [item["path"] for item in again["placeholders"]]
        constants = [arg for node in again["nodes"] for arg in node["args"] if isinstance(arg, float)]
        assert [arg for node in graph.nodes for arg in node.args if isinstance(arg, float)] == constants


def test_a_dress_is_drawn_apart_from_the_structure() -> None:
    tasks = [draw_task("dag", 5, dress=number) for number in range(6)]
    assert len({task.signature for task in tasks}) == 1
    assert len({task.task.files["model.py"] for task in tasks}) == 6


def test_constants_that_were_computed_with_are_refused() -> None:
    canonical, other = CanonicalDress(), Dress(random.Random(0))
    first, second = canonical.constant(0.1, 0.9), other.constant(0.1, 0.9)
    assert redress(json.dumps([first]), canonical, other) == json.dumps([second])
    with pytest.raises(ValueError, match="does not stand"):
        redress("[2.0]", canonical, other)
    with pytest.raises(ValueError, match="computed"):
        redress(json.dumps([first, 1 - first]), canonical, other)


def test_choices_are_drawn_without_an_opinion(structures: dict[str, Structure]) -> None:
    task, graph = dressed(structures["linear"], 0)
    sources = [teach(task, graph, random.Random(seed), lazy=False).source for seed in range(12)]
    assert len(set(sources)) > 6
    assert {'PRECISION="ieee"' in one for one in sources} == {True, False}
    workers = [f"n{i}" for i in range(6)]
    counts = {len(left_to_torch(workers, random.Random(seed))) for seed in range(60)}
    assert counts == {1, 2, 3, 4}


def test_the_answer_repeats_the_constructor(structures: dict[str, Structure]) -> None:
    task, graph = dressed(structures["linear"], 2)
    answer = teach(task, graph, random.Random(0), lazy=False).source
    reference = ast.parse(task.task.files["model.py"])
    wanted = next(n for n in ast.walk(reference) if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    found = next(n for n in ast.walk(ast.parse(answer)) if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert ast.unparse(found).replace("ModelNew", "X") == ast.unparse(wanted).replace(task.task.target, "X")
    assert "declare" not in answer


def test_what_no_constructor_can_make_is_refused() -> None:
    reference = Reference("from torch import nn\nclass M(nn.Module):\n    pass\n", "M")
    compiled = "import torch\nclass ModelNew(torch.nn.Module):\n    def from_reference(cls): pass\n"
    with pytest.raises(StyleError, match="takes tensors over"):
        nano_answer(compiled, reference)
    assert target_class(reference.source) == "M"
    with pytest.raises(StyleError, match="no module"):
        target_class("x = 1\n")
