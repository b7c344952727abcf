"""Diagnostics from the stored profile: where the time goes, at the line, as information and never as an error.

Codes: ``memory-bound``, ``compute-bound``, ``launch-bound``, ``latency-bound`` (what limits a hotspot), ``hotspot``
(not known), ``fusable`` (neighbouring operations that one kernel could do), ``stale`` (the function changed since it
was measured). The range is the definition's line, not its body. Pushed when a profile or a text changes; nothing is
run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsprotocol import types as lsp

from drk.lsp.documents import path_of
from drk.lsp.names import SOURCE
from drk.lsp.positions import TextMap, Units
from drk.lsp.profile_store import FileProfile, Fusable, Hotspot

if TYPE_CHECKING:
    from drk.lsp.session import DrkServer

MEANINGS = {
    "memory": "memory-bound: its time goes into moving data; fewer passes over memory make it faster",
    "compute": "compute-bound: its time goes into arithmetic; only cheaper arithmetic makes it faster",
    "launch": "launch-bound: the device waits between short kernels; fewer, larger kernels make it faster",
    "latency": "latency-bound: far below both roofs; more parallel work or fewer steps make it faster",
    "unknown": "what limits it is not known",
}


def time_text(time_us: float) -> str:
    """Return a time as people read it."""
    if time_us >= 1e6:
        return f"{time_us / 1e6:.3g} s"
    return f"{time_us / 1e3:.3g} ms" if time_us >= 1e3 else f"{time_us:.3g} us"


def share_text(share: float, times_are: str) -> str:
    """Return ``86 % of GPU time``."""
    return f"{share:.0%}".replace("%", " %") + (" of GPU time" if times_are == "device" else " of CPU time")


def file_diagnostics(
    profile: FileProfile, text: TextMap, units: Units, *, min_share: float, links: bool = False
) -> list[lsp.Diagnostic]:
    """Return what a profile says about a text: hotspots of at least ``min_share``, and fusable operations in them."""
    found = [
        made
        for row in profile.hotspots
        if row.share >= min_share and (made := _hotspot(profile, row, text, units, links)) is not None
    ]
    found += [made for row in profile.fusables if (made := _fusable(row, text, units, links)) is not None]
    return found


def _hotspot(profile: FileProfile, row: Hotspot, text: TextMap, units: Units, links: bool) -> lsp.Diagnostic | None:
    where = text.locate(row.place)
    if where is None:
        return None
    share = share_text(row.share, profile.times_are)
    objects = f" in {row.modules} modules" if row.modules > 1 else ""
    message = f"{row.place.qualname}: {share}, {time_text(row.total_us / row.steps)} a step{objects}"
    code = f"{row.bound}-bound" if row.bound != "unknown" else "hotspot"
    if where.stale:
        message += " before it was changed; profile again"
        code = "stale"
    else:
        message += f"; {row.bound}-bound" if row.bound != "unknown" else ""
        if row.work.amdahl_bound and row.work.amdahl_bound > 1:
            message += f"; at most {row.work.amdahl_bound:.2f}x for the whole if it took no time"
    data = {"target": row.target, "qualname": row.place.qualname, "report": profile.report_id}
    return _diagnostic(text.line_range(where.head_line, units), message, code, links, data, stale=where.stale)


def _fusable(row: Fusable, text: TextMap, units: Units, links: bool) -> lsp.Diagnostic | None:
    where = text.locate(row.place)
    if where is None or where.stale:
        return None
    ops = ", ".join(op.removeprefix("aten::") for op in row.ops)
    gain = f", {row.attainable_speedup:.2f}x here" if row.attainable_speedup else ""
    message = (
        f"{ops}: one kernel could do these; saves about {time_text(row.saved_us.value)} ({row.saved_us.how}){gain}"
    )
    data = {"target": row.target, "qualname": row.place.qualname}
    return _diagnostic(text.line_range(where.line, units), message, "fusable", links, data)


def _diagnostic(
    place: lsp.Range, message: str, code: str, links: bool, data: dict[str, Any], *, stale: bool = False
) -> lsp.Diagnostic:
    address = docs_address(code) if links else ""
    return lsp.Diagnostic(
        range=place,
        message=message,
        severity=lsp.DiagnosticSeverity.Hint if stale else lsp.DiagnosticSeverity.Information,
        code=code,
        source=SOURCE,
        code_description=lsp.CodeDescription(href=address) if address else None,
        data=data,
    )


def docs_address(code: str) -> str:
    """Return the address of a code's explanation, where this installation has the documentation beside it."""
    page = Path(__file__).resolve().parent.parent / "docs" / "editors.md"
    return f"{page.as_uri()}#{code}" if page.is_file() else ""


def publish(server: DrkServer, uri: str) -> None:
    """Send a document's diagnostics; a text that does not parse keeps the ones it has."""
    path = path_of(uri)
    document = server.workspace.text_documents.get(uri)
    if path is None or document is None:
        return
    settings = server.settings_for(path)
    profile = server.profile_for(path) if settings.diagnostics else None
    if profile is None:
        if uri in server.published:
            server.clear_diagnostics(uri)
        return
    text = server.text_map(uri)
    if text is None or text.text != document.source:
        return
    wanted = server.client_capabilities.text_document
    can_link = bool(wanted and wanted.publish_diagnostics and wanted.publish_diagnostics.code_description_support)
    found = file_diagnostics(profile, text, server.units, min_share=settings.min_share, links=can_link)
    server.published.add(uri)
    server.text_document_publish_diagnostics(
        lsp.PublishDiagnosticsParams(uri=uri, diagnostics=found, version=document.version)
    )
