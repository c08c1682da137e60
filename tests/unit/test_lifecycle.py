"""The life cycles: every defined transition can happen, every other one is refused, and the page says the same."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import product
from typing import Any

import pytest
from kvdepot.core import lifecycle
from kvdepot.core.arena import RowState
from kvdepot.core.lifecycle import (
    LEASE_TRANSITIONS,
    OBJECT_TRANSITIONS,
    SESSION_TRANSITIONS,
    BrokenLifecycle,
    LeaseEvent,
    LeaseState,
    ObjectEvent,
    SessionEvent,
    SessionState,
    next_state,
)

Table = Mapping[tuple[Any, Any], Any]
CYCLES: list[tuple[Table, type[Enum], type[Enum], Any]] = [
    (OBJECT_TRANSITIONS, RowState, ObjectEvent, RowState.FREE),
    (LEASE_TRANSITIONS, LeaseState, LeaseEvent, LeaseState.UNKNOWN),
    (SESSION_TRANSITIONS, SessionState, SessionEvent, SessionState.ABSENT),
]
each_cycle = pytest.mark.parametrize(("table", "states", "events", "start"), CYCLES, ids=["object", "lease", "session"])


def reachable(table: Table, start: Any) -> set[Any]:
    seen: set[Any] = set()
    ahead = {start}
    while ahead:
        seen |= ahead
        ahead = {after for (before, _), after in table.items() if before in seen} - seen
    return seen


@each_cycle
def test_every_state_is_reached_and_every_event_used(
    table: Table, states: type[Enum], events: type[Enum], start: Any
) -> None:
    assert reachable(table, start) == set(states)
    assert {event for _, event in table} == set(events)


@each_cycle
def test_i5_every_state_leads_back_to_the_start(
    table: Table, states: type[Enum], events: type[Enum], start: Any
) -> None:
    for state in states:
        assert start in reachable(table, state)


@each_cycle
def test_next_state_follows_the_table_and_refuses_all_else(
    table: Table, states: type[Enum], events: type[Enum], start: Any
) -> None:
    for state, event in product(states, events):
        if (state, event) in table:
            assert next_state(state, event) is table[state, event]  # type: ignore[call-overload]
        else:
            with pytest.raises(BrokenLifecycle, match=f"{state.name}.*{event.name}"):
                next_state(state, event)  # type: ignore[call-overload]


def test_a_state_of_another_cycle_is_refused() -> None:
    for (_, states, _, _), (_, _, events, _) in product(CYCLES, CYCLES):
        if (states, events) in [(s, e) for _, s, e, _ in CYCLES]:
            continue
        for state, event in product(states, events):
            with pytest.raises(BrokenLifecycle):
                next_state(state, event)  # type: ignore[call-overload]


def test_i6_no_deadline_makes_bytes_reusable() -> None:
    """Service ends by deadline and grace; bytes come back only by RECLAIM, END and DIE."""
    assert {event for (_, event), after in OBJECT_TRANSITIONS.items() if after is RowState.FREE} == {
        ObjectEvent.RECLAIM
    }
    assert next_state(LeaseState.OPEN, LeaseEvent.EXPIRE) is LeaseState.EXPIRED
    assert next_state(SessionState.DISCONNECTED, SessionEvent.LAPSE) is SessionState.LAPSED
    assert {before for (before, _), after in SESSION_TRANSITIONS.items() if after is SessionState.ABSENT} == {
        SessionState.DEAD
    }


def test_a_late_call_never_opens_a_lease_that_was_ended() -> None:
    state = next_state(LeaseState.UNKNOWN, LeaseEvent.END)
    assert next_state(state, LeaseEvent.GRANT) is LeaseState.ENDED


@each_cycle
def test_the_page_shows_exactly_the_table(table: Table, states: type[Enum], events: type[Enum], start: Any) -> None:
    words = [line.split() for line in (lifecycle.__doc__ or "").splitlines()]
    shown = {tuple(line[:3]) for line in words if len(line) > 3 and line[0] in states.__members__}
    assert shown == {(before.name, event.name, after.name) for (before, event), after in table.items()}
