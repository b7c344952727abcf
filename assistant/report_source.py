"""Places in source files: the enclosing function or class of a line, and a hash of its syntax tree.

The hash is of the tree without positions, comments and layout: an edit that only moves a function keeps it, an edit of
its code changes it. It holds within one Python minor version (the tree's form may differ between two); a reader on
another one sees rows as stale, never as fresh by mistake.

Left out: code made by ``exec`` or notebooks' cells that are no longer in a file (no text, no place).
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from drk.assistant.report import Place

MAX_SOURCE_BYTES = 4 * 2**20
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Span:
    """One function or class: dotted name in its file, first line (decorators included), last line, hash of its tree."""

    qualname: str
    first_line: int
    end_line: int
    is_class: bool
    ast_hash: str


def syntax_hash(node: ast.AST) -> str:
    """Return 16 hex digits of a syntax tree, positions and comments left out."""
    return hashlib.sha256(ast.dump(node, include_attributes=False).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def spans(text: str) -> tuple[Span, ...]:
    """Return every function and class of a source text, outer ones first; none when it cannot be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    found: list[Span] = []
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, prefix = pending.pop()
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, Definition):
                name = f"{prefix}.{child.name}" if prefix else child.name
                first = min([child.lineno, *(item.lineno for item in child.decorator_list)])
                last = child.end_lineno or child.lineno
                found.append(Span(name, first, last, isinstance(child, ast.ClassDef), syntax_hash(child)))
            pending.append((child, name))
    return tuple(sorted(found, key=lambda span: (span.first_line, -span.end_line)))


def span_at(found: tuple[Span, ...], line: int) -> Span | None:
    """Return the innermost function (or class) around ``line``."""
    inside = [span for span in found if span.first_line <= line <= span.end_line]
    return inside[-1] if inside else None


def span_named(found: tuple[Span, ...], qualname: str) -> Span | None:
    """Return the last definition of ``qualname`` (``Net``, ``Net.forward``), which is the one that counts."""
    named = [span for span in found if span.qualname == qualname]
    return named[-1] if named else None


class SourcePlaces:
    """Makes :class:`Place` values for files, relative to a project root; each file is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._spans = lru_cache(maxsize=4096)(_spans_of)

    def at(self, file: str, line: int) -> Place:
        """Return the place of a line, with the function (or class) around it where the text can be read."""
        span = span_at(self._spans(file), line)
        if span is None:
            return Place(self.relative(file), line, line, line)
        return Place(self.relative(file), line, span.end_line, span.first_line, span.qualname, span.ast_hash)

    def definition(self, file: str, qualname: str) -> Place | None:
        """Return the place of a class or function by its dotted name, or None when the text does not hold it."""
        span = span_named(self._spans(file), qualname)
        if span is None:
            return None
        first = span.first_line
        return Place(self.relative(file), first, span.end_line, first, span.qualname, span.ast_hash)

    def relative(self, file: str) -> str:
        """Return ``file`` as a report writes it."""
        path = Path(file)
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)


def _spans_of(file: str) -> tuple[Span, ...]:
    path = Path(file)
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return ()
        return spans(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError):
        return ()
