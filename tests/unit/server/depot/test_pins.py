"""Pins: what operators keep in RAM stays, what they may not keep goes, and an end comes to each."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import AcquireOutcome, Kind, ReserveOutcome
from kvdepot.core.errors import LimitExceeded, NotFound
from kvdepot.core.report import PinStatus
from kvdepot.server.depot import depot as engine_module
from kvdepot.server.depot.operators import pins
from kvdepot.server.depot.tree import walks
from kvdepot.server.depot.types import Quota

from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, audit, key, path, spec_of
from tests.rigs.tier_rig import ATTENTION, BOTH, COMMIT, on_tier_only, settle

PATH = path("pinned", 3)
OBJECT = 8192


def pin(rig: Rig, client: Client, key: bytes = b"", seconds: float = 60.0) -> PinStatus:
    rig.depot.pins.pin(client.namespace, key, seconds)
    sweep(rig)
    (found,) = [one for one in rig.depot.pins.statuses() if (one.namespace_id, one.key) == (client.namespace, key)]
    return found


def sweep(rig: Rig) -> None:
    while rig.depot.pins.run_once():
        audit(rig.depot)
    audit(rig.depot)


def later(rig: Rig, seconds: float) -> None:
    rig.now += seconds
    rig.depot.tick()
    sweep(rig)


def press(client: Client, count: int = 40) -> None:
    """More than the arena holds, each a path of its own."""
    for _ in range(count):
        client.rig.now += 0.1
        client.store(path(("pressure", client.rig.now), 1))
        client.end_request("")
    audit(client.rig.depot)


def held(client: Client, keys: list[bytes]) -> int:
    return client.locate(keys).boundary_tokens // CHUNK


def test_a_pinned_path_outlives_any_pressure_until_its_time_is_over() -> None:
    rig = Rig(eviction="lru")  # room for 32 objects
    client = rig.attach()
    client.store([*PATH, key("behind")])
    client.store(path("other", 3))
    assert pin(rig, client, PATH[2]) == PinStatus(client.namespace, PATH[2], 60.0, 3, 3, 3 * OBJECT)
    press(client)
    assert (held(client, PATH), held(client, path("other", 3))) == (3, 0)
    assert held(client, [*PATH, key("behind")]) == 3, "what lies behind the chunk is not pinned"
    tier = rig.depot.status().tier
    assert (tier.pinned_objects, tier.pinned_bytes) == (3, 3 * OBJECT)
    later(rig, 61)
    assert rig.depot.pins.statuses() == ()
    assert rig.depot.status().tier.pinned_objects == 0
    press(client)
    assert held(client, PATH) == 0


def test_pinning_again_begins_the_time_anew_and_unpinning_ends_it() -> None:
    rig = Rig(eviction="lru")
    client = rig.attach()
    client.store(PATH)
    pin(rig, client, PATH[2])
    later(rig, 50)
    assert pin(rig, client, PATH[2]).seconds_left == 60
    later(rig, 50)
    press(client)
    assert held(client, PATH) == 3
    rig.depot.pins.unpin(client.namespace, PATH[2])
    sweep(rig)
    press(client)
    assert held(client, PATH) == 0
    with pytest.raises(NotFound, match="is not pinned"):
        rig.depot.pins.unpin(client.namespace, PATH[2])
    with pytest.raises(NotFound, match="has no chunk"):
        pin(rig, client, PATH[2])
    with pytest.raises(NotFound, match="no namespace"):
        rig.depot.pins.pin(bytes(16), b"", 1.0)


@pytest.mark.requirement("I4")
def test_pins_take_no_more_than_their_share_and_nobody_is_refused_for_them() -> None:
    rig = Rig(eviction="lru", pin_share=0.25)  # 8 of 32 objects
    client, other = rig.attach("one", 10), rig.attach("other", 11, spec_of(*DENSE.groups, name="b"))
    client.store(path("long", 20))
    assert pin(rig, client).size_bytes == 8 * OBJECT
    later_pin = pin(rig, other)
    press(other)
    assert held(client, path("long", 20)) == 8, "the beginning of the path, which is of use without the rest"
    assert later_pin.objects == 0
    rig.depot.pins.unpin(client.namespace, b"")
    sweep(rig)
    assert rig.depot.status().tier.pinned_objects == 8, "its room is the other's"


@pytest.mark.requirement("I4")
def test_a_share_in_rows_where_objects_are_small() -> None:
    rig = Rig(data_pages=400, rows=32, pin_share=0.25)
    client = rig.attach()
    client.store(path("long", 20))
    assert pin(rig, client).objects == 8


def test_a_namespace_is_pinned_with_what_comes_later() -> None:
    rig = Rig(eviction="lru")
    client, other = rig.attach("one", 10), rig.attach("other", 11, spec_of(*DENSE.groups, name="b"))
    client.store(PATH[:1])
    assert pin(rig, client).chunks == 1
    client.store(PATH[1:], start=1, parent=PATH[0])
    later(rig, 3)
    press(other)
    assert held(client, PATH) == 3


def test_a_smaller_share_lets_go_of_what_is_above_it() -> None:
    rig = Rig(eviction="lru", pin_share=0.5)
    client = rig.attach()
    client.store(path("long", 12))
    assert pin(rig, client).objects == 12
    rig.depot.pins.configure(0.125)
    sweep(rig)
    assert rig.depot.status().tier.pinned_objects == 4
    press(client)
    assert held(client, path("long", 12)) == 4


@pytest.mark.requirement("I4")
def test_a_checkpoint_that_comes_when_the_share_is_used_up_may_go() -> None:
    rig = Rig(eviction="lru", pin_share=3 * OBJECT / (64 * 4096))
    client = rig.attach("hybrid", 10, HYBRID)
    other = rig.attach("other", 11)
    client.store(PATH)
    pin(rig, client, PATH[2])
    client.store(PATH[2:], (Kind.STATE,), start=2, parent=PATH[1])
    later(rig, 3)
    assert rig.depot.status().tier.pinned_objects == 3
    press(other)
    slot = rig.depot._tree.namespaces.by_id[client.namespace].slot
    node = rig.depot._tree.index.find(slot, PATH[2])
    assert rig.depot._ram.kinds(node) == [Kind.ATTENTION]


def test_checkpoints_are_pinned_with_the_attention() -> None:
    rig = Rig(eviction="lru")
    client, other = rig.attach("hybrid", 10, HYBRID), rig.attach("other", 11)
    client.store(PATH, BOTH)
    assert pin(rig, client, PATH[2]).objects == 6
    press(other)
    assert held(client, PATH) == 3
    assert client.acquire(PATH, BOTH[:1] * 3)[1].outcome is AcquireOutcome.GRANTED


def test_an_operators_eviction_takes_pinned_objects_too_and_the_pin_stays_for_what_comes() -> None:
    rig = Rig(eviction="lru")
    client = rig.attach()
    client.store(PATH)
    pin(rig, client)
    removal = rig.depot.deletion(client.namespace, b"")
    while removal.run_once():
        pass
    audit(rig.depot)
    assert rig.depot.status().tier.pinned_bytes == 0
    client.store(PATH)
    later(rig, 3)
    assert rig.depot.pins.statuses()[0].objects == 3


def test_a_quota_holds_for_pinned_objects_and_costs_their_owner_alone() -> None:
    small = Quota(tenant="small", capacity_bytes=4 * OBJECT)
    rig = Rig(quotas=(small,))
    client = rig.attach("one", 10, spec_of(*DENSE.groups, name="a", tenant="small"))
    other = rig.attach("other", 11, spec_of(*DENSE.groups, name="b"))
    client.store(path("long", 4))
    pin(rig, client)
    assert client.reserve(path("more", 1))[1].outcomes[0] != ReserveOutcome.GRANTED
    other.store(path("other", 10))
    assert (held(client, path("long", 4)), held(other, path("other", 10))) == (4, 10)


def test_overlapping_pins_each_hold_the_whole_of_what_they_name() -> None:
    rig = Rig(eviction="lru")
    client = rig.attach()
    client.store(PATH)
    assert (pin(rig, client, PATH[1]).objects, pin(rig, client, PATH[2]).objects) == (2, 3)
    assert rig.depot.status().tier.pinned_objects == 3
    rig.depot.pins.unpin(client.namespace, PATH[2])
    sweep(rig)
    press(client)
    assert held(client, PATH) == 2


def test_what_only_a_disk_has_is_pinned_once_it_is_in_ram_and_is_not_demoted() -> None:
    rig = Rig(eviction="lru", tier=COMMIT)
    client = on_tier_only(rig, PATH)
    assert pin(rig, client, PATH[2]) == PinStatus(client.namespace, PATH[2], 60.0, 3, 0, 0)
    client.acquire_later(PATH, ATTENTION * 3, 1, "")
    rig.tier.run()
    client.release(1)
    later(rig, 3)
    assert rig.depot.status().tier.pinned_objects == 3
    for name in range(40):
        client.store(path(("pressure", name), 1))
        settle(rig)
    assert rig.depot.status().tier.pinned_objects == 3


@pytest.mark.requirement("I8")
def test_a_pin_of_an_earlier_run_holds_what_is_adopted() -> None:
    rig = Rig(eviction="lru")
    client = rig.attach()
    client.store(PATH)
    rig.sum_all()
    rig.crash()
    rig.depot.pins.restore(client.namespace, PATH[2], 60.0)
    later(rig, 0.1)
    assert rig.depot.status().tier.pinned_objects == 3


@pytest.mark.requirement("I4")
def test_a_pinned_namespace_keeps_its_slot_and_pins_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS_MAX", 1)
    rig = Rig(eviction="lru")
    client = rig.attach()
    client.store(PATH)
    pin(rig, client)
    with pytest.raises(LimitExceeded, match="pins"):
        pin(rig, client, PATH[0])
    rig.dead.add(10)
    rig.depot.process_dead(client.attachment)
    vacated = []
    monkeypatch.setattr(engine_module, "free_slot", lambda tree, namespaces, limit: vacated.extend(namespaces))
    monkeypatch.setattr(rig.depot._tree.namespaces, "add", lambda *_: None)
    with pytest.raises(Exception, match="table is full"):
        rig.attach("other", 11, HYBRID)
    assert vacated == []


@pytest.mark.parametrize("walked", [1, 2, 4096])
def test_a_path_is_walked_in_slices_also_while_it_goes(walked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "_WALKED", walked)
    monkeypatch.setattr(pins, "_SLICE_NODES", 1)
    rig = Rig(eviction="lru")
    client = rig.attach()
    client.store(PATH)
    rig.depot.pins.pin(client.namespace, PATH[2], 60.0)
    rig.depot.pins.run_once()
    removal = rig.depot.deletion(client.namespace, PATH[1])
    while removal.run_once():
        pass
    sweep(rig)
    client.store(PATH)
    later(rig, 3)
    assert rig.depot.status().tier.pinned_objects == 3


def test_while_pins_are_looked_at_again_their_figures_stay() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(PATH)
    found = pin(rig, client, PATH[2])
    rig.depot.pins.configure(0.5)
    while rig.depot.pins.run_once():
        assert rig.depot.pins.statuses() == (found,)
