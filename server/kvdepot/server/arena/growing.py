"""The growth of all parts of the arena's data: each has a populator of its own, so that no part waits for another."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from kvdepot.server.arena.arena_file import ArenaFile
from kvdepot.server.arena.populate import Growth, Populator

_THREADS_MAX: Final = 4


class Growing:
    """Populates an arena. `grew(part, before, after)` is called on the loop."""

    def __init__(
        self, arena: ArenaFile, *, memory_alone: bool, loop: asyncio.AbstractEventLoop,
        grew: Callable[[int, Growth, Growth], None],
    ) -> None:  # fmt: skip
        self._arena = arena
        self._loop = loop
        self._grew = grew
        self._growths = [Growth(0, done=False) for _ in arena.parts]
        threads = max(min(os.cpu_count() or 1, _THREADS_MAX) // len(arena.parts), 1)
        self._populators = [
            Populator(
                fd=fd, address=address, size_bytes=room, threads=threads, memory_alone=memory_alone,
                lock_too=() if part else arena.tables_ranges, report=partial(self._report, part),
            )
            for part, ((fd, _), address, room) in enumerate(
                zip(arena.parts, arena.addresses, arena.rooms, strict=True)
            )
        ]  # fmt: skip

    @property
    def now(self) -> Growth:
        """Return the growth of all parts together: what is ready of them, and the first reason."""
        parts = self._growths
        return Growth(
            sum(one.ready_bytes for one in parts), all(one.done for one in parts),
            next((one.reason for one in parts if one.reason), ""), all(one.locked for one in parts),
        )  # fmt: skip

    def free_unused(self, log: logging.Logger, *, lent: bool) -> None:
        """Free an arena's memory beyond its rooms, before `start`. `lent`: an engine may still touch it."""
        arena = self._arena
        if arena.rooms == arena.layout.parts:
            return
        if lent:
            log.warning("arena keeps memory beyond its capacity until the next start: engines hold leases of it")
            return
        log.info("arena has %d MiB that are not used, because tiers below RAM need them", arena.free_unused() >> 20)

    def start(self) -> None:
        """Use what has its pages already, and populate the rest."""
        for part, populator in enumerate(self._populators):
            self._note(part, Growth(self._arena.populated_bytes(part), done=False))
            populator.start()

    def stop(self) -> None:
        """Stop. Blocks for a fraction of a second."""
        for populator in self._populators:
            populator.stop()

    def _report(self, part: int, growth: Growth) -> None:
        """Pass growth on to the loop. The populating threads call this."""
        self._loop.call_soon_threadsafe(self._note, part, growth)

    def _note(self, part: int, growth: Growth) -> None:
        before = self._growths[part]
        after = replace(growth, ready_bytes=max(growth.ready_bytes, before.ready_bytes))
        self._growths[part] = after
        self._grew(part, before, after)
