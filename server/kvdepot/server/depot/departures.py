"""The end of sessions: at grace, for lack of slots, or with their processes; and what goes with them.

A session *ends* when it is not served any more. It *goes*, with its slots, once it is lent nothing. What is lent to a
process that may live stays lent (I6), and its session stays too.

An engine can have tens of thousands of objects reserved. Its leases end in slices, between which others are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvdepot.core.lifecycle import LeaseState
from kvdepot.server.depot.loads.load import Loads
from kvdepot.server.depot.loads.records import Records
from kvdepot.server.depot.sessions.requests import Requests
from kvdepot.server.depot.sessions.session import Lease, Session, WriteLease
from kvdepot.server.depot.sessions.sessions import Sessions
from kvdepot.server.depot.stores.store import Stores
from kvdepot.server.depot.tiering.prefetch import Prefetch
from kvdepot.server.depot.types import Owner, ProcessIdentity
from kvdepot.server.platform.guard import Guard

OBJECTS_AT_ONCE: Final = 64
"""Of leases that end in one slice, some 6 ms. A lease ends as a whole, and has at most as many."""


class Departures:
    """Everything that ends a lease or a session without a call of its engine."""

    def __init__(
        self,
        sessions: Sessions,
        stores: Stores,
        loads: Loads,
        requests: Requests,
        prefetch: Prefetch,
        records: Records,
        clock: Callable[[], float],
        guard: Guard,
    ) -> None:
        self._sessions = sessions
        self._stores = stores
        self._loads = loads
        self._requests = requests
        self._prefetch = prefetch
        self._records = records
        self._clock = clock
        self._guard = guard
        self._leaving: dict[Session, Iterator[int]] = {}  # sessions whose leases end, and the rest of that
        self._left = OBJECTS_AT_ONCE  # of the present slice
        self._late = False  # further leases are over their deadline

    def tick(self) -> None:
        """Apply deadlines and grace."""
        self._expire_due()
        for session in self._sessions.idle_beyond_grace():
            self._guard.call("tick", self._end_service, session)
        for session in [one for one in self._sessions.by_slot.values() if one.dead and one not in self._leaving]:
            self._guard.call("tick", self._end, session)
        for session in self._sessions.over():
            if session not in self._leaving:
                self._guard.call("tick", self._remove, session)

    def go_on(self) -> bool:
        """Run what is left of a slice of what ends. Return whether there is more to do, soon."""
        if self._late:
            self._expire_due()
        while self._leaving and self._left > 0:
            self._step(next(iter(self._leaving)))
        self._left = OBJECTS_AT_ONCE
        return bool(self._leaving) or self._late

    def make_room(self, engine: bytes, process: ProcessIdentity, owner: Owner) -> None:
        """Make room before a process attaches: for its name, and for one more session."""
        for session in [one for one in self._leaving if one.has(process) and not one.scheduler_died]:
            while session in self._leaving:  # it may come back to this one
                self._step(session)
        orphan = self._sessions.expired_for(engine, process)
        if orphan is not None:
            self._end_service(orphan)
        for session in self._sessions.crowding(owner):
            if not session.ended:
                self._end_service(session)
            while session in self._leaving:  # else the rest of that would meet who has its slot then
                self._step(session)
            self._remove(session)

    def process_dead(self, attachment: int) -> tuple[int, ...]:
        """Implement `Depot.process_dead`."""
        dead = self._sessions.attachments.get(attachment)
        if dead is None:
            return ()
        session = dead.session
        if len(session.attachments) == 1:
            dead.unwatch()  # what it tells of is heard: the descriptor would continue to tell
            self._end(session)
            return ()
        self._sessions.remove_attachment(dead)
        if not dead.scheduler:
            return ()
        session.scheduler_died = True
        self._end_service(session)
        return tuple(other.slot for other in session.attachments.values() if other.connections)

    def end_orphaned(self) -> None:
        """End, after an adoption, sessions whose scheduler died while no daemon ran. Their workers may live."""
        for session in list(self._sessions.by_slot.values()):
            if session.scheduler_died:
                self._end_service(session)

    def drop(self, lease: Lease) -> None:
        """End a lease whose extents no process touches any more."""
        if isinstance(lease, WriteLease):
            self._stores.drop(lease)
        else:
            self._loads.release(lease)

    def _expire(self, lease: Lease) -> None:
        """End the service of a lease at its deadline, and never its loan (I5, I6)."""
        if lease.state is LeaseState.EXPIRED:
            return
        if isinstance(lease, WriteLease):
            self._stores.expire(lease)
        else:
            self._loads.expire(lease)

    def _expire_due(self) -> None:
        """Expire the leases that are due, as far as the slice goes. The others are served until a later one."""
        self._late = False
        for session in self._sessions.by_slot.values():
            for lease in session.due(self._clock()):
                if self._left <= 0:
                    self._late = True
                    return
                self._guard.call("tick", self._expire, lease)
                self._left -= _objects(lease)

    def _end_service(self, session: Session) -> None:
        """End the service of a session whose scheduler died or is out of reach.

        Processes that may live keep what they are lent.
        """
        self._leave(session, self._expire, lambda: self._leave_namespaces(session))

    def _end(self, session: Session) -> None:
        """End a session whose processes are all dead. Everything lent to it returns (row T7), and the session goes."""
        session.dead = True

        def go() -> None:
            self._guard.call("tick", self._leave_namespaces, session)
            if not session.leases:  # else one could not be ended: `tick` tries again
                self._remove(session)

        self._leave(session, self.drop, go)

    def _leave(self, session: Session, end: Callable[[Lease], None], last: Callable[[], None]) -> None:
        """End the session's service now, and its leases in slices, beginning with the present one."""
        self._sessions.end(session)
        self._guard.call("tick", self._records.engine_gone, session.engine_id)

        def steps() -> Iterator[int]:
            for lease in list(session.leases.values()):
                if session.leases.get(lease.id) is lease:  # else it has ended between two slices
                    self._guard.call("tick", end, lease)
                    yield _objects(lease)
            self._guard.call("tick", last)

        self._leaving[session] = steps()
        while session in self._leaving and self._left > 0:
            self._step(session)

    def _step(self, session: Session) -> None:
        """End the next lease of a session that leaves."""
        objects = next(self._leaving[session], None)
        if objects is None:
            del self._leaving[session]
        else:
            self._left -= objects

    def _remove(self, session: Session) -> None:
        """Free the slots of a session that is lent nothing.

        Slots that are free already may belong to another session. They are left alone.
        """
        if self._sessions.by_slot.get(session.slot) is not session:
            return
        for attachment in list(session.attachments.values()):
            self._sessions.remove_attachment(attachment)
        self._sessions.remove(session)

    def _leave_namespaces(self, session: Session) -> None:
        """Leave them also where a part raises: else each would count the session for ever and keep its slot."""
        for end in (self._requests.end_session, self._prefetch.end_session):
            self._guard.call("tick", end, session.slot)
        for namespace in session.namespaces.values():
            namespace.sessions -= 1
        session.namespaces.clear()


def _objects(lease: Lease) -> int:
    """Return how much work its end is, in objects of a reservation. Loans of a load end in columns."""
    return len(lease.entries) if isinstance(lease, WriteLease) else 1 + len(lease.entries) // 64
