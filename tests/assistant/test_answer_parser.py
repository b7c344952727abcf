from __future__ import annotations

import pytest

from drk.assistant.answer_parser import (
    MAX_ANSWER_CHARS,
    MAX_BLOCK_CHARS,
    fenced_blocks,
    missing_candidate,
    missing_reason,
    missing_verdict,
    parse_answer,
    strip_reasoning,
)
from drk.gym.schema import Candidate

GOOD = "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    pass\n"


def block(source: str, language: str = "python", fence: str = "```") -> str:
    return f"{fence}{language}\n{source.rstrip()}\n{fence}\n"


@pytest.mark.parametrize(
    "text",
    [
        block(GOOD),
        "Look:\n\n" + block(GOOD) + "\nThat is all.",
        block("class ModelNew: old = 1") + "Better:\n" + block(GOOD),
        block(GOOD) + "Use it so:\n" + block("import model\nmodel.ModelNew()"),
        block(GOOD) + block("pip install triton", "bash"),
        block(GOOD, ""),
        block(GOOD, "py"),
        block(GOOD, "Python"),
        block(GOOD, "triton"),
        block(GOOD, "python title=model.py"),
        block(GOOD, fence="~~~"),
        block(GOOD, fence="`````"),
        block(GOOD).replace("\n", "\r\n"),
        "1. Here:\n" + "".join(f"   {line}\n" for line in block(GOOD).splitlines()),
        GOOD,
        f"<think>{block('class ModelNew: wrong')}</think>{block(GOOD)}",
        f"so it goes</think>\n{block(GOOD)}",
        f"<THINKING>a</THINKING>{block(GOOD)}",
        f"<|channel|>analysis<|message|>{block('class ModelNew: no')}<|end|><|channel|>final<|message|>{block(GOOD)}",
        block(GOOD) + "and more:\n```python\nclass ModelNew:\n    def",
        block(GOOD) + block("def broken(:"),
    ],
    ids=range(21),
)
def test_it_finds_the_candidate(text: str) -> None:
    assert parse_answer(text).source == GOOD


def test_the_last_of_several_wins() -> None:
    found = parse_answer(block("class ModelNew: a = 1") + block("class ModelNew: a = 2"))
    assert found.source == "class ModelNew: a = 2\n"
    assert (found.blocks, found.truncated) == (2, False)


@pytest.mark.parametrize(
    ("text", "reason", "truncated"),
    [
        ("", "no fenced Python block", False),
        ("Sorry, no.", "no fenced Python block", False),
        (block("class Other: pass"), "defines no class ModelNew", False),
        (block("def ModelNew(): pass"), "defines no class ModelNew", False),
        (block("if 1:\n    class ModelNew: pass"), "defines no class ModelNew", False),
        (block("x = (\nclass ModelNew: pass"), "no valid Python: ", False),
        ("```python\nclass ModelNew:\n    def f(", "cut off before its code block ended", True),
        ("<think>and so on and on", "ended before its reasoning", True),
        (block("class ModelNew: pass", "cpp"), "no fenced Python block", False),
        (block("class ModelNew: s = '\0'"), "no valid Python", False),
        (block("class ModelNew: s = '\ud800'"), "no valid Python", False),
        (block("class ModelNew:\n    x = '" + "a" * MAX_BLOCK_CHARS + "'"), "longer than", False),
        ("a" * (MAX_ANSWER_CHARS + 1), "longer than", False),
        (block("x" + "+(-x" * 5000 + ")" * 5000), "no valid Python", False),
    ],
    ids=range(14),
)
def test_it_says_why_there_is_none(text: str, reason: str, truncated: bool) -> None:
    found = parse_answer(text)
    assert found.source is None
    assert reason in found.reason
    assert found.truncated == truncated


def test_an_unclosed_block_that_parses_is_used_and_flagged() -> None:
    found = parse_answer(f"```python\n{GOOD}")
    assert (found.source, found.truncated) == (GOOD, True)
    assert parse_answer(block(GOOD), cut=True).truncated


def test_the_line_of_a_syntax_error_is_told() -> None:
    assert "(line 2 of the block)" in parse_answer(block("class ModelNew: pass\nx = = 1")).reason


def test_ten_thousand_blocks_are_not_all_tried() -> None:
    found = parse_answer(block(GOOD) + block("x = 1") * 10_000)
    assert found.source is None
    assert "the last 64 of 10001 blocks" in found.reason
    assert found.blocks == 10_001


def test_a_tag_inside_the_code_stays() -> None:
    code = "class ModelNew:\n    tag = '<think>'\n"
    assert parse_answer(block(code)).source == code
    assert strip_reasoning("a<think>b</think>c") == ("ac", False)


def test_warnings_of_a_candidate_are_its_own(recwarn: pytest.WarningsRecorder) -> None:
    assert parse_answer(block("class ModelNew: s = '\\d'")).source is not None
    assert not recwarn.list


def test_blocks_inside_a_longer_fence_are_text() -> None:
    (outer,) = fenced_blocks("````markdown\n```python\nx\n```\n````")
    assert (outer.language, outer.text, outer.closed) == ("markdown", "```python\nx\n```", True)


def test_missing_candidates_carry_their_reason() -> None:
    one = missing_candidate("it was empty", proposer="openai:m", mark="turn 1, sample 1")
    assert missing_reason(one) == "it was empty"
    assert missing_reason(Candidate(GOOD, note="a note")) is None
    verdict = missing_verdict(one, evidence="gpu")
    assert (verdict.status, verdict.reached, verdict.accepted) == ("failed", None, False)
    assert verdict.error is not None
    assert verdict.error.message == "it was empty"
    assert one.source != missing_candidate("it was empty", proposer="openai:m", mark="turn 1, sample 2").source
