"""What can be done about each definition of a file: one list that code actions, lenses and hints all read.

An offer stands at a definition: what a profile measured of it, what a run found for it, the job that works on it now,
and whether kernels are applied. Definitions come from the profile, from runs, and from the text itself (a class with a
``forward``, a top-level function), so that something is on offer before anything was measured.

Left out: definitions in files that no editor holds open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drk.assistant.apply import applied_run
from drk.assistant.errors import DrkError
from drk.assistant.report_source import Span, span_named
from drk.lsp.documents import path_of, split_target
from drk.lsp.jobs import Job
from drk.lsp.positions import TextMap
from drk.lsp.profile_store import FileProfile, Hotspot
from drk.lsp.suggestions import Suggestion

if TYPE_CHECKING:
    from drk.lsp.session import DrkServer


@dataclass(frozen=True)
class Offer:
    """What stands at one definition. ``target`` is what ``drk optimize`` takes: an absolute file, colon, name."""

    qualname: str
    head_line: int
    end_line: int
    target: str = ""
    hotspot: Hotspot | None = None
    stale: bool = False
    suggestion: Suggestion | None = None
    job: Job | None = None

    @property
    def label(self) -> str:
        """The target's name, or the definition's."""
        return split_target(self.target)[1] or self.qualname


@dataclass(frozen=True)
class FileOffers:
    """A file's offers in the order of its lines; ``applied`` is the run whose kernels the text uses, or empty."""

    path: Path
    offers: tuple[Offer, ...]
    profile: FileProfile | None = None
    applied: str = ""
    profile_job: Job | None = None


def file_offers(server: DrkServer, uri: str) -> FileOffers | None:
    """Return what is on offer in an open document, or None when it is no local Python text. Nothing is raised."""
    path = path_of(uri)
    text = server.text_map(uri)
    if path is None or text is None:
        return None
    profile = server.profile_for(path)
    found: dict[str, Offer] = {}
    for row in profile.hotspots if profile is not None else ():
        where = text.locate(row.place)
        if where is not None:
            name = row.place.qualname
            found[name] = Offer(name, where.head_line, where.end_line, row.target, row, where.stale)
    suggestions = server.suggestions_for(path)
    for suggestion in reversed(suggestions):
        _add_suggestion(found, text, path, suggestion)
    jobs = server.jobs.of_file(path)
    for job in jobs:
        if job.spec.kind == "optimize":
            _add_job(found, text, path, job)
    return FileOffers(
        path,
        tuple(sorted(found.values(), key=lambda offer: offer.head_line)),
        profile,
        _applied(path, text.text, suggestions),
        next((job for job in jobs if job.spec.kind == "profile"), None),
    )


def offer_at(offers: FileOffers, text: TextMap, line: int) -> Offer | None:
    """Return the offer for a 0-based line: that of the innermost definition that has a target, else one to start."""
    around = [span for span in text.spans if span.first_line - 1 <= line <= span.end_line - 1]
    known = {offer.qualname: offer for offer in offers.offers}
    for span in reversed(around):
        offer = known.get(span.qualname)
        if offer is not None and (offer.target or offer.suggestion or offer.job):
            return offer
    start = next((span for span in reversed(around) if _can_start(span, text)), None)
    if start is None:
        return None
    offer = known.get(start.qualname)
    target = f"{offers.path}:{start.qualname}"
    if offer is not None:
        return replace(offer, target=target)
    return Offer(start.qualname, text.head_line(start), start.end_line - 1, target)


def _can_start(span: Span, text: TextMap) -> bool:
    """Say whether ``drk optimize`` may take a definition: a class with a ``forward``, a function at the top level."""
    if span.is_class:
        return span_named(text.spans, f"{span.qualname}.forward") is not None
    return "." not in span.qualname


def _add_suggestion(found: dict[str, Offer], text: TextMap, path: Path, suggestion: Suggestion) -> None:
    span = _span_of_target(text, suggestion.target)
    if span is None:
        return
    known = found.get(span.qualname)
    base = known or Offer(span.qualname, text.head_line(span), span.end_line - 1, f"{path}:{suggestion.target}")
    found[span.qualname] = replace(base, suggestion=suggestion, target=base.target or f"{path}:{suggestion.target}")


def _add_job(found: dict[str, Offer], text: TextMap, path: Path, job: Job) -> None:
    span = _span_of_target(text, job.spec.target)
    if span is not None:
        known = found.get(span.qualname)
        base = known or Offer(span.qualname, text.head_line(span), span.end_line - 1, f"{path}:{job.spec.target}")
        found[span.qualname] = replace(base, job=job)


def _span_of_target(text: TextMap, target: str) -> Span | None:
    """Return the definition of ``Net`` or, for ``Net.blocks.0``, of the class that it is a part of."""
    words = target.split(".")
    for count in range(len(words), 0, -1):
        span = span_named(text.spans, ".".join(words[:count]))
        if span is not None:
            return span
    return None


def _applied(path: Path, text: str, suggestions: tuple[Suggestion, ...]) -> str:
    """Return the run whose kernels the text uses: by drk's note, if the text has the import that drk writes."""
    try:
        run = applied_run(path)
    except DrkError:
        return ""
    module = next((one.kernels_module for one in suggestions if one.name == run and one.kernels_module), "_kernels")
    return run if run and f"{module} import " in text else ""
