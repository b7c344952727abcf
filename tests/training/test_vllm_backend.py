"""The vLLM client against a stand-in server that checks requests and answers in vLLM's recorded shapes."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from drk.training.backends import SamplerUnavailable
from drk.training.sampling import Prompt
from drk.training.vllm_backend import ServerRefusal, VllmBackend

Script = Callable[[dict[str, Any], int], tuple[int, Any]]


@contextlib.contextmanager
def serve(script: Script, port: int = 0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run the stand-in; a status of 0 closes the connection without an answer."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            status, answer = script(body, len(seen))
            if status:
                data = json.dumps(answer).encode() if not isinstance(answer, bytes) else answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        allow_reuse_address = True

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(ids: list[int], finish: str = "stop", **changes: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": " x",
        "logprobs": {"text_offset": [0] * len(ids), "token_logprobs": [-0.5] * len(ids), "tokens": [""] * len(ids),
                     "top_logprobs": [{"": -0.5}] * len(ids)},
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
        "prompt_token_ids": [1],
    }  # fmt: skip
    return {"id": "cmpl-1", "object": "text_completion", "model": "policy", "choices": [choice | changes]}


def make(url: str, patience_s: float = 10.0) -> VllmBackend:
    return VllmBackend(url, "policy", temperature=0.9, stop_ids=frozenset([7, 2]), patience_s=patience_s, timeout_s=5.0)


async def test_token_ids_go_in_and_out() -> None:
    with serve(lambda _, __: (200, answer([5, 6, 2]))) as (url, seen):
        backend = make(url)
        found = await backend.generate(Prompt((1, 3), 42, 16))
        await backend.close()
    assert (found.ids, found.logps, found.cut) == ((5, 6, 2), (-0.5, -0.5, -0.5), False)
    body = seen[0]
    assert body["prompt"] == [1, 3]
    assert (body["seed"], body["max_tokens"], body["temperature"], body["top_p"]) == (42, 16, 0.9, 1.0)
    assert (body["logprobs"], body["return_token_ids"], body["stop_token_ids"]) == (0, True, [2, 7])
    assert backend.busy_s > 0


async def test_a_cut_answer_says_so() -> None:
    with serve(lambda _, __: (200, answer([5], "length"))) as (url, _):
        backend = make(url)
        assert (await backend.generate(Prompt((1,), 0, 1))).cut
        await backend.close()


@pytest.mark.parametrize("first", [(503, {}), (0, None), (200, b'{"choices": ['), (429, {})])
async def test_a_server_that_fails_for_a_while_is_waited_for(first: tuple[int, Any]) -> None:
    with serve(lambda _, number: first if number < 3 else (200, answer([5, 2]))) as (url, seen):
        backend = make(url)
        assert (await backend.generate(Prompt((1,), 0, 4))).ids == (5, 2)
        await backend.close()
    assert len(seen) == 3
    assert backend.retries == 2
    assert backend.outages == (0 if first[0] == 429 else 2)


async def test_a_server_that_is_started_anew_goes_on() -> None:
    with serve(lambda _, __: (200, answer([5, 2]))) as (url, _):
        port = int(url.split(":")[2].split("/")[0])
    backend = make(url)
    import asyncio

    waiting = asyncio.create_task(backend.generate(Prompt((1,), 0, 4)))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    with serve(lambda _, __: (200, answer([8, 2])), port):
        assert (await waiting).ids == (8, 2)
    await backend.close()
    assert backend.retries >= 1
    assert backend.outages >= 1  # what it says now may come from other weights


async def test_a_server_that_stays_away_ends_in_a_clear_error() -> None:
    with serve(lambda _, __: (503, {})) as (url, _):
        backend = make(url, patience_s=0.5)
        with pytest.raises(SamplerUnavailable, match=r"no sampler at .* for 0\.5 s: HTTP 503"):
            await backend.generate(Prompt((1,), 0, 4))
        await backend.close()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((400, {"error": "max_tokens is too large"}), "max_tokens is too large"),
        ((200, answer([5], token_ids=None)), "no token ids"),
        ((200, answer([5], logprobs=None)), "no token ids or log-probabilities"),
        ((200, answer([5, 6], logprobs={"token_logprobs": [-0.5]})), "2 tokens and 1 log-probabilities"),
        ((200, {"choices": []}), "no token ids"),
    ],
)
async def test_what_asking_again_would_not_mend_is_not_asked_again(reply: tuple[int, Any], message: str) -> None:
    with serve(lambda _, __: reply) as (url, seen):
        backend = make(url)
        with pytest.raises(ServerRefusal, match=message):
            await backend.generate(Prompt((1,), 0, 4))
        await backend.close()
    assert len(seen) == 1
