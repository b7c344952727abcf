"""The real openai client against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import random
import sys
import tracemalloc
from typing import Any

import pytest
from model_endpoint import Answer, Behaviour, Drop, Endpoint, Garbage, Hang, Refusal, sequence, serve

from drk.assistant.llm.messages import ContextOverflow, Message, ModelFault, Reply, Request
from drk.assistant.llm.model_settings import ModelSettings

pytest.importorskip("openai", reason="the llm extra is not installed")
from drk.assistant.llm.openai_backend import OpenAIBackend


def backend_of(endpoint: Endpoint, **changes: Any) -> OpenAIBackend:
    settings = ModelSettings(base_url=endpoint.url, backoff_s=0.01, timeout_s=5.0)
    return OpenAIBackend("m", ModelSettings(**{**settings.__dict__, **changes}), key=endpoint.key)


async def ask(endpoint: Endpoint, text: str = "hello", **changes: Any) -> Reply:
    backend = backend_of(endpoint, **changes)
    try:
        return await backend.complete(Request((Message("user", text),), "call-1", 7, 64))
    finally:
        await backend.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_with_its_usage(stream: bool) -> None:
    with serve(sequence(Answer("one\ntwo " * 20))) as endpoint:
        reply = await ask(endpoint, "x" * 400, stream=stream)
    assert reply.text == "one\ntwo " * 20
    assert reply.usage is not None
    assert (reply.usage.prompt, reply.usage.completion, reply.usage.reasoning) == (100, 20, 5)
    assert (reply.cut, reply.attempts) == (False, 1)
    body = endpoint.requests[0]
    assert (body["max_tokens"], body["seed"], body["temperature"]) == (64, 7, 1.0)
    assert body["messages"] == [{"role": "user", "content": "x" * 400}]
    assert endpoint.headers[0]["idempotency-key"] == "call-1"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_is_marked_and_missing_usage_is_unknown(stream: bool) -> None:
    with serve(sequence(Answer("```python\nx", "length", usage=False))) as endpoint:
        reply = await ask(endpoint, stream=stream)
    assert reply.cut
    assert reply.usage is None


@pytest.mark.parametrize(
    "fault",
    [
        Refusal(429, "slow down", {"Retry-After": "0.01"}),
        Refusal(429, "slow down", {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        Refusal(500, "oops"),
        Refusal(503, "loading", {"Retry-After": "soon"}),
        Refusal(408, "slow"),
        Drop(),
        Drop(after=30),
        Garbage(),
        Garbage(b"{", "application/json"),
        Garbage(b'{"choices": []}'),
        Garbage(b'{"error": {"message": "upstream died"}}'),
        Garbage(b""),
        Garbage(b'["no", "object"]'),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
async def test_passing_faults_are_tried_again_with_the_same_key(fault: Behaviour, stream: bool) -> None:
    with serve(sequence(fault, fault, Answer("done"))) as endpoint:
        reply = await ask(endpoint, stream=stream)
    assert (reply.text, reply.attempts) == ("done", 3)
    assert {headers["idempotency-key"] for headers in endpoint.headers} == {"call-1"}
    assert endpoint.paid == {"call-1": 1}


@pytest.mark.parametrize("hang", [Hang(), Hang(drip=True)], ids=["silent", "dripping"])
async def test_a_timeout_is_tried_again(hang: Hang) -> None:
    with serve(sequence(hang, Answer("done"))) as endpoint:
        reply = await ask(endpoint, timeout_s=0.3)
    assert (reply.text, reply.attempts) == ("done", 2)


async def test_it_gives_up_and_names_the_endpoint() -> None:
    with serve(sequence(Refusal(500, "oops"))) as endpoint:
        with pytest.raises(ModelFault, match="openai:m failed 3 times") as caught:
            await ask(endpoint, attempts=3)
        assert "HTTP 500" in caught.value.cause
        assert endpoint.url in caught.value.help
    assert len(endpoint.requests) == 3


async def test_a_long_wait_is_a_fault_and_not_slept_through() -> None:
    refusal = Refusal(429, "daily limit", {"Retry-After": "86400"})
    with serve(sequence(refusal)) as endpoint, pytest.raises(ModelFault, match="asks to wait 86400 s"):
        await ask(endpoint)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (Refusal(404, "no such model"), "has no 'm'"),
        (Refusal(429, "pay first", code="insufficient_quota"), "quota"),
        (Refusal(400, "strange request"), "refused the request"),
        (Refusal(403, "not yours"), "refused the key in OPENAI_API_KEY"),
    ],
)
async def test_lasting_faults_are_told_at_once(refusal: Refusal, says: str) -> None:
    with serve(sequence(refusal)) as endpoint, pytest.raises(ModelFault, match=says):
        await ask(endpoint)
    assert len(endpoint.requests) == 1


async def test_a_conversation_too_long_is_told_apart() -> None:
    refusal = Refusal(400, "This model's maximum context length is 4096 tokens", code="context_length_exceeded")
    with serve(sequence(refusal)) as endpoint, pytest.raises(ContextOverflow):
        await ask(endpoint)


async def test_refused_parameters_are_exchanged_or_left_out() -> None:
    def script(body: dict[str, Any], _: int) -> Behaviour:
        if "max_tokens" in body:
            said = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
            return Refusal(400, said, code="unsupported_parameter", param="max_tokens")
        if "temperature" in body:
            return Refusal(400, "Unsupported value: 'temperature'", code="unsupported_value", param="temperature")
        return Answer("done")

    with serve(script) as endpoint:
        reply = await ask(endpoint)
    assert reply.text == "done"
    assert endpoint.requests[-1]["max_completion_tokens"] == 64
    assert "temperature is refused by the endpoint and was left out" in reply.notes
    assert len(endpoint.requests) == 3


async def test_both_limits_refused_is_a_fault_and_no_loop() -> None:
    def script(body: dict[str, Any], _: int) -> Behaviour:
        name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
        return Refusal(400, f"unknown parameter {name}", param=name)

    with serve(script) as endpoint, pytest.raises(ModelFault, match="refused the request"):
        await ask(endpoint)
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer(None, extra={"tool_calls": [{"id": "1", "type": "function", "function": 3}]}), ""),
        (Answer(None, "tool_calls", extra={"tool_calls": "nonsense"}), ""),
        (Answer([{"type": "text", "text": "a"}, {"type": "image"}, 3, {"text": "b"}]), "ab"),
        (Answer("fine", extra={"reasoning_content": "hm", "refusal": {"odd": 1}, "audio": "x"}), "fine"),
        (Answer("fine", "a-reason-nobody-knows"), "fine"),
        (Answer(17), ""),
    ],
)
async def test_malformed_messages_and_tool_noise(answer: Answer, text: str) -> None:
    with serve(sequence(answer)) as endpoint:
        assert (await ask(endpoint)).text == text


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_start_passes_where_the_endpoint_answers(status: int) -> None:
    with serve(sequence(Answer("x"))) as endpoint:
        endpoint.models_status = status
        backend = backend_of(endpoint)
        await backend.start()
        await backend.close()
        assert endpoint.model_lists == 1
        assert endpoint.requests == []


async def test_start_names_an_unreachable_endpoint_and_a_refused_key() -> None:
    with serve(sequence(Answer("x"))) as endpoint:
        backend = OpenAIBackend("m", ModelSettings(base_url=endpoint.url), key="sk-wrong-but-secret")
        with pytest.raises(ModelFault, match="refused the key in OPENAI_API_KEY") as caught:
            await backend.start()
        await backend.close()
        assert "wrong-but-secret" not in f"{caught.value.message}{caught.value.cause}{caught.value.help}"
    backend = backend_of(endpoint)
    with pytest.raises(ModelFault, match=f"cannot reach {endpoint.url}") as caught:
        await backend.start()
    await backend.close()
    assert "--base-url" in caught.value.help


async def test_an_answer_that_repeats_the_key_is_cleaned() -> None:
    with serve(sequence(Answer("your key is secret-key-of-the-test, sk-abcdefghijkl"))) as endpoint:
        reply = await ask(endpoint)
    assert reply.text == "your key is [key], sk-abcdefghijkl"


async def test_many_parallel_calls_with_faults_lose_and_pay_nothing_twice() -> None:
    dice = random.Random(3)
    faults = [Refusal(429, "slow", {"Retry-After": "0"}), Refusal(500), Drop(), Drop(after=9), Garbage()]

    def script(body: dict[str, Any], _: int) -> Behaviour:
        if dice.random() < 0.2:
            return dice.choice(faults)
        return Answer(f"answer to {body['messages'][0]['content']}")

    with serve(script) as endpoint:
        backend = backend_of(endpoint)
        gate = asyncio.Semaphore(16)

        async def one(number: int) -> Reply:
            async with gate:
                return await backend.complete(Request((Message("user", str(number)),), f"key {number}"))

        peaks = []
        for batch in range(3):
            tracemalloc.start()
            replies = await asyncio.gather(*(one(100 * batch + number) for number in range(64)))
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert [reply.text for reply in replies] == [f"answer to {100 * batch + i}" for i in range(64)]
        await backend.close()
    assert len(endpoint.paid) == 192
    assert set(endpoint.paid.values()) == {1}
    assert len(endpoint.requests) > 192
    assert peaks[2] < 2 * peaks[1] + 2**20


def test_a_missing_extra_gives_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ModelFault, match="need the llm extra") as caught:
        OpenAIBackend("m", ModelSettings(base_url="http://127.0.0.1:1/v1"))
    assert caught.value.help == "pip install 'drk[llm]'"
