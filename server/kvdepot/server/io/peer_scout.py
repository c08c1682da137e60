"""The scout of a peer tier: it asks all listed peers for summaries, and says which are worth asking (ADR 85).

Started by the daemon as `python -m kvdepot.server.io.peer_scout SOCKET_FD PARENT_PID SETTINGS ARENA_ID SEATS SECONDS
BYTES`. SETTINGS: `PeerSettings` without a place. ARENA_ID: the own daemon's, which may be in the list too. SECONDS:
between two questions to a place. BYTES: of all summaries. It has no memory of the arena, so nothing depends on its end.

Each place has a thread of its own, and a connection for each question. So a place that hangs delays no other one, and
no source has a connection of each node of a large fleet.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvdepot.server.io.chunk_words import words_of_names
from kvdepot.server.io.framing import FrameError
from kvdepot.server.io.lifeline import die_with, exit_code
from kvdepot.server.io.peer_client import Peer
from kvdepot.server.io.peer_ranking import WORDS_MAX, Wanted, leading
from kvdepot.server.io.peer_summary import Filter
from kvdepot.server.io.peer_wire import Lane, PeerSettings, Refused, Reply, Summarize, Summary, Unchanged
from kvdepot.server.io.scout_wire import (
    FOUND_MAX,
    FROM_SCOUT,
    NAMES_MAX,
    TO_SCOUT,
    WHY_BYTES_MAX,
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
from kvdepot.server.storage.shared_layout import object_of

ANSWER_SECONDS: Final = 10.0
"""From a question to the last byte of its answer. A source may have to make the summary first."""
FIRST_SECONDS_EACH: Final = 0.02
"""The first questions to all places are spread over so long for each of them."""
_SPREAD: Final = 0.2
"""Pauses are longer or shorter by up to this part, so that a fleet does not ask in step."""
KEPT_TIMES: Final = 4
"""A summary that could not be asked for again counts for so many pauses."""
RANK_SECONDS: Final = 0.5
"""At least between two rankings."""
THREADS_MAX: Final = 256
"""Threads of places, also of those that are not listed any more and hang. More places are not asked."""
_STACK_BYTES: Final = 512 << 10
_SWITCH_SECONDS: Final = 0.0005
"""So long a thread computes before another one may. A lookup waits for an answer while others rank."""
_M_MMAP_THRESHOLD: Final = -3
_MAPPED_BYTES: Final = 64 << 10


class RefusedSummaryError(ValueError):
    """An answer that is no summary, or one that says nothing."""


def main(arguments: list[str]) -> int:
    socket_fd, parent = int(arguments[0]), int(arguments[1])
    die_with(parent)
    for ending in (signal.SIGINT, signal.SIGTERM):  # for the daemon, which ends this process itself
        signal.signal(ending, signal.SIG_IGN)
    threading.excepthook = _end
    threading.stack_size(_STACK_BYTES)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Otherwise the C library raises this limit, and keeps the memory of summaries that have been taken in.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    settings = replace(PeerSettings.unpack(arguments[2]), lane=Lane.STREAM)
    scout = Scout(
        socket.socket(fileno=socket_fd), settings, arena_id=int(arguments[3]), seats=int(arguments[4]),
        every_seconds=float(arguments[5]), bytes_max=int(arguments[6]),
    )  # fmt: skip
    threading.Thread(target=scout.rank, daemon=True).start()
    scout.listen()
    return 0


def _end(failure: threading.ExceptHookArgs) -> None:
    """End the process with a thread that raises. The daemon starts another one."""
    sys.excepthook(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    os._exit(1)


class Place:
    """A listed place, and the thread that asks it."""

    def __init__(self, at: At, column: int) -> None:
        self.at = at
        self.column = column
        self.gone = threading.Event()
        self.itself = False
        self.arena_id = 0
        self.known: Filter | None = None
        self.version = 0
        self.bits_bytes = 0
        self.known_at = 0.0


class Scout:
    """What all threads have alike. `_changing` guards it."""

    def __init__(
        self, connection: socket.socket, settings: PeerSettings, *, arena_id: int, seats: int, every_seconds: float,
        bytes_max: int,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._settings = settings
        self._arena_id = arena_id
        self._seats = seats
        self._every_seconds = every_seconds
        self._bytes_max = bytes_max
        self._sending = threading.Lock()
        self._changing = threading.Lock()
        self._has_changed = threading.Event()
        self._pause = threading.Event()
        self._places: dict[At, Place] = {}  # in the order of the list
        self._members: tuple[At, ...] = ()
        self._free: list[int] = []
        self._columns = 0
        self._threads = 0
        self._wanted = Wanted()
        self._coming: deque[Want] = deque(maxlen=WORDS_MAX // NAMES_MAX)  # to be noted before the next ranking

    def listen(self) -> None:
        """Take messages until the daemon closes the socket. The caller ends the process then."""
        stream = self._connection.makefile("rb")
        while (frame := TO_SCOUT.read(stream)) is not None:
            number, message = frame
            if isinstance(message, Find):
                self._tell(self._found(message), number)
                continue
            if isinstance(message, Watch):
                with self._changing:
                    self._watch(message.places, message.members)
            else:
                self._coming.append(message)
            self._has_changed.set()

    def _found(self, message: Find) -> Found:
        """Return who has these. Takes no lock, and so no longer while others rank: only this thread adds places."""
        known = [(place.at, place.known) for place in self._places.values() if place.at not in self._members]
        others = [(at, summary) for at, summary in known if summary is not None]
        best = leading([summary for _, summary in others], _words_of(message))
        return Found(tuple(Useful(others[at][0], count) for at, count in best[:FOUND_MAX]))

    def rank(self) -> None:
        """Tell the daemon which places are worth asking whenever that changes."""
        told: Ranked | None = None
        while True:
            self._has_changed.wait(self._every_seconds)
            self._has_changed.clear()
            with self._changing:
                while self._coming:
                    self._wanted.want(_words_of(self._coming.popleft()))
                found = self._ranked()
            if found != told:
                told = found
                self._tell(found)
            self._pause.wait(RANK_SECONDS)

    def _ranked(self) -> Ranked:
        others = {place.column: place for place in self._places.values() if not place.itself}
        members = [self._places[at].column for at in self._members if at in self._places]
        best = self._wanted.best(list(others), [one for one in members if one in others], self._seats)
        itself = tuple(place.at for place in self._places.values() if place.itself)
        return Ranked(tuple(Useful(others[column].at, names) for column, names in best), itself)

    def _watch(self, places: Sequence[At], members: tuple[At, ...]) -> None:
        self._members = members
        for at in set(self._places) - set(places):
            place = self._places.pop(at)
            place.gone.set()
            self._wanted.knows(place.column, None)
            self._free.append(place.column)
        for at in places:
            if at not in self._places and self._threads < THREADS_MAX:
                self._places[at] = place = Place(at, self._column())
                self._threads += 1
                threading.Thread(target=self._follow, args=(place, len(places)), daemon=True).start()
        self._places = {at: self._places[at] for at in places if at in self._places}

    def _column(self) -> int:
        if self._free:
            return self._free.pop()
        self._columns += 1
        return self._columns - 1

    def _tell(self, message: Ranked | Told | Found, number: int = 0) -> None:
        try:
            with self._sending:
                self._connection.sendall(FROM_SCOUT.pack(message, number))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the daemon has ended, or is about to end this process

    # The thread of a place

    def _follow(self, place: Place, places: int) -> None:
        """Ask a place until it is not listed any more, or is this daemon."""
        seconds = random.uniform(0.0, FIRST_SECONDS_EACH * places)  # noqa: S311
        while not (place.gone.wait(seconds) or place.itself):
            self._ask(place)
            seconds = self._every_seconds * random.uniform(1 - _SPREAD, 1 + _SPREAD)  # noqa: S311
        with self._changing:
            self._threads -= 1

    def _ask(self, place: Place) -> None:
        settings = replace(self._settings, host=place.at.host, port=place.at.port)
        peer = Peer(settings, answer_seconds=ANSWER_SECONDS)
        why = ""
        try:
            asked = self._take(place, peer.ask(Summarize(place.version)))
        except RefusedSummaryError as error:
            asked, why = Asked.REFUSED, str(error)
        except OSError as error:
            asked = Asked.REFUSED if isinstance(error.__cause__, FrameError) else Asked.FAILED
            why = error.strerror or str(error)
        finally:
            peer.close()
        old = time.monotonic() - place.known_at > KEPT_TIMES * self._every_seconds
        if asked is Asked.REFUSED or (asked is Asked.FAILED and old):
            self._note(place, None)
        if not place.gone.is_set():
            why = why.encode("utf-8", "replace")[:WHY_BYTES_MAX].decode("utf-8", "ignore")
            self._tell(Told(place.at, asked, why, place.arena_id))

    def _take(self, place: Place, reply: Reply) -> Asked:
        """Take an answer. Raise OSError if the place does not answer this daemon, and RefusedSummaryError."""
        if isinstance(reply, Refused):
            raise OSError(0, f"the peer says: {reply.reason}")
        if not isinstance(reply, Summary | Unchanged):
            raise RefusedSummaryError(f"{type(reply).__name__} is no answer")
        place.arena_id = reply.arena_id
        if reply.arena_id == self._arena_id:
            place.itself = True
            self._note(place, None)
            return Asked.UNCHANGED
        if isinstance(reply, Unchanged):
            if not place.version:
                raise RefusedSummaryError("it says that a summary is unchanged, and has sent none")
            place.known_at = time.monotonic()
            return Asked.UNCHANGED
        with self._changing:
            others_bytes = sum(one.bits_bytes for one in self._places.values() if one is not place)
        if others_bytes + len(reply.bits) > self._bytes_max:
            raise RefusedSummaryError(f"the summaries of others leave no room: they have {others_bytes} bytes")
        try:
            known = Filter(reply)
        except ValueError as error:
            raise RefusedSummaryError(str(error)) from error
        self._note(place, known, len(reply.bits))
        return Asked.NEW

    def _note(self, place: Place, known: Filter | None, bits_bytes: int = 0) -> None:
        with self._changing:
            place.known = known
            place.version = known.version if known is not None else 0
            place.bits_bytes = bits_bytes
            place.known_at = time.monotonic()
            if not place.gone.is_set():  # else its column may be another place's
                self._wanted.knows(place.column, known)
        self._has_changed.set()


def _words_of(message: Want | Find) -> list[int]:
    """Return the words of these names, each once."""
    names = [found[:2] for file in message.names() if (found := object_of(file)) is not None]
    return list(dict.fromkeys(words_of_names(names).tolist()))


if __name__ == "__main__":
    code = exit_code(main)
    sys.stderr.flush()
    os._exit(code)  # not waiting for threads that hang
