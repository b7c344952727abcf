"""The layers of the sandbox as they were found on this machine, and what level they add up to.

:func:`drk.gym.sandbox.probe` fills a :class:`Layers` by trying each one; this module only judges it. Each missing
layer says what it exposes and how to get it, for ``drk doctor`` and for error messages. A ``Layers`` travels as JSON
(``as_dict``/``from_dict``), since the zygote probes and the Judge reports.

Levels are defined by effect. ``basic``: own session, limits and environment only. ``standard``: no foreign writes, no
foreign reads that matter, no network; whatever else the machine grants is used too. ``strict``: also its own process
tree and network namespaces, and signal scope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from drk.gym.errors import SandboxUnavailable
from drk.gym.sandbox.policy import Level


@dataclass(frozen=True)
class Layer:
    """One layer: whether it works here, the evidence, what its absence exposes, how to get it."""

    ok: bool
    detail: str = ""
    exposes: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Layers:
    """All layers. ``landlock_abi`` is 0 without Landlock; ``user_namespace`` tells that the namespaces need one.

    ``roots`` are the read-only places of every Runner on this machine.
    """

    rlimits: Layer
    no_new_privs: Layer
    pdeathsig: Layer
    landlock: Layer
    seccomp: Layer
    pidns: Layer
    netns: Layer
    ipcns: Layer
    uid_drop: Layer
    capability_drop: Layer
    process_limit: Layer
    memory_watch: Layer
    landlock_abi: int = 0
    user_namespace: bool = False
    runner_uid: int | None = None
    roots: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, Layer]]:
        """Name and layer, in the order in which they are applied."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Layer):
                yield field.name, value

    def missing(self) -> tuple[str, ...]:
        """Names of the layers that do not work here."""
        return tuple(name for name, layer in self.rows() if not layer.ok)

    def without(self, *names: str) -> Layers:
        """The same machine with some layers switched off (``landlock`` also clears the ABI)."""
        changed: dict[str, Any] = {
            name: replace(getattr(self, name), ok=False, detail="switched off") for name in names
        }
        if "landlock" in names:
            changed["landlock_abi"] = 0
        return replace(self, **changed)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Layers:
        """Inverse of :meth:`as_dict`. Raises ``TypeError`` when a field is missing or unknown."""
        values: dict[str, Any] = {
            key: Layer(**value) if isinstance(value, Mapping) else value for key, value in data.items()
        }
        values["roots"] = tuple(values.get("roots", ()))
        return Layers(**values)


_STANDARD = ("rlimits", "no_new_privs", "pdeathsig", "landlock")
_STRICT = (*_STANDARD, "seccomp", "pidns", "netns", "memory_watch")
_STRICT_ABI = 6


def lacking(level: Level, layers: Layers) -> tuple[str, ...]:
    """Names of the layers that ``level`` needs and that are missing (empty when the level can be had)."""
    if level == "basic":
        return () if layers.rlimits.ok else ("rlimits",)
    absent = [name for name in (_STRICT if level == "strict" else _STANDARD) if not getattr(layers, name).ok]
    if level == "strict" and layers.landlock.ok and layers.landlock_abi < _STRICT_ABI:
        absent.append("landlock")
    if level == "standard" and not (layers.seccomp.ok or layers.netns.ok):
        absent.append("seccomp")
    return tuple(absent)


def achieved_level(layers: Layers) -> Level:
    """The highest level that this machine grants."""
    if not lacking("strict", layers):
        return "strict"
    return "basic" if lacking("standard", layers) else "standard"


def require(level: Level, layers: Layers) -> None:
    """Raise :class:`SandboxUnavailable` with the missing layers, what they expose and how to get them."""
    absent = lacking(level, layers)
    if not absent:
        return
    found = [(name, getattr(layers, name)) for name in absent]
    reasons = "; ".join(f"{name}: {layer.detail or 'missing'} -> {layer.exposes}" for name, layer in found)
    remedies = "; ".join(dict.fromkeys(layer.remedy for _, layer in found if layer.remedy))
    best = achieved_level(layers)
    raise SandboxUnavailable(
        f"sandbox level '{level}' cannot be had here ({reasons})",
        help=f"{remedies}; or ask for --sandbox={best}" if remedies else f"ask for --sandbox={best}",
    )
