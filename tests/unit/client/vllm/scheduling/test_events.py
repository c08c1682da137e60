"""Events of chunks that share blocks (their keys differ by what their draft layers read next), and where they are."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.scheduling import events as events_module
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


def chain(events: KvEvents, count: int) -> list[Any]:
    """Announce so many chunks of one prompt, and return their blocks in order."""
    hashes = tuple(b"h%d" % number for number in range(2 * count))
    one: Any = SimpleNamespace(keys=[b"key %d" % number for number in range(count)], request=None)
    one.request = SimpleNamespace(block_hashes=hashes)
    for chunk in range(count):
        events.stored(one, chunk)
    events.take()
    return [list(hashes[2 * chunk : 2 * chunk + 2]) for chunk in range(count)]


def reset_engine(events: KvEvents) -> None:
    events._pool = SimpleNamespace(cached_block_hash_to_block=object())


def test_after_a_reset_of_the_engines_cache_some_chunks_a_step_are_announced_again(
    events: KvEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "AGAIN_PER_STEP", 2)
    blocks = chain(events, 5)
    reset_engine(events)
    assert events.take() == [("stored", RAM, blocks[0]), ("stored", RAM, blocks[1])]
    assert events.take() == [("stored", RAM, blocks[2]), ("stored", RAM, blocks[3])]
    assert events.take() == [("stored", RAM, blocks[4])]
    assert events.take() == []


def test_what_changes_before_its_turn_is_announced_once(events: KvEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "AGAIN_PER_STEP", 1)
    blocks = chain(events, 4)
    reset_engine(events)
    assert events.take() == [("stored", RAM, blocks[0])]
    events.missing(b"key 3")
    events.found([(b"key 2", events.announced[b"key 2"])], bytes([BELOW]))
    assert events.take() == [("stored", BELOW, blocks[2]), ("stored", RAM, blocks[1])]
    assert events.take() == events.take() == []
    assert list(events.announced) == [b"key 0", b"key 1", b"key 2"]
    assert len(events._blocks) == 3


def test_a_second_reset_begins_again(events: KvEvents) -> None:
    blocks = chain(events, 2)
    for _ in range(2):
        reset_engine(events)
        assert events.take() == [("stored", RAM, one) for one in blocks]


def test_nothing_is_kept_of_chunks_that_are_gone(events: KvEvents) -> None:
    chain(events, 4)
    found(events, ABSENT, RAM, BELOW, ABSENT)
    events.reset()
    assert not events.announced and not events._blocks and not events._following
