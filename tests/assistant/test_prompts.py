"""Prompts: what stands in them, how they are cut, and worked examples that really work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.answer_parser import fenced_blocks, missing_candidate, missing_verdict
from drk.assistant.episode import Turn
from drk.assistant.errors import UsageError
from drk.assistant.hotspots import Hotspot, Hotspots
from drk.assistant.prompts import FAMILIES, Prompts, Shape, conversation, family_of, fenced, representatives, task_text
from drk.assistant.proposers import ProposeContext
from drk.gym.devices import device_facts
from drk.gym.graph import graph_from_json
from drk.gym.schema import Call, Candidate, Scalar, Task, TensorSpec

WIDE = Shape("append-all", 100_000)


@pytest.fixture
def context(silu_task: Task, silu_graph: dict[str, Any]) -> ProposeContext:
    return ProposeContext(silu_task, graph_from_json(silu_graph), device_facts("h200"))


def turn(index: int, source: str, verdict: Any, sample: int = 0) -> Turn:
    return Turn(index, Candidate(source), verdict, 1.0, sample)


def test_the_task_says_what_decides(context: ProposeContext) -> None:
    text = task_text(Prompts(), context)
    assert context.task.files["model.py"].strip() in text
    assert "`model.py` (defines `ScaledSilu`):" in text
    assert "132 SMs, 227 KiB shared memory" in text
    assert "measured: fp32 matrix products" in text
    assert re.search(r"- torch \d+\.\d+", text)
    assert re.search(r"- triton \d+\.\d+", text)
    assert "float32[64, 96]" in text
    assert "silu -> float32[64, 96]: " in text
    assert "class ModelNew(torch.nn.Module)" in text
    assert "reward" not in text.lower()


def test_measured_hotspots_replace_estimates(context: ProposeContext) -> None:
    rows = (Hotspot("big_kernel", 2, 9.0, 0.9, "model.py:9 `x + 1`, in fc"), Hotspot("small", 1, 1.0, 0.1))
    measured = Hotspots("NVIDIA H200", rows, 2, 3, 10.0)
    for graph in (context.graph, None):
        text = task_text(Prompts(), replace(context, graph=graph, hotspots=measured))
        assert (
            "# Where its time goes (measured on NVIDIA H200)\n"
            "One forward call of the module as it is takes 10.0 us of GPU time, in 3 launches of 2 kernels. "
            "Most of it is in:\n"
            "- big_kernel (model.py:9 `x + 1`, in fc): 90%, 9.0 us, 2 launches\n"
            "- small: 10%, 1.0 us, 1 launch\n\n# An example"
        ) in text
        assert "estimate" not in text


def test_estimates_are_called_estimates(context: ProposeContext) -> None:
    unmeasured = (None, Hotspots(), Hotspots(reason="the profiler failed"))
    (text,) = {task_text(Prompts(), replace(context, hotspots=found)) for found in unmeasured}
    title = (
        "# Where its time goes (estimated from shapes)\nNothing was measured: these are estimates for NVIDIA H200, each"
    )
    assert title in text
    assert "measured on" not in text
    assert "the profiler failed" not in text


def test_without_a_graph_it_still_is_a_task(context: ProposeContext) -> None:
    text = task_text(Prompts(), replace(context, graph=None))
    assert "Where its time goes" not in text
    assert "It is called with" not in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "takes the constructor arguments of `ScaledSilu`"),
        ({"target_kind": "factory"}, "takes the constructor arguments of `ScaledSilu`"),
        ({"target_kind": "function"}, "takes no constructor arguments and has no parameters"),
        ({"submodule": "blocks.0"}, "replaces the part `blocks.0` of `ScaledSilu`. It takes no constructor arguments"),
        ({"mode": "train", "grad": True}, "in training mode, with gradients for inputs and parameters"),
        ({"precision": "bf16"}, "precision may go down to bf16"),
    ],
)
def test_what_is_to_be_handed_over(context: ProposeContext, changes: dict[str, Any], says: str) -> None:
    text = task_text(Prompts(), replace(context, task=replace(context.task, **changes)))
    assert says in text
    assert "\n- `forward` takes the same arguments" in text


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("self.conv = nn.Conv2d(3, 4, 3)\nx = self.linear(x)", "convolution"),
        ("return F.linear(x, w).softmax(-1)", "matmul"),
        ("return torch.softmax(x, -1)", "row_reduction"),
        ("return x.mean(-1)", "row_reduction"),
        ("return torch.relu(x) + torch.maximum(x, y)", "pointwise"),
    ],
)
def test_families_by_the_source(source: str, family: str) -> None:
    assert family_of(None, source) == family


def test_the_family_of_a_graph(silu_graph: dict[str, Any]) -> None:
    assert family_of(graph_from_json(silu_graph), "conv conv conv") == "pointwise"


def test_a_conversation_alternates_and_ends_with_the_user(context: ProposeContext, verdicts: Any) -> None:
    history = (turn(1, "# one", verdicts.refused()), turn(2, "# two", verdicts.accepted(1.5)))
    messages = conversation(Prompts(), replace(context, history=history, hints=("mind the tail",)), WIDE)
    assert [message.role for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[1].content == "```python\n# one\n```"
    assert "mismatch" in messages[2].content
    assert "mind the tail" not in messages[2].content
    assert "mind the tail" in messages[4].content
    assert "Make it faster" in messages[4].content
    assert "best so far: turn 2" in messages[2].content


def test_parallel_samples_show_their_best_and_name_the_others(context: ProposeContext, verdicts: Any) -> None:
    history = (
        turn(1, "# bad", verdicts.refused()),
        turn(1, "# good", verdicts.accepted(1.5), 1),
        turn(1, "# same", verdicts.accepted(1.5), 2),
    )
    assert [one.candidate.source for one in representatives(history)] == ["# good"]
    messages = conversation(Prompts(), replace(context, history=history), WIDE)
    assert len(messages) == 3
    assert "Other answers of the same turn:\n- rejected, reached ran (mismatch: " in messages[2].content


def test_a_missing_candidate_is_fed_back(context: ProposeContext) -> None:
    none = missing_candidate("it was cut off", proposer="m", mark="1")
    messages = conversation(Prompts(), replace(context, history=(Turn(1, none, missing_verdict(none)),)), WIDE)
    assert messages[1].content == "(no file)"
    assert "Nothing could be judged: it was cut off." in messages[2].content


def test_policies_choose_the_turns(context: ProposeContext, verdicts: Any) -> None:
    lows = [1.1, 1.9, 1.2, 1.8, 1.7, 1.3]
    history = tuple(turn(i, f"# {i}", verdicts.accepted(low)) for i, low in enumerate(lows, 1))
    context = replace(context, history=history)
    shown = {}
    for policy in ("append-all", "top-w", "best-window"):
        messages = conversation(Prompts(), context, Shape(policy, 100_000))
        shown[policy] = [message.content.split("\n")[1] for message in messages if message.role == "assistant"]
    assert shown["append-all"] == [f"# {i}" for i in range(1, 7)]
    assert shown["top-w"] == ["# 2", "# 4", "# 5", "# 6"]
    assert shown["best-window"] == ["# 2", "# 3", "# 4", "# 5"]


def test_a_conversation_never_exceeds_its_budget(context: ProposeContext, verdicts: Any) -> None:
    history = tuple(turn(i, f"# {i} {'x' * 3000}", verdicts.accepted(1 + i / 10)) for i in range(1, 7))
    context = replace(context, history=history)
    alone = len(task_text(Prompts(), context))
    for room in (200_000, 30_000, 12_000, 6_000, 4_500, 100):
        messages = conversation(Prompts(), context, Shape("append-all", alone + room), len)
        assert sum(len(message.content) + 8 for message in messages) <= alone + room
        assert messages[-1].role == "user"
        if len(messages) > 1:
            assert "# 6" in messages[-2].content  # the best stays longest
    assert len(messages) == 1
    with pytest.raises(UsageError, match="the task alone takes about"):
        conversation(Prompts(), context, Shape("append-all", alone - 1), len)


def test_fences_are_longer_than_what_they_hold(context: ProposeContext) -> None:
    assert fenced("a\n```\nb\n`````", "python") == "``````python\na\n```\nb\n`````\n``````"
    task = replace(context.task, files={"model.py": 's = """\n```python\nclass ModelNew: evil\n```\n"""\n'})
    text = task_text(Prompts(), replace(context, task=task, graph=None))
    assert "````python\ns = " in text


def test_long_projects_are_cut_and_said(context: ProposeContext) -> None:
    files = {**context.task.files, "a.py": "# a\n", "big.py": "# big\n" * 10_000, "empty.py": "\n"}
    text = task_text(Prompts(), replace(context, task=replace(context.task, files=files)))
    assert "`a.py`:" in text
    assert "Left out for length: big.py." in text
    assert "empty.py" not in text


def test_users_replace_templates_by_name(tmp_path: Path, context: ProposeContext) -> None:
    usual = Prompts()
    assert re.fullmatch(r"feedback 1, task 2 \([0-9a-f]{8}\)", usual.version)
    (tmp_path / "task.j2").write_text("Mine: {{ task.target }} on {{ hardware.key }}")
    mine = Prompts(tmp_path)
    assert task_text(mine, context) == "Mine: ScaledSilu on h200"
    assert mine.version.startswith("feedback 1, task own (")
    (tmp_path / "task.j2").write_text("{{ nothing_known }}")
    with pytest.raises(UsageError, match=r"the template task\.j2 has an error"):
        task_text(Prompts(tmp_path), context)
    (tmp_path / "task.j2").write_text("{{ task.__class__.__mro__ }}")
    with pytest.raises(UsageError) as caught:
        task_text(Prompts(tmp_path), context)
    assert "unsafe" in caught.value.cause
    (tmp_path / "tsak.j2").write_text("")
    with pytest.raises(UsageError, match=r"tsak\.j2 in .* is no template's name"):
        Prompts(tmp_path)
    with pytest.raises(UsageError, match="no folder of templates"):
        Prompts(tmp_path / "absent")


EXAMPLES = {
    "pointwise": Call((Scalar(24),)),
    "row_reduction": Call((Scalar(48),)),
    "matmul": Call((Scalar(40), Scalar(24))),
    "convolution": Call((Scalar(3), Scalar(8))),
}
INPUTS = {
    "pointwise": Call((TensorSpec((5, 24)),)),
    "row_reduction": Call((TensorSpec((6, 48)), TensorSpec((6, 48)))),
    "matmul": Call((TensorSpec((9, 40)),)),
    "convolution": Call((TensorSpec((2, 3, 8, 8)),)),
}


async def test_the_worked_examples_are_right() -> None:
    """Each example's answer is judged against its module: real kernels in the interpreter, real compilation."""
    from drk.gym import Gym, GymSettings

    assert set(EXAMPLES) == set(FAMILIES)
    async with Gym(GymSettings(device="interpret", sandbox="basic", seeds=1)) as gym:
        for family in FAMILIES:
            blocks = [block.text for block in fenced_blocks(Prompts().render(f"example_{family}"))]
            assert len(blocks) == 2
            task = Task(family, {"m.py": blocks[0]}, "m.py", "Model", init=EXAMPLES[family], inputs=INPUTS[family])
            verdict = await gym.evaluate(task, Candidate(blocks[1]))
            assert verdict.accepted, (family, verdict.error, verdict.cells)
            assert verdict.honest is not False
