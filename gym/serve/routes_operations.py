"""Routes for those who run the service: health, readiness, metrics, status, draining.

``/health`` and ``/ready`` tell the truth to anybody, in few words; the rest needs a token.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from redis.exceptions import RedisError

from drk.gym.serve import scripts
from drk.gym.serve.api import Admin, Front, Who, error_responses, with_scope
from drk.gym.serve.bodies import DrainBody
from drk.gym.serve.desk import Desk
from drk.gym.serve.metrics import render
from drk.gym.serve.tokens import Principal

router = APIRouter(tags=["operations"])
UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"description": "Not healthy: Redis does not answer, or no worker is alive."}
}


async def health_of(desk: Desk) -> dict[str, Any]:
    """Return what is true now: Redis, workers alive, queue, and whether new jobs are taken."""
    try:
        workers = await desk.store.workers()
        waiting, running = await desk.store.depth()
        draining = bool(await desk.store.redis.exists(scripts.DRAINING))
    except RedisError as error:
        return {"status": "unhealthy", "redis": False, "cause": type(error).__name__, "workers": 0, "ready": False}
    alive = bool(workers)
    return {
        "status": "healthy" if alive else "unhealthy",
        "redis": True,
        "workers": len(workers),
        "waiting": waiting,
        "running": running,
        "draining": draining,
        "ready": alive and not draining,
        "tolerance": desk.settings.tolerance,
        "device_class": desk.settings.device_class,
    }


@router.get("/health", responses=UNHEALTHY)
async def health(desk: Front, response: Response) -> dict[str, Any]:
    """Whether the service works: 503 without Redis or without a worker."""
    found = await health_of(desk)
    response.status_code = 200 if found["status"] == "healthy" else 503
    return found


@router.get("/ready", responses=UNHEALTHY)
async def ready(desk: Front, response: Response) -> dict[str, Any]:
    """Whether new jobs are taken and would be run."""
    found = await health_of(desk)
    response.status_code = 200 if found["ready"] else 503
    return {"ready": found["ready"]}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **error_responses()})
async def metrics(_: Annotated[Principal, Depends(with_scope("metrics"))], desk: Front) -> Response:
    """Prometheus metrics."""
    values = await desk.store.redis.hgetall(scripts.METRICS)
    text, media_type = render(values, await desk.store.depth(), await desk.store.workers())
    return Response(text, media_type=media_type)


@router.get("/v1/status", responses=error_responses())
async def status(who: Who, desk: Front) -> dict[str, Any]:
    """Workers, queue, and the caller's own open jobs."""
    workers = await desk.store.workers()
    shown = ("class", "device", "gpu", "sandbox", "host", "pid", "slots", "started_at")
    mine = await desk.store.redis.hget(scripts.OPEN, who.name)
    rows: list[dict[str, Any]] = [
        {"id": name, **{key: beat.get(key, "") for key in shown}} for name, beat in workers.items()
    ]
    for row, beat in zip(rows, workers.values(), strict=True):
        row["facts"] = json.loads(beat.get("facts") or "{}")
        row["jobs"] = json.loads(beat.get("jobs") or "[]")
    return {
        **await health_of(desk),
        "you": {"name": who.name, "scopes": sorted(who.scopes), "open": int(mine or 0)},
        "worker_list": rows,
    }


@router.post("/v1/drain", responses=error_responses("invalid_request"))
async def drain(body: DrainBody, who: Admin, desk: Front) -> dict[str, Any]:
    """Refuse new jobs (or take them again); what is accepted already is finished."""
    if body.on:
        await desk.store.redis.set(scripts.DRAINING, who.name)
    else:
        await desk.store.redis.delete(scripts.DRAINING)
    desk.audit.write("drain", who.name, on=body.on)
    waiting, running = await desk.store.depth()
    return {"draining": body.on, "waiting": waiting, "running": running}
