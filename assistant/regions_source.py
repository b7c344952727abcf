"""One candidate for the whole module, put together from candidates for its regions.

The sources stand one after the other with their top-level names made different; each ``ModelNew`` becomes ``PartN``.
``ModelNew.from_reference`` takes the original module and lets the parts at :data:`PARTS` run their kernels on their own
parameters and buffers; everything else stays the original's code. The gym judges this as any other candidate, so what
is reported for the whole module was judged and timed as a whole.

Left out: names are told apart by their tokens, not by scopes; a source that this breaks is refused by the gym.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FUTURE = "from __future__ import annotations"


@dataclass(frozen=True)
class RegionSource:
    """An accepted candidate's source, and the paths of the parts that it replaces."""

    paths: tuple[str, ...]
    source: str


_TAIL = '''\
PARTS = {
%(places)s}


def place(part: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Let ``part`` run the kernels of ``kind`` on its own parameters and buffers."""
    new = kind.from_reference(part) if hasattr(kind, "from_reference") else kind()
    new.train(part.training)
    for name, _ in [*new.named_parameters(remove_duplicate=False), *new.named_buffers(remove_duplicate=False)]:
        path, _, leaf = name.rpartition(".")
        try:
            theirs = part.get_submodule(path)
        except AttributeError:
            continue
        mine = new.get_submodule(path)
        for ours, other in ((mine._parameters, theirs._parameters), (mine._buffers, theirs._buffers)):
            if leaf in ours and other.get(leaf) is not None:
                ours[leaf] = other[leaf]
    part.forward = new.forward


class ModelNew(torch.nn.Module):
    """The original with kernels in %(count)s; everything else is the original's own code."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__()

    @classmethod
    def from_reference(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Return the original itself, with its parts changed."""
        for path, kind in PARTS.items():
            place(model.get_submodule(path), kind)
        return model
'''


def compose(regions: Sequence[RegionSource]) -> str:
    """Return the source of a candidate that replaces all these regions.

    Raises:
        ValueError: there is none, or a source is no Python.
    """
    if not regions:
        raise ValueError("there are no regions to put together")
    pieces = []
    for number, region in enumerate(regions, start=1):
        names = {name: f"{name}_{number}" for name in top_names(region.source)}
        pieces.append(_without_future(rename(region.source, {**names, "ModelNew": f"Part{number}"})).strip())
    rows = [(path, number) for number, region in enumerate(regions, start=1) for path in region.paths]
    places = "".join(f'    "{path}": Part{number},\n' for path, number in rows)
    count = "one part" if len(rows) == 1 else f"{len(rows)} parts"
    tail = _TAIL % {"places": places, "count": count}
    return "\n\n\n".join([f'"""Kernels for parts of a module."""\n\n{FUTURE}\n\nimport torch', *pieces, tail])


def top_names(source: str) -> set[str]:
    """Return the names that a source defines at its top level, imported ones left out."""
    names: set[str] = set()
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"a source is no Python: {error.msg}") from error
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {one.id for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def rename(source: str, names: Mapping[str, str]) -> str:
    """Return the source with these names changed wherever they stand, attributes left as they are."""
    lines = source.splitlines(keepends=True)
    edits: list[tuple[int, int, int, str]] = []
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in names and before != ".":
            edits.append((token.start[0], token.start[1], token.end[1], names[token.string]))
        elif token.type == tokenize.STRING and token.string.strip("\"'") in names and before == "->":
            edits.append((token.start[0], token.start[1] + 1, token.end[1] - 1, names[token.string.strip("\"'")]))
        before = token.string
    for row, start, end, text in reversed(edits):
        line = lines[row - 1]
        lines[row - 1] = line[:start] + text + line[end:]
    return "".join(lines)


def _without_future(source: str) -> str:
    return "".join(line for line in source.splitlines(keepends=True) if not line.startswith("from __future__ import"))
