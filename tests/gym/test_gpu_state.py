"""What a reading of the GPU says against a measurement."""

from __future__ import annotations

import pytest

from drk.gym.gpu_state import GpuState, doubts, read_state, throttle_words


def test_reasons_are_named_and_harmless_ones_are_not() -> None:
    assert throttle_words(0x1 | 0x2 | 0x10) == ()
    assert throttle_words(0x4 | 0x40) == ("power cap", "thermal slowdown (hardware)")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (GpuState(), []),
        (GpuState(1980, 1980, 40, (), (1, 2)), []),
        (GpuState(345, 1980), ["345 MHz of 1980 MHz"]),
        (GpuState(1500, 1980, throttle=("power cap",)), ["power cap"]),
        (GpuState(1980, 1980, processes=(1, 9)), ["other processes used the GPU while timing: 9"]),
        # a container: the driver's pids are not ours, so nothing is known
        (GpuState(1980, 1980, processes=(70001, 70002)), []),
    ],
)
def test_doubts(state: GpuState, words: list[str]) -> None:
    found = doubts(state, ours=(1, 2))
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


def test_a_gpu_that_is_not_there_says_nothing() -> None:
    assert read_state("GPU-00000000-0000-0000-0000-000000000000") is None
