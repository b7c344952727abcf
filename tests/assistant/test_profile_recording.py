from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from profile_events import recording

from drk.assistant.errors import TargetError
from drk.assistant.profile_recording import RecordedModule, RecordedWindow, read_recordings


def stored(folder, **changes):
    made = recording(**changes)
    (folder / f"recording-{made.pid}.json").write_text(json.dumps(asdict(made)))
    return made


def test_of_several_processes_the_one_that_tells_most_comes_first(tmp_path) -> None:
    stored(tmp_path, pid=1, window=RecordedWindow("refused", "busy"))
    stored(tmp_path, pid=2, steps={"0": [0, 1]})
    rank = stored(tmp_path, pid=3, device_steps_us={"0": [10.0, 11.0]})
    found = read_recordings(tmp_path)
    assert [one.pid for one in found] == [3, 2, 1]
    assert found[0] == rank


def test_roots_and_parts_of_one_name_are_told_apart(tmp_path) -> None:
    first, linear = recording().modules
    second = RecordedModule(2, 2, None, "", "Net", "/project/net.py", 2, 4)
    twice = RecordedModule(3, 2, 2, "_orig_mod.fc", "Linear", "/lib/linear.py", 0, 4)
    names = recording(modules=(first, linear, second, twice)).module_names()
    assert names == {0: "Net", 1: "Net.fc", 2: "Net#2", 3: "Net#2.fc"}


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}'])
def test_a_damaged_recording_is_told(tmp_path, text) -> None:
    (tmp_path / "recording-1.json").write_text(text)
    with pytest.raises(TargetError, match="cannot be read"):
        read_recordings(tmp_path)
