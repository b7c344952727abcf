"""The order in which a small model writes an answer: what can be copied first, one operation a line, names that tell
nothing ahead.

A model of some ten million parameters writes from left to right with little room to plan. A file that begins with its
formula, names kernels after what they compute, and nests expressions inside out asks it for the whole composition in
the first line: of the nano model's first training, three of four wrong tokens stood in such places, and few where code
follows the module's own order. So here ``ModelNew`` comes first (constructor and forward are near copies), then each
launcher with its kernel, then the device functions that were used; kernels, launchers and values in between are
numbered; in kernels every operation has a line of its own, in the order of evaluation. Python and Triton look names
up when a function runs, so that the order of definitions is free.

Left out: what stands before the first load and in loops, indices and masks, which stay as they are. Nothing is
computed differently.
"""

from __future__ import annotations

import ast
import copy
import re

from drk.assistant.module_excerpt import is_text

_WORD = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")
_ANY_WORD = re.compile(r"[A-Za-z_]\w*")
_CARRIED = re.compile(r"(?:_ptrs?|_mat|_tile|(?:_batch)?_\d+)$")
WHOLE_CALLS = ("load", "store", "dot", "program_id", "arange", "cdiv", "num_programs", "float")
"""Calls whose arguments stay where they are."""


def in_order(answer: str) -> str:
    """Return a file with ``ModelNew`` in the order of this module.

    Raises:
        SyntaxError: it does not parse.
    """
    tree = ast.parse(answer)
    body = tree.body[1:] if is_text(tree.body[0]) else tree.body
    names = function_names(tree)
    head = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    kernels = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in names]
    devices = [node for node in body if isinstance(node, ast.FunctionDef) and node.name not in names]
    rest = [node for node in body if node not in head and node not in kernels and node not in devices]
    lines = answer.splitlines()
    launched = sorted(kernels, key=lambda node: (_number(names[node.name]), bool(node.decorator_list)))
    values = value_names(tree, answer)
    parts = [_with_values(statement_text(node, lines), values) for node in rest]
    parts += [_with_values(_unnested(node, lines), values) for node in launched]
    parts += [statement_text(node, lines) for node in devices]
    text = "\n".join(statement_text(node, lines) for node in head) + "\n\n\n" + "\n\n\n".join(parts) + "\n"
    return renamed(text, names)


def value_names(tree: ast.Module, text: str) -> dict[str, str]:
    """Return numbered names for the values that ``ModelNew.forward`` computes, by the names that they have in ``text``.

    No number is given whose name the text already holds, in whatever place.
    """
    model = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelNew"), None)
    forward = next((node for node in model.body if getattr(node, "name", "") == "forward"), None) if model else None
    if not isinstance(forward, ast.FunctionDef):
        return {}
    taken = set(_ANY_WORD.findall(text))  # a walk of the tree takes ten times as long
    given = {one.arg for one in (*forward.args.args, *forward.args.kwonlyargs)}
    names: dict[str, str] = {}
    for node in (one for statement in forward.body for one in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in given | set(names):
            number = len(names) + 1
            while f"v{number}" in taken:
                number += 1
            names[node.id] = f"v{number}"
            taken.add(f"v{number}")
    return names


def _with_values(text: str, values: dict[str, str]) -> str:
    """Return ``text`` with these values' names replaced, also where pointers, strides and outputs carry them."""

    def other(found: re.Match[str]) -> str:
        word = found.group()
        for prefix in ("", "out_", "stride_"):
            rest = word.removeprefix(prefix)
            if rest in values and word.startswith(prefix):
                return prefix + values[rest]
            carried = _CARRIED.search(rest)
            if carried is not None and rest[: carried.start()] in values and word.startswith(prefix):
                return prefix + values[rest[: carried.start()]] + carried.group()
        return word

    return _WORD.sub(other, text)


def function_names(tree: ast.Module) -> dict[str, str]:
    """Return the numbered names of a file's kernels and launchers, by the names that they have."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    kernels = [node.name for node in functions if node.decorator_list and node.name.endswith("_kernel")]
    names: dict[str, str] = {}
    for number, kernel in enumerate(kernels, 1):
        names[kernel] = f"fused_{number}_kernel"
        names[kernel.removesuffix("_kernel")] = f"fused_{number}"
    return {name: names[name] for name in names if any(node.name == name for node in functions)}


def renamed(text: str, names: dict[str, str]) -> str:
    """Return ``text`` with these names replaced where they are functions, not attributes or other names' parts."""
    if not names:
        return text
    words = "|".join(sorted((re.escape(name) for name in names), key=len, reverse=True))
    # A launcher may be called as a value is: only where a call, a launch or a definition follows is it the function.
    pattern = re.compile(rf"(?<![\w.])({words})(?=[(\[])")
    return pattern.sub(lambda found: names[found.group(1)], text)


def _number(name: str) -> int:
    return int(name.split("_")[1])


def statement_text(node: ast.stmt, lines: list[str]) -> str:
    """Return a statement as it stands in its file's ``lines``, decorators included."""
    return "\n".join(lines[_first_line(node) : node.end_lineno])


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)]) - 1


def _unnested(kernel: ast.FunctionDef, lines: list[str]) -> str:
    if not kernel.decorator_list:
        return statement_text(kernel, lines)
    head_end = kernel.body[0].lineno - 1
    written = Unnested(set(_ANY_WORD.findall(statement_text(kernel, lines))))
    for statement in kernel.body:
        written.add(statement, lines)
    text = "\n".join(written.lines)
    return "\n".join(
        [*lines[_first_line(kernel) : head_end], _WORD.sub(lambda one: written.names.get(one[0], one[0]), text)]
    )


class Unnested:
    """Lines of a kernel in which every operation on values stands alone; ``taken`` are names that it has."""

    def __init__(self, taken: set[str]) -> None:
        self.lines: list[str] = []
        self.names: dict[str, str] = {}
        self._taken = taken
        self._count = 0
        self._loaded = False

    def add(self, statement: ast.stmt, source: list[str]) -> None:
        """Add a statement: in pieces where it computes values, as it stands where it does not."""
        value = _computed(statement) if self._loaded else None
        self._loaded = self._loaded or any(
            isinstance(node, ast.Call) and _called(node) == "load" for node in ast.walk(statement)
        )
        if value is None:
            self.lines += source[statement.lineno - 1 : statement.end_lineno]
            return
        changed = copy.deepcopy(statement)
        if isinstance(changed, ast.Assign):
            changed.value = self._flat(changed.value)
            target = changed.targets[0]
            if isinstance(target, ast.Name) and target.id not in self.names:
                self.names[target.id] = self._fresh()
        elif isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call):
            changed.value.args[1] = self._atom(changed.value.args[1])
        self._write(changed)

    def _write(self, statement: ast.stmt) -> None:
        self.lines.append("    " + ast.unparse(ast.fix_missing_locations(statement)))

    def _atom(self, value: ast.expr) -> ast.expr:
        if _is_atom(value):
            return value
        flat = self._flat(value)
        name = self._fresh()
        self._write(ast.Assign([ast.Name(name, ast.Store())], flat, lineno=0))
        return ast.Name(name, ast.Load())

    def _flat(self, value: ast.expr) -> ast.expr:
        """Return the operation with operands that are names, numbers or views of them."""
        if isinstance(value, ast.BinOp):
            value.left, value.right = self._atom(value.left), self._atom(value.right)
        elif isinstance(value, ast.UnaryOp):
            value.operand = self._atom(value.operand)
        elif isinstance(value, ast.Compare):
            value.left = self._atom(value.left)
            value.comparators = [self._atom(one) for one in value.comparators]
        elif isinstance(value, ast.Call):
            if isinstance(value.func, ast.Attribute) and not isinstance(value.func.value, ast.Name):
                value.func.value = self._atom(value.func.value)
            value.args = [self._atom(one) for one in value.args]
        elif isinstance(value, ast.Subscript):
            value.value = self._flat(value.value) if isinstance(value.value, ast.Call) else self._atom(value.value)
        return value

    def _fresh(self) -> str:
        self._count += 1
        while f"t{self._count}" in self._taken:
            self._count += 1
        return f"t{self._count}"


def _computed(statement: ast.stmt) -> ast.expr | None:
    """The expression of a statement that computes values, or none: indices, masks, loads, loops and products stay."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.value if _is_plain(statement.value) else None
    if (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _called(statement.value) == "store"
    ):
        stored = statement.value.args
        return stored[1] if len(stored) > 1 and _is_plain(stored[1]) and not _is_atom(stored[1]) else None
    return None


def _is_plain(value: ast.expr) -> bool:
    calls = [_called(node) for node in ast.walk(value) if isinstance(node, ast.Call)]
    if any(name in WHOLE_CALLS and name != "float" for name in calls):
        return False
    words = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    if words and all(word.isupper() or word.startswith(("row", "col", "mask", "n_", "tile", "pid")) for word in words):
        return False  # indices and masks
    return not any(isinstance(node, ast.IfExp | ast.BoolOp | ast.Lambda) for node in ast.walk(value))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_atom(value: ast.expr) -> bool:
    if isinstance(value, ast.Name | ast.Constant | ast.Attribute | ast.Tuple | ast.Slice):
        return True
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.operand, ast.Constant)
    if isinstance(value, ast.Subscript):
        return isinstance(value.value, ast.Name)
    return isinstance(value, ast.Call) and _called(value) == "float"
