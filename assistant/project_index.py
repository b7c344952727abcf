"""Looks classes and functions up across the files of an import closure, by name and by inheritance.

Answers what one file alone cannot: whether a class is a ``torch.nn.Module`` when its base lies in another file, and
which constructor or ``forward`` it inherits. Works on text only; see :mod:`drk.assistant.source_index` for limits. A
name is followed through imports and re-exports of the project at most 32 times.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from drk.assistant.errors import TargetError
from drk.assistant.import_closure import Closure
from drk.assistant.source_index import (
    ClassEntry,
    FunctionEntry,
    ModuleKind,
    SourceIndex,
    index_source,
    is_torch_module,
    origin,
)

MAX_HOPS = 32
PLAIN_MODULES = ("torch.nn.Module", "torch.nn.modules.module.Module", "torch.nn.modules.Module", "object")
FACTORY_WRAPPERS = ("torch.compile", "torch.jit.script", "torch.nn.DataParallel")


class ProjectIndex:
    """The closure's files, indexed when first asked for."""

    def __init__(self, closure: Closure) -> None:
        self.closure = closure
        self._indexed: dict[str, SourceIndex] = {}

    @property
    def entry(self) -> SourceIndex:
        """The entry file's index."""
        return self.file(self.closure.entry)

    def file(self, path: str) -> SourceIndex:
        """Return the index of one file.

        Raises:
            TargetError: kind ``syntax``.
        """
        if path not in self._indexed:
            self._indexed[path] = index_source(self.closure.files[path], path)
        return self._indexed[path]

    def _module_file(self, path: str, dotted: str) -> str | None:
        """Return the file that the module ``dotted``, as written in ``path``, stands for."""
        level = len(dotted) - len(dotted.lstrip("."))
        steps = dotted.lstrip(".").split(".") if dotted.lstrip(".") else []
        if level:
            folder = PurePosixPath(path).parent
            for _ in range(level - 1):
                folder = folder.parent
            bases = [folder]
        else:
            bases = [PurePosixPath(folder) for folder in self.closure.search]
        for base in bases:
            whole = base.joinpath(*steps)
            for candidate in (f"{whole}.py", str(whole / "__init__.py")):
                if candidate in self.closure.files:
                    return candidate
        return None

    def find(self, path: str, name: str, hops: int = 0) -> tuple[str, ClassEntry | FunctionEntry] | None:
        """Return the file and entry that ``name``, as written in ``path``, stands for; None when it is not ours."""
        if hops > MAX_HOPS:
            return None
        try:
            index = self.file(path)
        except TargetError:
            return None
        own = index.classes.get(name) or index.functions.get(name)
        if own is not None:
            return path, own
        dotted = origin(index, name)
        if dotted == name and name.partition(".")[0] not in index.imports:
            return self._star(index, path, name, hops)
        module, _, last = dotted.rpartition(".")
        module = module or "." * (len(dotted) - len(dotted.lstrip(".")))
        file = self._module_file(path, module)
        return self.find(file, last, hops + 1) if file is not None and file != path else None

    def _star(
        self, index: SourceIndex, path: str, name: str, hops: int
    ) -> tuple[str, ClassEntry | FunctionEntry] | None:
        star = index.imports.get("*")
        file = self._module_file(path, star.removesuffix("*").rstrip(".") or ".") if star else None
        return self.find(file, name, hops + 1) if file is not None and file != path else None

    def find_class(self, path: str, name: str) -> tuple[str, ClassEntry] | None:
        """As :meth:`find`, for classes only."""
        found = self.find(path, name)
        return (found[0], found[1]) if found is not None and isinstance(found[1], ClassEntry) else None

    def module_kind(self, path: str, entry: ClassEntry, hops: int = 0) -> ModuleKind:
        """Say whether a class is a ``torch.nn.Module``: ``yes``, ``likely`` (a foreign base and a forward), ``no``."""
        kinds: set[ModuleKind] = set()
        index = self.file(path)
        foreign = False
        for base in entry.bases:
            if is_torch_module(origin(index, base)):
                return "yes"
            found = self.find_class(path, base)
            if found is not None and hops < MAX_HOPS:
                kinds.add(self.module_kind(*found, hops + 1))
            elif base.partition(".")[0] in index.imports:
                foreign = True
        if "yes" in kinds:
            return "yes"
        return "likely" if "likely" in kinds or (foreign and "forward" in entry.methods) else "no"

    def method(self, path: str, entry: ClassEntry, name: str, hops: int = 0) -> FunctionEntry | None:
        """Return a method, inherited ones of the project included; None when it is a library's."""
        if name in entry.methods:
            return entry.methods[name]
        for base in entry.bases:
            found = self.find_class(path, base)
            if found is not None and hops < MAX_HOPS:
                inherited = self.method(*found, name, hops + 1)
                if inherited is not None:
                    return inherited
        return None

    def derives_from_plain_module(self, path: str, entry: ClassEntry, hops: int = 0) -> bool:
        """Whether every base is ``torch.nn.Module`` itself or a class of the project that derives from nothing else."""
        index = self.file(path)
        for base in entry.bases:
            if origin(index, base) in PLAIN_MODULES:
                continue
            found = self.find_class(path, base)
            if found is None or hops >= MAX_HOPS or not self.derives_from_plain_module(*found, hops + 1):
                return False
        return True

    def modules(self) -> list[ClassEntry]:
        """Return the entry file's module classes in the file's order, certain ones only when there are any."""
        path = self.closure.entry
        kinds = {entry.name: self.module_kind(path, entry) for entry in self.entry.classes.values()}
        wanted = "yes" if "yes" in kinds.values() else "likely"
        return [entry for entry in self.entry.classes.values() if kinds[entry.name] == wanted]

    def is_module_name(self, path: str, name: str) -> bool:
        """Whether ``name``, as written in ``path``, is a module class."""
        if is_torch_module(origin(self.file(path), name)):
            return True
        found = self.find_class(path, name)
        return found is not None and self.module_kind(*found) != "no"

    def is_factory(self, path: str, function: FunctionEntry, hops: int = 0) -> bool:
        """Whether the text says that a function returns a module: by annotation, or by what it returns."""
        index = self.file(path)
        annotation = function.returns.partition("[")[0].strip()
        if annotation and self.is_module_name(path, annotation):
            return True
        for name in function.returned:
            if self.is_module_name(path, name) or origin(index, name) in FACTORY_WRAPPERS:
                return True
            found = self.find(path, name)
            inner = found[1] if found is not None else None
            if found is None or not isinstance(inner, FunctionEntry) or hops >= MAX_HOPS:
                continue
            if self.is_factory(found[0], inner, hops + 1):
                return True
        return False
