"""Searches and profiles that the real server starts: joined, cancelled, killed, refused, failed."""

from __future__ import annotations

import asyncio
import fcntl
import signal
from pathlib import Path
from typing import Any

import pytest
from lsp_parts import MODEL, gone, make_run, titles

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLASS_LINE = MODEL.splitlines().index("class Net(nn.Module):")
BLOCK_LINE = MODEL.splitlines().index("class Block(nn.Module):")


async def test_a_client_that_refuses_progress_loses_nothing(client_in: Any, project: Path, scripted: Any) -> None:
    client = await client_in(project, {"command": scripted("win")})
    del client.answers["window/workDoneProgress/create"]
    uri = client.open(project / "model.py")
    await client.command("drk.optimize", uri=uri, target=f"{project / 'model.py'}:Net")
    assert "1.40x over compile" in await client.message("apply it")
    assert client.progress() == []


async def test_a_second_click_joins_and_cancel_keeps_the_best(client_in: Any, project: Path, scripted: Any) -> None:
    client = await client_in(project, {"command": scripted("wait")})
    uri = client.open(project / "model.py")
    first = await client.command("drk.optimize", uri=uri, target="Net")
    assert await client.command("drk.optimize", uri=uri, target="Net") == first
    await client.message("is being worked on already")
    token = (await client.reported("turn 2/2"))["token"]
    child = int((project / "child.pid").read_text())
    assert "stop optimising" in titles(await client.actions(uri, CLASS_LINE))[-1]
    client.notify("window/workDoneProgress/cancel", {"token": token})
    assert "the best so far is kept: 1.40x over compile" in await client.message("stopped")
    assert client.progress()[-1]["kind"] == "end"
    await gone(child)
    assert "drk: apply kernels to Net (1.40x over compile)" in titles(await client.actions(uri, CLASS_LINE))


@pytest.mark.parametrize(
    ("mode", "word"), [("die", "the process was killed"), ("refuse", "failed: no inputs are known. give --input")]
)
async def test_a_profile_that_fails_is_told(client_in: Any, project: Path, scripted: Any, mode: str, word: str) -> None:
    client = await client_in(project, {"command": scripted(mode)})
    uri = client.open(project / "model.py")
    assert await client.command("drk.profile", uri=uri)
    assert "model.py: " in await client.message(word)
    assert client.progress()[-1]["kind"] == "end"


async def test_a_team_s_gym_is_told_to_the_search(client_in: Any, project: Path, scripted: Any) -> None:
    client = await client_in(project, {"command": scripted("win"), "gymUrl": "http://gym.test:8000"})
    uri = client.open(project / "model.py")
    await client.command("drk.optimize", uri=uri, target="Net")
    await client.message("apply it")
    assert (project / "gym.url").read_text() == "http://gym.test:8000"


async def test_a_killed_job_is_told_and_can_be_gone_on_with(client_in: Any, project: Path, scripted: Any) -> None:
    client = await client_in(project, {"command": scripted("die")})
    uri = client.open(project / "model.py")
    run = make_run(project / "model.py", state="unfinished")
    await client.command("drk.optimize", uri=uri, target="Net")
    assert "was killed" in await client.message("go on where it stopped")
    assert client.progress()[-1]["kind"] == "end"
    (action,) = await client.actions(uri, CLASS_LINE, only=["refactor.rewrite.drk.resume"])
    assert action["data"]["argument"]["run"] == run.name


@pytest.mark.parametrize(
    ("mode", "word"), [("refuse", "no inputs are known. give --input"), ("garble", "drk failed here")]
)
async def test_a_command_that_refuses_is_quoted(
    client_in: Any, project: Path, scripted: Any, mode: str, word: str
) -> None:
    client = await client_in(project, {"command": scripted(mode)})
    uri = client.open(project / "model.py")
    await client.command("drk.optimize", uri=uri, target="Net")
    assert word in await client.message("failed")
    assert await client.command("drk.status", uri=uri)


async def test_a_command_that_does_not_exist_is_told(client_in: Any, project: Path) -> None:
    client = await client_in(project, {"command": ["/nowhere/drk"]})
    uri = client.open(project / "model.py")
    await client.command("drk.optimize", uri=uri, target="Net")
    assert "cannot start /nowhere/drk" in await client.message("failed")


async def test_a_killed_server_leaves_no_work_and_loses_nothing(start: Any, project: Path, scripted: Any) -> None:
    client = await start(project, {"command": scripted("wait")})
    uri = client.open(project / "model.py")
    await client.command("drk.optimize", uri=uri, target="Net")
    await client.reported("turn 2/2")
    leader = int((project / "leader.pid").read_text())
    client.process.send_signal(signal.SIGKILL)
    await client.process.wait()
    await gone(leader)
    again = await start(project)
    uri = again.open(project / "model.py")
    assert "drk: apply kernels to Net (1.40x over compile)" in titles(await again.actions(uri, CLASS_LINE))


async def test_a_killed_editor_ends_server_and_search(start: Any, project: Path, scripted: Any) -> None:
    client = await start(project, {"command": scripted("wait")})
    uri = client.open(project / "model.py")
    await client.command("drk.optimize", uri=uri, target="Net")
    await client.reported("turn 2/2")
    leader = int((project / "leader.pid").read_text())
    client.hang_up()
    await asyncio.wait_for(client.process.wait(), 120)
    await gone(leader)
    again = await start(project)
    uri = again.open(project / "model.py")
    assert "drk: apply kernels to Net (1.40x over compile)" in titles(await again.actions(uri, CLASS_LINE))


async def test_a_run_of_another_process_is_waited_for(client_in: Any, project: Path, scripted: Any) -> None:
    run = make_run(project / "model.py", state="unfinished")
    with (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = await client_in(project, {"command": scripted("win")})
        uri = client.open(project / "model.py")
        assert await client.command("drk.optimize", uri=uri, target="Net") is None
        assert run.name in await client.message("another process is working on model.py")
