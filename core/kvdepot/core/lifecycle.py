"""The life cycles of objects, leases and sessions, as tables (after h11's `_state.py`).

A table names every transition there is. Whoever changes a state asks `next_state`; a
pair that is not in the table is a broken invariant of the caller, never a matter of
timing or of what a client sends: calls that come late, twice or for something unknown
have their own transitions below.

Object: the state of its head row in the arena; its further rows are CONTINUATION.

    state         event    next          when
    FREE          RESERVE  RESERVED      granted to a writer; generation becomes odd
    FREE          EXTEND   CONTINUATION  a further extent of the object that is being reserved
    RESERVED      COMMIT   COMMITTED     all ranks wrote it; generation becomes even
    RESERVED      DROP     DYING         given up, but a rank may still write (deadline, lost ancestor)
    RESERVED      RECLAIM  FREE          abandoned, late or lost; every writer acknowledged or is proven dead
    COMMITTED     DROP     DYING         leaves the index while somebody reads it
    COMMITTED     RECLAIM  FREE          evicted or found corrupt; nobody is lent it
    CONTINUATION  RECLAIM  FREE          together with its head
    DYING         RECLAIM  FREE          the last process it was lent to acknowledged or is proven dead

Lease: a reader's pin or a writer's reservation, named by its client.

    state    event    next     when
    UNKNOWN  GRANT    OPEN     Acquire or Reserve granted
    UNKNOWN  END      ENDED    ended before its call arrived: a tombstone, the call will be refused
    OPEN     GRANT    OPEN     the call repeated: the same answer
    OPEN     EXPIRE   EXPIRED  deadline: service ends, its extents stay lent
    OPEN     END      ENDED    released, or the last object committed or abandoned, by all ranks
    OPEN     FORGET   UNKNOWN  its session died, or did not declare it on re-attach
    EXPIRED  GRANT    EXPIRED  the call repeated: refused
    EXPIRED  END      ENDED    acknowledged after all
    EXPIRED  FORGET   UNKNOWN  as above
    ENDED    GRANT    ENDED    a late original, or a late repeat: refused
    ENDED    END      ENDED    repeated
    ENDED    FORGET   UNKNOWN  tombstones are bounded, and end with their session

Session: an engine's liveness.

    state         event       next          when
    ABSENT        ATTACH      ATTACHED      the engine's first process connects
    ABSENT        ADOPT       DISCONNECTED  found in the arena after a daemon restart
    ATTACHED      ATTACH      ATTACHED      a further connection or process
    ATTACHED      DISCONNECT  DISCONNECTED  the last connection ended, no death is proven
    ATTACHED      DIE         DEAD          every process proven dead
    DISCONNECTED  ATTACH      ATTACHED      back
    DISCONNECTED  LAPSE       LAPSED        grace is over: service ends, extents stay lent
    DISCONNECTED  DIE         DEAD          as above
    LAPSED        ATTACH      ATTACHED      back after all; it declares the leases it holds
    LAPSED        DIE         DEAD          as above
    DEAD          CLEAR       ABSENT        its leases are forgotten, its slot is free
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, overload

from kvdepot.core.arena import RowState


class BrokenLifecycle(AssertionError):  # noqa: N818 - the house names errors by what happened
    """A transition that does not exist: a bug of the caller, to be reported, not handled."""


class ObjectEvent(Enum):
    RESERVE = auto()
    EXTEND = auto()
    COMMIT = auto()
    DROP = auto()
    RECLAIM = auto()


class LeaseState(Enum):
    UNKNOWN = auto()
    OPEN = auto()
    EXPIRED = auto()
    ENDED = auto()


class LeaseEvent(Enum):
    GRANT = auto()
    EXPIRE = auto()
    END = auto()
    FORGET = auto()


class SessionState(Enum):
    ABSENT = auto()
    ATTACHED = auto()
    DISCONNECTED = auto()
    LAPSED = auto()
    DEAD = auto()


class SessionEvent(Enum):
    ATTACH = auto()
    ADOPT = auto()
    DISCONNECT = auto()
    LAPSE = auto()
    DIE = auto()
    CLEAR = auto()


OBJECT_TRANSITIONS: Final[Mapping[tuple[RowState, ObjectEvent], RowState]] = {
    (RowState.FREE, ObjectEvent.RESERVE): RowState.RESERVED,
    (RowState.FREE, ObjectEvent.EXTEND): RowState.CONTINUATION,
    (RowState.RESERVED, ObjectEvent.COMMIT): RowState.COMMITTED,
    (RowState.RESERVED, ObjectEvent.DROP): RowState.DYING,
    (RowState.RESERVED, ObjectEvent.RECLAIM): RowState.FREE,
    (RowState.COMMITTED, ObjectEvent.DROP): RowState.DYING,
    (RowState.COMMITTED, ObjectEvent.RECLAIM): RowState.FREE,
    (RowState.CONTINUATION, ObjectEvent.RECLAIM): RowState.FREE,
    (RowState.DYING, ObjectEvent.RECLAIM): RowState.FREE,
}

LEASE_TRANSITIONS: Final[Mapping[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (LeaseState.UNKNOWN, LeaseEvent.GRANT): LeaseState.OPEN,
    (LeaseState.UNKNOWN, LeaseEvent.END): LeaseState.ENDED,
    (LeaseState.OPEN, LeaseEvent.GRANT): LeaseState.OPEN,
    (LeaseState.OPEN, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.OPEN, LeaseEvent.END): LeaseState.ENDED,
    (LeaseState.OPEN, LeaseEvent.FORGET): LeaseState.UNKNOWN,
    (LeaseState.EXPIRED, LeaseEvent.GRANT): LeaseState.EXPIRED,
    (LeaseState.EXPIRED, LeaseEvent.END): LeaseState.ENDED,
    (LeaseState.EXPIRED, LeaseEvent.FORGET): LeaseState.UNKNOWN,
    (LeaseState.ENDED, LeaseEvent.GRANT): LeaseState.ENDED,
    (LeaseState.ENDED, LeaseEvent.END): LeaseState.ENDED,
    (LeaseState.ENDED, LeaseEvent.FORGET): LeaseState.UNKNOWN,
}

SESSION_TRANSITIONS: Final[Mapping[tuple[SessionState, SessionEvent], SessionState]] = {
    (SessionState.ABSENT, SessionEvent.ATTACH): SessionState.ATTACHED,
    (SessionState.ABSENT, SessionEvent.ADOPT): SessionState.DISCONNECTED,
    (SessionState.ATTACHED, SessionEvent.ATTACH): SessionState.ATTACHED,
    (SessionState.ATTACHED, SessionEvent.DISCONNECT): SessionState.DISCONNECTED,
    (SessionState.ATTACHED, SessionEvent.DIE): SessionState.DEAD,
    (SessionState.DISCONNECTED, SessionEvent.ATTACH): SessionState.ATTACHED,
    (SessionState.DISCONNECTED, SessionEvent.LAPSE): SessionState.LAPSED,
    (SessionState.DISCONNECTED, SessionEvent.DIE): SessionState.DEAD,
    (SessionState.LAPSED, SessionEvent.ATTACH): SessionState.ATTACHED,
    (SessionState.LAPSED, SessionEvent.DIE): SessionState.DEAD,
    (SessionState.DEAD, SessionEvent.CLEAR): SessionState.ABSENT,
}

# Keyed by (state, event): the event's class tells the tables apart, and Enum members of
# different classes are never equal (RowState is an IntEnum, but is paired with ObjectEvent only).
_TRANSITIONS: Final[dict[tuple[object, object], object]] = dict(
    [*OBJECT_TRANSITIONS.items(), *LEASE_TRANSITIONS.items(), *SESSION_TRANSITIONS.items()]
)


@overload
def next_state(state: RowState, event: ObjectEvent) -> RowState: ...
@overload
def next_state(state: LeaseState, event: LeaseEvent) -> LeaseState: ...
@overload
def next_state(state: SessionState, event: SessionEvent) -> SessionState: ...
def next_state(state: object, event: object) -> object:
    """The state after `event`. BrokenLifecycle for a pair that no table has; nothing changed then."""
    following = _TRANSITIONS.get((state, event))
    if following is None:
        raise BrokenLifecycle(f"there is no transition from {state!r} on {event!r}")
    return following
