"""Whether two texts of a file hold the same target: the question before an edit follows a file that has changed.

Kernels were verified against one text. When only other things changed since (comments, layout, another class), the
verdict still holds. :func:`same_code` compares the syntax trees of the target, of everything at the top level that it
uses, directly or through others, and of the statements that bind no name (they act on import: ``torch.set_flush_...``).

Limits: what imported files hold is not looked at; a name that another function rebinds by ``global`` or ``exec`` is
missed; a change is a change even where it alters nothing (a renamed local). When in doubt the answer is no.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drk.assistant.errors import TargetError
from drk.assistant.source_edit import read_source
from drk.assistant.source_index import parse_source


def same_code(before: bytes, after: bytes, target: str) -> bool:
    """Say whether ``target`` (a dotted name) and all that it uses in its file are the same in two texts of the file."""
    try:
        old, new = (_relevant("".join(read_source(data).lines), target) for data in (before, after))
    except TargetError:
        return False
    return bool(old) and old == new


def _relevant(text: str, target: str) -> list[str]:
    """Return the dumps of the statements that matter for ``target``; none when the file does not bind it."""
    body = [node for node in parse_source(text, "").body if not _is_idle(node)]
    bound = [_bound_names(node) for node in body]
    wanted, pending = set[str](), [target.split(".")[0]]
    if not any(pending[0] in names for names in bound):
        return []
    chosen = {index for index, names in enumerate(bound) if not names or "*" in names}
    pending += [name for index in chosen for name in _used_names(body[index])]
    while pending:
        name = pending.pop()
        if name in wanted:
            continue
        wanted.add(name)
        for index, names in enumerate(bound):
            if name in names and index not in chosen:
                chosen.add(index)
                pending += _used_names(body[index])
    return [ast.dump(body[index]) for index in sorted(chosen)]


def _is_idle(node: ast.stmt) -> bool:
    """Say whether a statement does nothing on import: a text, ``pass``, the main guard."""
    if isinstance(node, ast.If):
        return any(isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(node.test))
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _used_names(node: ast.AST) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name))


def _bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a top-level statement binds, also inside its blocks (but not inside definitions)."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler):
            found |= _bound_names(child) if isinstance(child, ast.stmt) else _handler_names(child)
    return found


def _handler_names(node: ast.AST) -> set[str]:
    return {name for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt) for name in _bound_names(child)}
