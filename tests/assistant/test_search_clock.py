"""What a search's clock counts and when it stops."""

from __future__ import annotations

import asyncio

import pytest

from drk.assistant.search_clock import SearchClock, Stopped, covered_s


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0.0), ([(1, 3)], 2.0), ([(1, 3), (2, 5)], 4.0), ([(2, 3), (0, 10)], 10.0), ([(0, 1), (4, 6), (5, 6)], 3.0)],
)
def test_judgements_at_the_same_time_count_once(spans: list[tuple[float, float]], seconds: float) -> None:
    assert covered_s(spans) == seconds


def test_what_an_earlier_start_used_is_taken_from_the_budget() -> None:
    clock = SearchClock(1000.0, asyncio.Event())
    clock.replay(100.0, 5000.0)
    clock.replay(150.0, 5050.0)
    assert 840.0 < clock.left_s() <= 850.0
    clock.replay(200.0, None)  # recorded before ends were
    assert 640.0 < clock.left_s() <= 650.0
    clock.check(600.0)
    with pytest.raises(Stopped, match="too little for another candidate") as nearly:
        clock.check(700.0)
    assert not nearly.value.interrupted


async def test_it_ends_what_is_awaited() -> None:
    stop = asyncio.Event()
    with pytest.raises(Stopped, match=r"the time budget of 0\.01 s is spent"):
        await SearchClock(0.01, stop).before_end(asyncio.sleep(60))
    clock = SearchClock(60.0, stop)
    assert await clock.before_end(asyncio.sleep(0, "done")) == "done"
    stop.set()
    with pytest.raises(Stopped, match="interrupted") as stopped:
        await clock.before_end(asyncio.sleep(60))
    assert stopped.value.interrupted
    with pytest.raises(Stopped, match="interrupted"):
        clock.check()
