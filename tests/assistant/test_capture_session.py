from __future__ import annotations

import pytest
import torch
from torch import nn

import drk.assistant
from drk.assistant.errors import TargetError, UsageError
from drk.assistant.report_store import list_profiles, load_report


class Net(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        return torch.relu(self.fc(x))


def test_a_block_is_reported_and_stored(tmp_path) -> None:
    net = Net()
    with drk.assistant.capture(steps=2, profiles_dir=tmp_path, title="cell", target="h100") as captured:
        with pytest.raises(UsageError, match="nothing is captured yet"):
            _ = captured.report
        for _ in range(6):
            net(torch.randn(4, 8)).sum().backward()
    report = captured.report
    assert report.method.source == "notebook"
    assert report.module("Net").times.calls == 3  # two steps of four warm up, and one begins the next
    assert report.attribution.to_module > 0.5
    assert load_report(captured.path) == report
    assert captured.text().startswith(report.verdict)
    assert nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"


def test_what_the_block_raises_goes_through_and_is_reported(tmp_path) -> None:
    net = Net()
    with pytest.raises(ZeroDivisionError), drk.assistant.capture(profiles_dir=tmp_path) as captured:
        net(torch.randn(4, 8))
        raise ZeroDivisionError
    assert captured.report.method.ended == "crashed"
    assert len(list_profiles(tmp_path)) == 1


def test_a_block_without_modules_is_told(tmp_path) -> None:
    with pytest.raises(TargetError, match=r"called no torch\.nn\.Module"), drk.assistant.capture(profiles_dir=tmp_path):
        torch.randn(2)


def test_captures_do_not_nest(tmp_path) -> None:
    with (
        pytest.raises(UsageError, match="another capture"),
        drk.assistant.capture(profiles_dir=tmp_path),
        drk.assistant.capture(profiles_dir=tmp_path),
    ):
        pytest.fail("it began")
    assert nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"


def test_other_names_are_not_invented() -> None:
    with pytest.raises(AttributeError, match="no attribute 'captur'"):
        _ = drk.assistant.captur
