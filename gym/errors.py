"""The gym's error tree, and what is *not* an error.

::

    GymError                     root of everything that drk.gym raises
    +-- TaskError                the task itself cannot be judged (bad target, missing inputs, ...)
    +-- BundleError              a task or candidate could not be read, or exceeds a size limit
    +-- HostError                our or the host's fault: retried, never rewarded
        +-- ZygoteError          the warm parent died or did not answer
        +-- ProtocolError        a Runner spoke out of turn (only raised to the Judge's own code)
        +-- SandboxUnavailable   the level that was asked for cannot be had on this machine
        +-- DeviceError          the device named does not exist or is unhealthy

A wrong candidate is data, not a crash: nothing that a candidate does raises in the caller. It ends as a
:class:`drk.gym.schema.Verdict` whose ``error`` says at which stage, of which kind and on which line.
"""

from __future__ import annotations


class GymError(Exception):
    """Root of the tree. ``help`` is the next step that a person can take, or an empty string."""

    def __init__(self, message: str, *, help: str = "") -> None:  # noqa: A002 - the word users read
        super().__init__(message)
        self.message = message
        self.help = help


class TaskError(GymError):
    """The task cannot be judged as it stands: the reference fails, inputs are missing, the target is no module.

    ``kind`` is a stable identifier; ``file`` and ``line`` point into the user's source where known.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "task",
        file: str = "",
        line: int | None = None,
        help: str = "",  # noqa: A002
    ) -> None:
        super().__init__(message, help=help)
        self.kind = kind
        self.file = file
        self.line = line


class BundleError(GymError):
    """A bundle is malformed or larger than its limits."""


class HostError(GymError):
    """Our fault or the host's: the caller may retry; a reward is never derived from it."""


class ZygoteError(HostError):
    """The zygote did not start, died, or did not answer in time."""


class ProtocolError(HostError):
    """A frame was malformed, too long, or not the one expected."""


class SandboxUnavailable(HostError):
    """The sandbox level that was asked for cannot be reached here; ``help`` says how to get it."""


class DeviceError(HostError):
    """The device that was named is absent, busy beyond the limit, or unhealthy."""
