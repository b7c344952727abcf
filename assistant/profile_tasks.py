"""Tasks from a recording: what ``drk optimize --from-profile`` takes, and the inputs that module rows show.

A class of the user's own that was called becomes a target of its own (``model.py:Mlp``), built with the arguments that
its objects were built with; another module becomes a part of its root (``model.py:Net.blocks.0.norm``). All objects of
one class that were built alike are one target: their kinds of calls are added up, and each kind is a Task whose weight
is its share of the calls.

Left out: weights (trained values stay in the program), classes made inside functions, arguments that have no form.
Why a module has no Task stands with its inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drk.assistant.errors import DrkError
from drk.assistant.input_capture import ArgumentReader, UnsupportedArgument
from drk.assistant.input_language import format_argument, is_integer
from drk.assistant.intake import constructor_inputs, locate_target
from drk.assistant.profile_recording import RecordedKind, RecordedModule, Recording
from drk.assistant.report import InputKind, ModuleRow, Report
from drk.assistant.report_source import SourcePlaces
from drk.assistant.state_file import build_blob
from drk.assistant.target import Located
from drk.gym.schema import Argument, Inputs, Mode, Precision, Task, TensorSpec

MAX_TARGETS = 16
MAX_KINDS = 6
MAX_PARTS = 8
"""Library modules (``nn.Linear``) that become targets as a part of their root."""


@dataclass(frozen=True)
class SavedTask:
    """A Task and the folder name under which it is saved."""

    name: str
    task: Task


@dataclass(frozen=True)
class _Target:
    """Modules that are one target: ``label`` is ``file:Class`` or ``file:Root.part``, relative to the root folder.

    ``init`` is how it was built; ``part`` the other form of a class, as a part of its root, for when that is not known.
    """

    label: str
    init: int | None
    modules: tuple[RecordedModule, ...]
    share: float
    part: _Target | None = None


def with_tasks(
    report: Report, recording: Recording, folder: Path, *, precision: Precision = "match"
) -> tuple[Report, list[SavedTask]]:
    """Return the report with inputs and targets in its module rows, and the tasks to save beside it.

    Args:
        report: without inputs.
        recording: of the same process.
        folder: where the recorder left raw values.
        precision: goes into each Task.
    """
    writer = _Writer(Path(report.root), recording, folder, precision)
    rows = {row.name: row for row in report.modules}
    names = recording.module_names()
    targets = _targets(report, recording, names)
    for target in targets:
        label, kinds = writer.kinds(target)
        for module in target.modules:
            name = names[module.id]
            if name in rows:
                label = label if any(kind.task for kind in kinds.values()) else ""
                rows[name] = replace(rows[name], inputs=_own(module, kinds), target=label)
    seen = {module.id for target in targets for module in target.modules}
    for module in recording.modules:
        if module.id not in seen and names[module.id] in rows:
            rows[names[module.id]] = replace(rows[names[module.id]], inputs=writer.untargeted(module))
    return replace(report, modules=tuple(rows[row.name] for row in report.modules)), writer.saved


def _targets(report: Report, recording: Recording, names: dict[int, str]) -> list[_Target]:
    """Return the targets, by share of the time."""
    rows = {row.name: row for row in report.modules}
    places = SourcePlaces(Path(report.root))
    by_id = {module.id: module for module in recording.modules}
    found: dict[tuple[str, int | None, int | None], list[RecordedModule]] = {}
    parts = 0
    for row in report.modules:
        module = next((one for one in recording.modules if names[one.id] == row.name), None)
        if module is None or not module.kinds:
            continue
        if row.place is not None and "<locals>" not in module.class_name:
            # objects whose constructor was not seen may be of other sizes: each stands alone
            alone = module.id if module.init is None else None
            key = (f"{places.relative(module.file)}:{module.class_name}", module.init, alone)
        else:
            label = _part_label(module, by_id, rows, names, places)
            if not label or parts >= MAX_PARTS:
                continue
            parts += 1
            key = (label, by_id[module.root].init, None)
        found.setdefault(key, []).append(module)
    targets = []
    for (label, init, _), modules in found.items():
        share = sum(rows[names[one.id]].times.share for one in modules)
        other = _part_label(modules[0], by_id, rows, names, places)
        part = _Target(other, by_id[modules[0].root].init, (modules[0],), share) if other else None
        targets.append(_Target(label, init, tuple(modules), share, part))
    return sorted(targets, key=lambda target: -target.share)[: MAX_TARGETS + MAX_PARTS]


def _part_label(
    module: RecordedModule,
    by_id: dict[int, RecordedModule],
    rows: dict[str, ModuleRow],
    names: dict[int, str],
    places: SourcePlaces,
) -> str:
    root = by_id.get(module.root)
    row = rows.get(names[root.id]) if root is not None else None
    usable = root is not None and row is not None and row.place is not None and module.path and "<" not in module.path
    if not usable or root is None or "<locals>" in root.class_name:
        return ""
    return f"{places.relative(root.file)}:{root.class_name}.{rows[names[module.id]].path}"


class _Writer:
    """Makes Tasks, each once."""

    def __init__(self, root: Path, recording: Recording, folder: Path, precision: Precision) -> None:
        self.root = root
        self.recording = recording
        self.folder = folder
        self.precision = precision
        self.saved: list[SavedTask] = []

    def kinds(self, target: _Target) -> tuple[str, dict[str, InputKind]]:
        """Save a Task for each kind of call of a target, the most frequent first.

        Returns:
            What ``drk optimize`` takes, and what reports say of each kind (by :func:`kind_key`).
        """
        merged: dict[str, tuple[RecordedKind, int]] = {}
        for module in target.modules:
            for kind in module.kinds:
                key = kind_key(kind)
                known = merged.get(key)
                merged[key] = (kind, kind.count) if known is None else (known[0], known[1] + kind.count)
        order = sorted(merged.items(), key=lambda item: -item[1][1])
        total = sum(count for _, (_, count) in order)
        built = self._built(target)
        label = target.label
        if isinstance(built, str) and target.part is not None:
            as_part = self._built(target.part)
            if not isinstance(as_part, str):
                built, label = as_part, target.part.label
        many = "it is one of many kinds of calls"
        return label, {
            key: self._kind(kind, count, built if number < MAX_KINDS else many, count / total)
            for number, (key, (kind, count)) in enumerate(order)
        }

    def untargeted(self, module: RecordedModule) -> tuple[InputKind, ...]:
        """Return what reports say of a module that is no target."""
        return tuple(self._kind(kind, kind.count, "it is no target of its own", 1.0) for kind in module.kinds)

    def _built(self, target: _Target) -> tuple[Located, Inputs] | str:
        """Return the located target with its constructor's arguments, or why there are none."""
        try:
            located = locate_target(target.label, cwd=self.root)
            if target.init is None:
                return located, constructor_inputs(located, ())
            init = self.recording.inits[target.init]
            return located, ArgumentReader(self.folder).call({"args": init.args, "kwargs": init.kwargs})
        except DrkError as error:
            return error.message
        except UnsupportedArgument as error:
            return f"its constructor takes a {error}, which has no form"

    def _kind(self, kind: RecordedKind, count: int, built: tuple[Located, Inputs] | str, weight: float) -> InputKind:
        reader = ArgumentReader(self.folder)
        mode: Mode = "train" if kind.training else "eval"
        facts = InputKind(
            text=describe(kind),
            arguments=arguments(kind),
            count=count,
            mode=mode,
            grad=kind.grad,
            autocast=kind.autocast,
            dtypes=tuple(dict.fromkeys(item["dtype"] for item in _tensors(kind))),
            ranges=kind.ranges,
        )
        if isinstance(built, str):
            return replace(facts, reason=built)
        try:
            call = reader.call({"args": kind.args, "kwargs": kind.kwargs})
            blob = build_blob(reader.rows) if reader.rows else None
        except UnsupportedArgument as error:
            return replace(facts, reason=f"it takes a {error}, which has no form as an input")
        except (DrkError, OSError) as error:
            return replace(facts, reason=f"its values cannot be kept: {error}")
        located, init = built
        task = replace(
            located.task(init, call),
            mode=mode,
            grad=kind.training and kind.grad,
            autocast=kind.autocast,
            precision=self.precision,
            tensors=blob,
            weight=weight,
        )
        name = f"{len(self.saved):03d}"
        self.saved.append(SavedTask(name, task))
        return replace(facts, task=name)


def kind_key(kind: RecordedKind) -> str:
    """Return what two kinds of calls have in common when they are one, whichever process or object saw them."""
    facts = [_bare(kind.args), _bare(kind.kwargs), kind.training, kind.grad, kind.autocast]
    return json.dumps(facts, sort_keys=True)


def _bare(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _bare(value) for name, value in data.items() if name != "file"}
    return [_bare(item) for item in data] if isinstance(data, list) else data


def _own(module: RecordedModule, kinds: Mapping[str, InputKind]) -> tuple[InputKind, ...]:
    """Return the kinds of one module, with its own counts and the Tasks of its target."""
    found = [replace(kinds[kind_key(kind)], count=kind.count, ranges=kind.ranges) for kind in module.kinds]
    return tuple(sorted(found, key=lambda one: -one.count))


def _tensors(kind: RecordedKind) -> list[dict[str, Any]]:
    pending: list[dict[str, Any]] = [*kind.args, *kind.kwargs.values()]
    found = []
    while pending:
        item = pending.pop(0)
        if item["kind"] == "tensor":
            found.append(item)
        pending = [*item.get("items", ()), *pending]
    return found


def arguments(kind: RecordedKind) -> tuple[str, ...]:
    """Return the arguments in the form of ``--input``; ``<Type>`` where there is no form.

    Integers get the range that was seen where the recorder looked at it (the first tensors that are no part of others).
    """
    ranges = iter(kind.ranges)
    words = []
    for name, item in [*(("", item) for item in kind.args), *kind.kwargs.items()]:
        seen = next(ranges, None) if item["kind"] == "tensor" else None
        words.append((f"{name}=" if name else "") + _word(item, seen))
    return tuple(words)


def describe(kind: RecordedKind) -> str:
    """Return the arguments joined by blanks."""
    return " ".join(arguments(kind))


def _word(item: dict[str, Any], seen: tuple[float, float] | None) -> str:
    if item["kind"] == "unsupported":
        return f"<{item.get('type', '?')}>"
    try:
        argument: Argument = ArgumentReader(Path()).argument(_bare(item))
    except UnsupportedArgument as error:
        return f"<{error}>"
    if isinstance(argument, TensorSpec):
        argument = replace(argument, requires_grad=False, low=None, high=None, fill="normal")
        if is_integer(argument.dtype) and seen is not None:
            argument = replace(argument, low=seen[0], high=seen[1] + 1, fill="integers")
    return format_argument(argument)
