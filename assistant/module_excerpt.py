"""The part of a file that shows one module, in the form in which small models are taught: for prompts with little room.

Kept word for word: what the target needs (classes, functions, constants, imports), in the file's order, and the
functions that give inputs. Left out: the file's docstring, ``if __name__ == "__main__"``, and what nobody needs.
Inputs always stand as ``get_inputs`` and ``get_init_inputs``: a function of another name is renamed, and what the
command line gave is written as one. A file with nothing to change comes back as it is, without blank ends.

Needs are known by name only: whatever mentions a name needs it. A file that does not parse, or does not define its
target, is shown whole. Nothing is run.
"""

from __future__ import annotations

import ast
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drk.gym.schema import Argument, Call, Scalar, Task, TensorSpec, UserFunction

INPUTS, INIT_INPUTS = "get_inputs", "get_init_inputs"
USUAL = frozenset({"__future__", "math", "torch", "typing"})
"""Imports of these stay, needed or not: every module has them."""
GAP = "\n\n\n"


@dataclass(frozen=True)
class _Part:
    """One statement of the file: the names that it defines and mentions, and its lines (with its comments), 0-based."""

    node: ast.stmt
    defines: frozenset[str]
    mentions: frozenset[str]
    first: int
    end: int


def module_excerpt(task: Task) -> str:
    """Return what a small model is shown of the task's entry file; see the module's text."""
    text = "\n".join(task.files[task.entry].removeprefix("\ufeff").splitlines())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return text.strip()
    lines = text.split("\n")
    parts = list(_parts(tree, lines))
    names = [task.target.partition(".")[0], INPUTS, INIT_INPUTS]
    if not any(names[0] in part.defines for part in parts):
        return text.strip()
    names += [one.name for one in (task.inputs, task.init) if isinstance(one, UserFunction)]
    kept = _needed(parts, names)
    dropped = {line for part in parts if part not in kept for line in range(part.first, part.end)}
    dropped -= {line for part in kept for line in range(part.first, part.end)}
    renamed = {part.first: (part, name) for part in kept if (name := _new_name(part, task))}
    shown: list[str | None] = []  # null where a line was
    for number, line in enumerate(lines):
        one = next((one for first, one in renamed.items() if first <= number < one[0].end), None)
        if one is not None:
            shown += _input_function(one[0].node, one[1], lines) if number == one[0].first else []
        else:
            shown.append(None if number in dropped else line)
    excerpt = _without_gaps(shown) if dropped or renamed else text.strip()
    defined = {name for part in kept for name in part.defines} | {name for _, name in renamed.values()}
    return GAP.join([excerpt, *_missing_functions(task, defined)])


def _parts(tree: ast.Module, lines: Sequence[str]) -> Iterator[_Part]:
    before = 0
    for node in tree.body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) - 1
        while first > before and lines[first - 1].startswith("#"):
            first -= 1
        before = node.end_lineno or node.lineno
        names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
        found = {one.id for one in names if isinstance(one.ctx, ast.Store)} if not _is_definition(node) else set()
        found |= {one.name for one in ast.walk(node) if isinstance(one, (ast.ClassDef, ast.FunctionDef))}
        found |= {
            alias.asname or alias.name.partition(".")[0]
            for one in ast.walk(node)
            if isinstance(one, (ast.Import, ast.ImportFrom))
            for alias in one.names
        }
        mentions = frozenset(one.id for one in names if isinstance(one.ctx, ast.Load))
        own = getattr(node, "name", None) if _is_definition(node) else None
        yield _Part(node, frozenset({own} if isinstance(own, str) else found), mentions, first, before)


def _is_definition(node: ast.stmt) -> bool:
    return isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


def _needed(parts: Sequence[_Part], names: Sequence[str]) -> list[_Part]:
    """Return the parts that define ``names`` and all that those mention, with the usual imports."""
    wanted, found = set(names), {id(part): part for part in parts if _is_usual(part.node)}
    while True:
        fresh = [part for part in parts if id(part) not in found and part.defines & wanted and not _is_main(part.node)]
        if not fresh:
            return [part for part in parts if id(part) in found]
        for part in fresh:
            found[id(part)] = part
            wanted |= part.mentions


def _is_usual(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in USUAL for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in USUAL or any(alias.name == "*" for alias in node.names)
    return False


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _without_gaps(lines: Sequence[str | None]) -> str:
    """Return the lines as text; where some were left out, the longest run of blank ones beside them is the gap."""
    kept: list[str] = []
    for is_gap, run in itertools.groupby(lines, lambda line: line is None or not line.strip()):
        found = list(run)
        if is_gap and None in found:
            blanks = [
                len(list(one)) for is_blank, one in itertools.groupby(found, lambda one: one is not None) if is_blank
            ]
            kept += [""] * max(blanks, default=0)
        else:
            kept += [line for line in found if line is not None]
    return "\n".join(kept).strip()


# --- Inputs --------------------------------------------------------------------------------------------------


def _new_name(part: _Part, task: Task) -> str:
    """Return the name under which a part that gives inputs is shown, or nothing for any other part."""
    for given, name in ((task.inputs, INPUTS), (task.init, INIT_INPUTS)):
        if isinstance(given, UserFunction) and given.name != name and part.defines == {given.name}:
            node = part.node
            is_value = isinstance(node, ast.Assign) and isinstance(node.value, (ast.Tuple, ast.List))
            return name if isinstance(node, ast.FunctionDef) or is_value else ""
    return ""


def _input_function(node: ast.stmt, name: str, lines: Sequence[str]) -> list[str]:
    """Return a function (or value) that gives inputs under ``name``: without docstring and annotation, as a list."""
    source = "\n".join(lines)
    shown = [f"def {name}():"]
    for one in [node] if isinstance(node, ast.Assign) else getattr(node, "body", []):
        if isinstance(one, (ast.Return, ast.Assign)) and isinstance(one.value, (ast.Tuple, ast.List)):
            is_last = isinstance(one, ast.Return) and one.col_offset == 4
            if is_last or one is node:
                items = [ast.get_source_segment(source, item) or ast.unparse(item) for item in one.value.elts]
                shown.append(f"    return [{', '.join(items)}]")
                continue
        if not is_text(one):
            shown += lines[one.lineno - 1 : one.end_lineno]
    return shown


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a text alone, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _missing_functions(task: Task, defined: set[str]) -> list[str]:
    """Return the functions that the file lacks, written from what the task says about its inputs."""
    found = []
    for name, given in ((INPUTS, task.inputs), (INIT_INPUTS, task.init)):
        if name in defined or not isinstance(given, Call):
            continue
        texts = [_argument_text(one) for one in given.args]
        if None not in texts and not given.kwargs:
            found.append(f"def {name}():\n    return [{', '.join(text for text in texts if text)}]")
    return found


def _argument_text(one: Argument) -> str | None:
    """Return how a file would make this argument; null for what no short text makes."""
    if isinstance(one, Scalar):
        return repr(one.value)
    if not isinstance(one, TensorSpec) or one.strides is not None or one.layout != "contiguous":
        return None
    sizes = ", ".join(map(str, one.shape))
    if one.fill == "integers" or one.dtype.startswith(("int", "uint")):
        low, high = int(one.low or 0), int(one.high if one.high is not None else 2)
        return f"torch.randint({low}, {high}, ({sizes}{',' if len(one.shape) == 1 else ''}))"
    if one.dtype == "bool":
        return f"torch.rand({sizes}) > 0.5"
    name = {"normal": "randn", "uniform": "rand", "zeros": "zeros", "ones": "ones"}.get(one.fill)
    dtype = "" if one.dtype == "float32" else f", dtype=torch.{one.dtype}"
    return f"torch.{name}({sizes}{dtype})" if name else None
