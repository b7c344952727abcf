"""``drk profile`` from end to end: real programs in real processes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import pytest

from drk.assistant.cli import run
from drk.assistant.report import from_json
from drk.assistant.report_store import list_profiles, load_report, load_tasks, open_profile

TRAIN = """
import os, signal, sys
import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)) * 0.5)


class Net(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.mlp = Mlp(dim, hidden=32)

    def forward(self, x):
        return x + self.mlp(x)


def main():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16))
    workers = 1 if "workers" in sys.argv else 0
    for number, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=8, num_workers=workers)):
        print("step", number, flush=True)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        if number == 4 and "exit" in sys.argv:
            os._exit(5)
        if number == 4 and "terminate" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)
    raise ValueError("the program's own")


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def drk(project, monkeypatch, capfd):
    """Run ``drk`` in this process, in the project's folder; the programs that it starts are real ones."""
    monkeypatch.chdir(project)

    def call(*words):
        code = run(list(words))
        return Done(code, *capfd.readouterr())

    return call


def stored(project):
    (name,) = list_profiles(project / ".drk" / "profiles")
    path = open_profile(project / ".drk" / "profiles", name)
    return path, load_report(path)


def test_a_training_program_with_workers_that_crashes(project, drk) -> None:
    done = drk("profile", "--capture", "train.py workers", "--steps", "3", "--target", "a100")
    assert done.returncode == 1
    assert done.stdout.startswith("step 0\nstep 1\n")
    assert "ValueError: the program's own" in done.stderr
    assert "CPU times" in done.stdout
    path, report = stored(project)
    assert (report.method.exit_code, report.method.ended, report.method.processes) == (1, "crashed", 1)
    assert (report.method.steps, report.method.warmup) == (3, 2)
    mlp = report.module("Net.mlp")
    assert (mlp.target, mlp.place.qualname, mlp.place.file) == ("train.py:Mlp", "Mlp", "train.py")
    assert sum(row.times.total_us for row in report.kernels) == pytest.approx(report.total_us)
    assert report.attribution.to_line > 0.9
    lines = {(row.place.file, row.place.qualname) for row in report.kernels if row.place is not None}
    assert {("train.py", "Mlp.forward"), ("train.py", "main")} <= lines
    (kind,) = mlp.inputs
    assert (kind.text, kind.count, kind.mode, kind.grad) == ("f32[8,16]", 8, "train", True)
    (task,) = load_tasks(path, [kind.task])
    assert (task.target, task.mode, task.grad, task.weight) == ("Mlp", "train", True, 1.0)
    assert task.init.kwargs["hidden"].value == 32


@pytest.mark.parametrize(("word", "code", "ended"), [("exit", 5, "crashed"), ("terminate", 143, "killed")])
def test_programs_that_end_in_the_middle_are_still_reported(project, drk, word, code, ended) -> None:
    done = drk("profile", "--capture", f"train.py {word}", "--format", "json", "-o", "copy.json")
    assert done.returncode == code
    assert "step 4" in done.stderr  # standard output is the report's
    report = from_json(json.loads(done.stdout))
    assert (report.method.ended, report.method.exit_code) == (ended, code)
    assert report.method.steps >= 2
    assert from_json(json.loads((project / "copy.json").read_text())) == report
    assert stored(project)[1] == report


def test_a_program_that_calls_nothing_is_told(project, drk) -> None:
    (project / "idle.py").write_text("raise SystemExit(9)\n")
    done = drk("profile", "--capture", "idle.py")
    assert done.returncode == 9
    assert "nothing was recorded" in done.stderr
    assert "exit code 9" in done.stderr
    assert list_profiles(project / ".drk" / "profiles") == []


def test_a_target_is_called_in_the_sandbox(project, drk) -> None:
    (project / "model.py").write_text(
        TRAIN + "\n\ndef example_inputs():\n    return [torch.randn(8, 16)]\n\n\nprint('imported in', os.getcwd())\n"
    )
    done = drk("profile", "model.py:Net", "--mode", "train", "--export", "perfetto", "-o", "step.json")
    assert done.returncode == 0, done.stderr
    path, report = stored(project)
    assert (report.method.source, report.method.mode, report.method.inputs) == ("call", "train", "f32[8,16]")
    assert report.attribution.to_module == pytest.approx(1.0, abs=0.05)
    assert report.module("Net.mlp").place.file == "model.py"
    assert report.module("Net").target == "model.py:Net"
    assert load_tasks(path, [report.module("Net").inputs[0].task])[0].target == "Net"
    assert str(project) not in done.stderr.partition("imported in")[2].splitlines()[0]
    assert any(event["name"] == "Net.mlp" for event in json.loads((project / "step.json").read_text())["traceEvents"])


def test_a_target_that_fails_names_its_line(project, drk) -> None:
    (project / "broken.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    def forward(self, x):\n        return x.nonsense\n"
    )
    done = drk("profile", "broken.py", "--input", "f32[2]")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "broken.py:5" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "name either a target or a command"),
        (("model.py", "--capture", "train.py"), "name either a target or a command"),
        (("--capture", "a", "-m", "b"), "exclude each other"),
        (("model.py", "--export", "perfetto"), "--export needs a file"),
        (("--capture", "train.py", "--target", "h900"), "no figures for 'h900'"),
    ],
)
def test_wrong_command_lines_are_told(tmp_path, capsys, monkeypatch, words, told) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["profile", *words]) == 2
    assert told in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
