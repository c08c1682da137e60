"""What a depot does with a tier that is only read, as a peer is: nothing waits to be written there (ADR 78)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import AcquireOutcome
from kvdepot.server.depot.types import TierConfig
from kvdepot.server.storage.base import TierTraits

from tests.fakes.shared_memory_tier import SharedMedium
from tests.rigs.engine_rig import DENSE, Rig, audit, path
from tests.rigs.tier_rig import ATTENTION, COMMIT, boundary, published, rig_over, store


@pytest.mark.requirement("T3")
def test_nothing_is_queued_for_a_tier_that_is_only_read() -> None:
    keys = path("p", 4)
    rig, client = rig_over(keys[:2])
    rig.shared.traits = TierTraits(shared=True, read_only=True)
    files = dict(rig.shared_medium.files)
    assert boundary(client, keys) == 2
    granted = client.acquire_later(keys[:2], ATTENTION * 2, 1)
    rig.shared.run()
    assert granted[0].outcome is AcquireOutcome.GRANTED
    client.release(1)
    lease, _ = client.reserve(keys[2:], start=2, parent=keys[1])
    assert set(client.commit(lease, 0, 1)) == {1}
    store(client, path("q", 3))
    for _ in range(20):
        rig.depot.tick()
        rig.shared.run()
    (tier,) = rig.depot.status().lower_tiers
    assert (tier.queued_objects, tier.queued_bytes) == (0, 0)
    assert rig.shared.jobs == [] and rig.shared_medium.files == files
    audit(rig.depot)


@pytest.mark.requirement("S4")
@pytest.mark.parametrize(("bound_to", "found"), [("a", 2), ("b", 0)])
def test_only_objects_of_the_tier_s_tenant_are_looked_for(bound_to: str, found: int) -> None:
    spec, keys, medium = replace(DENSE, tenant="a"), path("p", 2), SharedMedium()
    published(medium, keys, spec)
    rig = Rig(shared=TierConfig(COMMIT.write, tenant=bound_to), shared_medium=medium)
    client = rig.attach(spec=spec)
    assert boundary(client, keys) == found
    assert rig.counter("tier_probed_objects.nfs/asked") == found
