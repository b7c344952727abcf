from __future__ import annotations

import pytest
import torch

from drk.gym.schema import Call, Scalar, TensorSpec
from drk.gym.wire import task_id
from drk.training.errors import OptionError
from drk.training.tasks import FAMILIES, draw_task, draw_tasks, largest_input, split_of


@pytest.mark.parametrize("family", [*FAMILIES, "long-chain"])
def test_every_module_runs_and_its_file_says_what_the_task_says(family: str) -> None:
    torch.manual_seed(0)
    for seed in range(12):
        task = draw_task(family, seed, rows=4).task
        names: dict = {}
        exec(task.files["model.py"], names)
        assert isinstance(task.init, Call)
        assert isinstance(task.inputs, Call)
        init = [arg.value for arg in task.init.args if isinstance(arg, Scalar)]
        assert names["get_init_inputs"]() == init
        inputs = names["get_inputs"]()
        specs = [arg for arg in task.inputs.args if isinstance(arg, TensorSpec)]
        assert [(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in inputs] == [
            (arg.shape, arg.dtype) for arg in specs
        ]
        with torch.no_grad():
            result = names[task.target](*init).eval()(*inputs)
        for one in result if isinstance(result, tuple) else (result,):
            assert one.isfinite().all(), task.files["model.py"]


def test_equal_seeds_give_equal_tasks_and_others_give_others() -> None:
    assert draw_tasks(20, seed=1) == draw_tasks(20, seed=1)
    left = {task_id(task.task) for task in draw_tasks(40, seed=1)}
    right = {task_id(task.task) for task in draw_tasks(40, seed=2)}
    assert len(left) == len(right) == 40
    assert left.isdisjoint(right)


def test_compositions_are_on_one_side_only() -> None:
    train = draw_tasks(200, rows=8)
    held_out = draw_tasks(40, rows=8, split="held-out")
    assert {task.signature for task in train}.isdisjoint(task.signature for task in held_out)


def test_a_held_out_family_is_never_trained_on() -> None:
    train = draw_tasks(50, held_out_families=["row"])
    assert {task.family for task in train} == set(FAMILIES) - {"row"}
    assert split_of(draw_task("row", 0), held_out_families=["row"]) == "held-out"


def test_names_are_open() -> None:
    """Identifiers come from syllables: most of what a late task uses was never seen before."""
    import re

    sources = [task.task.files["model.py"] for task in draw_tasks(120)]
    early = set(re.findall(r"\b[a-z]\w+", "".join(sources[:60])))
    late = {word for source in sources[60:] for word in re.findall(r"\b([a-z]\w+) = ", source)}
    assert len(late - early) > len(late) / 3


def test_tasks_of_a_least_size_have_an_input_of_that_size() -> None:
    least = 2**20
    found = draw_tasks(12, families=("pointwise", "row", "linear"), least_elements=least)
    assert all(largest_input(one.task) >= least for one in found)
    assert any(largest_input(one.task) < least for one in draw_tasks(12, families=("pointwise", "row", "linear")))


def test_who_gives_no_argument_gets_the_default() -> None:
    """Where a constructor has defaults, a task may leave arguments out: the module is the same."""
    shorter = 0
    for seed in range(60):
        task = draw_task("pointwise", seed, rows=4).task
        names: dict = {}
        exec(task.files["model.py"], names)
        given = len(task.init.args) if isinstance(task.init, Call) else 0
        takes = names[task.target].__init__.__code__.co_argcount - 1
        shorter += given < takes
    assert shorter > 3


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown family 'attention'"):
        draw_tasks(3, families=["attention"])
