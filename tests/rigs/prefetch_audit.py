"""What must hold of prefetch at any time, whoever waits, acquires, ends or dies. White box on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from kvdepot.core.arena import RowState
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.operators.operator_prefetch import OperatorPrefetch
from kvdepot.server.depot.tree.index import NONE


def audit_prefetch(engine: Depot, former_bytes: Sequence[int] = ()) -> None:
    """Assert that every hold has its requests, that nothing is kept for nobody, and that the share is respected.

    `former_bytes`: by room, what was pinned before a reload made the share smaller.
    """
    prefetch, ram = engine._prefetch, engine._ram
    holds = ram.pins.prefetch
    held = np.flatnonzero(holds._requests).tolist()
    tokens = [token for request in prefetch._requests.values() for token in request.tokens]
    tokens += prefetch._lowest._tokens if isinstance(prefetch._lowest, OperatorPrefetch) else []
    tokens += prefetch.rejected.tokens
    owners = Counter(token >> 32 for token in tokens if token & 0xFFFF_FFFF == holds._serials[token >> 32])
    assert {row: int(holds._requests[row]) for row in held} == {
        row: n for row, n in owners.items() if holds._requests[row]
    }
    assert holds.objects == len(held)
    for room in ram.rooms:
        there = sum(ram.rounded_bytes(row) for row in held if ram.part_of(row) == room.number)
        most = max([prefetch._share * room.allocator.ready_bytes, *former_bytes[room.number : room.number + 1]])
        assert holds.bytes_in(room.number) == there <= most
    for row in held:
        assert holds.pinned[row] and ram.node_of(row) != NONE, "held, and nobody finds it"
        assert ram.rows.state[row] == RowState.COMMITTED or engine._tiering.promotions.reading(row)
    leaving = {row for row in np.flatnonzero(np.frombuffer(holds.pinned, np.uint8)).tolist() if row not in held}
    assert leaving <= set(holds._leaving), "kept for nobody"
    unused = sum(not holds._used[row] for row in held)
    wasted = sum(n for name, n in engine.counters.snapshot().items() if name.startswith("prefetch_wasted_objects."))
    assert engine.counters.get("prefetched_objects") == engine.counters.get("prefetch_used_objects") + wasted + unused
    for room in ram.rooms:
        requests = [request for request in prefetch._requests.values() if request.room == room.number]
        assert all(ram.rooms.of(request.namespace.slot) is room for request in requests)
        assert prefetch._requests_in[room.number] == len(requests)
        assert prefetch._keys_in[room.number] == sum(request.chunks for request in requests)
    for number, queue in prefetch._queues.items():
        queued = [request for waiting in queue._waiting for _, request in waiting]
        assert len(queued) == len(set(map(id, queued)))
        assert all(number in request.queues for request in queued)
        assert all((number in request.queues) == (request in queued) for request in prefetch._requests.values())
        assert prefetch._begun[number] >= 0
