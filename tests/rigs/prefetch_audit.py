"""What must hold of prefetch at any time, whoever waits, acquires, ends or dies. White box on purpose."""

from __future__ import annotations

from collections import Counter

import numpy as np
from kvdepot.core.arena import RowState
from kvdepot.server.engine.engine import Engine
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.space import HELD
from kvdepot.server.engine.warming import Warming


def audit_prefetch(engine: Engine) -> None:
    """Assert that every hold has its requests, that nothing is kept for nobody, and that the share is respected."""
    prefetch, space = engine._prefetch, engine._space
    holds = prefetch._holds
    held = np.flatnonzero(holds._held).tolist()
    tokens = [token for wish in prefetch._wishes.values() for token in wish.tokens]
    tokens += prefetch.last._tokens if isinstance(prefetch.last, Warming) else []
    tokens += prefetch.declined.tokens
    owners = Counter(token >> 32 for token in tokens if token & 0xFFFF_FFFF == holds._serials[token >> 32])
    assert {row: int(holds._held[row]) for row in held} == {row: n for row, n in owners.items() if holds._held[row]}
    assert holds.objects == len(held)
    assert holds.bytes == sum(map(space.rounded_bytes, held)) <= prefetch.limit_bytes
    for row in held:
        assert space.kept_rows[row] & HELD and space.node_of(row) != NONE, "held, and nobody finds it"
        assert space.rows.state[row] == RowState.COMMITTED or engine._tiering.promotions.reading(row)
    leaving = {
        row for row in np.flatnonzero(np.frombuffer(space.kept_rows, np.uint8) & HELD).tolist() if row not in held
    }
    assert leaving <= set(holds._leaving), "kept for nobody"
    unused = sum(not holds._used[row] for row in held)
    wasted = sum(n for name, n in engine.counters.snapshot().items() if name.startswith("prefetch_wasted_objects."))
    assert engine.counters.get("prefetched_objects") == engine.counters.get("prefetch_used_objects") + wasted + unused
    assert prefetch._keys == sum(wish.chunks for wish in prefetch._wishes.values())
    for number, lane in prefetch._lanes.items():
        queued = [wish for _, wish in lane]
        assert len(queued) == len(set(map(id, queued)))
        assert all(number in wish.lanes for wish in queued)
        assert all((number in wish.lanes) == (wish in queued) for wish in prefetch._wishes.values())
        assert prefetch._begun[number] >= 0
