"""Where candidates are judged: a gym of this process, or a server that ``--gym`` or ``DRK_GYM_URL`` names.

``DRK_GYM_TOKEN`` holds the token; there is no flag for it, since command lines can be read by others. Device, sandbox
and target of a server are its own: flags for them only matter for a gym in this process (``--device interpret`` asks a
server for its interpreter).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from drk.gym.devices import list_gpus, resolve_device
from drk.gym.errors import DeviceError
from drk.gym.settings import GymSettings
from drk.gym.zygote_client import LaunchedZygote, launch, zygote_modes

if TYPE_CHECKING:
    from drk.gym.client import RemoteGym
    from drk.gym.engine import Gym

URL_VARIABLE = "DRK_GYM_URL"
TOKEN_VARIABLE = "DRK_GYM_TOKEN"
PATIENCE_S = 30.0
"""A person waits: sooner than a trainer would, say that the server is away."""
DEFAULT_URL = "http://127.0.0.1:8765"


def gym_url(flag: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Return the server's address, or an empty string when there is none: the flag first, then ``DRK_GYM_URL``."""
    environ = os.environ if environ is None else environ
    return flag if flag is not None else environ.get(URL_VARIABLE, "")


def gym_token(environ: Mapping[str, str] | None = None) -> str:
    """Return the token for the server, or an empty string."""
    return (os.environ if environ is None else environ).get(TOKEN_VARIABLE, "")


@asynccontextmanager
async def open_gym(settings: GymSettings, flag: str | None = None) -> AsyncIterator[Gym | RemoteGym]:
    """Enter a gym: the server's, where one is named, else one of this process.

    Raises:
        drk.gym.errors.DeviceError: the device that was named is not there.
        drk.gym.errors.HostError: the address is malformed.
    """
    url = gym_url(flag)
    if url:
        from drk.gym.client import RemoteGym

        async with RemoteGym(url, gym_token(), settings, patience_s=PATIENCE_S) as remote:
            yield remote
        return
    launched = launch_ahead(settings)
    try:
        from drk.gym.engine import Gym  # brings torch: not needed for a server, and zygotes import theirs meanwhile

        async with Gym(settings, launched) as gym:
            yield gym
    finally:
        for zygote in launched:
            zygote.close()


def launch_ahead(settings: GymSettings) -> list[LaunchedZygote]:
    """Start the zygotes that a gym with these settings will need, as far as that is known without torch."""
    try:
        device, _ = resolve_device(settings.device, list_gpus() if settings.device != "interpret" else [])
    except DeviceError:
        return []  # the gym will say so
    modes = zygote_modes(device, offline_compile=settings.offline_compile)
    return [launch(mode, settings.sandbox) for mode in modes]
