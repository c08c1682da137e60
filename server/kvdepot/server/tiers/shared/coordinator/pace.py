"""How long a node's heartbeats take lately, and what follows from it for leases and for steps of work (ADR 0052).

A heartbeat is some dozen requests. On a server that needs 50 ms for each, or that pauses, nothing may be expected as
soon as on a local disk.
"""

from __future__ import annotations

from typing import Final

from kvdepot.server.tiers.shared.coordinator.settings import LEASE_HEARTBEATS, CoordinatorSettings

STEP_SECONDS: Final = 0.02
LEASE_SECONDS_MAX: Final = 300.0
"""Whatever a lease says of itself: a janitor that died is followed after so long."""
_SETTLING_HEARTBEATS: Final = 1.5
"""Every node that lives has looked at the lease file in between."""
_STEP_BEATS: Final = 3
"""A step of work takes as long as so many heartbeats: with as long a rest as is left, work has half of the time."""
_STEPS_ALLOWED: Final = 10
"""So many steps end, at least, before a node that does not renew its file has to stop writing."""


class Pace:
    """The pace of one node."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._beat_seconds = 0.0

    def beat_took(self, seconds: float) -> None:
        """Take note of how long a heartbeat took.

        A slow one is expected again. The expectation halves with each faster heartbeat.
        """
        self._beat_seconds = max(seconds, self._beat_seconds / 2)

    @property
    def interval_seconds(self) -> float:
        """Return the seconds from one heartbeat to the next, with a step of work in between."""
        return max(self._settings.heartbeat_seconds, (1 + _STEP_BEATS) * self._beat_seconds)

    @property
    def lease_seconds(self) -> float:
        """Return the seconds that a lease written now has to last."""
        settings = self._settings
        return max(settings.lease_seconds, min(LEASE_HEARTBEATS * self.interval_seconds, LEASE_SECONDS_MAX))

    def honoured_seconds(self, lasts_seconds: int) -> float:
        """Return the age in seconds up to which a lease is honoured. `lasts_seconds`: what the lease says of itself."""
        return max(self._settings.lease_seconds, min(lasts_seconds, LEASE_SECONDS_MAX))

    @property
    def settling_seconds(self) -> float:
        return _SETTLING_HEARTBEATS * self.interval_seconds

    @property
    def step_seconds(self) -> float:
        """Return the seconds for a step of work, at most what leaves a node time to be heard by its daemon."""
        step_seconds = min(_STEP_BEATS * self._beat_seconds, self._settings.allowed_seconds / _STEPS_ALLOWED)
        return max(STEP_SECONDS, step_seconds)
