"""The daemon's end of the scout (`kvdepot.server.io.peer_scout`): started when there is a choice, told, replaced."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvdepot.core.printable import printable
from kvdepot.server.io.child_stream import ChildStream
from kvdepot.server.io.peer_wire import PeerSettings
from kvdepot.server.io.scout_wire import (
    FROM_SCOUT,
    HOST_CHARACTERS_MAX,
    PLACES_MAX,
    TO_SCOUT,
    Asked,
    At,
    Find,
    Found,
    Ranked,
    Told,
    Useful,
    Want,
    Watch,
)
from kvdepot.server.platform.addresses import url_address
from kvdepot.server.platform.backoff import Backoff
from kvdepot.server.tiers.peer.places import Place

_MODULE: Final = "kvdepot.server.io.peer_scout"
SUMMARY_SECONDS: Final = 30.0
"""Between two questions to a place."""
FIND_SECONDS: Final = 0.05
"""A lookup waits so long for the scout."""
_NICENESS: Final = 5
"""As I/O workers: lookups wait for it."""
_BYTES_MIN: Final = 16 << 20
_BYTES_MAX: Final = 128 << 20
_RAM_SHARE: Final = 256


def summaries_bytes(ram_bytes: int) -> int:
    """Return how many bytes of summaries a scout may keep: a part of RAM. Sources of a fleet are about as large."""
    return min(max(ram_bytes // _RAM_SHARE, _BYTES_MIN), _BYTES_MAX)


class Scout:
    """One process at a time, made again after a while when it dies. Counts `peer_summaries.` and what came of each."""

    def __init__(
        self, peer: PeerSettings, *, name: str, arena_id: int, seats: int, every_seconds: float, bytes_max: int,
        loop: asyncio.AbstractEventLoop, log: logging.Logger, count: Callable[[str, float], None],
        ranked: Callable[[Ranked], None],
    ) -> None:  # fmt: skip
        """Build it without a process. `peer`: without a place. `seats`: how many places lookups ask.

        `bytes_max`: of all summaries together. Those that come later are refused.
        """
        self._peer = peer
        self._name = name
        self._arguments = (arena_id, seats, every_seconds, bytes_max)
        self._loop = loop
        self._log = log
        self._count = count
        self._ranked = ranked
        self._stream = ChildStream(loop, self._on_data)
        self._received = bytearray()
        self._watch: Watch | None = None
        self._refused: dict[At, str] = {}
        self._arenas: dict[At, int] = {}
        self._started_at = 0.0
        self._finds: dict[int, tuple[Callable[[Sequence[Useful]], None], asyncio.TimerHandle]] = {}
        self._last_find = 0
        self._late = False  # with an answer
        self._backoff = Backoff()
        self._respawn: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return self._stream.pid if self._stream.running else None

    def watch(self, places: Sequence[Place], members: Sequence[Place]) -> None:
        """Ask the first ones of these places for summaries. The first ones are preferred where several are equal."""
        there = tuple(At(*place) for place in places[:PLACES_MAX] if len(place[0]) <= HOST_CHARACTERS_MAX)
        watch = Watch(there, tuple(at for place in members if (at := At(*place)) in there))
        if watch == self._watch:
            return
        self._watch = watch
        self._arenas = {at: arena_id for at, arena_id in self._arenas.items() if at in there}
        if self._stream.running:
            self._stream.send(TO_SCOUT.pack(watch))
        elif self._respawn is None:
            self._start()

    def place_of(self, arena_id: int) -> Place | None:
        """Return where the daemon with this arena answered last."""
        at = next((at for at, known in self._arenas.items() if known == arena_id), None)
        return (at.host, at.port) if at is not None else None

    def want(self, files: Sequence[str]) -> None:
        """Tell it what a lookup asks for, unless it has still to take in what it was told before."""
        if self._stream.running and not self._stream.unsent:
            self._stream.send(TO_SCOUT.pack(Want.of(files)))

    def find(self, files: Sequence[str], found: Callable[[Sequence[Useful]], None]) -> None:
        """Ask which places that are no members have the first of these, and how many. `found` is called once, soon.

        It gets nothing if the scout is busy: no lookup waits for one that has not answered another in time.
        """
        if not self._stream.running or self._stream.unsent or self._late:
            found(())
            return
        self._last_find = number = self._last_find + 1
        self._finds[number] = found, self._loop.call_later(FIND_SECONDS, self._not_found, number)
        self._stream.send(TO_SCOUT.pack(Find.of(files), number))

    def _not_found(self, number: int) -> None:
        self._late = True
        self._answer(number, ())

    def _answer(self, number: int, useful: Sequence[Useful]) -> None:
        found, timer = self._finds.pop(number)
        timer.cancel()
        found(useful)

    def use_names(self, names: tuple[str, ...]) -> None:
        """Believe peers whose certificates have these names, and forget all that is known."""
        self._peer = replace(self._peer, names=names)
        watch = self._watch
        self.close()
        if watch is not None:
            self._watch = watch
            self._start()

    def close(self) -> None:
        """Ask nobody any more."""
        self._watch = None
        if self._respawn is not None:
            self._respawn.cancel()
            self._respawn = None
        self._stream.end()
        self._received.clear()
        self._refused.clear()
        self._arenas.clear()
        self._forget_finds()

    def _forget_finds(self) -> None:
        self._late = False
        for number in tuple(self._finds):
            self._answer(number, ())

    def _start(self) -> None:
        self._respawn = None
        arguments = (self._peer.pack(), *self._arguments)
        self._received.clear()
        self._started_at = self._loop.time()
        try:
            self._stream.start(_MODULE, lambda fd: (fd, os.getpid(), *arguments), niceness=_NICENESS)
        except OSError as error:
            self._start_later(f"cannot be started: {error}")
            return
        assert self._watch is not None
        self._stream.send(TO_SCOUT.pack(self._watch))

    def _start_later(self, why: str) -> None:
        seconds = self._backoff.next_seconds()
        self._log.warning("tier %s: its scout %s; the next one starts in %.1f s", self._name, why, seconds)
        self._respawn = self._loop.call_later(seconds, self._start)

    def _on_data(self, data: bytes) -> None:
        if not data:
            self._ended("ended")
            return
        self._received += data
        try:
            messages = list(FROM_SCOUT.take(self._received))
        except Exception as error:  # noqa: BLE001 - a FrameError, or whatever else comes of such bytes
            self._stream.end()
            self._ended(f"sent {error}")
            return
        for number, message in messages:
            if isinstance(message, Found):
                self._late = False
                if number in self._finds:
                    self._answer(number, message.useful)
            elif isinstance(message, Ranked):
                self._ranked(message)
            else:
                self._told(message)

    def _ended(self, why: str) -> None:
        self._forget_finds()
        self._backoff.ran(self._loop.time() - self._started_at)
        self._start_later(why)

    def _told(self, told: Told) -> None:
        """Count an answer. The log has a refusal once, until it is another one."""
        self._count(f"peer_summaries.{told.asked}", 1)
        if told.arena_id:
            self._arenas[told.place] = told.arena_id
        if told.asked is not Asked.REFUSED:
            self._refused.pop(told.place, None)
        elif self._refused.get(told.place) != told.why:
            self._refused[told.place] = told.why
            self._log.warning(
                "tier %s: summary of %s is refused: %s",
                self._name, url_address(told.place.host, told.place.port), printable(told.why),
            )  # fmt: skip
