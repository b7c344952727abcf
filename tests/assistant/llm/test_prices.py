from __future__ import annotations

import pytest

from drk.assistant.errors import UsageError
from drk.assistant.llm.messages import Usage
from drk.assistant.llm.model_settings import OPENAI_URL
from drk.assistant.llm.prices import PriceList, require_price

USAGE = Usage(prompt=2_000_000, completion=1_000_000)


def test_given_prices_win() -> None:
    prices = PriceList("gpt-4o", OPENAI_URL, (1.0, 10.0))
    assert (prices.source, prices.cost_usd(USAGE)) == ("given", 12.0)
    assert prices.cost_usd(None) is None
    assert PriceList("m", "this process", (1.0, 10.0), local=True).cost_usd(USAGE) == 12.0


def test_a_local_model_costs_nothing_and_is_known() -> None:
    prices = PriceList("m", "this process", local=True)
    assert (prices.source, prices.cost_usd(USAGE), prices.cost_usd(None)) == ("local", 0.0, 0.0)


def test_the_table_is_looked_up_by_endpoint() -> None:
    pytest.importorskip("genai_prices", reason="genai-prices is not installed")
    public = PriceList("gpt-4o", OPENAI_URL)
    assert public.source == "genai-prices"
    cost = public.cost_usd(Usage(1_000_000, 0))
    assert cost is not None
    assert cost > 0
    cached = public.cost_usd(Usage(1_000_000, 0, cached=1_000_000))
    assert cached is not None
    assert cached < cost
    for unknown in (PriceList("gpt-4o", "http://127.0.0.1:8000/v1"), PriceList("no-such-model-x", OPENAI_URL)):
        assert (unknown.source, unknown.cost_usd(USAGE)) == ("unknown", None)


def test_a_limit_needs_a_price() -> None:
    unknown = PriceList("m", "http://127.0.0.1:8000/v1")
    require_price(unknown, None)
    require_price(PriceList("m", "x", (0.0, 0.0)), 1.0)
    with pytest.raises(UsageError, match=r"the price of m at .* is unknown"):
        require_price(unknown, 1.0)
