"""Events of chunks that share blocks (their keys differ by what their draft layers read next), and where they are."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.scheduling.events import Blocks, KvEvents
from kvdepot.core.calls import Kind, Nearest
from kvdepot.core.misses import MissReason
from kvdepot.core.planner import GroupSpec, Planner

BLOCK = 16
PLANNER = Planner([GroupSpec(Kind.ATTENTION, BLOCK, 0, (1,))], 2 * BLOCK)
RAM, BELOW, ABSENT, UNKNOWN = Nearest.RAM, Nearest.BELOW_RAM, Nearest.ABSENT, Nearest.UNKNOWN
BLOCKS = [b"h1", b"h2"]
POOL: Any = SimpleNamespace(cached_block_hash_to_block=None)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> KvEvents:
    monkeypatch.setattr(compat, "block_stored", lambda _, hashes, *__: SimpleNamespace(block_hashes=hashes))
    monkeypatch.setattr(compat, "in_tier", lambda event, tier: ("stored", tier, event.block_hashes))
    monkeypatch.setattr(compat, "block_removed", lambda hashes, _, tier: ("removed", tier, hashes))
    return KvEvents(PLANNER, POOL, [0], BLOCK, ["full_attention"])


def state(key: bytes, hashes: tuple[bytes, ...] = (b"h1", b"h2")) -> Any:
    return SimpleNamespace(keys=[key], request=SimpleNamespace(block_hashes=hashes))


def found(events: KvEvents, *tiers: Nearest) -> list[Any]:
    """Return the events of an answer about all announced chunks, the first one's place first."""
    events.found(list(events.announced.items()), bytes(tiers))
    return events.take()


def test_blocks_are_announced_once_and_removed_with_the_last_chunk_that_has_them(events: KvEvents) -> None:
    one, other = state(b"key, then 1"), state(b"key, then 2")
    events.stored(one, 0)
    events.stored(other, 0)
    events.stored(one, 0)
    assert events.take() == [("stored", RAM, BLOCKS)]
    events.missing(one.keys[0])
    assert events.take() == []
    events.located(other, 0, MissReason.EVICTED)
    assert events.take() == [("removed", RAM, BLOCKS)]
    events.stored(one, 0)
    assert events.take() == [("stored", RAM, BLOCKS)], "announced again"


def test_a_reset_removes_shared_blocks_once(events: KvEvents) -> None:
    for key in (b"key, then 1", b"key, then 2"):
        events.stored(state(key), 0)
    events.stored(state(b"another", (b"h1", b"h3")), 0)
    assert len(events.take()) == 2
    events.reset()
    assert events.take() == [("removed", RAM, [b"h1", b"h2", b"h1", b"h3"])]
    events.stored(state(b"key, then 1"), 0)
    assert len(events.take()) == 1


def test_what_moves_is_stored_where_it_is_before_it_is_removed_where_it_was(events: KvEvents) -> None:
    events.stored(state(b"key"), 0)
    events.take()
    assert found(events, RAM) == [], "nothing new"
    assert found(events, BELOW) == [("stored", BELOW, BLOCKS), ("removed", RAM, BLOCKS)]
    assert found(events, UNKNOWN) == [], "no reason to remove it"
    assert found(events, RAM) == [("stored", RAM, BLOCKS), ("removed", BELOW, BLOCKS)]
    found(events, BELOW)
    assert found(events, ABSENT) == [("removed", BELOW, BLOCKS)]
    assert not events.announced and not events._blocks


def test_blocks_of_several_chunks_are_where_the_nearest_of_them_is(events: KvEvents) -> None:
    for key in (b"key, then 1", b"key, then 2"):
        events.stored(state(key), 0)
    events.take()
    assert found(events, BELOW, RAM) == []
    assert found(events, BELOW, BELOW) == [("stored", BELOW, BLOCKS), ("removed", RAM, BLOCKS)]
    assert found(events, ABSENT, BELOW) == []
    assert found(events, ABSENT) == [("removed", BELOW, BLOCKS)]


def test_several_removals_are_one_event(events: KvEvents) -> None:
    events.stored(state(b"one"), 0)
    events.stored(state(b"another", (b"h1", b"h3")), 0)
    events.take()
    assert found(events, ABSENT, ABSENT) == [("removed", RAM, [b"h1", b"h2", b"h1", b"h3"])]


def test_an_answer_says_nothing_of_what_was_stored_meanwhile(events: KvEvents) -> None:
    for key in (b"key, then 1", b"key, then 2"):
        events.stored(state(key), 0)
    asked = list(events.announced.items())
    events.missing(b"key, then 1")
    events.found(asked[:1], bytes([BELOW]))
    events.stored(state(b"key, then 1"), 0)
    events.stored(state(b"key, then 2"), 0)  # still announced
    events.take()
    events.found(asked, bytes([ABSENT, ABSENT]))
    assert events.take() == []
    assert set(events.announced) == {b"key, then 1", b"key, then 2"}


def test_what_is_stored_again_is_where_it_was(events: KvEvents) -> None:
    events.stored(state(b"key"), 0)
    found(events, BELOW)
    events.stored(state(b"key"), 0)
    assert events.take() == [], "the next answer says whether it is in RAM"


def test_an_answer_about_many_chunks_with_the_same_blocks_is_looked_at_once(
    events: KvEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        events.stored(state(b"key, then %d" % number), 0)
    looked, nearest = Counter[str](), events._nearest

    def counted(blocks: Blocks) -> Nearest:
        looked["at"] += 1
        return nearest(blocks)

    monkeypatch.setattr(events, "_nearest", counted)
    found(events, *[BELOW] * 99, RAM)
    assert looked["at"] == 1
