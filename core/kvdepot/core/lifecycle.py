"""The life cycles of objects and leases, as tables (after h11's `_state.py`).

The tables name every transition there is. A change of a state asks for the next one; a
pair that is not in its table is a broken invariant of the caller, never a matter of
timing or of what a client sends.

Object: the state of its head row in the arena; its further rows are CONTINUATION.

    state         event    next          when
    FREE          RESERVE  RESERVED      granted to a writer; generation becomes odd
    FREE          EXTEND   CONTINUATION  a further extent of the object that is being reserved
    FREE          SCRATCH  DYING         granted to a writer for an audit: never in the index
    RESERVED      COMMIT   COMMITTED     all ranks wrote it; generation becomes even
    RESERVED      DROP     DYING         given up, but a rank may still write (deadline, lost ancestor)
    RESERVED      RECLAIM  FREE          abandoned, late or lost; every writer acknowledged or is proven dead
    COMMITTED     DROP     DYING         leaves the index while somebody reads it
    COMMITTED     RECLAIM  FREE          evicted or found corrupt; nobody is lent it
    CONTINUATION  RECLAIM  FREE          together with its head
    DYING         RECLAIM  FREE          the last process it was lent to acknowledged or is proven dead

Lease: what its session may still ask of it. The extents are another matter: they return object by
object, as the table above says (I5, I6).

    state         event    next          when
    PENDING       GRANT    HELD          everything it names is in RAM (most are granted at once)
    PENDING       END      ENDED         given up, or something could not be read: no rank has seen it
    HELD          EXPIRE   EXPIRED       its deadline passed, or its scheduler is gone: it is served no more
    HELD          END      ENDED         released, or all its objects are over; its id is remembered
    EXPIRED       END      ENDED         the same, late: acknowledged by all ranks, or these are proven dead
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, auto
from typing import Final, TypeVar

from kvdepot.core.arena import RowState


class BrokenLifecycle(AssertionError):  # noqa: N818 - the house names errors by what happened
    """A transition that does not exist: a bug of the caller, to be reported, not handled."""


class ObjectEvent(IntEnum):
    """What can happen to an object. A number, because the table is asked four times for each object."""

    RESERVE = auto()
    EXTEND = auto()
    SCRATCH = auto()
    COMMIT = auto()
    DROP = auto()
    RECLAIM = auto()


class LeaseState(Enum):
    """The states of a lease."""

    PENDING = auto()
    HELD = auto()
    EXPIRED = auto()
    ENDED = auto()


class LeaseEvent(Enum):
    """What can happen to a lease."""

    GRANT = auto()
    EXPIRE = auto()
    END = auto()


OBJECT_TRANSITIONS: Final[Mapping[tuple[int, ObjectEvent], RowState]] = {
    (RowState.FREE, ObjectEvent.RESERVE): RowState.RESERVED,
    (RowState.FREE, ObjectEvent.EXTEND): RowState.CONTINUATION,
    (RowState.FREE, ObjectEvent.SCRATCH): RowState.DYING,
    (RowState.RESERVED, ObjectEvent.COMMIT): RowState.COMMITTED,
    (RowState.RESERVED, ObjectEvent.DROP): RowState.DYING,
    (RowState.RESERVED, ObjectEvent.RECLAIM): RowState.FREE,
    (RowState.COMMITTED, ObjectEvent.DROP): RowState.DYING,
    (RowState.COMMITTED, ObjectEvent.RECLAIM): RowState.FREE,
    (RowState.CONTINUATION, ObjectEvent.RECLAIM): RowState.FREE,
    (RowState.DYING, ObjectEvent.RECLAIM): RowState.FREE,
}


LEASE_TRANSITIONS: Final[Mapping[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (LeaseState.PENDING, LeaseEvent.GRANT): LeaseState.HELD,
    (LeaseState.PENDING, LeaseEvent.END): LeaseState.ENDED,
    (LeaseState.HELD, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.HELD, LeaseEvent.END): LeaseState.ENDED,
    (LeaseState.EXPIRED, LeaseEvent.END): LeaseState.ENDED,
}

_State = TypeVar("_State", int, LeaseState)
_Event = TypeVar("_Event", ObjectEvent, LeaseEvent)
_Next = TypeVar("_Next", RowState, LeaseState)


def next_state(state: int, event: ObjectEvent) -> RowState:
    """Return the state after `event`. `state`: as the extent table has it.

    Raise BrokenLifecycle, before any change, for a pair that the table does not have.
    """
    return _next(OBJECT_TRANSITIONS, state, event)


def next_lease_state(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """Return the state of a lease after `event`. Raise BrokenLifecycle, as `next_state` does."""
    return _next(LEASE_TRANSITIONS, state, event)


def _next(table: Mapping[tuple[_State, _Event], _Next], state: _State, event: _Event) -> _Next:
    following = table.get((state, event))
    if following is None:
        raise BrokenLifecycle(f"there is no transition from {state!r} on {event!r}")
    return following
