"""What a Python file defines, read from its syntax tree and never by running it.

For each class and function: its line, its parameters with annotations and defaults, what it returns as far as the
text says so, and whether a class is a ``torch.nn.Module``. A class counts as a module when one of its bases comes from
``torch.nn``, or is such a class of the same project; a class with a ``forward`` whose base comes from another library
is a likely module. Classes that other classes use are their parts.

Limits: names that only exist at run time (``setattr``, ``exec``, decorators that replace a class, names from ``import
*`` of a library) are not seen; whether a factory returns a module is known only from its annotation or its return
statements.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from drk.assistant.errors import TargetError

ModuleKind = Literal["yes", "likely", "no"]
ParameterKind = Literal["positional", "keyword", "var_positional", "var_keyword"]
SAME_MODULE_METHODS = frozenset(
    ["apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "to", "to_empty", "train"]
)
"""Methods of a module that return it."""
DefinitionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``annotation`` and ``default`` are source text, ``default`` None when it is required."""

    name: str
    kind: ParameterKind = "positional"
    annotation: str = ""
    default: str | None = None
    positional_only: bool = False

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is None and self.kind in ("positional", "keyword")

    def __str__(self) -> str:
        stars = {"var_positional": "*", "var_keyword": "**"}.get(self.kind, "")
        text = f"{stars}{self.name}" + (f": {self.annotation}" if self.annotation else "")
        return text if self.default is None else f"{text} = {self.default}"


@dataclass(frozen=True)
class FunctionEntry:
    """A function or method. ``returned`` are the dotted names whose call, or which themselves, it returns.

    ``returned_count`` is the number of elements where every return is a list or tuple literal of one length.
    """

    name: str
    line: int
    parameters: tuple[Parameter, ...] = ()
    returns: str = ""
    returned: tuple[str, ...] = ()
    returned_count: int | None = None
    is_async: bool = False


@dataclass(frozen=True)
class ClassEntry:
    """A class; nested ones carry a dotted name. ``used`` are all names that its body and bases mention."""

    name: str
    line: int
    bases: tuple[str, ...] = ()
    methods: Mapping[str, FunctionEntry] = field(default_factory=dict)
    used: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SourceIndex:
    """One file: ``imports`` maps a local name to its dotted origin, with leading dots for relative imports."""

    path: str
    classes: Mapping[str, ClassEntry]
    functions: Mapping[str, FunctionEntry]
    values: Mapping[str, tuple[int, str]]
    imports: Mapping[str, str]

    def names(self) -> list[str]:
        """Return everything that can be a target, in the file's order."""
        lines = {name: entry.line for name, entry in self.classes.items()}
        lines |= {name: entry.line for name, entry in self.functions.items()}
        return sorted(lines, key=lambda name: lines[name])


def parse_source(text: str, path: str) -> ast.Module:
    """Parse ``text``.

    Raises:
        TargetError: kind ``syntax`` with line and a caret under the fault.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Bad escapes: a DeprecationWarning up to Python 3.11, SyntaxWarning since.
            return ast.parse(text, filename=path)
    except SyntaxError as error:
        line = (error.text or "").rstrip("\r\n").replace("\t", " ")
        caret = f"{line}\n{' ' * max((error.offset or 1) - 1, 0)}^" if line else ""
        raise TargetError(
            f"{path} is not valid Python: {error.msg}", kind="syntax", file=path, line=error.lineno, cause=caret
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise TargetError(f"{path} cannot be parsed: {error}", kind="syntax", file=path) from error


def dotted_name(node: ast.AST) -> str:
    """Return ``a.b.c`` for a name or attribute chain, the called or subscripted name for those, else ``""``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted_name(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    if isinstance(node, ast.Subscript):
        return dotted_name(node.value)
    return ""


def _parameters(arguments: ast.arguments, skip_first: bool) -> tuple[Parameter, ...]:
    found: list[Parameter] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        default = ast.unparse(arguments.defaults[index - missing]) if index >= missing else None
        only = index < len(arguments.posonlyargs)
        found.append(Parameter(argument.arg, "positional", _annotation(argument), default, only))
    if skip_first:
        found = found[1:]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, "var_positional", _annotation(arguments.vararg)))
    for argument, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = ast.unparse(node) if node is not None else None
        found.append(Parameter(argument.arg, "keyword", _annotation(argument), default))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, "var_keyword", _annotation(arguments.kwarg)))
    return tuple(found)


def _annotation(argument: ast.arg) -> str:
    return "" if argument.annotation is None else _annotation_text(argument.annotation)


def _annotation_text(node: ast.expr) -> str:
    """Return an annotation's source; a quoted one without its quotes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)


def _own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Walk statements without entering nested functions, lambdas and classes."""
    stack: list[ast.AST] = list(reversed(body))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))


def _made_by(value: ast.expr) -> Iterator[str]:
    """Yield the dotted names that an expression calls, or is: ``Net(4).eval() if c else net`` -> ``Net``, ``net``."""
    if isinstance(value, ast.IfExp):
        yield from _made_by(value.body)
        yield from _made_by(value.orelse)
    elif isinstance(value, ast.Call):
        function = value.func
        if isinstance(function, ast.Attribute) and function.attr in SAME_MODULE_METHODS:
            yield from _made_by(function.value)
        else:
            yield dotted_name(function)
    else:
        yield dotted_name(value)


def _literal_count(value: ast.expr) -> int | None:
    """Return the length of a list or tuple literal without stars."""
    if not isinstance(value, (ast.List, ast.Tuple)) or any(isinstance(item, ast.Starred) for item in value.elts):
        return None
    return len(value.elts)


def _function(node: DefinitionNode, *, method: bool = False) -> FunctionEntry:
    static = any(dotted_name(decorator) == "staticmethod" for decorator in node.decorator_list)
    assigned: dict[str, str] = {}
    returned: list[str] = []
    counts: set[int | None] = set()
    for inner in _own_nodes(node.body):
        if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call):
            made = next(_made_by(inner.value), "")
            assigned.update((target.id, made) for target in inner.targets if isinstance(target, ast.Name))
        if isinstance(inner, ast.Return) and inner.value is not None:
            counts.add(_literal_count(inner.value))
            returned.extend(_made_by(inner.value))
    names = tuple(dict.fromkeys(assigned.get(name, name) for name in returned if name))
    count = next(iter(counts)) if len(counts) == 1 else None
    returns = _annotation_text(node.returns) if node.returns is not None else ""
    parameters = _parameters(node.args, skip_first=method and not static)
    return FunctionEntry(
        node.name, node.lineno, parameters, returns, names, count, isinstance(node, ast.AsyncFunctionDef)
    )


def _class(node: ast.ClassDef, prefix: str) -> Iterator[ClassEntry]:
    name = f"{prefix}{node.name}"
    methods = {
        child.name: _function(child, method=True)
        for child in node.body
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    used = frozenset(child.id for child in ast.walk(node) if isinstance(child, ast.Name))
    bases = tuple(filter(None, (dotted_name(base) for base in node.bases)))
    yield ClassEntry(name, node.lineno, bases, methods, used)
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _class(child, f"{name}.")


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        return
    module = "." * node.level + (node.module or "")
    for alias in node.names:
        separator = "" if module.endswith(".") else "."
        yield alias.asname or alias.name, f"{module}{separator}{alias.name}"


def _is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield module-level statements, those in ``if``, ``try`` and ``with`` too; not the main guard's."""
    for node in body:
        if _is_main_guard(node):
            continue
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from _top_level(part)


def index_source(text: str, path: str) -> SourceIndex:
    """Index one file.

    Raises:
        TargetError: kind ``syntax``.
    """
    classes: dict[str, ClassEntry] = {}
    functions: dict[str, FunctionEntry] = {}
    values: dict[str, tuple[int, str]] = {}
    imports: dict[str, str] = {}
    for node in _top_level(parse_source(text, path).body):
        if isinstance(node, ast.ClassDef):
            classes.update((entry.name, entry) for entry in _class(node, ""))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions[node.name] = _function(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.update(_imports(node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            called = dotted_name(node.value.func) if isinstance(node.value, ast.Call) else ""
            values.update((target.id, (node.lineno, called)) for target in targets if isinstance(target, ast.Name))
    return SourceIndex(path, classes, functions, values, imports)


# --- what is a module ------------------------------------------------------------------------------------------


def origin(index: SourceIndex, name: str) -> str:
    """Return the dotted origin of ``name`` in a file: ``nn.Module`` -> ``torch.nn.Module``; own names unchanged."""
    head, _, rest = name.partition(".")
    imported = index.imports.get(head)
    if imported is None:
        return name
    return f"{imported}.{rest}" if rest else imported


def is_torch_module(dotted: str) -> bool:
    """Whether a dotted origin is a class of ``torch.nn`` (its functions and parameters excluded)."""
    last = dotted.rpartition(".")[2]
    excluded = ("Parameter", "Buffer", "UninitializedParameter")
    inside = dotted.startswith("torch.nn.") and not dotted.startswith(("torch.nn.functional.", "torch.nn.init."))
    return inside and last[:1].isupper() and last not in excluded
