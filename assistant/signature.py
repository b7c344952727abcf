"""What a constructor, a ``forward`` or a function needs, and whether given arguments fill it.

Built on parameters as :mod:`drk.assistant.source_index` reads them. A check is by name and count only; values and types
are known to the Runner. The words of "missing" errors, with the line to type, are made here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from drk.assistant.errors import TargetError, UsageError, did_you_mean
from drk.assistant.input_language import parse_arguments
from drk.assistant.project_index import ProjectIndex
from drk.assistant.source_index import ClassEntry, FunctionEntry, Parameter
from drk.gym.schema import Call

_EXAMPLES = (("bool", "true"), ("int", "1024"), ("float", "0.1"), ("str", '"text"'))


@dataclass(frozen=True)
class Need:
    """The parameters of ``owner`` (``Net.forward``), defined at ``line`` of ``file``."""

    owner: str
    parameters: tuple[Parameter, ...]
    line: int | None = None

    @property
    def required(self) -> tuple[Parameter, ...]:
        """Parameters that a call must give."""
        return tuple(parameter for parameter in self.parameters if parameter.required)

    def takes(self, count: int) -> bool:
        """Whether ``count`` positional arguments fill it."""
        positional = [p for p in self.parameters if p.kind == "positional"]
        open_ended = any(p.kind == "var_positional" for p in self.parameters)
        if any(p.kind == "keyword" for p in self.required):
            return False
        return sum(p.required for p in positional) <= count and (open_ended or count <= len(positional))

    def missing(self, option: str, file: str, target: str, why: str, given: Sequence[str] = ()) -> TargetError:
        """Return the error that names the arguments that nobody gave, with the line to type."""
        lacking = [p for p in self.required if p.name not in given]
        told = ", ".join(str(parameter) for parameter in lacking)
        typed = " ".join(f"{option} '{p.name}={example_value(p, option)}'" for p in lacking)
        named = "get_init_inputs" if option == "--init" else "example_inputs"
        return TargetError(
            f"{self.owner} needs {told}, and nobody gave {'it' if len(lacking) == 1 else 'them'}",
            kind="missing-inputs" if option == "--input" else "missing-init",
            file=file,
            line=self.line,
            cause=why,
            help=f"type, with your own shapes and values,\n{file}:{target} {typed}\nor define {named}() in the file",
        )


def example_value(parameter: Parameter, option: str) -> str:
    """Return a value that shows the form of what to type."""
    if option == "--input" and not parameter.annotation:
        return "f32[8,128,1024]"
    for word, example in _EXAMPLES:
        if re.search(rf"\b{word}\b", parameter.annotation):
            return example
    if option == "--init":
        return "1024"
    return "i64[8,128]{0..1000}" if "LongTensor" in parameter.annotation else "f32[8,128,1024]"


def function_need(entry: FunctionEntry) -> Need:
    """Return what a plain function needs."""
    return Need(entry.name, entry.parameters, entry.line)


def forward_need(project: ProjectIndex, path: str, entry: ClassEntry) -> Need | None:
    """Return what ``forward`` needs; None when it is a library's."""
    found = project.method(path, entry, "forward")
    return Need(f"{entry.name}.forward", found.parameters, found.line) if found is not None else None


def constructor_need(project: ProjectIndex, path: str, entry: ClassEntry) -> Need | None:
    """Return what the constructor needs; None when it is a library's.

    A class without ``__init__`` anywhere that derives from ``torch.nn.Module`` itself needs nothing.
    """
    found = project.method(path, entry, "__init__")
    if found is not None:
        return Need(entry.name, found.parameters, found.line)
    return Need(entry.name, (), entry.line) if project.derives_from_plain_module(path, entry) else None


def check_call(texts: Sequence[str], option: str, need: Need | None, file: str, target: str = "") -> Call:
    """Parse the texts and check them against ``need``.

    Raises:
        UsageError: malformed, an unknown name, too many arguments, or one given twice.
        TargetError: a required one is missing.
    """
    call = parse_arguments(texts, option)
    if need is None:
        return call
    positional = [p for p in need.parameters if p.kind == "positional"]
    if len(call.args) > len(positional) and not any(p.kind == "var_positional" for p in need.parameters):
        told = ", ".join(p.name for p in positional) or "none"
        raise UsageError(
            f"{option}: {need.owner} takes {len(positional)} positional arguments ({told}), not {len(call.args)}"
        )
    filled = [p.name for p in positional[: len(call.args)]]
    names = [p.name for p in need.parameters if p.kind in ("positional", "keyword") and not p.positional_only]
    for name in call.kwargs:
        if name in filled:
            raise UsageError(f"{option}: {name} is given twice, by position and by name")
        if name not in names and not any(p.kind == "var_keyword" for p in need.parameters):
            advice = did_you_mean(name, names) or f"it takes: {', '.join(names) or 'nothing'}"
            raise UsageError(f"{option}: {need.owner} has no parameter {name!r}", help=advice)
    given = [*filled, *call.kwargs]
    if any(p.name not in given for p in need.required):
        raise need.missing(option, file, target, "", given)
    return call
