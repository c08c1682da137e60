"""Budgets of RAM: how many bytes a party may have reserved, and be lent to read, at a time (ADR 67).

What is reserved or lent cannot be evicted, so a party with all of RAM would stop everybody else. A party is a tenant
or, without tenants, a user. Nothing is ever taken back because of a budget: a call waits, or its objects are computed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.server.depot.sessions.session import Session
from kvdepot.server.depot.sessions.sessions import Sessions
from kvdepot.server.depot.sessions.shares import part
from kvdepot.server.depot.tree.lent import SESSION_NUMBERS
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.types import DepotConfig

ALONE_SHARE: Final = 7 / 8
"""Of RAM, for a user that alone holds anything: the rest is for the next one."""
LEAST_SHARE: Final = 1 / 4
"""Of RAM, for a user among many."""
OVER_BUDGET: Final = "the engines of this user or tenant hold their share of RAM: end loads and stores first"


class Budgets:
    """The bounds of all parties. What they hold is read from sessions and the lent table: there is nothing to keep."""

    def __init__(self, sessions: Sessions, ram: RamTier, config: DepotConfig) -> None:
        self._sessions = sessions
        self._ram = ram
        self._config = config

    def configure(self, config: DepotConfig) -> None:
        self._config = config

    def bound_bytes(self, session: Session) -> int:
        """Return what the party of a session may hold."""
        data_bytes = self._ram.data_bytes
        if session.owner is not None and session.owner.tenant is not None:
            given = {name: one.credit_bytes for name, one in self._config.tenants.items()}
            return part(data_bytes, given, session.owner.tenant)
        holders = {one.party for one in self._sessions.by_slot.values() if one.leases}
        others = len(holders - {session.party, None})
        if others:
            return int(data_bytes * max(1 / (1 + others), LEAST_SHARE))
        return max(int(data_bytes * ALONE_SHARE), self._config.credit_bytes)

    def reservable_bytes(self, session: Session, wanted_bytes: int) -> int:
        """Return how many more bytes the session may have reserved; if all that it wants fits, not exactly."""
        bound = self.bound_bytes(session)
        own = self._sessions.of_party(session.party)
        left = bound - sum(one.credit_used_bytes for one in own)
        at_most = self._lent_at_most(own)
        if at_most and left - at_most < wanted_bytes:
            at_most = self._bytes(self._lent_rows(own), own)
        return left - at_most

    def reservable_objects(self, session: Session) -> int:
        """Return how many more objects the session may have reserved: the tables of rows and loans are shared too."""
        bound, own = self.bound_bytes(session), self._sessions.of_party(session.party)
        rows = self._part(self._ram.rows.count, bound) - self._loans(self._ram.lent.writes, own)
        return min(rows, self._loans_left(own, bound))

    def may_lend(self, session: Session, rows: npt.NDArray[np.int64]) -> bool:
        """Return whether these objects may be lent too. NO_ROW: the object is not in RAM yet."""
        bound = self.bound_bytes(session)
        own = self._sessions.of_party(session.party)
        if len(rows) > self._loans_left(own, bound):
            return False
        left = bound - sum(one.credit_used_bytes for one in own)
        if self._lent_at_most(own) + len(rows) * session.object_bytes_max <= left:
            return True
        lent = self._lent_rows(own)
        lent[rows[rows != NO_ROW]] = True
        coming = int(np.count_nonzero(rows == NO_ROW)) * session.object_bytes_max
        return self._bytes(lent, own) + coming <= left

    def _loans_left(self, own: list[Session], bound: int) -> int:
        lent = self._ram.lent
        return self._part(lent.count, bound) - self._loans(lent.reads, own) - self._loans(lent.writes, own)

    def _part(self, table: int, bound: int) -> int:
        """Return the same part of a table that the bound is of RAM."""
        return int(table * min(bound / self._ram.data_bytes, 1.0))

    @staticmethod
    def _loans(counts: npt.NDArray[np.uint32], own: list[Session]) -> int:
        return sum(int(counts[one.slot]) for one in own)

    def _lent_at_most(self, own: list[Session]) -> int:
        """Return a bound of what is lent to them to read. An object that is lent twice counts twice."""
        reads = self._ram.lent.reads
        return sum(int(reads[one.slot]) * one.object_bytes_max for one in own)

    def _lent_rows(self, own: list[Session]) -> npt.NDArray[np.bool_]:
        """Return, for each row, whether it is lent to one of them to read. O(lent table)."""
        lent = self._ram.lent
        theirs = np.zeros(SESSION_NUMBERS, np.bool_)
        theirs[[one.slot for one in own]] = True
        rows = np.zeros(self._ram.rows.count, np.bool_)
        rows[lent.rows[(lent.modes == LentMode.READ) & theirs[lent.sessions]]] = True
        return rows

    def _bytes(self, rows: npt.NDArray[np.bool_], own: list[Session]) -> int:
        """Return the bytes of objects by their head rows. One in several extents counts as a largest one."""
        heads = np.flatnonzero(rows)
        several = self._ram.rows.nexts[heads] != NO_ROW
        largest = max(one.object_bytes_max for one in own)
        granule = self._ram.allocator.granule_bytes
        granules = -(-self._ram.rows.lengths[heads[~several]].astype(np.int64) // granule)
        return int(granules.sum()) * granule + int(np.count_nonzero(several)) * largest
