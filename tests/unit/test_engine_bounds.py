"""What clients may ask for again and again without filling a table, hanging the engine or costing it its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.errors import NoRoom
from kvdepot.server.engine import engine as engine_module
from kvdepot.server.engine import namespaces as namespaces_module

from tests.fakes.engine_rig import DENSE, Rig, audit, path


@pytest.mark.parametrize("seed", range(4))
def test_i4_a_namespace_of_whole_paths_is_dropped_from_the_leaves_up(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In slices; and freed nodes are no roots, although the last of the free list has no link."""
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", 2)
    monkeypatch.setattr(engine_module, "_NAMESPACE_EVICTIONS_MAX", 5)
    rig = Rig(seed=seed)
    leaving = rig.attach("leaving", pid=11, spec=replace(DENSE, epoch="old"))
    leaving.store(path("p", 8))
    rig.engine.process_dead(leaving.attachment)
    staying = rig.attach("staying", pid=12)
    with pytest.raises(NoRoom):
        rig.engine.register_namespace(staying.session, replace(DENSE, epoch="new"))
    assert rig.engine.status().tier.objects == 3
    audit(rig.engine)
    rig.engine.register_namespace(staying.session, replace(DENSE, epoch="new"))
    assert rig.engine.status().tier.objects == 0
    audit(rig.engine)
