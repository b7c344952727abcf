from __future__ import annotations

import pytest

from drk.assistant.report_source import SourcePlaces, span_at, span_named, spans

TEXT = '''
import torch

def free(x):
    return x + 1

class Net:
    """Doc."""

    def forward(self, x):
        def inner(y):
            return y * 2
        return inner(x)

    @property
    @staticmethod
    def decorated():
        return 1
'''


def test_the_innermost_definition_counts() -> None:
    found = spans(TEXT)
    names = {line: getattr(span_at(found, line), "qualname", None) for line in (2, 5, 8, 11, 12, 13, 16, 18)}
    assert names == {
        2: None,
        5: "free",
        8: "Net",
        11: "Net.forward.inner",
        12: "Net.forward.inner",
        13: "Net.forward",
        16: "Net.decorated",
        18: "Net.decorated",
    }
    assert span_named(found, "Net").is_class
    assert span_named(found, "Missing") is None


def digest(text, name="Net.forward"):
    return span_named(spans(text), name).ast_hash


@pytest.mark.parametrize(
    "edited",
    [
        "# a comment\n" * 5 + TEXT,
        TEXT.replace("return y * 2", "return y * 2  # twice"),
        TEXT.replace("y * 2", "(y  *  2)"),
    ],
)
def test_moves_and_layout_keep_the_hash(edited) -> None:
    assert digest(edited) == digest(TEXT)


def test_an_edit_of_the_code_changes_it() -> None:
    edited = TEXT.replace("y * 2", "y * 3")
    assert digest(edited) != digest(TEXT)
    assert digest(edited, "Net") != digest(TEXT, "Net")
    assert digest(edited, "free") == digest(TEXT, "free")


def test_places_are_relative_to_the_root(tmp_path) -> None:
    (tmp_path / "net.py").write_text(TEXT)
    places = SourcePlaces(tmp_path)
    place = places.at(str(tmp_path / "net.py"), 13)
    assert (place.file, place.line, place.first_line, place.end_line) == ("net.py", 13, 10, 13)
    assert place.qualname == "Net.forward"
    assert places.definition(str(tmp_path / "net.py"), "Net").line == 7
    assert places.definition(str(tmp_path / "net.py"), "Other") is None
    assert places.at("/elsewhere/gone.py", 3).file == "/elsewhere/gone.py"
    assert places.at("/elsewhere/gone.py", 3).ast_hash == ""


def test_text_that_does_not_parse_has_no_spans(tmp_path) -> None:
    assert spans("def broken(:") == ()
    assert spans("x = '\0'") == ()
    (tmp_path / "latin.py").write_bytes(b"# \xff\n")
    assert SourcePlaces(tmp_path).at(str(tmp_path / "latin.py"), 1).qualname == ""
