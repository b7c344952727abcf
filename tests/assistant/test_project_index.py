from __future__ import annotations

from pathlib import Path

import pytest

from drk.assistant.import_closure import Closure
from drk.assistant.project_index import ProjectIndex


def project(entry, **files):
    texts = {f"{name.replace('__', '/')}.py": text for name, text in files.items()}
    texts["pkg/__init__.py"] = texts.pop("pkg.py", "")
    return ProjectIndex(Closure(Path("/nowhere"), entry, texts))


BASE = """
from torch import nn

class Base(nn.Module):
    def __init__(self, dim): ...
    def forward(self, x, y=1): ...
"""


@pytest.mark.parametrize(
    ("entry", "text", "files"),
    [
        ("model.py", "from base import Base\n", {"base": BASE}),
        ("model.py", "import base as b\nBase = 3\n", {"base": BASE}),
        ("pkg/model.py", "from .base import Base\n", {"pkg__base": BASE}),
        ("pkg/model.py", "from pkg import Base\n", {"pkg": "from .base import Base\n", "pkg__base": BASE}),
        ("pkg/model.py", "from . import base as b\n", {"pkg__base": BASE}),
        ("pkg/model.py", "from .base import *\n", {"pkg__base": BASE}),
    ],
)
def test_bases_in_other_files(entry, text, files):
    name = "b.Base" if " as b" in text else "Base"
    net = f"{text}class Net({name}): ...\nclass Plain: ...\n"
    index = project(entry, **{entry.removesuffix(".py").replace("/", "__"): net, **files})
    classes = index.entry.classes
    assert index.module_kind(entry, classes["Net"]) == "yes"
    assert index.module_kind(entry, classes["Plain"]) == "no"
    assert [p.name for p in index.method(entry, classes["Net"], "forward").parameters] == ["x", "y"]
    assert [module.name for module in index.modules()] == ["Net"]


def test_circles_of_names_and_bases_end():
    index = project("a.py", a="from b import X\nclass Y(X): ...\n", b="from a import X\n")
    assert index.module_kind("a.py", index.entry.classes["Y"]) == "no"
    index = project("a.py", a="class X(Y): ...\nclass Y(X): ...\ndef f(): return g()\ndef g(): return f()\n")
    assert index.module_kind("a.py", index.entry.classes["X"]) == "no"
    assert not index.is_factory("a.py", index.entry.functions["f"])


def test_plain_modules_are_told_from_library_ones():
    text = "from torch import nn\nclass A(nn.Module): ...\nclass B(A): ...\nclass C(nn.Linear): ...\n"
    index = project("a.py", a=text)
    plain = [name for name, entry in index.entry.classes.items() if index.derives_from_plain_module("a.py", entry)]
    assert plain == ["A", "B"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def f() -> nn.Module: ...", True),
        ("def f() -> 'Net': ...", True),
        ("def f():\n    return nn.Linear(1, 2).to('cuda')", True),
        ("def f(fast):\n    return torch.compile(Net()) if fast else Net()", True),
        ("def f(x):\n    return F.relu(x)", False),
        ("def f(x):\n    return nn.Linear(1, 2)(x)", False),
        ("def f(x):\n    def inner():\n        return Net()\n    return x", False),
        ("def f() -> torch.Tensor:\n    return make()", False),
    ],
)
def test_factories(body, expected):
    head = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\nclass Net(nn.Module): ...\n"
    index = project("a.py", a=head + body + "\n")
    assert index.is_factory("a.py", index.entry.functions["f"]) is expected
