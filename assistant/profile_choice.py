"""What ``drk optimize --from-profile`` works on: a Task of a stored profile, by what could be gained.

Modules with the same target (all objects of one class that were built alike) count together. The class of the user's
own with the largest share is taken; the outermost module, which is everything, only when nothing inside it has a third
of its time. Of the target's kinds of calls the most frequent one is taken. A target that is named is taken instead.

Left out: several targets in one run; kinds of calls beyond the first are told, not optimised for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drk.assistant.artefact import SourceFile
from drk.assistant.errors import TargetError, UsageError, did_you_mean
from drk.assistant.intake import split_target
from drk.assistant.report import InputKind, ModuleRow, Report
from drk.assistant.report_store import find_profiles_dir, load_report, load_tasks, open_profile
from drk.gym.schema import Task

WORTH = 1 / 3


@dataclass(frozen=True)
class Group:
    """One target with its module rows; ``share`` is of the whole time, parts inside others of the group once."""

    target: str
    rows: tuple[ModuleRow, ...]
    share: float

    @property
    def kinds(self) -> list[InputKind]:
        """Kinds of calls that have a Task, the most frequent first, counts of all rows added up."""
        found: dict[str, tuple[InputKind, int]] = {}
        for row in self.rows:
            for kind in row.inputs:
                if kind.task is not None:
                    count = found[kind.task][1] if kind.task in found else 0
                    found[kind.task] = (kind, count + kind.count)
        return [kind for kind, _ in sorted(found.values(), key=lambda item: -item[1])]


@dataclass(frozen=True)
class Chosen:
    """What to optimise: ``target`` as the user would type it, ``path`` its file, ``kind`` the call it is for."""

    profile: str
    target: str
    path: Path
    task: Task
    kind: InputKind
    share: float
    other_kinds: int

    def source(self) -> SourceFile:
        """Return the user's file as it is now.

        Raises:
            TargetError: kind ``stale-profile``: it is not what was profiled; kind ``unreadable``.
        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise TargetError(f"cannot read {self.path}", kind="unreadable", cause=str(error)) from error
        if data.decode("utf-8", "surrogatepass") != self.task.files[self.task.entry]:
            raise TargetError(
                "the file has changed since it was profiled",
                kind="stale-profile",
                file=str(self.path),
                help="profile it again, or name the target and its inputs: drk optimize FILE:TARGET --input ...",
            )
        root = self.path.resolve().parents[len(Path(self.task.entry).parts) - 1]
        return SourceFile(root, self.task.entry, data)

    def verify_words(self) -> list[str]:
        """Return the command line that judges a candidate for this task on a GPU."""
        label = split_target(self.target)[1]
        words = ["drk", "verify", f"{self.path}:{label}", "{candidate}", "--device", "cuda:0"]
        for text in self.kind.arguments:
            words += ["--input", text]
        if self.task.mode == "train":
            words += ["--train"] if self.task.grad else ["--mode", "train"]
        return words


def groups(report: Report) -> list[Group]:
    """Return the targets of a report that have a Task, the largest share first."""
    found: dict[str, list[ModuleRow]] = {}
    for row in report.modules:
        if row.target and any(kind.task is not None for kind in row.inputs):
            found.setdefault(row.target, []).append(row)
    result = []
    for target, rows in found.items():
        names = {row.name for row in rows}
        outer = [row for row in rows if not any(row.name.startswith(f"{name}.") for name in names)]
        result.append(Group(target, tuple(rows), sum(row.times.share for row in outer)))
    return sorted(result, key=lambda group: -group.share)


def best(found: Sequence[Group]) -> Group:
    """Return the group to begin with; ``found`` is not empty."""
    inner = [group for group in found if all(row.parent is not None and row.place is not None for row in group.rows)]
    return inner[0] if inner and inner[0].share >= WORTH * found[0].share else found[0]


def choose_profiled(name: str | None, cwd: Path | None = None) -> Chosen:
    """Return what to optimise.

    Args:
        name: a profile's id, its path, or a target (``model.py:Mlp``) of the latest one; null for the latest.
        cwd: where relative paths start, the current folder by default.

    Raises:
        UsageError: there is no such profile, or the target is not in it.
        TargetError: nothing in it can be optimised.
    """
    here = cwd or Path.cwd()
    file, label = split_target(name or "", here)
    if file.endswith(".py"):
        path = open_profile(find_profiles_dir((here / file).absolute().parent) or find_profiles_dir(here))
    else:
        path = open_profile(find_profiles_dir(here), name or "latest")
    report = load_report(path)
    found = groups(report)
    if not found:
        reasons = [kind.reason for row in report.modules for kind in row.inputs if kind.reason]
        raise TargetError(
            f"profile {report.id} holds nothing to optimise",
            kind="no-tasks",
            cause=reasons[0] if reasons else "no module of your own was called",
            help="name a target and its inputs: drk optimize FILE:TARGET --input ...",
        )
    group = _named(report, found, here / file, label) if file.endswith(".py") else best(found)
    kind = group.kinds[0]
    task = load_tasks(path, [kind.task or ""])[0]
    where, _ = split_target(group.target)
    return Chosen(
        profile=report.id,
        target=group.target,
        path=Path(report.root) / where,
        task=task,
        kind=kind,
        share=group.share,
        other_kinds=len(group.kinds) - 1,
    )


def _named(report: Report, found: list[Group], file: Path, label: str) -> Group:
    """Return the group that a target names; without a label the best one of its file."""
    inside = [
        group for group in found if (Path(report.root) / split_target(group.target)[0]).resolve() == file.resolve()
    ]
    named = [group for group in inside if not label or split_target(group.target)[1] == label]
    if named:
        return best(named)
    labels = [split_target(group.target)[1] for group in inside]
    advice = did_you_mean(label, labels) or (f"it has: {', '.join(labels[:8])}" if labels else "")
    raise UsageError(f"profile {report.id} has no task for {file.name}:{label}".rstrip(":"), help=advice)
