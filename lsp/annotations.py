"""Extras beside the code: lenses above definitions, hints at line ends, tables on hover. All are of the stored profile.

Not every editor shows them, so nothing depends on them: diagnostics and code actions carry the product. A lens offers
at most three steps, the most useful first. Stale rows keep their lens and lose their hint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lsprotocol import types as lsp

from drk.assistant.report import Figure
from drk.lsp.diagnostics import MEANINGS, share_text, time_text
from drk.lsp.documents import path_of
from drk.lsp.offers import FileOffers, Offer, file_offers
from drk.lsp.profile_store import FileProfile, Hotspot, KernelLine

if TYPE_CHECKING:
    from drk.lsp.session import DrkServer


def code_lenses(server: DrkServer, uri: str) -> list[lsp.CodeLens]:
    """Return the lenses of an open document."""
    path = path_of(uri)
    if path is None or not server.settings_for(path).code_lens:
        return []
    offers = file_offers(server, uri)
    if offers is None:
        return []
    least = server.settings_for(path).min_share
    return [lens for offer in offers.offers if _worth(offer, least) for lens in _lenses(uri, offers, offer)]


def _worth(offer: Offer, min_share: float) -> bool:
    measured = offer.hotspot is not None and offer.hotspot.share >= min_share
    return measured or offer.suggestion is not None or offer.job is not None


def _lenses(uri: str, offers: FileOffers, offer: Offer) -> list[lsp.CodeLens]:
    about: dict[str, Any] = {"uri": uri, "target": offer.target}
    share = ""
    if offer.hotspot is not None and offers.profile is not None:
        share = share_text(offer.hotspot.share, offers.profile.times_are) + (" (stale)" if offer.stale else "")
    steps: list[tuple[str, str, dict[str, Any]]] = []
    suggestion = offer.suggestion
    if offer.job is not None:
        steps.append((f"{offer.job.message}: stop", "drk.cancel", {"uri": uri, "job": offer.job.id}))
    elif suggestion is not None and suggestion.name == offers.applied:
        steps.append((f"kernels applied ({suggestion.headline}): take them out", "drk.restore", {"uri": uri}))
    elif suggestion is not None and suggestion.state == "ready":
        about["run"] = suggestion.name
        steps.append((f"apply kernels: {suggestion.headline}", "drk.apply", about))
        steps.append(("show the change", "drk.diff", about))
    elif suggestion is not None and suggestion.state == "unfinished":
        steps.append(("go on with the interrupted run", "drk.resume", {**about, "run": suggestion.name}))
    elif suggestion is not None and suggestion.state == "running":
        steps.append(("another process optimises this", "drk.status", {"uri": uri}))
    elif offer.target:
        steps.append(("find faster kernels", "drk.optimize", about))
    if share:
        first = steps.pop(0) if steps else ("profile again", "drk.profile", {"uri": uri})
        steps.insert(0, (f"{share} · {first[0]}", first[1], first[2]))
        steps.append(("report", "drk.openReport", {"uri": uri}))
    place = lsp.Position(line=offer.head_line, character=0)
    return [
        lsp.CodeLens(
            range=lsp.Range(start=place, end=place),
            command=lsp.Command(title=title, command=command, arguments=[argument]),
        )
        for title, command, argument in steps
    ]


def inlay_hints(server: DrkServer, uri: str, wanted: lsp.Range) -> list[lsp.InlayHint]:
    """Return ``212 us, 86 %`` at the end of each hotspot's line inside ``wanted``."""
    path = path_of(uri)
    text = server.text_map(uri)
    if path is None or text is None or not server.settings_for(path).inlay_hints:
        return []
    offers = file_offers(server, uri)
    found = []
    for offer in offers.offers if offers is not None else ():
        row = offer.hotspot
        if row is None or offer.stale or row.share < server.settings_for(path).min_share:
            continue
        if wanted.start.line <= offer.head_line <= wanted.end.line:
            label = f"{time_text(row.total_us / row.steps)}, {row.share:.0%}".replace("%", " %")
            end = text.line_range(offer.head_line, server.units).end
            found.append(lsp.InlayHint(position=end, label=label, padding_left=True))
    return found


def hover(server: DrkServer, uri: str, position: lsp.Position) -> lsp.Hover | None:
    """Return what the profile says about the definition whose line is hovered."""
    path = path_of(uri)
    text = server.text_map(uri)
    if path is None or text is None or not server.settings_for(path).hover:
        return None
    offers = file_offers(server, uri)
    if offers is None or offers.profile is None:
        return None
    at = next((offer for offer in offers.offers if offer.head_line == position.line and offer.hotspot), None)
    if at is None or at.hotspot is None:
        return None
    value = hover_text(offers.profile, at.hotspot, stale=at.stale)
    if at.suggestion is not None and at.suggestion.state == "ready":
        value += f"\n\nRun `{at.suggestion.name}`: {at.suggestion.headline}."
    return lsp.Hover(
        contents=lsp.MarkupContent(kind=lsp.MarkupKind.Markdown, value=value),
        range=text.line_range(at.head_line, server.units),
    )


def hover_text(profile: FileProfile, row: Hotspot, *, stale: bool) -> str:
    """Return Markdown: a sentence, what limits it, and a table of its kernels."""
    what = "kernels" if profile.times_are == "device" else "operators"
    lines = [
        f"**{row.place.qualname}**: {share_text(row.share, profile.times_are)}, "
        f"{time_text(row.total_us / row.steps)} a step, {row.calls} calls, median {time_text(row.median_us)}",
        "",
        MEANINGS[row.bound] + ".",
    ]
    if stale:
        lines += ["", "It changed since this was measured."]
    if row.work.amdahl_bound:
        roof = f"; {row.work.percent_of_roof:.0f} % of the roof" if row.work.percent_of_roof is not None else ""
        lines += ["", f"If it took no time, the whole would be {row.work.amdahl_bound:.2f}x as fast{roof}."]
    if row.kernels:
        lines += ["", f"| {what} | calls | time | share | moved | of roof |", "|---|--:|--:|--:|--:|--:|"]
        lines += [_kernel_row(kernel) for kernel in row.kernels]
    lines += ["", f"Measured on {_code(profile.device)}, profile {_code(profile.report_id)}."]
    return "\n".join(lines)


def _kernel_row(row: KernelLine) -> str:
    roof = "" if row.percent_of_roof is None else f"{row.percent_of_roof:.0f} %"
    cells = (row.calls, time_text(row.total_us), f"{row.share:.0%}".replace("%", " %"), _moved(row.size_bytes), roof)
    return f"| {_code(row.name)} | " + " | ".join(str(cell) for cell in cells) + " |"


def _moved(figure: Figure | None) -> str:
    if figure is None:
        return ""
    text = f"{figure.value / 1e6:.3g} MB"
    return text if figure.how == "measured" else f"{text} (est.)"


def _code(text: str) -> str:
    """Return text as inline code: names of kernels hold characters that Markdown and tables would read."""
    plain = text.replace("`", "'").replace("|", "/").replace("\n", " ")
    return f"`{plain if len(plain) <= 60 else plain[:57] + '...'}`"
