"""Conversations again under other names: what a small model would else learn by heart from pairs that it sees often.

A shard's pairs are few beside what a training run reads. The module's own names (classes, arguments, attributes,
values) say nothing about the answer, so they are replaced, in the whole conversation and the answer alike, by new ones
of the same kinds (:mod:`drk.training.dressing`). The compiler makes names in the answer by joining the module's with
``_``; between such parts they are found and replaced too. A test holds answers to what the teacher says of the renamed
module.

Left out: names shorter than three letters, and those that texts hold for other reasons (``weight``, ``dim=``). They
stay, and so do constants, sizes, comments and launch choices.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable
from typing import Literal

from drk.assistant.synth.naming import is_kept
from drk.training.dressing import Dress, Slot

Kind = Slot | Literal["local"]

SHORTEST = 3
TRIES = 12
_WORD = re.compile(r"[A-Za-z_]\w*")
_KEPT = frozenset(("forward", "get_inputs", "get_init_inputs", "self", "ModelNew"))


class Renamer:
    """Gives conversations other names. ``texts`` are whole conversations, from which words that stay are learned."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._usual: set[str] = set()
        for text in texts:
            own = own_names(module_of(text))
            rest = _pattern(own).sub(" ", text) if own else text
            for word in set(_WORD.findall(rest)):
                self._usual.update(_parts(word))

    def renamed(self, text: str, rng: random.Random) -> str:
        """Return the conversation with as many of its module's own names replaced as can be told from other words."""
        own = {name: kind for name, kind in own_names(module_of(text)).items() if self._is_free(name)}
        taken = self._usual | set(_WORD.findall(text))
        dress = Dress(rng)
        dress.taken |= taken
        new: dict[str, str] = {}
        for name, kind in own.items():
            found = self._draw(dress, kind, taken)
            if found:
                new[name] = found
                taken.add(found)
        return _pattern(new).sub(lambda found: new[found[0]], text) if new else text

    def _is_free(self, name: str) -> bool:
        """Whether a name can be told from other words, and the compiler takes it as it is."""
        return len(name) >= SHORTEST and name not in self._usual and is_kept(name)

    def _draw(self, dress: Dress, kind: Kind, taken: set[str]) -> str:
        for _ in range(TRIES):
            found = dress.local() if kind == "local" else dress.name(kind)
            if found not in taken and self._is_free(found):
                return found
        return ""


def module_of(text: str) -> str:
    """Return the file that a conversation begins with."""
    return text.split("<|user|>", 1)[-1].split("<|end|>", 1)[0]


def own_names(source: str) -> dict[str, Kind]:
    """Return the names that a module's file defines itself, each with its kind; none where it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found = _Names()
    found.visit(tree)
    return {name: kind for name, kind in found.names.items() if name not in found.foreign}


class _Names(ast.NodeVisitor):
    """``names`` that a file defines, and ``foreign`` ones that are somebody else's too."""

    def __init__(self) -> None:
        self.names: dict[str, Kind] = {}
        self.foreign: set[str] = set(_KEPT)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names[node.name] = "class"
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        kind: Kind = "argument" if node.name == "__init__" else "input"
        for one in (*node.args.args, *node.args.kwonlyargs):
            self.names.setdefault(one.arg, kind)
        if not node.name.startswith("__"):
            self.names.setdefault(node.name, "local")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names.setdefault(node.id, "local")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            self.foreign.add(node.attr)
        elif isinstance(node.ctx, ast.Store):
            self.names[node.attr] = "attribute"
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.foreign.add(node.arg or "")
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.foreign.update((node.asname or node.name).split("."))


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])")


def _parts(word: str) -> Iterable[str]:
    """Yield what stands between underscores in ``word``, and every run of such parts."""
    parts = word.split("_")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield "_".join(parts[start:end])
