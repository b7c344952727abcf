"""From a language model's answer to a candidate: the last complete code block that parses and holds ``ModelNew``.

Order: reasoning is taken away; then the fenced blocks are tried from the last to the first; then a last block whose
fence never closed (the answer was cut off: flagged ``truncated``, and used only if it still parses); then the whole
text, for models that answer with bare code. What cannot be used gives a ``reason`` for the next turn's feedback.

An answer is data from outside. It is never imported or run here, at most 64 blocks are tried, no block above 256 KiB
is parsed, and names inside it become no path. Honest limit: code that defines ``ModelNew`` and is wrong passes, since
judging it is the gym's work; text inside a block that looks like a closing fence ends it, as in Markdown.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

from drk.gym.schema import Candidate, Evidence, Failure, Verdict

ENTRY = "ModelNew"
MAX_ANSWER_CHARS = 4 * 2**20
MAX_BLOCK_CHARS = 2**18
MAX_BLOCKS_TRIED = 64
CODE_LANGUAGES = frozenset(("", "python", "python3", "py", "triton", "cuda"))

NO_CANDIDATE = "no candidate: "
"""A candidate whose note starts so stands for an answer that held none; the rest of the note is the reason."""

_OPEN = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[A-Za-z0-9_+.-]*)[^`\n]*$")
_TAG = re.compile(r"<(?P<end>/?)(?P<name>think|thinking|thought|reasoning|analysis)>", re.IGNORECASE)
_CHANNEL = re.compile(r"<\|channel\|>final(?:[^<]*)<\|message\|>")


@dataclass(frozen=True)
class Extraction:
    """What an answer held. ``source`` is null when nothing in it can be judged; ``reason`` then says why.

    ``truncated``: the answer ended inside its reasoning or its last block. ``blocks`` counts fenced blocks.
    """

    source: str | None
    reason: str = ""
    truncated: bool = False
    blocks: int = 0


@dataclass(frozen=True)
class Block:
    """One fenced block: its text without the fences, its language, and whether its fence closed."""

    text: str
    language: str
    closed: bool = True


def parse_answer(text: str, *, cut: bool = False) -> Extraction:
    """Return the candidate that ``text`` holds, or the reason why there is none.

    Args:
        text: the model's answer, reasoning and all.
        cut: the endpoint said that the answer hit its length limit.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return Extraction(None, f"the answer is longer than {MAX_ANSWER_CHARS} characters")
    body, unfinished = strip_reasoning(text)
    if unfinished:
        return Extraction(None, "the answer ended before its reasoning did; reason more briefly", truncated=True)
    blocks = [block for block in fenced_blocks(body) if block.language in CODE_LANGUAGES]
    found = _from_blocks(blocks)
    if found.source is None and not blocks and _problem(body.strip()) == "":
        found = Extraction(body.strip() + "\n")
    truncated = (bool(blocks) and not blocks[-1].closed) or cut
    if found.source is None and truncated:
        found = replace(found, reason="the answer was cut off before its code block ended; answer more briefly")
    return replace(found, truncated=truncated, blocks=len(blocks))


def strip_reasoning(text: str) -> tuple[str, bool]:
    """Return the answer without its reasoning, and whether reasoning began and never ended."""
    channel = list(_CHANNEL.finditer(text))
    if channel:
        return text[channel[-1].end() :], False
    parts: list[str] = []
    begin = 0
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(text):  # one pass: an answer of nothing but tags must not take quadratic time
        if opened is None and tag["end"]:  # the opening tag stood in the prompt, as some chat templates have it
            parts, begin = [], tag.end()
        elif opened is None:
            parts.append(text[begin : tag.start()])
            opened = tag
        elif tag["end"] and tag["name"].lower() == opened["name"].lower():
            opened, begin = None, tag.end()
    if opened is not None:
        if not "".join(parts).strip():
            return "", True
        begin = opened.start()  # a tag inside the answer proper, as in a comment
    return "".join(parts) + text[begin:], False


def fenced_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of ``text`` in order, the last one also when its fence never closed."""
    lines: list[str] = []
    fence = language = ""
    for line in text.splitlines():
        mark = line.strip()
        if not fence:
            opened = _OPEN.match(line)
            if opened:
                fence, language, lines = opened["fence"], opened["language"].lower(), []
        elif len(mark) >= len(fence) and mark == fence[0] * len(mark):
            yield Block("\n".join(lines), language)
            fence = ""
        else:
            lines.append(line)
    if fence:
        yield Block("\n".join(lines), language, closed=False)


def _from_blocks(blocks: list[Block]) -> Extraction:
    if not blocks:
        return Extraction(None, "the answer holds no fenced Python block and is not Python itself")
    reasons = []
    last_first = blocks[: -MAX_BLOCKS_TRIED - 1 : -1]
    # complete blocks first: a block that was cut off counts only when nothing whole is there
    for block in sorted(last_first, key=lambda one: not one.closed):
        problem = _too_long(block.text)
        source = "" if problem else textwrap.dedent(block.text).strip("\n") + "\n"
        problem = problem or _problem(source)
        if not problem:
            return Extraction(source)
        reasons.append(problem)
    skipped = len(blocks) - len(reasons)
    more = f" (the last {MAX_BLOCKS_TRIED} of {len(blocks)} blocks were tried)" if skipped else ""
    return Extraction(None, reasons[0] + more)


def _too_long(source: str) -> str:
    return f"the code block is longer than {MAX_BLOCK_CHARS} characters" if len(source) > MAX_BLOCK_CHARS else ""


def _problem(source: str) -> str:
    """Say why ``source`` is no candidate, or return an empty string."""
    if problem := _too_long(source):
        return problem
    try:
        source.encode("utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings are the candidate's business
            tree = ast.parse(source)
    except SyntaxError as error:
        return f"the code block is no valid Python: {error.msg} (line {error.lineno} of the block)"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"the code block is no valid Python: {type(error).__name__}"
    if not any(_defines_entry(node) for node in tree.body):
        return f"the code block defines no class {ENTRY}"
    return ""


def _defines_entry(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return node.name == ENTRY
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == ENTRY for t in node.targets)


# --- Answers without a candidate, as turns -------------------------------------------------------------------


def missing_candidate(reason: str, *, proposer: str, mark: str) -> Candidate:
    """Return the candidate that stands for an answer without one; ``mark`` keeps two of them apart."""
    return Candidate(f"# {mark}: the answer held no candidate\n", proposer=proposer, note=NO_CANDIDATE + reason)


def missing_reason(candidate: Candidate) -> str | None:
    """Return why an answer held no candidate, or null for a real one."""
    return candidate.note.removeprefix(NO_CANDIDATE) if candidate.note.startswith(NO_CANDIDATE) else None


def missing_verdict(candidate: Candidate, *, evidence: Evidence = "compile-only") -> Verdict:
    """Return the verdict of :func:`missing_candidate`'s candidate: failed, nothing reached, without asking the gym."""
    reason = missing_reason(candidate) or "the answer held no candidate"
    error = Failure("parse", "no-candidate", reason)
    return Verdict("failed", evidence, None, correct=False, honest=None, error=error)
