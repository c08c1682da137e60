"""How sessions end: at grace, for want of slots, or with their processes; and what goes with them.

A session *ends* when it is served no more. It *goes*, with its slots, once it is lent nothing: what a process that may
live is lent stays lent (I6), and the session with it.

An engine can have tens of thousands of objects reserved. Its leases end in slices, between which others are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvdepot.core.lifecycle import LeaseState
from kvdepot.server.engine.leases import Lease, WriteLease
from kvdepot.server.engine.load import Loads
from kvdepot.server.engine.prefetch import Prefetch
from kvdepot.server.engine.requests import Requests
from kvdepot.server.engine.sessions import Session, Sessions
from kvdepot.server.engine.store import Stores
from kvdepot.server.engine.types import ProcessIdentity
from kvdepot.server.guard import Guard

OBJECTS_AT_ONCE: Final = 512
"""Of leases that end in one slice: 2 to 6 ms."""


class Departures:
    """Everything that ends a lease or a session without a call of its engine."""

    def __init__(
        self,
        sessions: Sessions,
        stores: Stores,
        loads: Loads,
        requests: Requests,
        prefetch: Prefetch,
        clock: Callable[[], float],
        guard: Guard,
    ) -> None:
        self._sessions = sessions
        self._stores = stores
        self._loads = loads
        self._requests = requests
        self._prefetch = prefetch
        self._clock = clock
        self._guard = guard
        self._leaving: dict[Session, Iterator[int]] = {}  # sessions whose leases end, and the rest of that

    def tick(self) -> None:
        """Deadlines and grace."""
        self._expire_due()
        for session in self._sessions.idle_beyond_grace():
            self._guard.call("tick", self._end_service, session)
        for session in [one for one in self._sessions.by_slot.values() if one.dead and one not in self._leaving]:
            self._guard.call("tick", self._end, session)
        for session in self._sessions.over():
            if session not in self._leaving:
                self._guard.call("tick", self._remove, session)

    def go_on(self) -> bool:
        """A slice of what ends; whether there is more to do, soon."""
        objects = OBJECTS_AT_ONCE
        while self._leaving and objects > 0:
            objects -= self._step(next(iter(self._leaving)))
        return bool(self._leaving)

    def make_room(self, engine_id: str, process: ProcessIdentity) -> None:
        """Before a process attaches: for its name, and for one more session."""
        for session in [one for one in self._leaving if one.has(process) and not one.scheduler_died]:
            while session in self._leaving:  # it may come back to this one
                self._step(session)
        orphan = self._sessions.expired_for(engine_id, process)
        if orphan is not None:
            self._end_service(orphan)
        for session in self._sessions.crowding():
            if not session.ended:
                self._end_service(session)
            while session in self._leaving:  # else the rest of that would meet who has its slot then
                self._step(session)
            self._remove(session)

    def process_dead(self, attachment: int) -> tuple[int, ...]:
        """See Engine."""
        dead = self._sessions.attachments.get(attachment)
        if dead is None:
            return ()
        session = dead.session
        if len(session.attachments) == 1:
            dead.unwatch()  # what it tells of is heard: the descriptor would go on telling
            self._end(session)
            return ()
        self._sessions.remove_attachment(dead)
        if not dead.scheduler:
            return ()
        session.scheduler_died = True
        self._end_service(session)
        return tuple(other.slot for other in session.attachments.values() if other.connections)

    def drop(self, lease: Lease) -> None:
        """Nobody touches its extents any more."""
        if isinstance(lease, WriteLease):
            self._stores.drop(lease)
        else:
            self._loads.release(lease)

    def _expire(self, lease: Lease) -> None:
        """The deadline ends service, never the loan (I5, I6)."""
        if lease.state is LeaseState.EXPIRED:
            return
        if isinstance(lease, WriteLease):
            self._stores.expire(lease)
        else:
            self._loads.expire(lease)

    def _expire_due(self) -> None:
        """What is left for the next tick is served a little longer."""
        objects = OBJECTS_AT_ONCE
        for session in self._sessions.by_slot.values():
            for lease in session.due(self._clock()):
                if objects <= 0:
                    return
                self._guard.call("tick", self._expire, lease)
                objects -= _objects(lease)

    def _end_service(self, session: Session) -> None:
        """Its scheduler died or is out of reach; processes that may live keep what they are lent."""
        self._leave(session, self._expire, lambda: self._leave_namespaces(session))

    def _end(self, session: Session) -> None:
        """All its processes are dead: everything returns (row T7), and it goes."""

        session.dead = True

        def go() -> None:
            self._guard.call("tick", self._leave_namespaces, session)
            if not session.leases:  # else one could not be ended: `tick` tries again
                self._remove(session)

        self._leave(session, self.drop, go)

    def _leave(self, session: Session, end: Callable[[Lease], None], last: Callable[[], None]) -> None:
        """End the session's service now, and its leases in slices, the first of them now."""
        self._sessions.end(session)

        def steps() -> Iterator[int]:
            for lease in list(session.leases.values()):
                if session.leases.get(lease.id) is lease:  # else it has ended between two slices
                    self._guard.call("tick", end, lease)
                    yield _objects(lease)
            self._guard.call("tick", last)

        self._leaving[session] = steps()
        objects = OBJECTS_AT_ONCE
        while session in self._leaving and objects > 0:
            objects -= self._step(session)

    def _step(self, session: Session) -> int:
        """The next lease of a session that leaves. Returns how many objects that were."""
        objects = next(self._leaving[session], None)
        if objects is None:
            del self._leaving[session]
        return objects or 0

    def _remove(self, session: Session) -> None:
        """It is lent nothing: its slots are free. Where they are free already they may be another one's."""
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
    """How much work its end is, in objects of a reservation. A load's are given back in columns."""
    return len(lease.entries) if isinstance(lease, WriteLease) else 1 + len(lease.entries) // 64
