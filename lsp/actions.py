"""Code actions: what the editor's menu offers at a line. Kinds form a hierarchy, so that editors can filter.

``refactor.rewrite.drk.fuse`` starts a search, ``.apply`` puts found kernels to use, ``.restore`` takes them out,
``.diff`` shows the change, ``.resume`` goes on with an interrupted run, ``.cancel`` stops a job;
``source.drk.profile`` and ``source.drk.openReport`` concern the file. On one of our diagnostics the search is also a
quick fix. Actions carry ``data`` and get their command when one is picked, where the client can ask for that; others
get it at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsprotocol import types as lsp

from drk.lsp.names import COMMANDS, REWRITE, SOURCE
from drk.lsp.offers import FileOffers, Offer, file_offers, offer_at

if TYPE_CHECKING:
    from drk.lsp.session import DrkServer


@dataclass(frozen=True)
class _Step:
    kind: str
    title: str
    command: str
    argument: dict[str, Any]


def code_actions(server: DrkServer, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    """Return the actions for a range: for its first line, and for the file."""
    uri = params.text_document.uri
    text = server.text_map(uri)
    offers = file_offers(server, uri)
    if text is None or offers is None:
        return []
    offer = offer_at(offers, text, params.range.start.line)
    steps = _file_steps(uri, offers) + (_offer_steps(uri, offers, offer) if offer is not None else [])
    ours = [one for one in params.context.diagnostics if one.source == SOURCE]
    if ours:
        steps += [
            _Step("quickfix", one.title, one.command, one.argument) for one in steps if one.kind.endswith(".fuse")
        ]
    lazily = _resolves(server)
    return [
        _action(step, ours if step.kind == "quickfix" else None, lazily)
        for step in steps
        if _wanted(step.kind, params.context.only)
    ]


def resolve(action: lsp.CodeAction) -> lsp.CodeAction:
    """Give an action the command that its data name; data that are not ours stay without one."""
    data = action.data
    if isinstance(data, dict) and data.get("command") in COMMANDS and isinstance(data.get("argument"), dict):
        action.command = lsp.Command(title=action.title, command=data["command"], arguments=[data["argument"]])
    return action


def _offer_steps(uri: str, offers: FileOffers, offer: Offer) -> list[_Step]:
    about: dict[str, Any] = {"uri": uri, "target": offer.target}
    name = offer.label
    if offer.job is not None:
        stop = {"uri": uri, "job": offer.job.id}
        return [_Step(f"{REWRITE}.cancel", f"drk: stop optimising {name} ({offer.job.message})", "drk.cancel", stop)]
    steps: list[_Step] = []
    suggestion = offer.suggestion
    if suggestion is not None and suggestion.name != offers.applied:
        chosen = {**about, "run": suggestion.name}
        if suggestion.state == "ready":
            title = f"drk: apply kernels to {name} ({suggestion.headline})"
            steps.append(_Step(f"{REWRITE}.apply", title, "drk.apply", chosen))
            steps.append(_Step(f"{REWRITE}.diff", f"drk: show the change to {name}", "drk.diff", chosen))
        elif suggestion.state == "unfinished":
            title = f"drk: go on with the interrupted search for {name}"
            steps.append(_Step(f"{REWRITE}.resume", title, "drk.resume", chosen))
    if offer.target and not offers.applied:
        steps.append(_Step(f"{REWRITE}.fuse", f"drk: find faster kernels for {name}", "drk.optimize", about))
    return steps


def _file_steps(uri: str, offers: FileOffers) -> list[_Step]:
    name, about = offers.path.name, {"uri": uri}
    steps = []
    if offers.applied:
        steps.append(_Step(f"{REWRITE}.restore", f"drk: take the kernels out of {name}", "drk.restore", about))
    if offers.profile_job is None:
        steps.append(_Step("source.drk.profile", f"drk: profile {name}", "drk.profile", about))
    if offers.profile is not None:
        steps.append(_Step("source.drk.openReport", "drk: open the profile's report", "drk.openReport", about))
    return steps


def _action(step: _Step, fixes: list[lsp.Diagnostic] | None, lazily: bool) -> lsp.CodeAction:
    action = lsp.CodeAction(
        title=step.title,
        kind=step.kind,
        diagnostics=fixes,
        data={"command": step.command, "argument": step.argument},
    )
    return action if lazily else resolve(action)


def _wanted(kind: str, only: Any) -> bool:
    """Say whether a kind is asked for: ``refactor`` asks for all below it."""
    return not only or any(kind == str(one) or kind.startswith(f"{one}.") or not one for one in map(_text, only))


def _text(kind: Any) -> str:
    return str(getattr(kind, "value", kind))


def _resolves(server: DrkServer) -> bool:
    document = server.client_capabilities.text_document
    action = document.code_action if document is not None else None
    return action is not None and action.resolve_support is not None
