"""The FastAPI application: routes, who may use them, and how errors look.

State lives in ``app.state`` (one :class:`Desk`, one token book), made by the lifespan. No CORS headers are ever sent.
Interactive pages are left out (they load scripts from elsewhere); ``/openapi.json`` is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from drk.gym.serve.broker import make_celery
from drk.gym.serve.desk import Desk, installed_versions
from drk.gym.serve.feed import Feed, end_tasks
from drk.gym.serve.limits import BODY_BYTES, BodyLimit
from drk.gym.serve.overseer import Overseer
from drk.gym.serve.records import Audit
from drk.gym.serve.refusals import STATUS, Refusal
from drk.gym.serve.settings import ServeSettings
from drk.gym.serve.store import Store, connect, connect_streams
from drk.gym.serve.tokens import LOCAL, Principal, TokenBook

BEARER = HTTPBearer(auto_error=False, description="A token made by drk gym token create.")
_CODES = {404: "not_found", 405: "method_not_allowed", 400: "bad_request", 413: "too_large"}


def create_app(settings: ServeSettings) -> FastAPI:
    """Return the application for ``settings``."""
    from drk.gym.serve import routes_evaluations, routes_kernelgym, routes_operations

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        redis = connect(settings.redis_url)
        streams = connect_streams(settings.redis_url)
        store = Store(redis, streams)
        celery = make_celery(settings.redis_url, settings.run_s)
        audit = Audit(settings.audit_file, sources=settings.audit_sources)
        with contextlib.suppress(RedisError):
            # Connections for feed and overseer: the client leaks one whose making is cancelled.
            await asyncio.gather(redis.ping(), redis.ping(), streams.ping())
        async with Feed(redis, streams) as feed:
            app.state.desk = Desk(settings, store, celery, feed, audit)
            overseer = asyncio.create_task(Overseer(store, celery, settings.result_ttl_s).run())
            yield
            await end_tasks([overseer])
        app.state.desk.close()
        audit.close()
        await redis.aclose()
        await streams.aclose()

    app = FastAPI(
        title="drk gym",
        version=installed_versions().partition(",")[0].removeprefix("drk "),
        summary="Judges Triton kernels: correct, honest, faster?",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.settings = settings
    tokens = app.state.tokens = TokenBook(Path(settings.tokens_file)) if settings.tokens_file else None
    for module in (routes_evaluations, routes_kernelgym, routes_operations):
        app.include_router(module.router)
    _handle_errors(app)
    app.add_middleware(
        BodyLimit,
        size_bytes=settings.body_bytes,
        seconds=settings.body_s,
        loopback_only=settings.insecure_local,
        knows=(lambda token: tokens.check(token) is not None) if tokens is not None else None,
    )
    return app


def _handle_errors(app: FastAPI) -> None:
    def answer(refusal: Refusal, status: int | None = None) -> Response:
        text = json.dumps(refusal.body())  # ASCII: a message may quote what is no Unicode
        return Response(text, status or refusal.status, refusal.headers(), "application/json")

    async def on_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return answer(error)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        rows = [
            {"where": ".".join(str(part) for part in row["loc"]), "message": row["msg"]} for row in error.errors()[:20]
        ]
        first = f"{rows[0]['where']}: {rows[0]['message']}" if rows else "invalid"
        # KernelGYM's clients expect 400 here.
        status = None if request.url.path.startswith("/v1/") else 400
        return answer(Refusal("invalid_request", first, details=rows), status)

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        refusal = Refusal(_CODES.get(error.status_code, "bad_request"), str(error.detail))
        response = answer(refusal, error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def on_redis(_: Request, error: Exception) -> Response:
        return answer(Refusal("unavailable", f"Redis does not answer: {type(error).__name__}"))

    app.add_exception_handler(Refusal, on_refusal)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RedisError, on_redis)


async def principal(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]
) -> Principal:
    """Return who asks.

    Raises:
        Refusal: no token, or one that is not valid.
    """
    tokens: TokenBook | None = request.app.state.tokens
    if tokens is None:
        return LOCAL
    found = tokens.check(credentials.credentials) if credentials is not None else None
    if found is None:
        raise Refusal("unauthorized", "a valid bearer token is needed", help="drk gym token create NAME, on the server")
    return found


def with_scope(scope: str) -> Callable[[Principal], Awaitable[Principal]]:
    """Return a dependency: who asks, if they hold ``scope``."""

    async def check(who: Annotated[Principal, Depends(principal)]) -> Principal:
        if not who.may(scope):
            raise Refusal("forbidden", f"this token lacks the scope {scope!r}")
        return who

    return check


async def desk_of(request: Request) -> Desk:
    """Return the application's desk. (A coroutine, like all dependencies: others would be called in a thread.)"""
    found: Desk = request.app.state.desk
    return found


async def body_size(request: Request) -> int:
    """Return how many bytes the request's body has."""
    found: int = request.scope[BODY_BYTES]
    return found


Who = Annotated[Principal, Depends(principal)]
Evaluator = Annotated[Principal, Depends(with_scope("evaluate"))]
Profiler = Annotated[Principal, Depends(with_scope("profile"))]
Admin = Annotated[Principal, Depends(with_scope("admin"))]
Front = Annotated[Desk, Depends(desk_of)]
BodyBytes = Annotated[int, Depends(body_size)]


def error_responses(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of the errors that a route may answer with."""
    found: dict[int | str, dict[str, Any]] = {}
    schema = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message"],
                "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            }
        },
    }
    for code in ("unauthorized", "forbidden", "too_large", "too_slow", "bad_request", "unavailable", *codes):
        status = STATUS[code]
        known = found.get(status, {}).get("description")
        found[status] = {
            "description": f"{known}, {code}" if known else code,
            "content": {"application/json": {"schema": schema}},
        }
    return found
