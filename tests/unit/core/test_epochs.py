"""The operator's bump counters and ids (row P2)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import InvalidArgument, LimitExceeded
from kvdepot.core.keys import bumped_id
from kvdepot.core.limits import BUMPS_MAX, INVALIDATED_NAMESPACES_MAX

from tests.rigs.engine_rig import DENSE

BASE = bytes(range(16))


@pytest.mark.requirement("P2")
def test_a_counter_makes_another_id_and_0_the_one_of_before() -> None:
    ids = {replace(DENSE, bumps=bumps).namespace_id() for bumps in (0, 1, 2, BUMPS_MAX)}
    assert len(ids) == 4
    assert DENSE.namespace_id() == DENSE.base_id() == replace(DENSE, bumps=7).base_id()
    assert replace(DENSE, bumps=2).namespace_id() == bumped_id(DENSE.base_id(), 2)
    assert DENSE.differences(replace(DENSE, bumps=1)) == ["bumps: (absent) != 1"]
    assert bumped_id(BASE, 1).hex() == "5fd816c5f0aeae268cd3ec28911a8b2e"


def test_one_namespace_is_bumped_by_itself_again_and_again() -> None:
    epochs, other = Epochs(), bytes(16)
    for bumps in range(3):
        assert (epochs.counter(BASE), epochs.counter(other)) == (bumps, 0)
        epochs = epochs.with_invalidated(bumped_id(BASE, bumps))
        assert epochs.with_invalidated(bumped_id(BASE, bumps)) is epochs
    epochs = epochs.with_all_invalidated()
    assert epochs == Epochs(4), "above every counter in use"
    assert (epochs.counter(BASE), epochs.counter(other)) == (4, 4)


def test_nodes_of_a_directory_come_to_one_counter() -> None:
    assert Epochs(3).with_all_invalidated(7) == Epochs(7)
    assert Epochs(7).with_all_invalidated(7) == Epochs(7)
    assert Epochs(9).with_all_invalidated(7) == Epochs(9)
    with pytest.raises(InvalidArgument, match=r"may be in use.*bump to 5 or more"):
        Epochs(3, (BASE,)).with_all_invalidated(4)
    assert Epochs(3, (BASE,)).with_all_invalidated(5) == Epochs(5)


@pytest.mark.requirement("I4")
def test_counters_and_lists_have_ends() -> None:
    full = Epochs(0, tuple(number.to_bytes(16, "little") for number in range(INVALIDATED_NAMESPACES_MAX)))
    with pytest.raises(LimitExceeded, match="bump all"):
        full.with_invalidated(b"x" * 16)
    assert full.with_all_invalidated() == Epochs(INVALIDATED_NAMESPACES_MAX + 1)
    with pytest.raises(LimitExceeded):
        Epochs(BUMPS_MAX).with_all_invalidated()


@given(st.lists(st.sampled_from(["all", "one", "other", "to"]), max_size=12))
def test_no_id_that_was_void_is_ever_valid_again(bumps: list[str]) -> None:
    epochs, bases = Epochs(), {"one": BASE, "other": bytes(16)}
    void: set[bytes] = set()
    for bump in bumps:
        now = {name: bumped_id(base, epochs.counter(base)) for name, base in bases.items()}
        assert not void.intersection(now.values())
        if bump in bases:
            epochs = epochs.with_invalidated(now[bump])
            void.add(now[bump])
        else:
            epochs = epochs.with_all_invalidated(
                epochs.bump + len(epochs.invalidated_namespaces) + 3 if bump == "to" else 0
            )
            void.update(now.values())
    assert not void.intersection(bumped_id(base, epochs.counter(base)) for base in bases.values())
