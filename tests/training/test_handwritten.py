"""The hand-written test set: every module runs, and none is among what the generator writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drk.gym.graph import graph_from_json
from drk.gym.runner.capture import capture
from drk.training.answer_style import target_class
from drk.training.canonical import canonical_graph
from drk.training.dataset import leaks
from drk.training.tasks import FAMILIES, draw_task
from drk.training.teacher import capture_structure

FOLDER = Path(__file__).parents[1] / "fixtures" / "handwritten"
FILES = sorted(FOLDER.rglob("*.py"))


def load(path: Path) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    names: dict = {}
    source = path.read_text()
    exec(compile(source, str(path), "exec"), names)
    torch.manual_seed(0)
    return names[target_class(source)](*names["get_init_inputs"]()).eval(), names["get_inputs"]()


def test_there_are_sixty_of_many_fields() -> None:
    assert len(FILES) >= 60
    assert len({path.parent.name for path in FILES}) >= 10
    assert len({target_class(path.read_text()) for path in FILES}) == len(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_runs_and_stays_finite(path: Path) -> None:
    module, inputs = load(path)
    with torch.no_grad():
        result = module(*inputs)
    for one in result if isinstance(result, tuple) else (result,):
        assert one.isfinite().all()


@pytest.mark.slow
def test_the_generator_has_none_of_them() -> None:
    """By canonical graph and by runs of tokens, over a sample of every family."""
    generated = {
        canonical_graph(graph_from_json(__import__("json").loads(capture_structure(family, 11, rows=8).graph_text)))
        for family in FAMILIES
    }
    for path in FILES[::6]:
        module, inputs = load(path)
        assert canonical_graph(graph_from_json(capture(module, inputs))) not in generated, path
    assert leaks([draw_task(family, seed) for family in FAMILIES for seed in range(20)], FOLDER, threshold=0.9) == []
