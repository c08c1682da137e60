"""The opening process of a disk tier, as the tier has it: who holds the directory, and what its index says.

The process is made (`start`), admitted to the directory (`locked`), and asked to read the index (`open`). What it
streams goes into a `Reopening`; at its end the tier is told `opened`. Whatever goes wrong ends the process: the tier is
told `opening_lost`, and starts the next one. Nothing is written without the lock that the process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from kvdepot.core.allocator import Extent, ExtentError
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.found import FoundObjects
from kvdepot.server.tiers.disk.links import OpenerLink
from kvdepot.server.tiers.disk.medium import Medium
from kvdepot.server.tiers.disk.messages import (
    Begin,
    Claims,
    Compacted,
    Done,
    Ended,
    Failed,
    Held,
    Locked,
    Message,
    Objects,
    Opened,
    Request,
    Synced,
    Waiting,
)
from kvdepot.server.tiers.disk.reopening import Reopening


class OpeningListener(Protocol):
    """The tier, which reacts to its openings."""

    def opened(self, facts: Opened, token: str, unkilled: Sequence[int]) -> None:
        """Serve: all of the index was reported. `unkilled`: sequences whose KILL is to be appended."""

    def opening_lost(self, reason: str, *, gone: bool) -> None:
        """Stop writing: nothing can be written. `gone`: the directory is gone, too."""

    def opening_waits(self, reason: str) -> None: ...

    def compacted(self, message: Compacted) -> None: ...

    def tell_found(self, objects: FoundObjects) -> None: ...

    def tell_lost(self, handles: Sequence[int]) -> None: ...


class Openings:
    """One process at a time, and one reading of the index."""

    def __init__(
        self, link: OpenerLink, medium: Medium, listener: OpeningListener, making: Callable[[], int], guard: Guard
    ) -> None:
        """Prepare, without a process. `making` returns the segment that a worker may be making; -1: none."""
        self.link = link
        self.locked = False
        self.reopening: Reopening | None = None
        self.synced: bool | None = None
        """The answer to a `Sync`."""
        self._medium = medium
        self._listener = listener
        self._making = making
        self._guard = guard
        self._token = ""
        self._device = 0
        self._store_id = ""

    @property
    def idle(self) -> bool:
        """Return whether the process has the directory and reads no index."""
        return self.locked and self.reopening is None

    def start(self) -> None:
        self.locked = False
        try:
            self.link.start(self.on_message)
            self.link.send(Begin(self._token, self._device, self._store_id))
        except Exception as error:  # noqa: BLE001 - an OSError, or whatever it is: tried again
            if not isinstance(error, OSError):
                self._guard.caught("the start of an opening process", error)
            self.link.end()
            self._listener.opening_lost(f"the opening process cannot be started: {error}", gone=False)

    def start_and_wait(self, seconds: float) -> Held | None:
        """Return by whom the directory is held, if that is known so soon. Then the process is ended."""
        self.start()
        message = self.link.wait(seconds) if self.link.running else None
        if isinstance(message, Held):
            self.link.end()
            return message
        if message is not None:
            self.on_message(message)
        return None

    def open(self) -> None:
        if not self._guard.call("the begin of an opening", self._begin):
            self._lose("the daemon failed at the begin of an opening")

    def send(self, what: str, request: Request) -> bool:
        return self._guard.call(what, self.link.send, request)

    def run_once(self) -> None:
        """Tell a further slice of what the index has lost."""
        if self.reopening is not None and self.reopening.complete:
            self._guarded("the end of an opening", partial(self._streamed, self.reopening))

    def dropped(self, handle: int, sequence: int) -> None:
        """Take note that an object was dropped during an opening."""
        if self.reopening is not None:
            self.reopening.dropped(handle, sequence)

    def on_message(self, message: Message) -> None:
        """Take in a message of the process. If that fails, end the opening: the next one sends its content again."""
        self._guarded(f"the message {type(message).__name__}", partial(self._take, message))

    def _guarded(self, what: str, step: Callable[[], None]) -> None:
        if not self._guard.call(what, step):
            self._guard.call("giving an opening up", self._lose, f"the daemon failed at {what}")

    def _begin(self) -> None:
        self.reopening = Reopening(self._medium, self._listener.tell_found, self._listener.tell_lost)
        self.link.send(replace(self.reopening.begin(self._making()), store_id=self._store_id))

    def _take(self, message: Message) -> None:
        match message:
            case Locked(token, device):
                self._admitted(token, device)
            case Waiting(reason):
                self._listener.opening_waits(reason)
            case Held(pid):
                self._lose(f"the directory is held by the daemon with pid {pid}")
            case Failed(reason, outcome):
                self._lose(reason, gone=outcome == IoOutcome.GONE)
            case Ended():
                self._lose("the opening process ended")
            case Opened() if self.reopening is not None:
                self._store_id = message.store_id
                self.reopening.opened(message)
            case Claims(fragments) if self.reopening is not None:
                self._claim(fragments)
            case Objects(puts) if self.reopening is not None:
                self.reopening.objects(puts)
            case Done() if self.reopening is not None:
                self._streamed(self.reopening)
            case Compacted():
                self._listener.compacted(message)
            case Synced(failed):
                self.synced = not failed

    def _admitted(self, token: str, device: int) -> None:
        self._token, self._device, self.locked = token, device, True
        if self._medium.journal.idle:
            self.open()

    def _claim(self, fragments: Sequence[Extent]) -> None:
        try:
            self._medium.space.claim(fragments)
        except ExtentError as error:
            self._lose(f"the index contradicts itself: {error}")

    def _streamed(self, reopening: Reopening) -> None:
        """End an opening whose index is complete. Lost objects are reported in slices, one at each tick."""
        if reopening.lose():
            facts = reopening.facts
            assert facts is not None
            unkilled = reopening.finish()  # the depot drops what came after lost objects, still as part of this
            self.reopening = None
            self._listener.opened(facts, self._token, unkilled)

    def _lose(self, reason: str, *, gone: bool = False) -> None:
        """End the process and with it the lock. Nothing is written until the next process has the lock."""
        self.link.end()
        self.locked = False
        self._medium.space.give_up()
        self.reopening = None
        self._listener.opening_lost(reason, gone=gone)
