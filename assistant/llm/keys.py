"""Keys of model endpoints: read from the environment, shown to nobody.

``NAME`` holds the key, or ``NAME_FILE`` a file that does; ``NAME`` is ``OPENAI_API_KEY`` unless ``--api-key-env`` says
otherwise. An endpoint on this machine's loopback needs none. The key is handed to the HTTP client only; whatever an
endpoint says is cleaned of it (:func:`redact`) before it is stored or printed.

Honest limit: redaction knows this key and texts that look like keys (``sk-...``); a transformed copy gets through.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from drk.assistant.llm.messages import ModelFault
from drk.assistant.llm.model_settings import OPENAI_URL, ModelSettings

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"
"""What is sent where no key is needed; the client insists on a value."""

_LOOKS_LIKE_KEY = re.compile(r"\b(?:sk|pk|key|hf|gsk|xai)[-_][A-Za-z0-9*_-]{8,}")


def find_key(settings: ModelSettings, environ: Mapping[str, str] | None = None) -> str:
    """Return the key for the endpoint of ``settings``.

    Raises:
        ModelFault: there is none and one is needed; names the variable.
    """
    environ = os.environ if environ is None else environ
    name = settings.api_key_env or DEFAULT_KEY_VARIABLE
    key = environ.get(name, "").strip() or _read_key_file(name, environ)
    if key:
        if not key.isprintable() or not key.isascii():
            raise ModelFault(f"the key in {name} holds characters that no key has", help=f"set {name} again")
        return key
    if is_loopback(settings.base_url) and not settings.api_key_env:
        return NO_KEY
    raise ModelFault(
        f"no key for {settings.base_url or OPENAI_URL}: the environment variable {name} is not set",
        help=f"export {name}=..., or {name}_FILE=path; another name: --api-key-env NAME; another endpoint: --base-url",
    )


def _read_key_file(name: str, environ: Mapping[str, str]) -> str:
    path = environ.get(f"{name}_FILE", "")
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFault(f"cannot read the file that {name}_FILE names", cause=str(error)) from error


def is_loopback(url: str) -> bool:
    """Say whether ``url`` is an address of this machine's loopback."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def redact(text: str, key: str = "") -> str:
    """Return ``text`` without ``key`` and without whatever looks like a key."""
    if key and key != NO_KEY:
        text = text.replace(key, "[key]")
    return _LOOKS_LIKE_KEY.sub("[key]", text)


def without_key(text: str, key: str) -> str:
    """Return ``text`` without ``key``; code that merely looks like a key stays as it is."""
    return text.replace(key, "[key]") if key and key != NO_KEY else text
