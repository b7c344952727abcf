"""KernelGYM-compatible routes: its clients and load scripts work when pointed here (:mod:`.kernelgym_form`).

``task_id`` belongs to the caller: two tokens may use the same. Asking again with the same code gives the same job.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import ValidationError

from drk.gym.serve.api import Evaluator, Front, Who, error_responses
from drk.gym.serve.bodies import Options
from drk.gym.serve.desk import Desk, Item
from drk.gym.serve.jobs import TERMINAL
from drk.gym.serve.kernelgym_form import BatchRequest, EvaluationRequest, WorkflowRequest, response_of, stamp
from drk.gym.serve.refusals import Refusal
from drk.gym.serve.tokens import Principal
from drk.gym.wire import candidate_id, task_id

router = APIRouter(tags=["kernelgym"])
TaskName = Annotated[str, Path(min_length=1, max_length=100)]
ERRORS = error_responses("bad_request", "queue_full", "quota_exceeded", "rate_limited", "draining")
READ_ERRORS = error_responses("not_found")
GRACE_S = 60.0


def _key(who: Principal, name: str) -> str:
    return f"drk:kernelgym:{who.name}:{name}"


async def _submit(desk: Desk, who: Principal, request: EvaluationRequest) -> str:
    """Submit one request and remember its job under its ``task_id``."""
    if request.workflow not in (None, "kernelbench") or request.cases is not None or request.cases_code is not None:
        raise Refusal("bad_request", "only the kernelbench workflow is supported", help="leave workflow and cases out")
    task = desk.read_task_value(request.task())
    candidate = request.candidate()
    nonce = secrets.token_hex(16) if request.force_refresh else "kernelgym-" + task_id(task) + candidate_id(candidate)
    options = Options(
        priority=request.priority,
        run_deadline_s=float(request.timeout),
        timing=request.timing,
        cache=not request.force_refresh,
    )
    (job_id,) = await desk.submit(
        who, [Item("evaluation", task, candidate)], options, nonce=f"{nonce}-{request.task_id}"
    )
    await desk.store.redis.set(_key(who, request.task_id), job_id, ex=desk.settings.result_ttl_s)
    return job_id


async def _judged(desk: Desk, who: Principal, request: EvaluationRequest) -> dict[str, Any]:
    job_id = await _submit(desk, who, request)
    result = await desk.wait(job_id, desk.settings.queue_s + request.timeout + GRACE_S)
    if result is None:
        raise Refusal("unavailable", f"{request.task_id!r} is still not finished", help="ask /results/{task_id} later")
    return response_of(request.task_id, json.loads(result), request.reference_backend)


@router.post("/evaluate", responses=ERRORS)
async def evaluate(body: EvaluationRequest, who: Evaluator, desk: Front) -> dict[str, Any]:
    """Judge one kernel; the answer comes when it is done."""
    return await _judged(desk, who, body)


@router.post("/evaluate/batch", responses=ERRORS)
async def evaluate_batch(body: BatchRequest, who: Evaluator, desk: Front) -> dict[str, Any]:
    """Judge several kernels, concurrently; the answer comes when all are done."""
    results = await asyncio.gather(*(_judged(desk, who, request) for request in body.tasks))
    completed = sum(row["status"] == "completed" for row in results)
    return {
        "batch_id": body.batch_id,
        "batch_status": "completed",
        "total_tasks": len(results),
        "completed_tasks": completed,
        "failed_tasks": len(results) - completed,
        "results": results,
    }


@router.post("/workflow/submit", responses=ERRORS)
async def submit_workflow(body: WorkflowRequest, who: Evaluator, desk: Front) -> dict[str, Any]:
    """Run the ``kernelbench`` workflow on a payload of ``/evaluate``'s fields."""
    name = body.task_id or str(body.payload.get("task_id") or "") or secrets.token_hex(8)
    fields = {**body.payload, "task_id": name, "workflow": body.workflow, "force_refresh": body.force_refresh}
    try:
        request = EvaluationRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refusal("bad_request", f"payload.{where}: {first['msg']}") from error
    found = await _judged(desk, who, request)
    return {
        "task_id": name,
        "status": found["status"],
        "result": found,
        "error_message": found["error_message"],
        "error_code": found["error_code"],
        "completed_at": found["completed_at"],
    }


async def _job_of(desk: Desk, who: Principal, name: str) -> str:
    job_id = await desk.store.redis.get(_key(who, name))
    if job_id is None:
        raise Refusal("not_found", f"there is no task {name!r}")
    return str(job_id)


@router.get("/results/{name}", responses=READ_ERRORS)
@router.get("/workflow/results/{name}", responses=READ_ERRORS)
async def results(name: TaskName, who: Who, desk: Front) -> dict[str, Any]:
    """Return a finished task's result; 404 while it runs, as KernelGYM does."""
    result = await desk.wait(await _job_of(desk, who, name), 0.0)
    if result is None:
        raise Refusal("not_found", f"the task {name!r} is not finished")
    return response_of(name, json.loads(result))


@router.get("/status/{name}", responses=READ_ERRORS)
async def task_status(name: TaskName, who: Who, desk: Front) -> dict[str, Any]:
    """Return where a task is."""
    job_id = await _job_of(desk, who, name)
    fields = await desk.visible(who, job_id)
    state = {"waiting": "pending", "running": "processing"}.get(fields["state"], "completed")
    if fields["state"] in TERMINAL:
        result = await desk.wait(job_id, 0.0)
        state = response_of(name, json.loads(result))["status"] if result else "failed"
    worker = fields.get("worker") or None
    return {
        "task_id": name,
        "status": state,
        "submitted_at": stamp(float(fields["submitted_at"])),
        "assigned_worker": worker,
    }


@router.delete("/tasks/{name}", responses=READ_ERRORS)
async def cancel_task(name: TaskName, who: Evaluator, desk: Front) -> dict[str, Any]:
    """Cancel a task, also one that runs."""
    state = await desk.cancel(who, await _job_of(desk, who, name))
    return {"task_id": name, "status": "cancelled" if state not in TERMINAL else "completed"}


@router.get("/workers/status", responses=error_responses())
async def workers_status(_: Who, desk: Front) -> dict[str, Any]:
    """Return the workers that are alive."""
    beats = await desk.store.workers()
    rows = {
        name: {"status": "online", "device": beat["device"], "device_class": beat["class"], "slots": int(beat["slots"])}
        for name, beat in beats.items()
    }
    return {"workers": rows, "total_workers": len(rows)}


@router.get("/queue/status", responses=error_responses())
async def queue_status(_: Who, desk: Front) -> dict[str, Any]:
    """Return how many tasks wait and run."""
    waiting, running = await desk.store.depth()
    return {"pending": waiting, "processing": running}
