"""An index that is full: what is only in a shared tier gives way, and takes the place of nothing."""

from __future__ import annotations

import pytest

from tests.rigs.engine_rig import CHUNK, audit, path
from tests.rigs.tier_rig import (
    COMMIT,
    EVICT,
    boundary,
    reboot,
    rig_over,
    store,
)


@pytest.mark.requirement("I4")
def test_what_only_a_shared_tier_has_makes_room_in_the_index_for_local_objects() -> None:
    keys = path("foreign", 12)
    rig, client = rig_over(keys)
    assert boundary(client, keys) == 12
    index = rig.depot._tree.index
    index.capacity = index.count
    store(client, path("own", 4))
    audit(rig.depot)
    assert client.locate(path("own", 4), 4 * CHUNK).boundary_tokens == 4 * CHUNK
    assert index.count <= index.capacity and len(rig.shared.handles) < 12
    assert rig.counter("tier_evicted_objects.nfs/nodes") > 0 and len(rig.shared_medium.files) == 12


@pytest.mark.requirement("I4")
def test_what_is_looked_up_takes_no_place_of_others_in_a_full_index() -> None:
    rig, client = rig_over(path("foreign", 4), shared=EVICT)
    store(client, path("own", 4))
    index = rig.depot._tree.index
    index.capacity = index.count + 2
    assert boundary(client, path("foreign", 4)) == 2
    assert rig.counter("tier_found_objects.nfs/index_full") == 1 and len(rig.shared.handles) == 2
    assert client.locate(path("own", 4), 4 * CHUNK).boundary_tokens == 4 * CHUNK


@pytest.mark.requirement("I4")
def test_a_disk_that_opens_again_takes_the_place_of_what_only_a_shared_tier_has() -> None:
    keys = path("foreign", 12)
    rig, client = rig_over(keys, tier=COMMIT)
    store(client, path("own", 4))
    rig.tier.run()
    reboot(rig)
    client = rig.attach()
    index, held = rig.depot._tree.index, dict(rig.medium.stored)
    rig.tier.lose(*held)
    assert boundary(client, keys) == 12
    index.capacity = index.count
    rig.medium.stored.update(held)
    rig.tier.open()
    assert rig.counter("tier_found_objects.memory/index_full") == 0
    assert client.locate(path("own", 4), 4 * CHUNK).boundary_tokens == 4 * CHUNK
    audit(rig.depot)
