"""The parent of a service: what it starts again, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from drk.gym.serve.settings import ServeSettings
from drk.gym.serve.up import Child, Household

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
)


def test_a_second_signal_ends_what_does_not_end() -> None:
    told: list[str] = []
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        household = Household(None, [Child("stubborn", "", ServeSettings(), process)], told.append, grace_s=600)
        household._on_signal()
        household._on_signal()
        household.run()
        assert process.poll() == -signal.SIGKILL
    assert told == ["stubborn did not end in time; what it ran will be run again"]


def test_what_ends_by_itself_is_started_again_after_ever_longer_pauses() -> None:
    child = Child("broken", "drk.no_such_module", ServeSettings())
    pauses = []
    for _ in range(2):
        child.start()
        assert child.process is not None
        child.process.wait()
        assert child.died()
        assert child.start_at > time.monotonic()
        pauses.append(child.pause_s)
    assert pauses[1] == 2 * pauses[0]


def test_what_is_killed_is_started_again_at_once() -> None:
    child = Child("killed", "drk.no_such_module", ServeSettings(), pause_s=5.0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        child.process, child.started_at = process, time.monotonic()
        assert not child.died()
        process.kill()
        process.wait()
        assert child.died()
    assert child.pause_s == 0.2
