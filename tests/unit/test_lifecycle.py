"""The life cycle of an object: every defined transition can happen, every other is refused, the page says the same."""

from __future__ import annotations

from itertools import product

import pytest
from kvdepot.core import lifecycle
from kvdepot.core.arena import RowState
from kvdepot.core.lifecycle import OBJECT_TRANSITIONS, BrokenLifecycle, ObjectEvent, next_state


def reachable(start: RowState) -> set[RowState]:
    seen: set[RowState] = set()
    ahead = {start}
    while ahead:
        seen |= ahead
        ahead = {after for (before, _), after in OBJECT_TRANSITIONS.items() if before in seen} - seen
    return seen


def test_every_state_is_reached_and_every_event_used() -> None:
    assert reachable(RowState.FREE) == set(RowState)
    assert {event for _, event in OBJECT_TRANSITIONS} == set(ObjectEvent)


def test_i5_every_state_leads_back_to_the_start() -> None:
    for state in RowState:
        assert RowState.FREE in reachable(state)


def test_next_state_follows_the_table_and_refuses_all_else() -> None:
    for state, event in product(RowState, ObjectEvent):
        if (state, event) in OBJECT_TRANSITIONS:
            assert next_state(state, event) is OBJECT_TRANSITIONS[state, event]
        else:
            with pytest.raises(BrokenLifecycle, match=f"{state.name}.*{event.name}"):
                next_state(state, event)


def test_i6_only_a_reclaim_makes_bytes_reusable() -> None:
    assert {event for (_, event), after in OBJECT_TRANSITIONS.items() if after is RowState.FREE} == {
        ObjectEvent.RECLAIM
    }


def test_the_page_shows_exactly_the_table() -> None:
    words = [line.split() for line in (lifecycle.__doc__ or "").splitlines()]
    shown = {tuple(line[:3]) for line in words if len(line) > 3 and line[0] in RowState.__members__}
    assert shown == {(before.name, event.name, after.name) for (before, event), after in OBJECT_TRANSITIONS.items()}
