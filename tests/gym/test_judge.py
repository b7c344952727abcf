"""What the Judge says of a candidate's text before any process is started."""

from __future__ import annotations

import pytest

from drk.gym.draft import Stop
from drk.gym.judge import PARSED_BYTES, parse_candidate
from drk.gym.wire import MAX_SOURCE_BYTES


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("x = (", "syntax-error"),
        ("print 'x'", "syntax-error"),
        ("```python\nx = 1\n```", "syntax-error"),
        ("x = '\0'", "syntax-error"),
        ("x = '\udc80'", "unparsable"),
        ("x = " + "-" * 60_000 + "1", "unparsable"),
        ("x = a" + "()" * 30_000, "unparsable"),
        ("x = " + "9" * 10_000, "syntax-error"),
        ("x = 1\n" + "#" * MAX_SOURCE_BYTES, "too-large"),
    ],
)
def test_text_that_is_no_python(source: str, kind: str) -> None:
    with pytest.raises(Stop) as stop:
        parse_candidate(source)
    failure = stop.value.failure
    assert (stop.value.status, failure.stage, failure.kind) == ("failed", "parse", kind)
    assert len(failure.message) < 300


@pytest.mark.parametrize("source", ["x = 1\n", "\ufeffx = 1\n", "# coding: rot13\nx = 1\n"])
def test_text_that_is_python(source: str) -> None:
    assert parse_candidate(source)


@pytest.mark.parametrize("source", ["x = 1\n" * PARSED_BYTES, "x = (" + " " * PARSED_BYTES])
def test_long_text_is_parsed_where_it_is_imported(source: str) -> None:
    assert not parse_candidate(source)
