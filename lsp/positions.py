"""Where rows of a profile stand in a text that has changed since, and how texts become edits.

A row names its function or class and a hash of its syntax tree (:mod:`drk.assistant.report_source`). In the present
text the definition is looked up by name: same hash, so the row still speaks of it, wherever it moved; another hash, so
the row is stale; no such name, so the row is dropped. Nothing is run and nothing is measured anew.

Positions count UTF-16 units, code points or bytes, as client and server agreed; whole-line edits need none of that.
Lines end at ``\\n``, ``\\r\\n`` and ``\\r`` only, as the protocol says (``str.splitlines`` knows more).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

from lsprotocol import types as lsp

from drk.assistant.errors import TargetError
from drk.assistant.report import Place
from drk.assistant.report_source import Span, span_named, spans
from drk.assistant.source_index import parse_source

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\s+\w+")
Units = Callable[[str], int]
"""The length of a text in the units of the connection."""


@dataclass(frozen=True)
class Located:
    """A place in the present text: 0-based line of the definition and of the row itself; ``stale``: it was changed."""

    head_line: int
    line: int
    end_line: int
    stale: bool


def split_lines(text: str) -> list[str]:
    """Return the lines of a text with their ends."""
    return _LINE.findall(text)


class TextMap:
    """One text with its definitions; made once per version of a document."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = split_lines(text)
        self.spans = spans(text)

    @property
    def parsed(self) -> bool:
        """Whether the text is Python: false in the middle of an edit."""
        return bool(self.spans) or _parses(self.text)

    def locate(self, place: Place) -> Located | None:
        """Return where ``place`` is now, or None when its definition is gone (or it never had one)."""
        span = span_named(self.spans, place.qualname) if place.qualname else None
        if span is None:
            return None
        head = self.head_line(span)
        same = span.ast_hash == place.ast_hash
        offset = place.line - place.first_line
        line = span.first_line + offset if same and span.first_line + offset <= span.end_line else head + 1
        # what is named as the row's line may be a decorator: the definition itself is what people look at
        return Located(head, max(line - 1, head), span.end_line - 1, not same)

    def definition_at(self, line: int) -> Span | None:
        """Return the innermost definition around a 0-based line."""
        inside = [span for span in self.spans if span.first_line - 1 <= line <= span.end_line - 1]
        return inside[-1] if inside else None

    def head_line(self, span: Span) -> int:
        """Return the 0-based line of a definition's ``def`` or ``class``, below its decorators."""
        for number in range(span.first_line - 1, min(span.end_line, len(self.lines))):
            if _DEFINITION.match(self.lines[number]):
                return number
        return span.first_line - 1

    def line_range(self, line: int, units: Units) -> lsp.Range:
        """Return the range of a line's text without indentation and line end."""
        text = self.lines[line].rstrip() if line < len(self.lines) else ""
        start = len(text) - len(text.lstrip())
        return lsp.Range(
            start=lsp.Position(line=line, character=units(text[:start])),
            end=lsp.Position(line=line, character=units(text)),
        )


def _parses(text: str) -> bool:
    try:
        parse_source(text, "")
    except TargetError:
        return False
    return True


def text_edits(before: str, after: str, units: Units) -> list[lsp.TextEdit]:
    """Return edits of whole lines that turn ``before`` into ``after``; they do not overlap."""
    old, new = split_lines(before), split_lines(after)
    steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [
        lsp.TextEdit(
            range=lsp.Range(start=_line_start(old, low, units), end=_line_start(old, high, units)),
            new_text="".join(new[new_low:new_high]),
        )
        for kind, low, high, new_low, new_high in steps
        if kind != "equal"
    ]


def _line_start(lines: list[str], line: int, units: Units) -> lsp.Position:
    """Return the start of a line; the end of the text when it is behind a last line without a line end."""
    if line == len(lines) and lines and not lines[-1].endswith(("\r", "\n")):
        return lsp.Position(line=line - 1, character=units(lines[-1]))
    return lsp.Position(line=line, character=0)
