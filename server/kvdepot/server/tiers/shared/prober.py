"""What stands in the coordinator's place where there is no directory: it proves by a probe that the place serves.

A bucket or a peer has no marker, no nodes and no janitor. Before anything is served, a worker does a probe. For a
bucket it proves that the server holds to If-None-Match. What fails is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvdepot.server.io.jobs import Answer, Priority, Probe
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.shared.links import Failed, Message, Report
from kvdepot.server.tiers.workers import Workers

_RETRY_SECONDS_MAX: Final = 60.0
_NO_LIMIT_BYTES: Final = 1 << 62


class Prober:
    """A `CoordinatorLink`. It makes the workers, which the tier replaces once the place is proven."""

    def __init__(self, data: Workers, *, node: str, loop: asyncio.AbstractEventLoop, retry_seconds: float) -> None:
        self._data = data
        self._node = node
        self._loop = loop
        self._retry_seconds = retry_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._on_message: Callable[[Message], None] | None = None

    def start(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._data.renew("")
        self._probe()

    def hurry(self) -> None:
        """Try again now, if a probe has failed and the next one waits: there is a new place."""
        if self._timer is not None:
            self._timer.cancel()
            self._probe()

    def publish(self, total_bytes: int, wanted_bytes: int = 0, settled: str = "", *, refused: bool = False) -> None:
        """Do nothing: nobody counts what lies there."""

    def end(self) -> None:
        self._on_message = None
        if self._timer is not None:
            self._timer.cancel()

    def _probe(self) -> None:
        self._timer = None
        self._data.submit(Probe(PROBE), priority=Priority.TEND, done=self._probed)

    def _probed(self, answer: Answer) -> None:
        if self._on_message is None:
            return
        if answer.outcome is IoOutcome.OK:
            self._on_message(self._report())
            return
        self._timer = self._loop.call_later(self._retry_seconds, self._probe)
        self._retry_seconds = min(2 * self._retry_seconds, _RETRY_SECONDS_MAX)
        self._on_message(Failed(f"{answer.outcome}: {answer.detail}"))

    def _report(self) -> Report:
        return Report(
            self._node, "", is_janitor=False, used_bytes=0, quarantined_bytes=0, objects=0,
            limit_bytes=_NO_LIMIT_BYTES, marker_ok=True, device=0,
        )  # fmt: skip
