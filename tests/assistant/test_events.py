from __future__ import annotations

from pathlib import Path

from drk.assistant.events import EVENTS, EventLog, make_event, read_events


def test_events_come_back_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(3):
        log.append(make_event("note", text=f"line {number}\nsecond"))
    events = read_events(tmp_path / "events.jsonl")
    assert [event["text"] for event in events] == [f"line {n}\nsecond" for n in range(3)]
    assert all(event["schema_version"] == 1 and event["time_utc"].endswith("Z") for event in events)
    assert {event["event"] for event in events} <= set(EVENTS)


def test_a_torn_last_line_is_dropped_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).append(make_event("note", text="whole"))
    with path.open("a") as stream:
        stream.write('{"event": "note", "text": "to')
    assert [event["text"] for event in read_events(path)] == ["whole"]
    EventLog(path).append(make_event("note", text="next"))
    assert [event["text"] for event in read_events(path)] == ["whole", "next"]
    assert path.read_bytes().count(b"\n") == 2


def test_a_reader_does_not_change_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "note"}\n{"ev')
    EventLog(path)
    read_events(path)
    assert path.read_text() == '{"event": "note"}\n{"ev'


def test_what_is_no_object_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'[1]\nnull\n\xff\xfe\n{"event": "note"}\n')
    assert read_events(path) == [{"event": "note"}]
    assert read_events(tmp_path / "absent.jsonl") == []
