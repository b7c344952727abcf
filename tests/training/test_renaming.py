"""Other names: the teacher answers the renamed module with the renamed answer; words that are not names stay."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from drk.gym.graph import graph_from_json
from drk.training.renaming import Renamer, module_of, own_names
from drk.training.tasks import FAMILIES, TrainingTask
from drk.training.teacher import capture_structure, capture_task, dressed, teach

MODULE = """import torch
from torch import nn


class WarmField(nn.Module):
    def __init__(self, hidden_ka, dim=4):
        super().__init__()
        self.lam_kel = nn.Linear(hidden_ka, dim)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, data_nor, x):
        feat_sul = self.lam_kel(data_nor).sum(dim=1, keepdim=True)
        return feat_sul * self.weight + x


def get_init_inputs():
    return [8]
"""


def conversation(module: str, *answers: str) -> str:
    return f"<|user|>{module}<|end|>" + "".join(f"<|assistant|>{one}<|end|>" for one in answers)


def test_names_are_the_modules_own() -> None:
    assert own_names(MODULE) == {
        "WarmField": "class", "hidden_ka": "argument", "data_nor": "input", "x": "input", "lam_kel": "attribute",
        "weight": "attribute", "feat_sul": "local",
    }  # fmt: skip
    assert own_names("def (") == {}


def test_names_change_together_also_where_the_compiler_joined_them() -> None:
    answer = "lam_kel_weight_ptr = p_lam_kel_data_nor_1 + x_ptr  # lam_kels, weight"
    renamed = Renamer([conversation("a = 1", "the weight of x")]).renamed(
        conversation(MODULE, answer), random.Random(3)
    )
    before, after = own_names(MODULE), own_names(module_of(renamed))
    assert list(before.values()) == list(after.values())
    table = dict(zip(before, after, strict=True))
    same = {"x", "weight"}  # too short, and a word of the other text
    assert {name for name in table if table[name] == name} == same
    told = f"{table['lam_kel']}_weight_ptr = p_{table['lam_kel']}_{table['data_nor']}_1 + x_ptr  # lam_kels, weight"
    assert renamed == conversation(module_of(renamed), told)
    assert "dim=1, keepdim=True" in renamed
    assert "self.weight" in renamed


def test_usual_words_are_no_names() -> None:
    """What other texts hold without defining it, in whole or as a part, is left alone."""
    texts = [conversation("a = 1", "lam_kel feat_sul_ptr hidden_ka WarmField data_nor weight")]
    assert Renamer(texts).renamed(conversation(MODULE, "lam_kel"), random.Random(0)) == conversation(MODULE, "lam_kel")


@pytest.mark.parametrize("family", sorted(FAMILIES)[::9])
def test_the_teacher_answers_alike(family: str) -> None:
    structure = capture_structure(family, 11, rows=8)
    tasks = [dressed(structure, number)[0] for number in range(2)]
    texts = [conversation(one.task.files[one.task.entry], answer_of(one)) for one in tasks]
    renamer = Renamer(texts)
    for number, (task, text) in enumerate(zip(tasks, texts, strict=True)):
        other = renamer.renamed(text, random.Random(number))
        assert other != text
        # how long names are decides where lines are split, and with it which device function is named first
        assert blocks(other) == blocks(conversation(module_of(other), answer_of(retold(task, module_of(other)))))


def answer_of(task: TrainingTask) -> str:
    graph = graph_from_json(json.loads(capture_task(task)))
    return teach(task, graph, random.Random(task.task.entry)).source


def blocks(text: str) -> list[str]:
    return sorted(block.strip() for block in text.removesuffix("<|end|>").split("\n\n\n"))


def retold(task: TrainingTask, module: str) -> TrainingTask:
    """The task with another file of the same structure."""
    old = own_names(task.task.files[task.task.entry])
    target = dict(zip(old, own_names(module), strict=True))[task.task.target]
    return replace(task, task=replace(task.task, files={task.task.entry: module}, target=target))
