"""Native routes under ``/v1``: evaluations, profiles, batches with server-sent events, results, cancelling."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from drk.gym.serve import scripts
from drk.gym.serve.api import BodyBytes, Evaluator, Front, Profiler, Who, error_responses
from drk.gym.serve.bodies import BatchBody, EvaluationBody, Options, ProfileBody
from drk.gym.serve.desk import Desk, Item, aside
from drk.gym.serve.jobs import TERMINAL, make_id
from drk.gym.serve.refusals import Refusal
from drk.gym.serve.tokens import Principal
from drk.gym.wire import candidate_id, task_id

router = APIRouter(prefix="/v1", tags=["native"])
JobId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
Wait = Annotated[float, Query(ge=0, le=3600, description="Seconds to wait for the result.")]
SUBMIT_ERRORS = error_responses("invalid_request", "queue_full", "quota_exceeded", "rate_limited", "draining")
READ_ERRORS = error_responses("invalid_request", "not_found")
ACCEPTED: dict[str, Any] = {"description": "Accepted, not finished yet."}
UNFINISHED: dict[str, Any] = {"description": "Not finished yet."}
BEAT_S = 15.0
LOOK_S = 2.0
PAGE = 200


def _answer(job_id: str, result: str | None, state: str = "waiting") -> Response:
    """Return a job's public form; 202 while it is not finished. A result is passed on as it was written."""
    if result is not None:
        return Response(result, media_type="application/json")
    body = {"job_id": job_id, "state": state, "verdict": None, "report": None, "error": None}
    return JSONResponse(body, 202, {"Location": f"/v1/evaluations/{job_id}"})


@router.post("/evaluations", response_model=dict[str, Any], responses={202: ACCEPTED, **SUBMIT_ERRORS})
async def submit_evaluation(body: EvaluationBody, who: Evaluator, desk: Front, size_bytes: BodyBytes) -> Response:
    """Judge one candidate; answers 200 with the result, or 202 with the job when ``wait_s`` was too short."""
    task = await aside(size_bytes, desk.read_task, body.task)
    item = Item("evaluation", task, desk.read_candidate(body.candidate))
    return _answer(*await desk.judge(who, item, body, body.wait_s))


@router.post("/profiles", response_model=dict[str, Any], responses={202: ACCEPTED, **SUBMIT_ERRORS})
async def submit_profile(body: ProfileBody, who: Profiler, desk: Front, size_bytes: BodyBytes) -> Response:
    """Look at a task's reference: shapes, graph, estimated cost, measured kernels."""
    task = await aside(size_bytes, desk.read_task, body.task)
    return _answer(*await desk.judge(who, Item(body.what, task, None), body, body.wait_s))


@router.get("/evaluations/{job_id}", response_model=dict[str, Any], responses={202: UNFINISHED, **READ_ERRORS})
@router.get("/profiles/{job_id}", response_model=dict[str, Any], responses={202: UNFINISHED, **READ_ERRORS})
async def get_job(job_id: JobId, who: Who, desk: Front, wait_s: Wait = 0.0) -> Response:
    """Return a job's result, or its state."""
    fields = await desk.visible(who, job_id)
    return _answer(job_id, await desk.wait(job_id, wait_s), fields["state"])


@router.delete("/evaluations/{job_id}", responses=READ_ERRORS)
@router.delete("/profiles/{job_id}", responses=READ_ERRORS)
async def cancel_job(job_id: JobId, who: Who, desk: Front) -> dict[str, Any]:
    """Cancel a job: one that waits never starts, one that runs is ended."""
    state = await desk.cancel(who, job_id)
    return {"job_id": job_id, "was": state, "cancelled": state not in TERMINAL}


# --- batches -------------------------------------------------------------------------------------------------


@router.post("/batches", status_code=202, responses=SUBMIT_ERRORS)
async def submit_batch(body: BatchBody, who: Evaluator, desk: Front, size_bytes: BodyBytes) -> dict[str, Any]:
    """Accept many evaluations, all or none."""
    if len(body.items) > desk.settings.batch_limit:
        raise Refusal("invalid_request", f"a batch has at most {desk.settings.batch_limit} items")
    items, content = await aside(size_bytes, _read_items, desk, body)
    nonce = body.idempotency_key or secrets.token_hex(16)
    batch = make_id(who.name, nonce, "batch", content)
    options = Options(**{**body.model_dump(include=set(Options.model_fields)), "idempotency_key": nonce})
    ids = await desk.submit(who, items, options, batch=batch)
    return {"batch_id": batch, "total": len(ids), "job_ids": ids, "events": f"/v1/batches/{batch}/events"}


def _read_items(desk: Desk, body: BatchBody) -> tuple[list[Item], str]:
    """Return a batch's items, and a digest of them: the same key with other items is another batch."""
    tasks = {name: desk.read_task(data) for name, data in body.tasks.items()}
    for row in body.items:
        if row.task not in tasks:
            raise Refusal("invalid_request", f"items: there is no task {row.task!r} in this batch")
    ids = {name: task_id(task) for name, task in tasks.items()}
    rows = [(row.task, desk.read_candidate(row.candidate)) for row in body.items]
    content = json.dumps([[ids[name], candidate_id(candidate)] for name, candidate in rows])
    return [Item("evaluation", tasks[name], candidate) for name, candidate in rows], make_id("", "", content)


async def _visible_batch(desk: Desk, who: Principal, batch_id: str) -> dict[str, str]:
    meta = await desk.store.batch(batch_id)
    if not meta or (meta.get("owner") != who.name and not who.may("read")):
        raise Refusal("not_found", f"there is no batch {batch_id!r}")
    return meta


@router.get("/batches/{batch_id}", responses=READ_ERRORS)
async def get_batch(batch_id: JobId, who: Who, desk: Front) -> dict[str, Any]:
    """Say how far a batch is."""
    meta = await _visible_batch(desk, who, batch_id)
    total, finished = int(meta["total"]), int(meta["finished"])
    return {"batch_id": batch_id, "total": total, "finished": finished, "done": finished >= total}


@router.get(
    "/batches/{batch_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}, **READ_ERRORS},
)
async def batch_events(
    batch_id: JobId,
    who: Who,
    desk: Front,
    request: Request,
    last_event_id: Annotated[str | None, Header(pattern=r"^\d{1,20}-\d{1,20}$")] = None,
) -> StreamingResponse:
    """Stream results as they come: events ``result`` and, when all are there, ``end``.

    An event's id goes into ``Last-Event-ID`` to go on after a broken connection.
    """
    meta = await _visible_batch(desk, who, batch_id)
    events = _events(desk, batch_id, int(meta["total"]), last_event_id or "0-0", request)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(desk: Desk, batch_id: str, total: int, last: str, request: Request) -> AsyncIterator[str]:
    stream = scripts.batch_key(batch_id)
    redis = desk.store.redis
    sent = 0 if last == "0-0" else len(await redis.xrange(stream, "-", last))
    told_at = time.monotonic()
    while sent < total and not desk.feed.closing:
        answer = await desk.store.streams.xread({stream: last}, count=PAGE, block=int(LOOK_S * 1000))
        entries = answer[0][1] if answer else []
        results = await desk.store.results([fields["job"] for _, fields in entries])
        for (last, fields), result in zip(entries, results, strict=True):  # noqa: PLR1704 - where to go on from
            sent += 1
            data = json.dumps({"index": int(fields["index"]), "finished": sent, "total": total, "result": result})
            yield f"id: {last}\nevent: result\ndata: {data}\n\n"
        if entries or time.monotonic() > told_at + BEAT_S:
            told_at = time.monotonic()
            yield "" if entries else ": still working\n\n"
        if await request.is_disconnected():
            return
    if sent < total:
        return  # the server ends; its clients go on from their last event at the next one
    yield f"event: end\ndata: {json.dumps({'total': total})}\n\n"


@router.delete("/batches/{batch_id}", responses=READ_ERRORS)
async def cancel_batch(batch_id: JobId, who: Evaluator, desk: Front) -> dict[str, Any]:
    """Cancel what is left of a batch."""
    meta = await _visible_batch(desk, who, batch_id)
    if meta.get("owner") != who.name and not who.may("admin"):
        raise Refusal("forbidden", "only its owner or an admin may cancel a batch")
    cancelled = 0
    for job_id in await desk.store.open_of_batch(batch_id):
        cancelled += await desk.cancel(who, job_id) not in TERMINAL
    return {"batch_id": batch_id, "cancelled": cancelled}
