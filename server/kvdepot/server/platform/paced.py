"""Calls that together take at most a share of the loop's time: what others ask for must not keep it from its own."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

BURST_SECONDS: Final = 0.05
"""What may be done at once, after a while in which nothing was asked."""


class Paced:
    """Calls in the order in which they come. Who waits for all of them to be done limits their number."""

    def __init__(
        self, share: float, loop: asyncio.AbstractEventLoop, *, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`share`: of the loop's time, above 0. `cpu_clock`: what the thread has computed, in seconds."""
        self._cpu_clock = cpu_clock
        self._share = share
        self._loop = loop
        self._waiting: deque[Callable[[], object]] = deque()
        self._paid_at = 0.0
        """When the calls of before have taken no more than their share."""
        self._timer: asyncio.TimerHandle | None = None

    def call(self, call: Callable[[], object]) -> None:
        """Call it now, or later. It must not raise."""
        self._waiting.append(call)
        if self._timer is None:
            self._work()

    def clear(self) -> None:
        """Forget the calls that wait."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _work(self) -> None:
        self._timer = None
        while self._waiting:
            now = self._loop.time()
            early_seconds = self._paid_at - BURST_SECONDS / self._share - now
            if early_seconds > 0:
                self._timer = self._loop.call_later(early_seconds, self._work)
                return
            before = self._cpu_clock()
            self._waiting.popleft()()
            self._paid_at = max(self._paid_at, now) + (self._cpu_clock() - before) / self._share
