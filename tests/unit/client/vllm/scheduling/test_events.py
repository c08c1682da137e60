"""Events of chunks that share blocks: their keys differ by what their draft layers read next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.scheduling.events import KvEvents
from kvdepot.core.calls import Kind
from kvdepot.core.misses import MissReason
from kvdepot.core.planner import GroupSpec, Planner

BLOCK = 16
PLANNER = Planner([GroupSpec(Kind.ATTENTION, BLOCK, 0, (1,))], 2 * BLOCK)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> KvEvents:
    monkeypatch.setattr(compat, "block_stored", lambda _, hashes, *__: SimpleNamespace(block_hashes=hashes))
    monkeypatch.setattr(compat, "block_removed", lambda hashes, _: ("removed", hashes))
    return KvEvents(PLANNER, [0], BLOCK, ["full_attention"])


def state(key: bytes, hashes: tuple[bytes, ...] = (b"h1", b"h2")) -> Any:
    return SimpleNamespace(keys=[key], request=SimpleNamespace(block_hashes=hashes))


def test_blocks_are_announced_once_and_removed_with_the_last_chunk_that_has_them(events: KvEvents) -> None:
    one, other = state(b"key, then 1"), state(b"key, then 2")
    events.stored(one, 0)
    events.stored(other, 0)
    events.stored(one, 0)
    assert [event.block_hashes for event in events.take()] == [[b"h1", b"h2"]]
    events.missing(one.keys[0])
    assert events.take() == []
    events.located(other, 0, MissReason.EVICTED)
    assert events.take() == [("removed", [b"h1", b"h2"])]
    events.stored(one, 0)
    assert len(events.take()) == 1, "announced again"


def test_a_reset_removes_shared_blocks_once(events: KvEvents) -> None:
    for key in (b"key, then 1", b"key, then 2"):
        events.stored(state(key), 0)
    events.stored(state(b"another", (b"h1", b"h3")), 0)
    assert len(events.take()) == 2
    events.reset()
    assert events.take() == [("removed", [b"h1", b"h2", b"h1", b"h3"])]
    events.stored(state(b"key, then 1"), 0)
    assert len(events.take()) == 1
