from __future__ import annotations

from pathlib import Path

import pytest

from drk.assistant.errors import UsageError
from drk.assistant.report import Attribution, Environment, Method, Report
from drk.assistant.report_store import (
    default_profiles_dir,
    find_profiles_dir,
    free_profile_id,
    latest_report,
    list_profiles,
    load_report,
    load_tasks,
    open_profile,
    save_report,
)
from drk.gym.schema import Task


def report(identifier: str) -> Report:
    return Report(
        id=identifier,
        created="2026-01-01T00:00:00+00:00",
        title="net",
        verdict="",
        root="/project",
        total_us=1.0,
        wall_us=1.0,
        method=Method("call", "cpu", 1),
        environment=Environment("cpu", "2.13.0", "", "3.11"),
        attribution=Attribution(1.0, 1.0),
    )


@pytest.fixture
def place(tmp_path) -> Path:
    return default_profiles_dir(tmp_path)


def test_a_saved_report_is_found_from_a_source_file(tmp_path, place) -> None:
    path = save_report(place, report("20260101T000000Z-net"))
    source = tmp_path / "package" / "deep" / "net.py"
    source.parent.mkdir(parents=True)
    assert find_profiles_dir(source) == place
    assert latest_report(source) == load_report(path) == report("20260101T000000Z-net")
    assert (tmp_path / ".drk" / ".gitignore").read_text() == "*\n"
    assert (place / "latest").resolve() == path.resolve()


def test_nothing_stored_is_no_report(tmp_path) -> None:
    assert latest_report(tmp_path) is None
    with pytest.raises(UsageError, match="no stored profile"):
        open_profile(None)


def test_tasks_lie_beside_it(place) -> None:
    task = Task("net", {"net.py": "x = 1\n"}, "net.py", "Net", weight=0.5)
    path = save_report(place, report("a"), [("000", task)])
    assert load_tasks(path, ["000"]) == [task]
    assert list_profiles(place) == ["a"]


def test_profiles_are_opened_by_id_part_path_or_latest(place) -> None:
    older = save_report(place, report("20260101T000000Z-net"))
    newer = save_report(place, report("20260102T000000Z-other"))
    assert open_profile(place) == newer.resolve()
    assert open_profile(place, "20260101T000000Z-net") == older
    assert open_profile(place, "other") == newer
    assert open_profile(None, str(older)) == older.resolve()
    with pytest.raises(UsageError, match="fits several"):
        open_profile(place, "2026")
    with pytest.raises(UsageError, match="no profile 'nett'") as caught:
        open_profile(place, "nett")
    assert caught.value.help


def test_ids_are_never_taken_twice(place) -> None:
    first = free_profile_id(place, "My Net!")
    save_report(place, report(first))
    assert first.endswith("-my-net")
    assert free_profile_id(place, "My Net!") != first


def test_broken_files_are_told(place) -> None:
    path = save_report(place, report("a"))
    path.write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        load_report(path)
    path.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        load_report(path)


def test_a_place_that_cannot_be_written_is_told(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write a profile") as caught:
        save_report(tmp_path / "file" / "profiles", report("a"))
    assert "--profiles-dir" in caught.value.help
