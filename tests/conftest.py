"""What every test gets: private user folders, no stray settings, and a skip where a GPU is needed and missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: several tests run beside each other

import torch
from warm_python import WarmPython
from warm_zygotes import WarmZygotes

from drk.assistant import gym_address
from drk.gym import zygote_client
from drk.gym.devices import list_gpus


class TorchRandom:
    """torch's generator, for hypothesis: each example starts from the same numbers, so that a failure repeats."""

    def seed(self, value: int) -> None:
        """Start anew from ``value``."""
        torch.manual_seed(value)

    def getstate(self) -> torch.Tensor:
        """Return the state to come back to."""
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        """Come back to ``state``."""
        torch.set_rng_state(state)


torch_random = TorchRandom()  # hypothesis holds it weakly
hypothesis.register_random(torch_random)
# A run of the tests answers for the change it was started for: the same examples each time. To look for new ones:
# --hypothesis-profile=explore.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without one (asked once, without initialising CUDA)."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not list_gpus():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Let every test draw the same inputs each time."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def private_user_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's own settings, caches and logs out of tests, and tests out of them. Returns the folder."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("CONFIG", "CACHE", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(folder / name.lower()))
    for name in [name for name in os.environ if name.startswith("DRK_")]:
        monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Processes of their own that begin with torch and Triton imported."""
    process = WarmPython("torch", "triton")
    yield process
    process.close()


@pytest.fixture(scope="session")
def warm_interpreting_python() -> Iterator[WarmPython]:
    """Processes of their own that begin with torch and Triton imported, and interpret kernels."""
    process = WarmPython("torch", "triton", "torch._dynamo", TRITON_INTERPRET="1")
    yield process
    process.close()


@pytest.fixture(scope="session")
def warm_zygotes() -> Iterator[WarmZygotes]:
    """Where gyms in a test's own process have their zygotes from."""
    zygotes = WarmZygotes()
    yield zygotes
    zygotes.close()


@pytest.fixture(autouse=True, scope="session")
def gyms_start_warm(warm_zygotes: WarmZygotes) -> Iterator[None]:
    """Open gyms without importing torch once more for each."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (zygote_client, gym_address):
            patch.setattr(module, "launch", warm_zygotes.launch)
        yield
