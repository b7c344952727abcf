"""Errors of the API: one form, stable codes, the right HTTP status.

``{"error": {"code", "message", "help"}}``. Codes, which are never renamed: ``invalid_request`` 422,
``unauthorized`` 401, ``forbidden`` 403, ``not_found`` 404, ``method_not_allowed`` 405, ``not_finished`` 409,
``too_large`` 413, ``too_slow`` 408, ``queue_full`` / ``quota_exceeded`` / ``rate_limited`` 429, ``draining`` and
``unavailable`` 503. Those that pass carry Retry-After.
"""

from __future__ import annotations

from typing import Any

STATUS = {
    "invalid_request": 422,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "not_finished": 409,
    "too_large": 413,
    "too_slow": 408,
    "queue_full": 429,
    "quota_exceeded": 429,
    "rate_limited": 429,
    "draining": 503,
    "unavailable": 503,
    "bad_request": 400,
}
RETRY_AFTER_S = {"queue_full": 5, "quota_exceeded": 5, "rate_limited": 15, "draining": 30, "unavailable": 2}


class Refusal(Exception):
    """Ends a request with an error of the API."""

    def __init__(self, code: str, message: str, *, help: str = "", details: Any = None) -> None:  # noqa: A002
        super().__init__(message)
        self.code = code
        self.message = message
        self.help = help
        self.details = details

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.code]

    def headers(self) -> dict[str, str]:
        """Return Retry-After and the like."""
        found = {"Cache-Control": "no-store"}
        if self.code in RETRY_AFTER_S:
            found["Retry-After"] = str(RETRY_AFTER_S[self.code])
        if self.code == "unauthorized":
            found["WWW-Authenticate"] = "Bearer"
        return found

    def body(self) -> dict[str, Any]:
        """Return the JSON."""
        error = {"code": self.code, "message": self.message, "help": self.help or None}
        if self.details is not None:
            error["details"] = self.details
        return {"error": error}
