"""How a language model is asked: endpoint, sampling, context, retries, prices. No secret is ever in here.

Defaults follow the paper's evaluation (temperature 1.0, 8,192 tokens an answer, 32,768 of context). ``api_key_env``
names the environment variable that holds the key; see :mod:`drk.assistant.llm.keys`.

Left out: settings of single providers; what an endpoint refuses is left out of the request and noted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from drk.assistant.episode import POLICIES
from drk.assistant.errors import UsageError, did_you_mean

OPENAI_URL = "https://api.openai.com/v1"


@dataclass(frozen=True)
class ModelSettings:
    """See the module's text. Times are in seconds; ``prices`` are dollars a million prompt and completion tokens.

    ``attempts`` is how often one call is made at most, ``backoff_s`` the first pause between two of them (it doubles;
    a ``Retry-After`` of the endpoint wins). ``policy`` chooses the earlier turns that the model sees.
    """

    base_url: str = ""
    api_key_env: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 8192
    context_tokens: int = 32768
    timeout_s: float = 600.0
    attempts: int = 8
    backoff_s: float = 0.5
    concurrency: int = 16
    stream: bool = False
    policy: str = "top-w"
    templates: Path | None = None
    prices: tuple[float, float] | None = None
    max_cost_usd: float | None = None

    def checked(self) -> ModelSettings:
        """Return the settings.

        Raises:
            UsageError: a value cannot be used; names the option.
        """
        if self.policy not in POLICIES:
            near = did_you_mean(self.policy, POLICIES) or f"known are: {', '.join(POLICIES)}"
            raise UsageError(f"unknown policy {self.policy!r}", help=near)
        if self.max_tokens + 1024 > self.context_tokens:
            raise UsageError(
                f"--max-tokens {self.max_tokens} leaves no room for the task in --context-tokens {self.context_tokens}"
            )
        if self.base_url:
            check_url(self.base_url)
        return self


def check_url(url: str) -> None:
    """Check a base URL.

    Raises:
        UsageError: not http(s), or a secret stands in it.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError("--base-url is no http or https address", help="--base-url http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UsageError(
            "--base-url holds a user name, a password or a query", help="keep secrets in the environment: --api-key-env"
        )


def parse_prices(text: str) -> tuple[float, float]:
    """Read ``IN,OUT``: dollars a million prompt and completion tokens.

    Raises:
        UsageError: not two numbers, or one is negative.
    """
    try:
        prompt, completion = (float(part) for part in text.split(","))
    except ValueError:
        prompt = completion = -1.0
    if not (0 <= prompt < 1e6 and 0 <= completion < 1e6):
        raise UsageError(f"--price is not two prices: {text!r}", help="--price 0.25,2 (dollars a million tokens)")
    return prompt, completion
