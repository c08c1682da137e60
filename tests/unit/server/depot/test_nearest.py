"""Where the daemon has the attention of chunks: `FindTiers`, which engines with KV events ask for."""

from __future__ import annotations

from kvdepot.core.calls import FindTiersCall, Kind, Nearest

from tests.rigs.engine_rig import HYBRID, Client, Rig, path
from tests.rigs.tier_rig import BOTH, COMMIT, on_tier_only, published, settle, store, verify

KEYS = path("p", 4)
ABSENT, RAM, BELOW, UNKNOWN = Nearest.ABSENT, Nearest.RAM, Nearest.BELOW_RAM, Nearest.UNKNOWN


def nearest(client: Client, keys: list[bytes] = KEYS) -> list[Nearest]:
    call = FindTiersCall(client.session, client.namespace, b"".join(keys))
    return [Nearest(number) for number in client.rig.depot.find_tiers(call).tiers]


def empty_ram(rig: Rig, objects: int = 100) -> None:
    rig.depot._ram.evictor.evict_to(rig.depot._ram.rooms[0], 0, objects, "watermark")


def test_what_is_committed_is_in_ram_and_what_was_evicted_is_absent() -> None:
    rig = Rig()
    client = rig.attach()
    assert nearest(client) == [ABSENT] * 4
    lease, _ = client.reserve(KEYS)
    assert nearest(client) == [ABSENT] * 4, "being written"
    client.commit(lease, 0, 1, 2, 3)
    assert nearest(client, [*KEYS[::-1], *path("q", 1)]) == [RAM] * 4 + [ABSENT]
    empty_ram(rig, 1)
    assert nearest(client) == [RAM] * 3 + [ABSENT], "a path loses its end"


def test_what_only_a_tier_below_has_is_there_until_it_is_read() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS)
    rig.tier.run()
    assert nearest(client) == [RAM] * 4
    verify(rig)
    empty_ram(rig)
    assert nearest(client) == [BELOW] * 4
    rig.tier.readable = False
    assert nearest(client) == [BELOW] * 4, "its breaker may close again"
    rig.tier.readable = True
    client.acquire_later(KEYS, bytes([Kind.ATTENTION] * 4), client.lease())
    assert nearest(client) == [BELOW] * 4, "being read"
    rig.tier.run()
    assert nearest(client) == [RAM] * 4


def test_a_shared_tier_is_below_ram_too() -> None:
    rig = Rig(shared=COMMIT)
    published(rig.shared_medium, KEYS)
    client = rig.attach()
    assert nearest(client) == [ABSENT] * 4, "nobody has asked the tier"
    client.locate_later(KEYS, wait_seconds=10.0)
    rig.shared.run()
    rig.depot.tick()
    assert nearest(client) == [BELOW] * 4


def test_states_say_nothing_of_attention() -> None:
    rig = Rig(data_pages=256)
    client = rig.attach(spec=HYBRID)
    store(client, KEYS, kinds=BOTH)
    node = rig.depot._tree.index.find(rig.depot._tree.namespaces.by_id[client.namespace].slot, KEYS[-1])
    rig.depot._tree.drop_row(node, Kind.STATE)
    assert nearest(client) == [RAM] * 4
    rig.depot._tree.drop_row(node, Kind.ATTENTION)
    assert nearest(client) == [RAM] * 3 + [ABSENT]


def test_what_was_adopted_is_in_ram_before_it_is_verified() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS)
    rig.sum_all()
    rig.crash()
    assert nearest(rig.attach()) == [RAM] * 4


def test_nothing_is_absent_for_sure_before_every_disk_has_opened() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS)
    rig.tier.run()
    verify(rig)
    empty_ram(rig)
    rig.tier_opens_at_start = False
    rig.dead.add(rig.tier.pid)
    rig.crash()
    client = rig.attach()
    assert nearest(client) == [UNKNOWN] * 4
    others = path("q", 2)
    client.store(others)
    empty_ram(rig)
    assert nearest(client, others) == [ABSENT] * 2, "of these it knows that they went"
    rig.tier.open()
    settle(rig)
    assert nearest(client, [*KEYS, *path("r", 1)]) == [BELOW] * 4 + [ABSENT]


def test_what_waits_in_ram_for_its_path_is_not_absent_although_the_disk_cannot_be_read() -> None:
    """As `test_attaching` has it: the disk alone has the first chunks, and RAM those that follow."""
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, KEYS[:2])
    lease, _ = client.reserve(KEYS)
    client.commit(lease, 2, 3)
    verify(rig)
    rig.tier_opens_at_start = False
    rig.dead.add(rig.tier.pid)
    rig.crash()
    client = rig.attach()
    rig.tier.state = "offline"
    assert nearest(client) == [ABSENT] * 2 + [UNKNOWN] * 2
