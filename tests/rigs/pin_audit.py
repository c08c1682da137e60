"""What must hold of pins at any time, whoever stores, evicts, removes or dies. White box on purpose."""

from __future__ import annotations

import numpy as np
from kvdepot.server.engine.engine import Engine
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.rows import COMMITTED
from kvdepot.server.engine.space import PINNED


def audit_pins(engine: Engine) -> None:
    """Assert that the figures are right and within the share, and that what is pinned is a tree from its roots on."""
    pins, space = engine.pins, engine._space
    index = space.index
    pinned = np.flatnonzero(pins._sizes).tolist()
    assert pinned == np.flatnonzero(np.frombuffer(space.kept_rows, np.uint8) & PINNED).tolist()
    assert pins.objects == len(pinned)
    assert pins.bytes == sum(map(space.rounded_bytes, pinned))
    assert pins._rows == sum(len(space.rows.chain(row)) for row in pinned)
    if pins._sweep is None:  # else what is above a smaller share goes at the moment
        assert pins.bytes <= pins._share * space.allocator.ready_bytes
        assert pins._rows <= pins._share * space.rows.count
    for row in pinned:
        node = space.node_of(row)
        assert node != NONE and space.rows.state[row] == COMMITTED, "pinned, and nobody finds it"
        kind = space.path_kind(node)
        assert space.evictor.worth(node) is None or space.rows.kind[row] not in space.evictor._going(node)
        above = index.parent(node)
        if not index.cut_off(node) and space.pinned(node, kind) and above != NONE and space.has(above, kind):
            assert space.pinned(above, kind), "what is before it on its path is kept, and not counted"


def sweep(engine: Engine) -> None:
    """As the daemon does before it answers."""
    while engine.pins.run_once():
        audit_pins(engine)
    audit_pins(engine)
