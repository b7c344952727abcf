from __future__ import annotations

from pathlib import Path

from drk.assistant.llm.call_journal import FILE_NAME, CallJournal, CallRecord, read_spending
from drk.assistant.llm.messages import Reply, Usage
from drk.assistant.replay import read_recording

REPLY = Reply("```python\nclass ModelNew: a = '\ud800'\n```\u2028", Usage(10, 5, 2, 1), True, 2, "m-1", ("a note",))


def test_what_was_answered_is_read_back(tmp_path: Path) -> None:
    journal = CallJournal(tmp_path)
    journal.ask(1, 0, model="m")
    journal.answer(CallRecord(1, 0, REPLY, 0.5, 1.25, False, {"sha256": "00"}))
    journal.ask(1, 1)
    again = CallJournal(tmp_path)
    assert again.answered == {(1, 0): CallRecord(1, 0, REPLY, 0.5, 1.25, False, {"sha256": "00"})}
    spent = read_spending(tmp_path)
    assert (spent.calls, spent.lost_calls, spent.no_candidate) == (1, 1, 1)
    assert (spent.prompt_tokens, spent.completion_tokens, spent.cost_usd, spent.unpriced_calls) == (10, 5, 0.5, 0)


def test_torn_lines_are_dropped_and_written_over(tmp_path: Path) -> None:
    journal = CallJournal(tmp_path)
    journal.answer(CallRecord(1, 0, Reply("a")))
    with (tmp_path / FILE_NAME).open("a") as stream:
        stream.write('{"event": "answered", "turn": 1, "sam')
    again = CallJournal(tmp_path)
    assert set(again.answered) == {(1, 0)}
    again.answer(CallRecord(1, 1, Reply("b")))
    assert {key: one.reply.text for key, one in CallJournal(tmp_path).answered.items()} == {(1, 0): "a", (1, 1): "b"}
    assert CallJournal(tmp_path).spending().unpriced_calls == 2


def test_without_a_folder_it_remembers_only(tmp_path: Path) -> None:
    journal = CallJournal(None)
    journal.ask(1, 0)
    journal.answer(CallRecord(1, 0, REPLY))
    assert journal.spending().calls == 1
    assert not list(tmp_path.iterdir())
    assert read_spending(tmp_path).calls == 0


def test_a_journal_is_a_recording(tmp_path: Path) -> None:
    journal = CallJournal(tmp_path)
    for sample, text in enumerate(["```python\nclass ModelNew: a = 1\n```", "no code"]):
        journal.ask(1, sample)
        journal.answer(CallRecord(1, sample, Reply(text, model="m")))
    good, bad = read_recording(tmp_path)
    assert good.source == "class ModelNew: a = 1\n"
    assert bad.note.startswith("no candidate: ")
