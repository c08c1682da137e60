"""How sessions end: at grace, for want of slots, or with their processes; and what goes with them.

A session *ends* when it is served no more. It *goes*, with its slots, once it is lent nothing: what a process that may
live is lent stays lent (I6), and the session with it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.core.lifecycle import LeaseState
from kvdepot.server.engine.leases import Lease, WriteLease
from kvdepot.server.engine.load import Loads
from kvdepot.server.engine.prefetch import Prefetch
from kvdepot.server.engine.requests import Requests
from kvdepot.server.engine.sessions import Session, Sessions
from kvdepot.server.engine.store import Stores
from kvdepot.server.engine.types import ProcessIdentity


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
    ) -> None:
        self._sessions = sessions
        self._stores = stores
        self._loads = loads
        self._requests = requests
        self._prefetch = prefetch
        self._clock = clock

    def tick(self) -> None:
        """Deadlines and grace."""
        for session in self._sessions.by_slot.values():
            for lease in session.due(self._clock()):
                self._expire(lease)
        for session in self._sessions.idle_beyond_grace():
            self._end_service(session)
        for session in self._sessions.over():
            self._remove(session)

    def make_room(self, engine_id: str, process: ProcessIdentity) -> None:
        """Before a process attaches: for its name, and for one more session."""
        orphan = self._sessions.expired_for(engine_id, process)
        if orphan is not None:
            self._end_service(orphan)
        for session in self._sessions.crowding():
            if not session.ended:
                self._end_service(session)
            self._remove(session)

    def process_dead(self, attachment: int) -> tuple[int, ...]:
        """See Engine."""
        dead = self._sessions.attachments.get(attachment)
        if dead is None:
            return ()
        session = dead.session
        if len(session.attachments) == 1:
            self._end(session)
            self._remove(session)
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

    def _end_service(self, session: Session) -> None:
        """Its scheduler died or is out of reach; processes that may live keep what they are lent."""
        self._sessions.end(session)
        for lease in list(session.leases.values()):
            self._expire(lease)
        self._leave_namespaces(session)

    def _end(self, session: Session) -> None:
        """All its processes are dead: everything returns (row T7)."""
        self._sessions.end(session)
        for lease in list(session.leases.values()):
            self.drop(lease)
        self._leave_namespaces(session)

    def _remove(self, session: Session) -> None:
        """It is lent nothing: its slots are free."""
        for attachment in list(session.attachments.values()):
            self._sessions.remove_attachment(attachment)
        self._sessions.remove(session)

    def _leave_namespaces(self, session: Session) -> None:
        self._requests.end_session(session.slot)
        self._prefetch.end_session(session.slot)
        for namespace in session.namespaces.values():
            namespace.sessions -= 1
        session.namespaces.clear()
