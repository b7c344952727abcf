"""One HTTP connection pool to a gym server: tokens, retries with back-off, and errors in the gym's own words.

What passes (a connection that breaks, 408, 429, 502 to 504) is tried again for as long as the caller's patience lasts;
Retry-After is kept. What does not pass is raised: BundleError for what the server finds malformed or too large,
HostError for everything else. Callers make requests safe to repeat by idempotency keys.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection
from typing import Any

import httpx

from drk.gym.errors import BundleError, HostError

READ_S = 60.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
PASSING = {408, 425, 429, 502, 503, 504}


class GymConnection:
    """A pool of at most ``connections`` connections. ``patience_s``: how long a server may be away or refuse."""

    def __init__(self, url: str, token: str, *, patience_s: float, connections: int) -> None:
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        timeout = httpx.Timeout(READ_S, connect=10, pool=None)
        if not self.url.startswith(("http://", "https://")):
            raise HostError(f"not a gym's address: {url}", help="such as http://127.0.0.1:8765")
        try:
            self.http = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise HostError(f"not a gym's address: {url}", help="such as http://127.0.0.1:8765") from error

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def request(self, method: str, path: str, *, allow: Collection[int] = (), **how: Any) -> httpx.Response:
        """Send a request until it is answered for good; ``allow`` lists refusals to return instead of raising.

        Raises:
            BundleError: the server finds the request malformed or too large.
            HostError: it does not answer for long, or refuses.
        """
        deadline = time.monotonic() + self.patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                response = await self.http.request(method, path, **how)
            except httpx.TransportError as error:
                told: httpx.Response | None = None
                failure = HostError(f"the gym at {self.url} does not answer: {error or type(error).__name__}")
            else:
                if response.status_code not in PASSING:
                    if response.status_code not in allow:
                        raise_refusal(response)
                    return response
                told = response
                failure = HostError(refusal_message(response))
            wait_s = max(retry_after_s(told), pause_s * random.uniform(0.5, 1.5))
            if time.monotonic() + wait_s > deadline:
                raise failure
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def refusal_message(response: httpx.Response) -> str:
    """Return what the server says about an error."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"


def retry_after_s(response: httpx.Response | None) -> float:
    """Return how long the server asks to wait, within reason; 0 if it does not say."""
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return min(float(text), LONGEST_PAUSE_S) if text.isdigit() else 0.0


def raise_refusal(response: httpx.Response) -> None:
    """Raise what a refusal means.

    Raises:
        BundleError: 400, 413, 422.
        HostError: anything else from 400 on.
    """
    if response.status_code < 400:
        return
    message = refusal_message(response)
    if response.status_code in (400, 413, 422):
        raise BundleError(f"the gym refused: {message}")
    if response.status_code in (401, 403):
        raise HostError(f"the gym refused: {message}", help="set DRK_GYM_TOKEN to a token with the right scopes")
    raise HostError(f"the gym answered {response.status_code}: {message}")
