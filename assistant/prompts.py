"""Prompts: a search's history as a conversation, from versioned templates that a user may replace.

A conversation is what the training data has: the task (module, hardware, versions, rules, one worked example chosen by
family), then for each turn that the policy keeps the file that was judged and the feedback on it. There is no system
message. Reasoning is not repeated, and no reward is shown. :func:`conversation` never exceeds its token budget: the
least telling turns go first, then long digests; a task that does not fit alone is an error.

Templates are ``task.j2``, ``feedback.j2`` and ``example_<family>.j2``; their first line names a version. A folder given
by the user replaces them file by file. They run in jinja2's sandbox and see frozen values only.

Honest limits: hotspots are measured on a GPU only; elsewhere they are estimates from shapes, and called that. The text
of the user's files goes to the endpoint as it stands.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drk.assistant.answer_parser import missing_reason
from drk.assistant.episode import (
    POLICIES,
    Episode,
    Turn,
    best_of_history,
    describe_gain,
    digest,
    is_usable,
    turn_score,
)
from drk.assistant.errors import UsageError
from drk.assistant.hotspots import SHOWN
from drk.assistant.llm.messages import Message, estimate_tokens
from drk.assistant.module_excerpt import module_excerpt
from drk.assistant.proposers import ProposeContext
from drk.gym.devices import DeviceFacts
from drk.gym.graph import Graph
from drk.gym.graph_cost import VIEWS, node_cost

FAMILIES = ("convolution", "matmul", "row_reduction", "pointwise")
DIGEST_CHARS = 2000
SHORT_DIGEST_CHARS = 500
FILE_CHARS = 40_000
"""Sources of one task beyond this are named and left out; the entry file always goes in."""

_FOLDER = Path(__file__).parent / "templates"
_NAMES = ("feedback.j2", "task.j2", *(f"example_{family}.j2" for family in FAMILIES))
_REDUCTIONS = re.compile(r"softmax|norm|sum|mean|max|min|prod|cum|var|std|arg|logsumexp|topk|sort")
_MATMULS = re.compile(r"^(linear|mm|addmm|matmul|bmm|baddbmm|einsum|dot|mv|scaled_dot_product)")
_VERSION = re.compile(r"\{#-? drk-prompt (\w+) (\d+)")
# measured at 4096^3 in fp32 with Triton 3.6, relative errors 1.1e-6 and 2.5e-7
_CEILINGS: Mapping[str, tuple[str, ...]] = {
    "h200": (
        "measured: fp32 matrix products of the library 51 TFLOP/s, Triton tf32x3 91 TFLOP/s (and more exact), "
        "Triton bf16x3 125 TFLOP/s (less exact)",
    )
}


class Prompts:
    """The templates. ``folder`` holds replacements by file name; ``version`` names what is used, for the journal.

    ``shows_hotspots`` says whether the task's template tells where the time goes.

    Raises:
        UsageError: the folder is missing, a name in it is no template's, or a template has an error.
    """

    def __init__(self, folder: Path | None = None) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if folder is not None:
            _check_folder(folder)
        places = [place for place in (folder, _FOLDER) if place is not None]
        self._environment = ImmutableSandboxedEnvironment(
            loader=jinja2.FileSystemLoader(places), undefined=jinja2.StrictUndefined, keep_trailing_newline=False
        )
        self._environment.filters["fenced"] = fenced
        self._faults = (jinja2.TemplateError, TypeError, ValueError)
        self.version = self._describe_versions(places)
        task = next(place / "task.j2" for place in places if (place / "task.j2").is_file())
        self.shows_hotspots = "hotspot" in task.read_text(encoding="utf-8")

    def render(self, name: str, **values: Any) -> str:
        """Return a template filled in.

        Raises:
            UsageError: the template has an error.
        """
        try:
            return self._environment.get_template(f"{name}.j2").render(**values).strip()
        except self._faults as error:
            raise UsageError(f"the template {name}.j2 has an error", cause=str(error)) from error

    def _describe_versions(self, places: Sequence[Path]) -> str:
        parts, sha = [], hashlib.sha256()
        for name in _NAMES:
            text = next((place / name).read_text(encoding="utf-8") for place in places if (place / name).is_file())
            sha.update(f"{name}\0{text}\0".encode())
            found = _VERSION.match(text)
            if not name.startswith("example_"):
                parts.append(f"{name.removesuffix('.j2')} {found[2] if found else 'own'}")
        return f"{', '.join(parts)} ({sha.hexdigest()[:8]})"


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"there is no folder of templates at {folder}", help="--templates FOLDER")
    strange = sorted(path.name for path in folder.glob("*.j2") if path.name not in _NAMES)
    if strange:
        raise UsageError(f"{strange[0]} in {folder} is no template's name", help=f"known are: {', '.join(_NAMES)}")


def fenced(text: str, language: str = "") -> str:
    """Return ``text`` in a fence that is longer than any inside it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


# --- The task ------------------------------------------------------------------------------------------------


def family_of(graph: Graph | None, source: str = "") -> str:
    """Return the family whose example fits best: of the captured operators, else of the words in the source."""
    names = [node.bare_op for node in graph.nodes if node.bare_op not in VIEWS] if graph else []
    words = names or re.findall(r"[a-z_]+\d?d?", source.lower())
    if any("conv" in word for word in words):
        return "convolution"
    if any(_MATMULS.match(word) for word in words):
        return "matmul"
    reductions = [word for word in words if _REDUCTIONS.search(word) and word not in ("maximum", "minimum")]
    return "row_reduction" if reductions else "pointwise"


def task_text(prompts: Prompts, context: ProposeContext) -> str:
    """Return the first user message."""
    task = context.task
    files, left_out = _choose_files(task.files, task.entry)
    told = told_hotspots(context)
    example = prompts.render(f"example_{family_of(context.graph, task.files[task.entry])}")
    return prompts.render(
        "task",
        task=task,
        hardware=context.hardware,
        hardware_lines=hardware_lines(context.hardware),
        version_lines=[f"{name} {_version(name)}" for name in ("torch", "triton")],
        files=files,
        left_out=left_out,
        excerpt=module_excerpt(task),
        input_lines=_input_lines(context.graph),
        hotspot_lines=told.lines,
        hotspots_how=told.how,
        hotspots_note=told.note,
        example=example,
    )


def _choose_files(files: Mapping[str, str], entry: str) -> tuple[list[dict[str, Any]], list[str]]:
    chosen = [{"path": entry, "text": files[entry], "entry": True}]
    left_out, room = [], FILE_CHARS - len(files[entry])
    for path, text in sorted(files.items(), key=lambda item: (len(item[1]), item[0])):
        if path == entry or not text.strip():
            continue
        if len(text) <= room:
            chosen.append({"path": path, "text": text, "entry": False})
            room -= len(text)
        else:
            left_out.append(path)
    return chosen, left_out


def hardware_lines(facts: DeviceFacts) -> list[str]:
    """Return the facts about a GPU that decide how a kernel is cut."""
    peaks = ", ".join(f"{name} {value:g}" for name, value in facts.peak_tflops.items())
    return [
        f"{facts.name} ({facts.target}): {facts.sm_count} SMs, {facts.shared_bytes // 1024} KiB shared memory a block, "
        f"{facts.l2_bytes // 2**20} MiB L2, {facts.memory_bytes / 1e9:.0f} GB at {facts.bandwidth_gb_s:g} GB/s",
        f"peaks by data sheet in TFLOP/s: {peaks}",
        *_CEILINGS.get(facts.key, ()),
    ]


@dataclass(frozen=True)
class ToldHotspots:
    """Where the time goes, in words: how that is known (for a title), what the lines are of, and the lines."""

    how: str = ""
    note: str = ""
    lines: tuple[str, ...] = ()


def told_hotspots(context: ProposeContext) -> ToldHotspots:
    """Return where the time goes: measured kernels where there are any, else estimates from the graph's shapes."""
    measured = context.hotspots
    if measured is not None and measured.rows:
        return ToldHotspots(measured.how, measured.note, tuple(row.line() for row in measured.rows))
    if context.graph is None:
        return ToldHotspots()
    note = f"Nothing was measured: these are estimates for {context.hardware.name}, each operation on its own."
    return ToldHotspots("estimated from shapes", note, _estimated_lines(context.graph, context.hardware))


def _estimated_lines(graph: Graph, hardware: DeviceFacts) -> tuple[str, ...]:
    metas = graph.metas()
    peak = hardware.peak_tflops.get("fp32", 1.0)
    rows_us = [
        (cost.time_us(hardware.bandwidth_gb_s, peak), cost, node)
        for node in graph.nodes
        if (cost := node_cost(node, metas)).size_bytes
    ]
    total_us = sum(time_us for time_us, _, _ in rows_us) or 1.0
    rows_us.sort(key=lambda row: (-row[0], row[2].name))
    return tuple(
        f"{node.bare_op}{_shape_of(node)}{f' in {node.module}' if node.module else ''}: {time_us / total_us:.0%}, "
        f"{cost.size_bytes / 1e6:.3g} MB, {cost.flops / 1e6:.3g} MFLOP"
        for time_us, cost, node in rows_us[:SHOWN]
    )


def _shape_of(node: Any) -> str:
    meta = next((item for item in node.metas if item is not None), None)
    return f" -> {meta.dtype}{list(meta.shape)}" if meta else ""


def _input_lines(graph: Graph | None) -> list[str]:
    if graph is None:
        return []
    return [
        f"{item.path or item.name}: {item.meta.dtype}{list(item.meta.shape)}"
        + ("" if item.meta.contiguous else f", strides {list(item.meta.strides)}")
        for item in graph.placeholders
        if item.kind == "input"
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed here)"


# --- The conversation ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How a conversation is cut: which earlier turns (a policy's name), and tokens that it may have at most."""

    policy: str = "top-w"
    max_tokens: int = 24_000


def conversation(
    prompts: Prompts,
    context: ProposeContext,
    shape: Shape,
    count_tokens: Callable[[str], int] = estimate_tokens,
) -> tuple[Message, ...]:
    """Return the messages for the next turn, in at most ``shape.max_tokens`` tokens; the last one is the user's.

    Raises:
        UsageError: the task alone does not fit.
    """
    task = task_text(prompts, context)
    kept = list(POLICIES[shape.policy](representatives(context.history)))
    digest_chars = DIGEST_CHARS
    while True:
        messages = _messages(prompts, context, task, kept, digest_chars)
        needed = sum(count_tokens(message.content) + 8 for message in messages)
        if needed <= shape.max_tokens:
            return messages
        if len(kept) > 1:
            kept.remove(min(kept, key=lambda turn: (turn_score(turn), turn.index)))
        elif kept and digest_chars > SHORT_DIGEST_CHARS:
            digest_chars = SHORT_DIGEST_CHARS
        elif kept:
            kept = []
        else:
            raise UsageError(
                f"the task alone takes about {needed} tokens, and only {shape.max_tokens} are there for it",
                help="--context-tokens N, when the model has more; or choose a smaller part of the module",
            )


def representatives(history: Sequence[Turn]) -> list[Turn]:
    """Return one turn for each step, its best sample (the first among equals): parallel samples are alternatives."""
    best: dict[int, Turn] = {}
    for turn in history:
        kept = best.get(turn.index)
        if kept is None or turn_score(turn) > turn_score(kept):
            best[turn.index] = turn
    return [best[index] for index in sorted(best)]


def _messages(
    prompts: Prompts, context: ProposeContext, task: str, kept: Sequence[Turn], digest_chars: int
) -> tuple[Message, ...]:
    if not kept:
        hints = "\n".join(f"- {hint}" for hint in context.hints)
        return (Message("user", f"{task}\n\nThe user suggests:\n{hints}" if hints else task),)
    messages = [Message("user", task)]
    best = best_of_history(Episode("", context.history))
    previous: Turn | None = None
    for turn in kept:
        missing = missing_reason(turn.candidate)
        answer = "(no file)" if missing else fenced(turn.candidate.source, "python")
        told = digest(
            turn.verdict,
            digest_chars,
            candidate=turn.candidate,
            best=best,
            previous=previous.verdict if previous else None,
        )
        last = turn is kept[-1]
        text = prompts.render(
            "feedback",
            missing=missing or "",
            digest=told,
            others=_other_lines(context.history, turn),
            hints=context.hints if last else (),
            last=last,
            accepted=is_usable(turn.verdict),
        )
        messages += [Message("assistant", answer), Message("user", text)]
        previous = turn
    return tuple(messages)


def _other_lines(history: Sequence[Turn], chosen: Turn, count: int = 4) -> list[str]:
    others = [turn for turn in history if turn.index == chosen.index and turn is not chosen]
    return [_one_line(turn) for turn in others[:count]]


def _one_line(turn: Turn) -> str:
    if is_usable(turn.verdict):
        return f"accepted, {describe_gain(turn.verdict)}"
    error = turn.verdict.error
    why = f" ({error.kind}: {error.message.strip().splitlines()[0][:120]})" if error and error.message.strip() else ""
    return f"{turn.verdict.status}, reached {turn.verdict.reached or 'nothing'}{why}"
