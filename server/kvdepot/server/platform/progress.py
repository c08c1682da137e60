"""Waiting on the loop's thread for a state that callbacks bring about."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Progress:
    """`moved` is called by the callbacks, and wakes who waits in `until`."""

    def __init__(self) -> None:
        self._moved = asyncio.Event()

    def moved(self) -> None:
        self._moved.set()

    async def until(self, reached: Callable[[], bool], seconds: float | None = None) -> None:
        """Return when this is reached, or after so many seconds. None: wait as long as it takes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not reached():
                    self._moved.clear()
                    await self._moved.wait()
