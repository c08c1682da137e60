"""What must hold of pins at any time, whoever stores, evicts, removes or dies. White box on purpose."""

from __future__ import annotations

import numpy as np
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.rows import COMMITTED


def audit_pins(engine: Depot) -> None:
    """Assert that the figures are right and within the share, and that what is pinned is a tree from its roots on."""
    tree, ram = engine._tree, engine._ram
    pins, taken = engine.pins, ram.pins.user
    index = tree.index
    pinned = np.flatnonzero(taken.sizes).tolist()
    assert pinned == np.flatnonzero(np.frombuffer(taken.pinned, np.uint8)).tolist()
    assert taken.objects == len(pinned)
    assert taken.bytes == sum(map(ram.rounded_bytes, pinned))
    assert taken.rows == sum(len(ram.rows.chain(row)) for row in pinned)
    if pins._sweep is None:  # else what is above a smaller share goes at the moment
        assert taken.bytes <= pins._share * ram.rooms.ready_bytes
        assert taken.rows <= pins._share * ram.rows.count
    for row in pinned:
        node = ram.node_of(row)
        assert node != NONE and ram.rows.state[row] == COMMITTED, "pinned, and nobody finds it"
        kind = tree.path_kind(node)
        assert ram.evictor.worth(node) is None or ram.rows.kind[row] not in ram.evictor._going(node)
        above = index.parent(node)
        if not index.unlinked(node) and ram.pinned(node, kind) and above != NONE and kind in ram.kinds(above):
            assert ram.pinned(above, kind), "what is before it on its path is kept, and not counted"


def sweep(engine: Depot) -> None:
    """As the daemon does before it answers."""
    while engine.pins.run_once():
        audit_pins(engine)
    audit_pins(engine)
