"""The edit that puts an artefact into a user's file: one import and one decorator line, everything else byte for byte.

``@optimized`` above the class, factory or function is the form that always works: whoever constructs the class gets the
kernels, pickles keep their names, and the edit does not depend on how many construction sites there are. Where the
file does not define the target itself but imports it, the name is rebound after its last import instead.

Encoding, byte order mark and newlines stay as they are. Positions come from :mod:`ast`; no user code runs.

Left out: targets bound by assignment, defined by ``exec``, or under a name that is deleted later.
"""

from __future__ import annotations

import ast
import codecs
import difflib
import io
import re
import tokenize
from dataclasses import dataclass

from drk.assistant.errors import TargetError

DECORATOR = "optimized"
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class SourceText:
    """A file's text with what is needed to write it back exactly: codec name, byte order mark, newline."""

    lines: tuple[str, ...]
    encoding: str
    bom: bytes
    newline: str

    def encode(self, lines: tuple[str, ...]) -> bytes:
        """Return ``lines`` as bytes of this file's encoding."""
        return self.bom + "".join(lines).encode(self.encoding)


def read_source(data: bytes, name: str = "") -> SourceText:
    """Decode a Python file as Python would.

    Raises:
        TargetError: the encoding is unknown or the bytes do not fit it.
    """
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        text = data[len(bom) :].decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise TargetError("the file's encoding cannot be read", file=name, cause=str(error)) from error
    lines = tuple(_LINE.findall(text))
    first = re.search(r"\r\n|\r|\n", text)
    return SourceText(lines, encoding, bom, first[0] if first else "\n")


def add_kernels(data: bytes, *, target: str, kernels_module: str, name: str = "") -> bytes:
    """Return the file with ``target`` decorated.

    Args:
        data: the file's bytes.
        target: dotted name of the class, factory or function in it.
        kernels_module: where ``optimized`` is imported from (``model_kernels``, ``.model_kernels`` in a package).
        name: the file's name, for errors.

    Raises:
        TargetError: the file cannot be parsed, uses this artefact already, or does not bind the target.
    """
    source = read_source(data, name)
    text = "".join(source.lines)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise TargetError("the file is not valid Python", file=name, cause=str(error)) from error
    if _imports_from(tree, kernels_module):
        raise TargetError(
            f"the file uses {kernels_module} already", file=name, help="`drk restore FILE` takes it back first"
        )
    alias = DECORATOR if DECORATOR not in _names(tree) else f"drk_{DECORATOR}"
    imported = DECORATOR if alias == DECORATOR else f"{DECORATOR} as {alias}"
    lines = list(source.lines)
    definition = _definition(tree.body, target.split("."))
    if definition is not None:
        first = min([definition.lineno, *(one.lineno for one in definition.decorator_list)])
        # the import may stand below the definition's line only if nothing above can hold it
        at = _import_line(tree, before=first)
        lines.insert(first - 1, f"{_indent(lines[first - 1])}@{alias}{source.newline}")
        lines.insert(at, f"from {kernels_module} import {imported}{source.newline}")
    else:
        after = _binding_line(tree, target)
        if after is None:
            raise TargetError(f"the file neither defines nor imports {target}", file=name)
        if not lines[-1].endswith(("\r", "\n")):
            lines[-1] += source.newline
        rebound = [f"from {kernels_module} import {imported}", f"{target} = {alias}({target})"]
        lines[after:after] = [line + source.newline for line in ("", *rebound, "")]
    return source.encode(tuple(lines))


def added_lines(before: bytes, after: bytes) -> list[str]:
    """Return the lines (without newlines) that an edit added, in order."""
    old, new = read_source(before).lines, read_source(after).lines
    steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [line.rstrip("\r\n") for kind, _, _, low, high in steps if kind != "equal" for line in new[low:high]]


def drop_lines(data: bytes, lines: list[str]) -> bytes | None:
    """Return the file without the given lines, or null unless each non-blank one stands in it exactly once."""
    source = read_source(data)
    wanted = [line for line in lines if line.strip()]
    bare = [line.rstrip("\r\n") for line in source.lines]
    if any(bare.count(line) != 1 for line in wanted):
        return None
    return source.encode(tuple(line for line, text in zip(source.lines, bare, strict=True) if text not in wanted))


def unified_diff(before: bytes, after: bytes, path: str) -> bytes:
    """Return the unified diff of two versions of ``path`` in the file's own encoding; ``git apply`` takes it."""
    old, new = read_source(before, path), read_source(after, path)
    parts = difflib.unified_diff(old.lines, new.lines, f"a/{path}", f"b/{path}", n=3)
    out = []
    for part in parts:
        whole = part.endswith("\n") or part.startswith(("---", "+++", "@@"))
        out.append(part if whole else f"{part}\n\\ No newline at end of file\n")
    text = "".join(out)
    return text.encode(new.encoding, "surrogateescape")


def _definition(body: list[ast.stmt], path: list[str]) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the last definition of a dotted name, also inside ``if`` and ``try`` blocks."""
    found = None
    for node in body:
        if isinstance(node, _DEFINITIONS):
            if node.name == path[0]:
                found = node if len(path) == 1 else _definition(node.body, path[1:]) or found
        else:
            for block in ("body", "orelse", "finalbody"):
                inner = getattr(node, block, None)
                if isinstance(inner, list) and isinstance(node, ast.If | ast.Try | ast.With):
                    found = _definition(inner, path) or found
    return found


def _import_line(tree: ast.Module, before: int) -> int:
    """Return the index of the line at which an import can be inserted: after the last top-level import above."""
    at = 0
    for index, node in enumerate(tree.body):
        end = node.end_lineno or node.lineno
        docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if end < before and (docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            at = end
    if at:
        # statements that share the import's last line (a; b) and reach further down
        return max([at, *(node.end_lineno or 0 for node in tree.body if node.lineno <= at < (node.end_lineno or 0))])
    first = tree.body[0] if tree.body else None
    decorators = getattr(first, "decorator_list", [])
    return min([first.lineno, *(one.lineno for one in decorators)]) - 1 if first is not None else 0


def _binding_line(tree: ast.Module, target: str) -> int | None:
    """Return the index of the line after the last top-level statement that imports the target's first name."""
    wanted = target.split(".", maxsplit=1)[0]
    at = None
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.If | ast.Try):
            imports = [one for one in ast.walk(node) if isinstance(one, ast.Import | ast.ImportFrom)]
            bound = {(alias.asname or alias.name).split(".")[0] for one in imports for alias in one.names}
            if wanted in bound:
                at = node.end_lineno
    return at


def _imports_from(tree: ast.Module, module: str) -> bool:
    level = len(module) - len(module.lstrip("."))
    return any(
        isinstance(node, ast.ImportFrom) and node.module == module.lstrip(".") and node.level == level
        for node in ast.walk(tree)
    )


def _names(tree: ast.Module) -> set[str]:
    """Return every name the file uses or binds anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, _DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())].strip("\r\n\f")
