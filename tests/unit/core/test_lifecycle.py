"""The life cycles of objects and leases: each defined transition can happen, no other, and the page says the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from itertools import product
from typing import Any

import pytest
from kvdepot.core import lifecycle
from kvdepot.core.arena import RowState
from kvdepot.core.lifecycle import (
    LEASE_TRANSITIONS,
    OBJECT_TRANSITIONS,
    BrokenLifecycle,
    LeaseEvent,
    LeaseState,
    ObjectEvent,
    next_lease_state,
    next_state,
)

Table = Mapping[tuple[Any, Any], Any]
TABLES = [
    (OBJECT_TRANSITIONS, RowState, ObjectEvent, next_state, RowState.FREE),
    (LEASE_TRANSITIONS, LeaseState, LeaseEvent, next_lease_state, LeaseState.PENDING),
]
names = pytest.mark.parametrize(("table", "states", "events", "following", "first"), TABLES, ids=["object", "lease"])


def reachable(table: Table, start: Enum) -> set[Enum]:
    seen: set[Enum] = set()
    ahead = {start}
    while ahead:
        seen |= ahead
        ahead = {after for (before, _), after in table.items() if before in seen} - seen
    return seen


@names
def test_every_state_is_reached_and_every_event_used(
    table: Table, states: type[Enum], events: type[Enum], following: Callable[[Any, Any], Enum], first: Enum
) -> None:
    assert reachable(table, first) == set(states)
    assert {event for _, event in table} == set(events)


@names
def test_the_next_state_follows_the_table_and_all_else_is_refused(
    table: Table, states: type[Enum], events: type[Enum], following: Callable[[Any, Any], Enum], first: Enum
) -> None:
    for state, event in product(states, events):
        if (state, event) in table:
            assert following(state, event) is table[state, event]
        else:
            with pytest.raises(BrokenLifecycle, match=f"{state.name}.*{event.name}"):
                following(state, event)


@pytest.mark.requirement("I5")
def test_every_object_leads_back_to_the_start_and_every_lease_ends() -> None:
    for state in RowState:
        assert RowState.FREE in reachable(OBJECT_TRANSITIONS, state)
    for lease_state in LeaseState:
        assert LeaseState.ENDED in reachable(LEASE_TRANSITIONS, lease_state)
    assert not [state for state, _ in LEASE_TRANSITIONS if state is LeaseState.ENDED]


@pytest.mark.requirement("I6")
def test_only_a_reclaim_makes_bytes_reusable() -> None:
    assert {event for (_, event), after in OBJECT_TRANSITIONS.items() if after is RowState.FREE} == {
        ObjectEvent.RECLAIM
    }


def test_the_page_shows_exactly_the_tables() -> None:
    words = [line.split() for line in (lifecycle.__doc__ or "").splitlines()]
    members = RowState.__members__.keys() | LeaseState.__members__.keys()
    shown = {tuple(line[:3]) for line in words if len(line) > 3 and line[0] in members}
    tables: tuple[Table, ...] = (OBJECT_TRANSITIONS, LEASE_TRANSITIONS)
    assert shown == {
        (before.name, event.name, after.name) for table in tables for (before, event), after in table.items()
    }
