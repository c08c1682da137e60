"""What an engine's log says about its daemon: attached, away, and back.

    none --missed--> begun --at once, or BEGIN_SECONDS after the last line--> logged --REPEAT_SECONDS--> logged again
      ^_____________________________________ answered ______________________________________________________|

An outage is a time in which the engine has no daemon: none listens, it refuses the engine, or it does not answer. The
attachment and the session report each failed attempt, about once a second. Used on the session's thread, except
`computed`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from kvdepot.core.units import duration_text, size_text

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.keys import NamespaceSpec

BEGIN_SECONDS: Final = 60.0
"""At least so long between a line about an outage and the first line of another one: a crash loop fills no log."""
REPEAT_SECONDS: Final = 300.0
"""How often an outage that lasts is logged again."""


class DaemonLog:
    """The log lines of one session. See the module."""

    def __init__(self, endpoint: Endpoint, log: logging.Logger, clock: Callable[[], float]) -> None:
        self.computed = 0
        """Requests that the engine computed because of an outage. Written by the scheduler's thread only."""
        self._endpoint = endpoint
        self._log = log
        self._clock = clock
        self._began_at: float | None = None  # the outage
        self._computed_before = 0
        self._logged = False  # this outage
        self._logged_at = -BEGIN_SECONDS
        self._attached = ""  # the last line about it

    def absent(self, reason: str) -> None:
        """Note an attempt that met no daemon."""
        self._missed(f"no daemon at {self._endpoint}", reason, "requests are computed until the daemon is there")

    def refused(self, reason: str) -> None:
        """Note an attempt that the daemon refused, or that failed for another reason. `Attachment` logs the first."""
        self._begin(logged=True)
        self._missed(f"not attached to {self._endpoint}", reason)

    def silent(self) -> None:
        """Note that a daemon that accepts calls does not answer them."""
        self._missed(f"no answer from the daemon at {self._endpoint}", "", "requests are computed until it answers")

    def _begin(self, *, logged: bool) -> None:
        """Begin an outage, unless there is one."""
        if self._began_at is None:
            self._began_at, self._logged = self._clock(), logged
            if logged:
                self._logged_at = self._began_at

    def _missed(self, what: str, reason: str, effect: str = "") -> None:
        self._begin(logged=False)
        now, why = self._clock(), f": {reason}" if reason else ""
        if now - self._logged_at < (REPEAT_SECONDS if self._logged else BEGIN_SECONDS):
            return
        if self._logged:
            self._log.warning("kvdepot: %s for %s%s; %s", what, self._age(), why, self._cost())
        else:
            self._log.warning("kvdepot: %s%s; %s", what, why, effect)
        self._logged, self._logged_at = True, now

    def answered(self) -> None:
        """Note that the daemon serves this engine."""
        if self._began_at is not None and self._logged:
            self._log.warning(
                "kvdepot: the daemon at %s is back after %s; %s", self._endpoint, self._age(), self._cost()
            )
        self._began_at = None
        self._computed_before = self.computed  # not at the begin: the engine may notice an outage first

    def attached(self, version: str, spec: NamespaceSpec | None, tier_bytes: Mapping[str, int]) -> None:
        """Log what this engine is attached to, unless the last such line said the same.

        Args:
            version: of the daemon.
            spec: of a namespace that the daemon has accepted; None while there is none.
            tier_bytes: capacity by tier; empty from an older daemon.
        """
        tiers = ", ".join(f"{name} {size_text(tier_bytes[name])}" for name in sorted(tier_bytes, key=_ram_first))
        daemon = f"kvdepotd {version}" + (f"; {tiers}" if tiers else "")
        namespace = "no namespace yet, because the weights are being identified"
        if spec is not None:
            names = f"{spec.label}, epoch {spec.epoch!r}, bump {spec.bumps}"
            namespace = f"namespace {spec.namespace_id().hex()} ({names}), chunks of {spec.chunk_tokens} tokens"
        line = f"kvdepot: attached to {self._endpoint} ({daemon}); {namespace}"
        if line != self._attached:
            self._attached = line
            self._log.info("%s", line)

    def _age(self) -> str:
        assert self._began_at is not None
        return duration_text(self._clock() - self._began_at)

    def _cost(self) -> str:
        return f"{self.computed - self._computed_before} requests were computed"


def _ram_first(tier: str) -> tuple[bool, str]:
    return tier != "ram", tier
