"""What a call costs: the user's own prices, else the offline table of ``genai-prices`` (optional), else unknown.

Unknown is null and never 0: a limit on money is refused when it could not be kept. A backend inside this process costs
nothing per call, which is 0 and known; its electricity and the GPU it holds are left out.

The table is looked up by the endpoint's address, not by the model's name alone: a model of the same name on a team's
own server has no public price. The table is as old as the installed package.
"""

from __future__ import annotations

from dataclasses import dataclass

from drk.assistant.errors import UsageError
from drk.assistant.llm.messages import Backend, Usage
from drk.assistant.llm.model_settings import ModelSettings


@dataclass(frozen=True)
class PriceList:
    """Prices of one model at one endpoint. ``source`` says where they come from: ``given``, ``genai-prices``, ..."""

    model: str
    endpoint: str
    given: tuple[float, float] | None = None
    local: bool = False

    @property
    def source(self) -> str:
        """Where prices come from: ``given``, ``local``, ``genai-prices`` or ``unknown``."""
        if self.given is not None:
            return "given"
        if self.local:
            return "local"
        return "unknown" if self.cost_usd(Usage(1000, 1000)) is None else "genai-prices"

    def cost_usd(self, usage: Usage | None) -> float | None:
        """Return the dollars of a call, or null where price or usage is unknown."""
        if self.given is None and self.local:
            return 0.0
        if usage is None:
            return None
        if self.given is not None:
            return (usage.prompt * self.given[0] + usage.completion * self.given[1]) / 1e6
        return _table_cost(self.model, self.endpoint, usage)


def _table_cost(model: str, endpoint: str, usage: Usage) -> float | None:
    try:
        import genai_prices
    except ModuleNotFoundError:
        return None
    tokens = genai_prices.Usage(
        input_tokens=usage.prompt, output_tokens=usage.completion, cache_read_tokens=min(usage.cached, usage.prompt)
    )
    try:
        return float(genai_prices.calc_price(tokens, model_ref=model, provider_api_url=endpoint).total_price)
    except (LookupError, ValueError):
        return None


def price_list(backend: Backend, settings: ModelSettings) -> PriceList:
    """Return the prices that hold for ``backend``."""
    model = backend.name.partition(":")[2]
    return PriceList(model, backend.endpoint, settings.prices, backend.local)


def require_price(prices: PriceList, max_cost_usd: float | None) -> None:
    """Check that a limit on money can be kept.

    Raises:
        UsageError: there is a limit and no price.
    """
    if max_cost_usd is not None and prices.source == "unknown":
        raise UsageError(
            f"--max-cost cannot be kept: the price of {prices.model} at {prices.endpoint} is unknown",
            help="give it: --price IN,OUT (dollars a million tokens); or pip install 'drk[llm]' for the price table",
        )
