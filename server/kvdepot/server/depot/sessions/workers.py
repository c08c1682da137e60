"""I/O workers as processes that may touch extents: sessions of their own, loans in the lent table (I6).

A worker process is the one attachment of a session `kvdepotd/io/N`. So a daemon that adopts
the arena treats a worker of the last run like any process that was lent extents. What the
worker holds comes back at its proven death and not before (row I1a). Rows that such a worker
was to fill are not waited for, because they are not committed any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvdepot.core.arena import LentMode, RowState
from kvdepot.server.depot.sessions.session import Attachment
from kvdepot.server.depot.sessions.sessions import Sessions
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED, RESERVED
from kvdepot.server.depot.types import ProcessIdentity
from kvdepot.server.storage.base import UnknownWorker

_STATE: Final = {LentMode.WRITE: RESERVED, LentMode.READ: COMMITTED}
"""What a worker writes is not published; what it reads is."""


class Workers:
    """The registry of worker processes. `identify` names a child by its pid."""

    def __init__(self, sessions: Sessions, identify: Callable[[int], ProcessIdentity]) -> None:
        self._sessions = sessions
        self._identify = identify
        self._attached: dict[int, Attachment] = {}  # of this run, by number

    def started(self, pid: int) -> int:
        """Write the process down, before it is lent anything. Raise NoRoom when a table is full."""
        attachment = self._sessions.open_worker(self._identify(pid))
        self._attached[attachment.slot] = attachment
        return attachment.slot

    @property
    def earlier(self) -> int:
        """The number of workers of earlier runs, until they are proven dead.

        They are in an adopted arena, and no process holds their pipes.
        """
        return sum(one.worker and not one.connected for one in self._sessions.by_slot.values())

    def dead(self, worker: int) -> None:
        """Remove a worker that is proven dead and whose loans ended. Another process in its slot keeps the slot."""
        attachment = self._attached.pop(worker)
        if self._sessions.attachments.get(worker) is attachment:
            self._sessions.remove_attachment(attachment)
            self._sessions.remove(attachment.session)

    def session(self, worker: int) -> int:
        """Return the slot of the worker's session.

        Raise UnknownWorker where the table has no such process, or another one in its slot (I6).
        """
        attachment = self._attached.get(worker)
        if attachment is None or self._sessions.attachments.get(worker) is not attachment:
            raise UnknownWorker(f"I/O worker in slot {worker} is not in the attachment table, though it lives")
        return attachment.session.slot


class WorkerLoans:
    """The maker of loans to worker processes."""

    def __init__(self, ram: RamTier, workers: Workers) -> None:
        self._ram = ram
        self._rows = ram.rows
        self._lent = ram.lent
        self._workers = workers
        self._loans = 0

    def loan(self, row: int, mode: LentMode) -> ObjectLoan:
        """Make a loan for the object as it is now. Once the object is dropped, no worker begins to touch it."""
        return ObjectLoan(self, row, self._rows.generation[row], mode)

    def lend(self, worker: int, row: int, mode: LentMode) -> int:
        """Return the lent entry. Raise UnknownWorker."""
        session = self._workers.session(worker)
        self._loans += 1
        return self._lent.lend(self._loans, session, mode, row, 0)

    def alive(self, row: int, generation: int, mode: LentMode) -> bool:
        rows = self._rows
        return rows.generation[row] == generation and RowState(rows.state[row]) == _STATE[mode]

    def can_lend(self) -> bool:
        return self._lent.free_count > 0

    def end_loan(self, entry: int) -> None:
        self._ram.end_loan(entry)


class ObjectLoan:
    """One object's extents, for as long as a worker may touch them."""

    __slots__ = ("_entries", "_generation", "_loans", "_mode", "_row", "begun")

    def __init__(self, loans: WorkerLoans, row: int, generation: int, mode: LentMode) -> None:
        self._loans = loans
        self._row = row
        self._generation = generation
        self._mode = mode
        self.begun = False
        self._entries: list[int] = []  # several where the job was given to another worker

    def begin(self, worker: int) -> bool:
        """Lend it to this worker. False when it was dropped meanwhile, or the lent table is full."""
        loans = self._loans
        if not loans.alive(self._row, self._generation, self._mode) or not loans.can_lend():
            return False
        self._entries.append(loans.lend(worker, self._row, self._mode))
        self.begun = True
        return True

    def end(self) -> None:
        """End the loan of one worker, which answered or is proven dead."""
        self._loans.end_loan(self._entries.pop())
