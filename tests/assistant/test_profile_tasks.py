from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from profile_events import gpu_events, recording

from drk.assistant.errors import TargetError, UsageError
from drk.assistant.profile_build import Asked, build_report
from drk.assistant.profile_choice import best, choose_profiled, groups
from drk.assistant.profile_recording import RecordedInit, RecordedKind, RecordedModule
from drk.assistant.profile_tasks import describe, with_tasks
from drk.assistant.profile_trace import analyse
from drk.assistant.report import Method
from drk.assistant.report_store import save_report
from drk.gym.schema import Call, CapturedTensor, Scalar, TensorSpec

MODEL = """
from torch import nn

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def forward(self, x, ids=None):
        return self.fc(x)

class Net(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.a = Block(4)
        self.b = Block(4)

    def forward(self, x):
        return self.b(self.a(x))
"""


def tensor(*shape, dtype="float32", **more):
    return {"kind": "tensor", "shape": list(shape), "dtype": dtype, "strides": None, "requires_grad": False, **more}


def kind(*args, count=1, training=False, **kwargs):
    return RecordedKind(list(args), kwargs, training, training, None, count, ((-1.0, 1.0),))


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def made(project, modules, inits=()):
    file = str(project / "net.py")
    return recording(
        modules=tuple(replace(module, file=file if module.file == "own" else module.file) for module in modules),
        inits=tuple(replace(init, file=file) for init in inits),
        lines=((file, 10), (file, 19), (file, 30)),
    )


def tasks_of(project, told):
    method = Method("command", "cpu", 0, command="x")
    report = build_report(told, analyse(gpu_events(4), 0), Asked("id", "net", project, method, None, (f"{project}/",)))
    return with_tasks(report, told, project)


MODULES = (
    RecordedModule(0, 0, None, "", "Net", "own", 2, 4, init=0, kinds=(kind(tensor(8, 4), count=4),)),
    RecordedModule(1, 0, 0, "a", "Block", "own", 0, 3, init=1, kinds=(kind(tensor(8, 4), count=3),)),
    RecordedModule(
        2, 0, 0, "b", "Block", "own", 0, 2, init=1, kinds=(kind(tensor(8, 4)), kind(tensor(2, 4), training=True))
    ),
)
INITS = (
    RecordedInit("", "Net", [{"kind": "unsupported", "type": "Config"}], {}),
    RecordedInit("", "Block", [{"kind": "scalar", "value": 4}], {}),
)


def test_objects_of_one_class_are_one_target_weighted_by_frequency(project) -> None:
    report, saved = tasks_of(project, made(project, MODULES, INITS))
    assert report.module("Net.a").target == report.module("Net.b").target == "net.py:Block"
    assert [(one.task.target, one.task.weight, one.task.mode, one.task.grad) for one in saved] == [
        ("Block", 0.8, "eval", False),
        ("Block", 0.2, "train", True),
    ]
    assert saved[0].task.init == Call((Scalar(4),))
    assert saved[0].task.inputs == Call((TensorSpec((8, 4)),))
    (first,) = report.module("Net.a").inputs
    assert (first.text, first.count, first.task, first.ranges) == ("f32[8,4]", 3, "000", ((-1.0, 1.0),))


def test_why_there_is_no_task_stands_with_the_inputs(project) -> None:
    report, _ = tasks_of(project, made(project, MODULES, INITS))
    (only,) = report.module("Net").inputs
    assert (only.task, only.reason) == (None, "its constructor takes a Config, which has no form")
    assert report.module("Net").target == ""


def test_a_class_whose_constructor_was_not_seen_is_a_part_of_its_root(project) -> None:
    modules = tuple(replace(module, init=None) for module in MODULES)
    report, saved = tasks_of(project, made(project, modules))
    assert report.module("Net").target == "net.py:Net"  # it needs no arguments
    assert report.module("Net.a").target == "net.py:Net.a"
    assert {one.task.submodule for one in saved} == {"", "a", "b"}


def test_values_that_matter_travel_and_are_described_by_their_range(project) -> None:
    (project / "data-1-0.bin").write_bytes(bytes(range(8)) * 2)
    ids = tensor(2, dtype="int64", file="data-1-0.bin")
    seen = RecordedKind([tensor(8, 4)], {"ids": ids}, False, False, None, 1, ((-1.0, 1.0), (3.0, 9.0)))
    modules = (*MODULES[:2], replace(MODULES[2], kinds=(seen,)))
    _, saved = tasks_of(project, made(project, modules, INITS))
    task = next(one.task for one in saved if "ids" in one.task.inputs.kwargs)
    assert isinstance(task.inputs.kwargs["ids"], CapturedTensor)
    assert task.tensors is not None
    assert describe(seen) == "f32[8,4] ids=i64[2]{3..10}"


def test_arguments_without_a_form_are_named() -> None:
    odd = {"kind": "unsupported", "type": "Cache"}
    assert describe(kind(odd, tensor(2))) == "<Cache> f32[2]"


@pytest.fixture
def stored(project):
    report, saved = tasks_of(project, made(project, MODULES, INITS))
    save_report(project / ".drk" / "profiles", report, [(one.name, one.task) for one in saved])
    return report


def test_the_hottest_class_of_the_users_own_is_chosen(project, stored) -> None:
    chosen = choose_profiled(None, project)
    assert (chosen.target, chosen.profile, chosen.other_kinds) == ("net.py:Block", "id", 1)
    assert chosen.task.weight == 0.8
    assert chosen.source().entry == "net.py"
    assert chosen.verify_words()[:4] == ["drk", "verify", f"{project}/net.py:Block", "{candidate}"]
    assert "f32[8,4]" in chosen.verify_words()
    assert choose_profiled("id", project) == choose_profiled("net.py:Block", project) == chosen
    assert choose_profiled("net.py", project) == chosen


def test_a_target_that_is_not_in_the_profile_is_told(project, stored) -> None:
    with pytest.raises(UsageError, match=r"no task for net\.py:Blok") as caught:
        choose_profiled("net.py:Blok", project)
    assert "Block" in caught.value.help
    with pytest.raises(UsageError, match="no profile 'other'"):
        choose_profiled("other", project)


def test_a_file_that_changed_since_is_told(project, stored) -> None:
    (project / "net.py").write_text(MODEL + "\n# edited\n")
    with pytest.raises(TargetError, match="changed since it was profiled"):
        choose_profiled(None, project).source()


def test_everything_is_chosen_only_when_nothing_inside_stands_out(project) -> None:
    report, _ = tasks_of(project, made(project, tuple(replace(one, init=None) for one in MODULES)))
    found = groups(report)
    assert found[0].target == "net.py:Net"
    assert best(found).target == "net.py:Net.a"
    assert best([found[0], replace(found[1], share=0.1)]).target == "net.py:Net"


def test_a_profile_without_tasks_says_why(project) -> None:
    modules = (replace(MODULES[0], path=""),)
    report, saved = tasks_of(project, made(project, modules, INITS))
    assert saved == []
    save_report(project / ".drk" / "profiles", report)
    with pytest.raises(TargetError, match="nothing to optimise") as caught:
        choose_profiled(None, project)
    assert "Config" in caught.value.cause
