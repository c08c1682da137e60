"""I/O workers as processes that may touch extents: sessions of their own, loans in the lent table (I6).

A worker process is the one attachment of a session `kvdepotd/io/N`, so that a daemon that
adopts the arena treats a worker of the last run like any process it was lent to: what it
holds comes back at its proven death and not before (row I1a). What such a worker was to
fill is not waited for: nobody commits it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvdepot.core.arena import LentMode, RowState
from kvdepot.server.engine.rows import COMMITTED, RESERVED
from kvdepot.server.engine.sessions import Attachment, Sessions
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.types import ProcessIdentity
from kvdepot.server.tiers.base import UnknownWorker

_STATE: Final = {LentMode.WRITE: RESERVED, LentMode.READ: COMMITTED}
"""What a worker writes is not published; what it reads is."""


class Workers:
    """The registry of worker processes, and the maker of loans. `identify` names a child by its pid.

    Tiers are made with the registry, and the space with the tiers: `lend_from` comes third.
    """

    _space: Space

    def __init__(self, sessions: Sessions, identify: Callable[[int], ProcessIdentity]) -> None:
        self._sessions = sessions
        self._identify = identify
        self._loans = 0
        self._attached: dict[int, Attachment] = {}  # of this run, by number

    def lend_from(self, space: Space) -> None:
        self._space = space

    def started(self, pid: int) -> int:
        """Write the process down, before it is lent anything. Raises NoRoom when a table is full."""
        attachment = self._sessions.open_worker(self._identify(pid))
        self._attached[attachment.slot] = attachment
        return attachment.slot

    @property
    def earlier(self) -> int:
        """Of earlier runs: an adopted arena's, whose pipes nobody holds, until they are proven dead."""
        return sum(one.worker and not one.connected for one in self._sessions.by_slot.values())

    def dead(self, worker: int) -> None:
        """Its death is proven and its loans have ended. Another process that has its slot by now keeps it."""
        attachment = self._attached.pop(worker)
        if self._sessions.attachments.get(worker) is attachment:
            self._sessions.remove_attachment(attachment)
            self._sessions.remove(attachment.session)

    def loan(self, row: int, mode: LentMode) -> ObjectLoan:
        """For the object as it is now: once it is dropped, nobody begins to touch it."""
        return ObjectLoan(self, row, self._space.rows.generation[row], mode)

    def lend(self, worker: int, row: int, mode: LentMode) -> int:
        """Raises UnknownWorker where the table has no such process, or another one in its slot (I6)."""
        attachment = self._attached.get(worker)
        if attachment is None or self._sessions.attachments.get(worker) is not attachment:
            raise UnknownWorker(f"I/O worker in slot {worker} is not in the attachment table, though it lives")
        self._loans += 1
        return self._space.lent.lend(self._loans, attachment.session.slot, mode, row, 0)

    def alive(self, row: int, generation: int, mode: LentMode) -> bool:
        rows = self._space.rows
        return rows.generation[row] == generation and RowState(rows.state[row]) == _STATE[mode]

    def can_lend(self) -> bool:
        return self._space.lent.free_count > 0

    def give_back(self, entry: int) -> None:
        self._space.give_back(entry)


class ObjectLoan:
    """One object's extents, for as long as a worker may touch them."""

    __slots__ = ("_entries", "_generation", "_mode", "_row", "_workers", "begun")

    def __init__(self, workers: Workers, row: int, generation: int, mode: LentMode) -> None:
        self._workers = workers
        self._row = row
        self._generation = generation
        self._mode = mode
        self.begun = False
        self._entries: list[int] = []  # several where the job was given to another worker

    def begin(self, worker: int) -> bool:
        """Lend it to this worker. False when it was dropped meanwhile, or the lent table is full."""
        workers = self._workers
        if not workers.alive(self._row, self._generation, self._mode) or not workers.can_lend():
            return False
        self._entries.append(workers.lend(worker, self._row, self._mode))
        self.begun = True
        return True

    def end(self) -> None:
        """One worker answered or is proven dead."""
        self._workers.give_back(self._entries.pop())
