"""Collects the sources that a file needs: its import closure inside its project root, without running anything.

Imports are followed in the text, also inside functions (in the entry file only, where the whole would be too large),
``try`` and ``if``, but not under ``if TYPE_CHECKING``; absolute ones on the folders where the file would find them (its
own, its package's top, the project root, ``src``), relative ones from their package, with the
``__init__.py`` of each package on the way; ``importlib.import_module("literal")`` too. Whatever is not found
under the root is taken for an installed package. The project root is the nearest parent with ``pyproject.toml``,
``setup.py``, ``setup.cfg`` or ``.git``, else the folder above the outermost package, else the file's own.

Limits: only ``.py`` files travel. Data files, compiled extensions, modules imported by a computed name and packages
that are changed by ``.pth`` files or import hooks do not. A source is decoded as Python would do it (BOM, coding
cookie); its cookie is rewritten to utf-8, since sources are written as UTF-8 where they are run.
"""

from __future__ import annotations

import ast
import codecs
import importlib.machinery
import io
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from drk.assistant.errors import TargetError
from drk.assistant.source_index import dotted_name, parse_source
from drk.gym.module_names import place_module
from drk.gym.wire import MAX_SOURCE_BYTES

MAX_FILES = 2000
ROOT_MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_COOKIE = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)([-\w.]+)", re.ASCII)


@dataclass(frozen=True)
class Closure:
    """``files`` maps paths relative to ``root`` to text; ``external`` are names that were not found in the project."""

    root: Path
    entry: str
    files: dict[str, str]
    external: frozenset[str] = frozenset()
    search: tuple[str, ...] = (".",)


def decode_source(data: bytes, path: str) -> str:
    """Decode source bytes as Python does; a byte order mark is dropped, line ends stay as they are.

    Raises:
        TargetError: kind ``not-python`` (binary data, or an encoding that is unknown or does not fit).
    """
    if b"\0" in data:
        raise TargetError(f"{path} is a binary file, not Python source", kind="not-python", file=path)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        advice = "save it as UTF-8, or name its encoding in the first line: # -*- coding: latin-1 -*-"
        raise TargetError(f"{path} cannot be decoded: {error}", kind="not-python", file=path, help=advice) from error
    return _cookie_to_utf8(text)


def _cookie_to_utf8(text: str) -> str:
    lines = text.splitlines(keepends=True)
    for index, line in enumerate(lines[:2]):
        match = _COOKIE.match(line)
        if match and codecs.lookup(match.group(2)).name != "utf-8":
            lines[index] = f"{match.group(1)}utf-8{line[match.end() :]}"
            return "".join(lines)
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return text


def read_source(path: Path, shown: str) -> str:
    """Read and decode one file.

    Raises:
        TargetError: kinds ``unreadable``, ``too-large``, ``not-python``.
    """
    try:
        size = path.stat().st_size
        if size > MAX_SOURCE_BYTES:
            raise TargetError(
                f"{shown} is larger than the limit for sources ({size} > {MAX_SOURCE_BYTES} bytes)",
                kind="too-large",
                file=shown,
            )
        data = path.read_bytes()
    except OSError as error:
        raise TargetError(f"cannot read {shown}: {error.strerror}", kind="unreadable", file=shown) from error
    return decode_source(data, shown)


def find_root(path: Path) -> Path:
    """Return the project root of the file at ``path`` (absolute)."""
    for folder in path.parents:
        if any((folder / marker).exists() for marker in ROOT_MARKERS):
            return folder
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


@dataclass(frozen=True)
class _Import:
    module: str
    level: int = 0
    names: tuple[str, ...] = ()


def _walk(tree: ast.Module, deep: bool) -> Iterator[ast.AST]:
    """Yield nodes, without what only type checkers read; function bodies only when ``deep``."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If) and dotted_name(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            stack.extend(node.orelse)
        elif deep or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))


def _found_imports(tree: ast.Module, deep: bool = True) -> Iterator[_Import]:
    for node in _walk(tree, deep):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(alias.name)
        elif isinstance(node, ast.ImportFrom):
            yield _Import(node.module or "", node.level, tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            literal = node.args[0].value
            if name in ("import_module", "__import__") and isinstance(literal, str) and not literal.startswith("."):
                yield _Import(literal)


class _Collector:
    """Follows imports breadth first below one root."""

    def __init__(self, root: Path, entry: str, deep: bool) -> None:
        self.root = root
        self.entry = entry
        self.deep = deep
        self.files: dict[str, str] = {}
        self.external: set[str] = set()
        self.search: tuple[str, ...] = (".",)
        self.queue: list[str] = []
        self.bytes = 0

    def add(self, path: str) -> bool:
        """Take the file at ``path`` (relative) in, if it is there."""
        if path in self.files:
            return True
        file = self.root / path
        if not file.is_file():
            return False
        text = read_source(file, path)
        self.files[path] = text
        self.bytes += len(text.encode("utf-8", "surrogatepass"))
        if self.bytes > MAX_SOURCE_BYTES or len(self.files) > MAX_FILES:
            raise TargetError(
                f"{self.entry} imports more than {MAX_SOURCE_BYTES} bytes or {MAX_FILES} files of its project",
                kind="too-large",
                file=self.entry,
                help="move the module and what it needs into a smaller file",
            )
        self.queue.append(path)
        return True

    def add_packages(self, folder: PurePosixPath, top: PurePosixPath) -> None:
        """Take in the ``__init__.py`` of every package from ``folder`` up to below ``top``."""
        while folder != top and str(folder) != ".":
            self.add(str(folder / "__init__.py"))
            folder = folder.parent

    def add_module(self, base: PurePosixPath, dotted: str) -> bool:
        """Take in module ``dotted`` below the folder ``base``: a file, or a package with its parents."""
        path = base.joinpath(*dotted.split(".")) if dotted else base
        is_package = self.add(str(path / "__init__.py"))
        found = is_package or self.add(f"{path}.py") or (self.root / path).is_dir()
        if found:
            self.add_packages(path.parent, base)
        return found

    def follow(self, path: str) -> None:
        """Take in everything that the file at ``path`` imports."""
        try:
            tree = parse_source(self.files[path], path)
        except TargetError:
            if path == self.entry:
                raise
            return  # The Runner's import will say so, if the file is really imported.
        for item in _found_imports(tree, self.deep or path == self.entry):
            if item.level:
                folder = PurePosixPath(path).parent
                for _ in range(item.level - 1):
                    folder = folder.parent
                bases = [folder]
            else:
                bases = [PurePosixPath(folder) for folder in self.search]
            if not any(self.import_from(base, item) for base in bases) and not item.level:
                self.external.add(item.module.split(".")[0])

    def import_from(self, base: PurePosixPath, item: _Import) -> bool:
        if not item.level and not self.is_local(base, item.module):
            return False
        found = self.add_module(base, item.module)
        for name in item.names if found else ():
            if name != "*":
                self.add_module(base, f"{item.module}.{name}" if item.module else name)
        return found

    def is_local(self, base: PurePosixPath, dotted: str) -> bool:
        head = self.root / base / dotted.split(".")[0]
        if head.with_suffix(".py").is_file() or (head / "__init__.py").is_file():
            return True
        # A folder without __init__.py is a namespace package, which gives way to any installed one.
        whole = (self.root / base).joinpath(*dotted.split("."))
        return (whole.is_dir() or whole.with_suffix(".py").is_file()) and not self.is_installed(head.name)

    def is_installed(self, name: str) -> bool:
        spec = importlib.machinery.PathFinder.find_spec(name)
        origin = spec.origin if spec is not None else None
        return origin is not None and not Path(origin).is_relative_to(self.root)


def collect(path: Path) -> Closure:
    """Return the import closure of the file at ``path``.

    Where following every import exceeds the limits, imports inside functions are followed in the entry file only.

    Raises:
        TargetError: kinds ``syntax`` (the entry), ``unreadable``, ``not-python``, ``too-large``.
    """
    try:
        return _collect(path, deep=True)
    except TargetError as error:
        if error.kind != "too-large":
            raise
    return _collect(path, deep=False)


def _collect(path: Path, *, deep: bool) -> Closure:
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - links are kept: imports are found beside the link
    root = find_root(absolute)
    entry = absolute.relative_to(root).as_posix()
    collector = _Collector(root, entry, deep)
    collector.add(entry)
    tree = parse_source(collector.files[entry], entry)
    relative = any(item.level for item in _found_imports(tree))
    packages = [str(folder / "__init__.py") for folder in PurePosixPath(entry).parents]
    present = {name for name in packages if (root / name).is_file()} | {entry}
    place = place_module(entry, present, relative=relative)
    collector.search = place.search
    if "." in place.name:
        collector.add_packages(PurePosixPath(entry).parent, PurePosixPath(place.search[0]))
    while collector.queue:
        collector.follow(collector.queue.pop(0))
    return Closure(root, entry, collector.files, frozenset(collector.external), collector.search)
