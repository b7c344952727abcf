"""The form in which the nano model answers: the builtin compiler's file, shorter, with the reference's own constructor.

The compiler declares parameters by key and shape, which a small model would have to compute; here ``ModelNew`` repeats
the reference's ``__init__`` word for word, so that names and keys are copied and sizes need no arithmetic. Docstrings
of kernels and launchers go, and what spares the host time; device functions stay as they are. Then everything is
brought in the order in which it is easiest to write (:mod:`drk.training.answer_order`).

Left out: modules whose tensors no constructor can make again (the compiler's ``from_reference``).
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass

from drk.assistant.synth.launch import without_launch
from drk.training.answer_order import in_order, statement_text

_TRITON = ("import triton", "import triton.language as tl")
_FUNCTIONAL = re.compile(r"\bF\.")


class StyleError(ValueError):
    """The compiler's file cannot be written in this form; the message says why."""


@dataclass(frozen=True)
class Reference:
    """A reference file and the class in it that is made faster."""

    source: str
    target: str


def nano_answer(compiled: str, reference: Reference) -> str:
    """Return the compiler's file ``compiled`` in the nano model's form.

    Raises:
        StyleError: it needs what a constructor cannot make.
        SyntaxError: one of the files does not parse.
    """
    compiled = without_launch(compiled)
    tree, lines = ast.parse(compiled), compiled.splitlines()
    model = _class_named(tree, "ModelNew")
    if any(_is_function(item, "from_reference") for item in model.body):
        raise StyleError("it takes tensors over from the reference")
    parts = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name != "declare":
            is_kernel = bool(node.decorator_list) and not node.name.endswith("_kernel") and _is_device(node)
            parts.append(statement_text(node, lines) if is_kernel else _without_docstring(node, lines))
    forward = next(item for item in model.body if _is_function(item, "forward"))
    classes = _constructors(reference, _extra_lines(model, lines))
    body = "\n\n".join([*classes[1], textwrap.indent(textwrap.dedent(statement_text(forward, lines)), "    ")])
    head = f"{classes[0]}{_header(reference)}\n{body}"
    code = "\n\n\n".join([*(part.strip("\n") for part in parts), head])
    return in_order(f"{_imports(reference, code)}\n\n\n{code}\n")


def target_class(source: str) -> str:
    """Return the last class that is a module of torch.

    Raises:
        StyleError: there is none.
    """
    found = [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and _is_module(node)]
    if not found:
        raise StyleError("there is no module in the file")
    return found[-1]


def _imports(reference: Reference, code: str) -> str:
    tree, lines = ast.parse(reference.source), reference.source.splitlines()
    kept = [statement_text(node, lines) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    found = [line for line in kept if not line.endswith(" as F") and not line.startswith("from __future__")]
    found = [line for line in found if line != "import math" or "math." in code]
    if not any(line == "import torch" for line in found):
        found.append("import torch")
    if _FUNCTIONAL.search(code):
        found.append("import torch.nn.functional as F")
    return "\n".join([*dict.fromkeys(found), *_TRITON])


def _header(reference: Reference) -> str:
    node = _class_named(ast.parse(reference.source), reference.target)
    return f"class ModelNew({', '.join(ast.unparse(base) for base in node.bases)}):"


def _constructors(reference: Reference, extra: list[str]) -> tuple[str, list[str]]:
    """Return the text of other modules' constructors, and ModelNew's own as a list of one part or none."""
    tree, lines = ast.parse(reference.source), reference.source.splitlines()
    others, own = [], []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        made = [statement_text(item, lines) for item in node.body if _is_function(item, "__init__")]
        if node.name == reference.target:
            own = [re.sub(rf"super\({node.name}, self\)", "super(ModelNew, self)", text) for text in made]
        elif made:
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            others.append(f"class {node.name}({bases}):\n{made[0]}\n\n\n")
    if extra:
        own = own or ["    def __init__(self):\n        super().__init__()"]
        own = [own[0] + "\n" + "\n".join(f"        {line}" for line in extra)]
    return "".join(others), own


def _extra_lines(model: ast.ClassDef, lines: list[str]) -> list[str]:
    """Return the constructor's lines of the compiler that the reference's own do not replace: its constants."""
    init = next((item for item in model.body if _is_function(item, "__init__")), None)
    if not isinstance(init, ast.FunctionDef):
        return []
    texts = [textwrap.dedent(statement_text(item, lines)).strip() for item in init.body]
    return [text for text in texts if not text.startswith(("super(", "declare("))]


def _is_device(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(one) for one in node.decorator_list)


def _without_docstring(node: ast.FunctionDef, lines: list[str]) -> str:
    """Return the function's text without docstring and annotations of tensors."""
    first = node.body[0]
    kept = statement_text(node, lines).splitlines()
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        del kept[first.lineno - start : (first.end_lineno or first.lineno) - start + 1]
    text = "\n".join(kept)
    return text.replace(": torch.Tensor", "").replace(" -> torch.Tensor", "")


def _class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise StyleError(f"there is no class {name}")


def _is_module(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("Module") for base in node.bases)


def _is_function(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name
