from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsp_parts import MODEL
from lsprotocol import types as lsp

from drk.assistant.report import Place
from drk.assistant.report_source import SourcePlaces
from drk.lsp.positions import TextMap, split_lines, text_edits


def utf16(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


@pytest.fixture
def forward(tmp_path: Path) -> Place:
    (tmp_path / "model.py").write_text(MODEL)
    found = SourcePlaces(tmp_path).at(str(tmp_path / "model.py"), 12)
    assert found.qualname == "Block.forward"
    return found


def test_a_row_follows_its_function(forward: Place) -> None:
    same = TextMap(MODEL).locate(forward)
    assert same is not None
    assert (same.head_line, same.line, same.stale) == (10, 11, False)
    moved = TextMap("# a\n# b\n" + MODEL.replace("linear(x)", "linear( x )")).locate(forward)
    assert moved is not None
    assert (moved.head_line, moved.line, moved.stale) == (12, 13, False)
    changed = TextMap(MODEL.replace("* 2.0", "* 3.0")).locate(forward)
    assert changed is not None
    assert changed.stale
    assert TextMap(MODEL.replace("def forward", "def backward")).locate(forward) is None


def test_decorators_and_texts_that_do_not_parse() -> None:
    text = TextMap("@one\n@two(\n    3)\nclass Net:\n    pass\n")
    assert text.head_line(text.spans[0]) == 3
    assert text.parsed
    assert TextMap("x = 1\n").parsed
    assert TextMap("").parsed
    assert not TextMap("class (:\n").parsed


def test_ranges_count_in_the_clients_units() -> None:
    text = TextMap("    x = '\U0001f600'  \r\n")
    assert text.line_range(0, utf16) == lsp.Range(lsp.Position(0, 4), lsp.Position(0, 12))
    assert text.line_range(0, len) == lsp.Range(lsp.Position(0, 4), lsp.Position(0, 11))
    assert text.line_range(7, len) == lsp.Range(lsp.Position(7, 0), lsp.Position(7, 0))


LINES = st.lists(st.sampled_from(["a\n", "b\r\n", "\U0001f600\n", "\n", "c\x0bd\u2028e\n"]), max_size=8)
TEXTS = st.builds(lambda lines, tail: "".join(lines) + tail, LINES, st.sampled_from(["", "end \U0001f600"]))


@given(TEXTS, TEXTS)
def test_edits_turn_one_text_into_the_other(before: str, after: str) -> None:
    edits = text_edits(before, after, utf16)
    lines = split_lines(before)
    starts = [sum(len(line) for line in lines[:index]) for index in range(len(lines) + 1)]
    text = before
    for edit in reversed(edits):
        low, high = (
            starts[place.line] + (len(lines[place.line]) if place.character else 0)
            for place in (edit.range.start, edit.range.end)
        )
        text = text[:low] + edit.new_text + text[high:]
    assert text == after
