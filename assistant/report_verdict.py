"""The sentence at the top of a report: where the time is, and what removing or fusing it could win at most.

It speaks of modules of one class together, since one kernel replaces them all; the outermost module, which is
everything, is named only when nothing below it stands out. An optimizer or a loss that takes more is named first.
"""

from __future__ import annotations

from collections.abc import Sequence

from drk.assistant.profile_work import amdahl
from drk.assistant.report import Attribution, ModuleRow, Report

NEARLY_ALL = 0.97
WORTH_NAMING = 0.2


def class_groups(report: Report) -> list[tuple[str, list[ModuleRow], float]]:
    """Return (class, its module rows, their share of the time) by share; rows inside others of the class once."""
    groups: dict[tuple[str, str], list[ModuleRow]] = {}
    for row in report.modules:
        groups.setdefault((row.class_name, row.place.file if row.place is not None else ""), []).append(row)
    found = []
    for (name, _), rows in groups.items():
        names = {row.name for row in rows}
        outer = [row for row in rows if not _is_inside(row, names, report)]
        found.append((name, rows, sum(row.times.share for row in outer)))
    return sorted(found, key=lambda item: -item[2])


def _is_inside(row: ModuleRow, names: set[str], report: Report) -> bool:
    above = row.parent
    seen = 0
    while above is not None and seen < 100:
        if above in names:
            return True
        found = report.module(above)
        above = found.parent if found is not None else None
        seen += 1
    return False


def duration_text(time_us: float) -> str:
    """Return a duration in three significant digits with its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if time_us >= size:
            return f"{time_us / size:.3g} {unit}"
    return f"{time_us:.3g} us"


def known_text(known: Attribution) -> str:
    """Return how much of the time is known to belong where."""
    text = f"{100 * known.to_module:.0f} % by module"
    if known.to_part is not None and known.to_part > known.to_module + 0.005:
        text += f" ({100 * known.to_part:.0f} % with what runs outside of modules)"
    return f"{text}, {100 * known.to_line:.0f} % by line"


def verdict_sentence(report: Report) -> str:
    """Return the sentence."""
    whose = "device time" if report.method.times_are == "device" else "CPU time"
    steps = max(report.method.steps, 1)
    each = report.total_us / steps
    if not report.total_us:
        return "nothing was measured"
    parts = [_where(report, f"{duration_text(each)} {whose} a step")]
    if report.fusions:
        best = report.fusions[0]
        where = f" at {best.place.file}:{best.place.line}" if best.place is not None else ""
        parts.append(f"fusing {_joined(best.ops)}{where} could save {duration_text(best.saved_us.value / steps)}")
    return "; ".join(parts) + (" (estimated)" if report.fusions else "")


def _where(report: Report, whole: str) -> str:
    groups = [group for group in class_groups(report) if any(row.parent is not None for row in group[1])]
    inner = [group for group in groups if all(row.place is not None for row in group[1])] or groups
    parts = [group for group in inner if group[2] < NEARLY_ALL]
    if parts and parts[0][2] >= WORTH_NAMING:  # what a wrapper (DistributedDataParallel) holds is everything again
        inner = parts
    if not inner or inner[0][2] < 0.05:
        top = report.kernels[:3]
        share = sum(row.times.share for row in top)
        return f"{100 * share:.0f} % of {whole} is in {len(top)} kinds of kernel"
    name, rows, share = inner[0]
    bound = amdahl(1.0, min(share, 1.0))
    at_most = f"at most {bound:.2g}x" if bound is not None and bound < 100 else "nearly everything"
    many = f" ({len(rows)} modules)" if len(rows) > 1 else ""
    where = f"in {name}{many}, worth {at_most} by Amdahl"
    outside = report.parts[0] if report.parts else None
    if outside is not None and outside.times.share > share:
        part = f"{100 * outside.times.share:.0f} % of {whole} is in {outside.name}, outside of modules"
        return f"{part}; {100 * share:.0f} % is {where}"
    return f"{100 * share:.0f} % of {whole} is {where}"


def _joined(ops: Sequence[str]) -> str:
    return " + ".join(ops[:4]) + (f" + {len(ops) - 4} more" if len(ops) > 4 else "")
