"""Under which name, and with which search path, a project's file is imported.

Pure functions over relative POSIX paths, shared by the side that collects a file's imports without running anything
and by the sandboxed side that imports them, so that both agree. A file inside packages gets its dotted name; a
file whose stem is no identifier (``my-model.py``, ``1.py``) or would hide a module that is already loaded gets a
unique name. Folders without ``__init__.py`` are namespace packages when the file imports relatively.

Left out: ``.pth`` files, import hooks, zip imports, packages whose ``__path__`` is changed at run time.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import PurePosixPath

ENTRY_PREFIX = "drk_entry_"


@dataclass(frozen=True)
class ModulePlace:
    """``name`` is dotted below ``search[0]``; ``search`` are folders relative to the root, first one first.

    ``synthetic`` names a package that must be made up for the entry's folder, or is empty.
    """

    name: str
    search: tuple[str, ...]
    synthetic: str = ""


def package_top(entry: str, files: Container[str]) -> str:
    """Return the folder (relative to the root, ``.`` for it) that holds the outermost package around ``entry``."""
    folder = PurePosixPath(entry).parent
    while str(folder) != "." and str(folder / "__init__.py") in files:
        folder = folder.parent
    return str(folder)


def _search(first: str, entry: str) -> tuple[str, ...]:
    folder = str(PurePosixPath(entry).parent)
    wanted = [first, folder, ".", "src"]
    return tuple(dict.fromkeys(wanted))


def place_module(
    entry: str, files: Container[str], *, relative: bool = False, taken: Container[str] = ()
) -> ModulePlace:
    """Return how to import ``entry``, a path relative to the root that holds ``files``.

    Args:
        entry: POSIX path of the file.
        files: all paths of the project that can be imported.
        relative: whether the file itself uses relative imports (then a folder without ``__init__.py`` is a package).
        taken: module names that must not be replaced.
    """
    path = PurePosixPath(entry)
    folder = path.parent
    in_package = str(folder) != "." and str(folder / "__init__.py") in files
    top = package_top(entry, files) if in_package else str(folder)
    if not in_package and relative and str(folder) != ".":
        top = "."
        in_package = True
    if not in_package and relative:
        package = f"{ENTRY_PREFIX}package"
        return ModulePlace(f"{package}.{_identifier(path.stem)}", _search(top, entry), synthetic=package)
    inner = path.relative_to(top).with_suffix("") if top != "." else path.with_suffix("")
    parts = list(inner.parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    clean = all(part.isidentifier() for part in parts) and ".".join(parts) not in taken and parts[0] not in taken
    if clean:
        return ModulePlace(".".join(parts), _search(top, entry))
    if len(parts) > 1 and all(part.isidentifier() for part in parts[:-1]) and parts[0] not in taken:
        return ModulePlace(".".join([*parts[:-1], _identifier(parts[-1])]), _search(top, entry))
    return ModulePlace(ENTRY_PREFIX + _identifier("_".join(parts)), _search(top, entry))


def _identifier(text: str) -> str:
    cleaned = "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in text)
    return cleaned if cleaned.isidentifier() else f"_{cleaned}"
