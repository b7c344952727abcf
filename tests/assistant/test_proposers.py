from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.episode import Turn
from drk.assistant.errors import UsageError
from drk.assistant.proposers import ProposeContext, SeededProposer, is_model, make_proposer, opened
from drk.gym.devices import device_facts
from drk.gym.graph import graph_from_json
from drk.gym.schema import Candidate, Task


def context(task: Task, *history: Turn, graph: Any = None, limit: int = 2) -> ProposeContext:
    return ProposeContext(task, graph, device_facts("sm_90"), history, limit)


@pytest.mark.parametrize(
    ("name", "message", "help_text"),
    [
        ("bultin", "unknown proposer 'bultin'", "did you mean 'builtin'?"),
        ("gpt", "unknown proposer 'gpt'", "known are: builtin, replay"),
        ("builtin:x", "takes no argument", ""),
        ("replay", "needs a file", "replay:candidates.jsonl"),
        ("replay:absent.jsonl", "cannot read candidates", ""),
    ],
)
def test_wrong_names(name: str, message: str, help_text: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make_proposer(name)
    assert help_text in caught.value.help


async def test_replay_gives_each_candidate_once_in_order(tmp_path: Path, silu_task: Task, verdicts: Any) -> None:
    file = tmp_path / "c.jsonl"
    sources = ["# a", "# b", "# a", "# c"]
    file.write_text("\n\n".join(json.dumps({"source": source, "note": source}) for source in sources))
    proposer = make_proposer(f"replay:{file}")
    first = await proposer.propose(context(silu_task))
    assert [one.source for one in first] == ["# a", "# b"]
    turns = [Turn(1, one, verdicts.refused()) for one in first]
    assert [one.source for one in await proposer.propose(context(silu_task, *turns))] == ["# c"]
    turns.append(Turn(2, Candidate("# c"), verdicts.refused()))
    assert await proposer.propose(context(silu_task, *turns)) == []


async def test_replay_reads_files_and_folders(tmp_path: Path, silu_task: Task) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.py").write_text(f"# {name}")
    for where, wanted in ((tmp_path, ["# a", "# b"]), (tmp_path / "b.py", ["# b"])):
        found = await make_proposer(f"replay:{where}").propose(context(silu_task))
        assert [one.source for one in found] == wanted


def test_replay_names_the_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"source": "# a"}\n{"sauce": 1}\n')
    with pytest.raises(UsageError) as caught:
        make_proposer(f"replay:{file}")
    assert (caught.value.file, caught.value.line) == (str(file), 2)
    file.write_text("\n")
    with pytest.raises(UsageError, match="no candidates"):
        make_proposer(f"replay:{file}")


async def test_builtin_gives_new_variants_each_time(silu_task: Task, silu_graph: Any, verdicts: Any) -> None:
    proposer = make_proposer("builtin")
    graph = graph_from_json(silu_graph)
    first = await proposer.propose(context(silu_task, graph=graph))
    assert first
    assert all("class ModelNew" in one.source and one.proposer == "builtin" for one in first)
    assert first == await proposer.propose(context(silu_task, graph=graph))
    turns = [Turn(1, one, verdicts.accepted()) for one in first]
    second = await proposer.propose(context(silu_task, *turns, graph=graph))
    assert not {one.source for one in first} & {one.source for one in second}
    assert await proposer.propose(context(silu_task)) == []


async def test_opened_starts_and_closes_what_can_be(silu_task: Task) -> None:
    seen: list[str] = []

    class Held:
        name, ordered, endpoint = "held", False, "somewhere"

        async def start(self) -> None:
            seen.append("start")

        async def close(self) -> None:
            seen.append("close")

        async def propose(self, context: ProposeContext) -> list[Candidate]:
            seen.append("propose")
            return [Candidate("# held")]

    seeded = SeededProposer(make_proposer("builtin"), Held())
    assert (seeded.name, seeded.endpoint) == ("held", "somewhere")
    with pytest.raises(RuntimeError):
        async with opened(seeded):
            # nothing was captured, so builtin has nothing and the other one begins
            assert [one.source for one in await seeded.propose(context(silu_task))] == ["# held"]
            raise RuntimeError
    assert seen == ["start", "propose", "close"]


def test_models_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, says in (("openai", "openai needs the model's name"), ("vllm", "vllm needs a checkpoint's folder")):
        with pytest.raises(UsageError, match=says):
            make_proposer(name)
    assert is_model("openai:x")
    assert not is_model("builtin")
    assert not is_model("some/folder")
