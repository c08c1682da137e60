"""What `kvdepotctl ls` and `describe` are told: by pages, while everything changes, over all tiers."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from kvdepot.core.calls import ROOT_KEY
from kvdepot.core.errors import InvalidArgument, NotFound
from kvdepot.core.listing import Chunk, ChunkPage, NamespaceContents, ObjectDescription
from kvdepot.server.depot.operators import listing
from kvdepot.server.depot.operators.listing import Listing

from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, audit, key, path, spec_of
from tests.rigs.tier_rig import BOTH, COMMIT, on_tier_only, reboot, settle, store

OBJECT = 8192
STATE = 5000


def chunks_of(rig: Rig, client: Client, prefix: str = "", limit: int = 500) -> list[Chunk]:
    """All pages."""
    found: list[Chunk] = []
    token = ""
    while True:
        page = rig.depot.listing.chunks(client.namespace, prefix, limit, token)
        assert len(page.chunks) <= limit
        found += page.chunks
        token = page.next_page_token
        if not token:
            return found


def keys_in(chunks: Sequence[Chunk]) -> set[bytes]:
    keys = [chunk.key for chunk in chunks]
    assert len(keys) == len(set(keys)), "shown twice"
    return set(keys)


def contents(rig: Rig, client: Client) -> NamespaceContents:
    (found,) = rig.depot.listing.namespaces(client.namespace.hex(), 10, "").namespaces
    return found


def objects(rig: Rig, client: Client, chunk: bytes) -> dict[tuple[str, int], ObjectDescription]:
    found = rig.depot.listing.describe_chunk(client.namespace, chunk).objects
    return {(one.tier, one.kind): one for one in found}


# Namespaces


def test_namespaces_say_what_each_tier_holds() -> None:
    rig = Rig(data_pages=256, tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    store(client, path("p", 3), kinds=BOTH)
    rig.tier.finish(rig.tier.jobs[0])  # attention of the first chunk
    rig.now += 5
    found = contents(rig, client)
    assert (found.label, found.chunk_tokens, found.chunks, found.sessions) == ("hybrid", CHUNK, 3, 1)
    assert found.idle_seconds == 5
    ram, memory = found.tiers
    assert (ram.tier, ram.objects, ram.size_bytes) == ("ram", {1: 3, 3: 3}, 3 * (OBJECT + STATE))
    assert (memory.tier, memory.objects, memory.size_bytes) == ("memory", {1: 1}, OBJECT)
    settle(rig)
    assert contents(rig, client).tiers[1].objects == {1: 3, 3: 3}
    rig.tier.lose(*rig.tier.medium.stored)
    assert contents(rig, client).tiers[1].objects == {}
    assert contents(rig, client).tiers[1].size_bytes == 0


def test_namespaces_come_by_pages_and_by_prefix() -> None:
    rig = Rig()
    specs = [(name, spec_of(*DENSE.groups, name=name)) for name in "abcdefgh"]
    ids = [rig.attach(name, pid=ord(name), spec=spec).namespace for name, spec in specs]
    seen: list[bytes] = []
    token = ""
    while True:
        page = rig.depot.listing.namespaces("", 3, token)
        assert len(page.namespaces) <= 3
        seen += [one.namespace_id for one in page.namespaces]
        token = page.next_page_token
        if not token:
            break
    assert seen == sorted(ids)
    digit = ids[0].hex()[0]
    with_digit = rig.depot.listing.namespaces(digit, 64, "").namespaces
    assert [one.namespace_id for one in with_digit] == [one for one in sorted(ids) if one.hex()[0] == digit]
    with pytest.raises(InvalidArgument, match="page_token"):
        rig.depot.listing.namespaces("", 3, "no hex")
    with pytest.raises(InvalidArgument, match="not the beginning"):
        rig.depot.listing.namespaces("xyz", 3, "")


def test_a_namespace_is_described_by_what_engines_registered() -> None:
    rig = Rig()
    one, other = rig.attach("one", 1), rig.attach("other", 2)
    found = rig.depot.listing.describe_namespace(one.namespace)
    assert one.namespace == other.namespace
    assert found.spec == DENSE
    assert found.engines == ("one", "other")
    assert found.contents.sessions == 2
    with pytest.raises(NotFound, match="no namespace"):
        rig.depot.listing.describe_namespace(bytes(16))


def test_a_namespace_that_no_engine_registered_in_this_run_has_contents_only() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, path("p", 2))
    rig.tier.run()
    reboot(rig)
    found = rig.depot.listing.describe_namespace(client.namespace)
    assert found.spec is None
    assert found.engines == ()
    assert [tier.objects for tier in found.contents.tiers] == [{}, {1: 2}]
    assert found.contents.tiers[1].size_bytes == 2 * OBJECT


# Chunks


def test_a_chunk_says_its_place_and_what_is_where() -> None:
    rig = Rig(data_pages=256, tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    first, second = keys = path("p", 2)
    store(client, keys, kinds=BOTH)
    rig.tier.finish(rig.tier.jobs[0])
    by_key = {chunk.key: chunk for chunk in chunks_of(rig, client)}
    assert by_key[first] == Chunk(first, ROOT_KEY, CHUNK, True, (b"\x01\x03", b"\x01"), (OBJECT + STATE, OBJECT))
    assert by_key[second] == Chunk(second, first, 2 * CHUNK, True, (b"\x01\x03", b""), (OBJECT + STATE, 0))
    assert rig.depot.listing.chunks(client.namespace, "", 9, "").tiers == ("ram", "memory")


def test_an_inner_chunk_without_checkpoint_is_not_usable() -> None:
    rig = Rig(data_pages=256)
    client = rig.attach(spec=HYBRID)
    first, second = path("p", 2)
    store(client, [first])
    client.store([second], BOTH, parent=first, start=1)
    assert {chunk.key: chunk.usable for chunk in chunks_of(rig, client)} == {first: False, second: True}


def test_what_is_being_written_is_shown_as_incomplete() -> None:
    rig = Rig()
    client = rig.attach()
    client.reserve(path("p", 1))
    (chunk,) = chunks_of(rig, client)
    assert (chunk.kinds, chunk.incomplete, chunk.size_bytes, chunk.usable) == ((b"",), b"\x01", (0,), False)


def test_other_namespaces_are_not_shown() -> None:
    rig = Rig(data_pages=256)
    client, other = rig.attach("one", 1), rig.attach("other", 2, spec=HYBRID)
    store(client, path("p", 3))
    store(other, path("p", 2))
    assert keys_in(chunks_of(rig, client)) == set(path("p", 3))
    assert keys_in(chunks_of(rig, other)) == set(path("p", 2))
    with pytest.raises(NotFound):
        rig.depot.listing.chunks(bytes(16), "", 10, "")


def test_chunks_come_by_pages_of_any_size() -> None:
    rig = Rig(data_pages=256)
    client = rig.attach()
    expected = {one for name in range(5) for one in path(name, 7)}
    for name in range(5):
        store(client, path(name, 7))
    for limit in (1, 2, 34, 35, 36):
        assert keys_in(chunks_of(rig, client, limit=limit)) == expected


def test_a_prefix_chooses_chunks_at_every_length() -> None:
    rig = Rig(data_pages=256)
    client = rig.attach()
    keys = [bytes(8) + b"\x01" + bytes(6) + bytes([n]) for n in range(1, 6)] + [b"\x12" + bytes(14) + b"\x07"]
    store(client, keys)
    for digits in ("", "0", "1", "12", "13", "00" * 8, "00" * 8 + "01", "00" * 8 + "02", keys[3].hex(), "f" * 32):
        expected = {one for one in keys if one.hex().startswith(digits)}
        assert keys_in(chunks_of(rig, client, digits, limit=2)) == expected, digits
    with pytest.raises(InvalidArgument):
        rig.depot.listing.chunks(client.namespace, "XY", 10, "")


def test_pages_that_change_under_the_cursor_show_what_stays_exactly_once() -> None:
    """Chunks go and come between pages, also at the numbers that were freed."""
    rig = Rig(data_pages=512, rows=256)
    client = rig.attach()
    stays = {one for name in range(0, 12, 2) for one in path(name, 4)}
    for name in range(12):
        store(client, path(name, 4))
    found: list[Chunk] = []
    token, turn = "", 0
    while True:
        page = rig.depot.listing.chunks(client.namespace, "", 3, token)
        found += page.chunks
        token = page.next_page_token
        if not token:
            break
        gone = 2 * turn + 1
        if gone < 12:
            tree = rig.depot._tree
            namespace = tree.namespaces.by_id[client.namespace]
            tree.drop_subtree(tree.index.find(namespace.slot, key(gone, 0)))
            store(client, path(f"new {turn}", 2))
        turn += 1
    assert turn > 6
    assert stays <= keys_in(found)
    audit(rig.depot)


def test_removed_chunks_are_not_shown() -> None:
    rig = Rig(data_pages=256)
    client = rig.attach()
    for name in "ab":
        store(client, path(name, 4))
    tree = rig.depot._tree
    namespace = tree.namespaces.by_id[client.namespace]
    tree.drop_subtree(tree.index.find(namespace.slot, key("a", 0)))
    assert keys_in(chunks_of(rig, client)) == set(path("b", 4))
    tree.drop_subtree(tree.index.find(namespace.slot, key("b", 0)))
    assert rig.depot.listing.chunks(client.namespace, "", 10, "") == ChunkPage(("ram",))


@pytest.mark.requirement("I4")
def test_a_page_looks_at_a_bounded_part_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_NUMBERS_MAX", 8)
    monkeypatch.setattr(listing, "_CANDIDATES_MAX", 3)
    rig = Rig(data_pages=256)
    client, other = rig.attach("one", 1), rig.attach("other", 2, spec=HYBRID)
    store(other, path("before", 20))
    store(client, path("p", 7))
    store(other, path("after", 20))
    first = rig.depot.listing.chunks(client.namespace, "", 500, "")
    assert first.chunks == ()
    assert first.next_page_token, "an empty page is not the last"
    assert keys_in(chunks_of(rig, client)) == set(path("p", 7))
    assert keys_in(chunks_of(rig, other, limit=500)) == {*path("before", 20), *path("after", 20)}


def test_a_cursor_of_another_run_is_refused() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, path("p", 4))
    token = rig.depot.listing.chunks(client.namespace, "", 2, "").next_page_token
    assert token
    rig.crash()
    with pytest.raises(InvalidArgument, match="restarted"):
        rig.depot.listing.chunks(client.namespace, "", 2, token)
    for garbage in ("x", "1", f"{rig.run:x}.", f"{rig.run:x}.-1", "..", "1.2.3", "\u0661.\u0661" * 9):
        with pytest.raises(InvalidArgument, match="page_token"):
            rig.depot.listing.chunks(client.namespace, "", 2, garbage)
    beyond = rig.depot.listing.chunks(client.namespace, "", 2, f"{rig.run:x}.ffffffffffff")
    assert beyond.chunks == ()
    assert not beyond.next_page_token


# One chunk


def test_a_chunk_is_described_with_its_objects_in_every_tier() -> None:
    rig = Rig(data_pages=256, tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    keys = path("p", 3)
    store(client, keys, kinds=BOTH)
    before = objects(rig, client, keys[1])["ram", 1]
    assert (before.state, before.checksum, before.size_bytes, before.loans) == ("complete", b"", OBJECT, ())
    assert before.generation == 2
    assert before.extents == 1
    settle(rig)
    rig.sum_all()
    found = objects(rig, client, keys[1])
    assert set(found) == {("ram", 1), ("ram", 3), ("memory", 1), ("memory", 3)}
    assert found["ram", 1].checksum, "the write took a sum"
    below = found["memory", 3]
    assert below.state == "complete"
    assert below.sequence > 0
    assert (below.size_bytes, below.stored_bytes) == (STATE, STATE)
    assert len(below.checksum) == 16
    assert found["memory", 1].checksum == found["ram", 1].checksum, "stored without a codec"
    rig.tier.readable = False
    assert objects(rig, client, keys[1])["memory", 3].state == "disabled"


def test_a_chunk_is_described_with_its_place_in_the_tree() -> None:
    rig = Rig(data_pages=256)
    client = rig.attach()
    keys = path("p", 4)
    store(client, keys)
    client.store([key("branch")], parent=keys[2], start=3)
    found = rig.depot.listing.describe_chunk(client.namespace, keys[2])
    assert (found.path, found.depth, found.children, found.more_children) == ((keys[1], keys[0]), 2, 2, False)
    assert found.chunk.parent == keys[1]
    root = rig.depot.listing.describe_chunk(client.namespace, keys[0])
    assert (root.path, root.depth, root.chunk.parent) == ((), 0, ROOT_KEY)
    with pytest.raises(NotFound, match="no chunk"):
        rig.depot.listing.describe_chunk(client.namespace, key("another"))
    with pytest.raises(NotFound, match="no namespace"):
        rig.depot.listing.describe_chunk(bytes(16), keys[0])


@pytest.mark.requirement("I4")
def test_long_paths_and_many_children_are_counted_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PATH_KEYS_MAX", 2), ("CHILDREN_COUNTED_MAX", 3), ("_DEPTH_MAX", 4)):
        monkeypatch.setattr(listing, name, value)
    rig = Rig(data_pages=256)
    client = rig.attach()
    keys = path("p", 7)
    store(client, keys)
    found = rig.depot.listing.describe_chunk(client.namespace, keys[6])
    assert (found.path, found.depth) == ((keys[5], keys[4]), 4)
    for number in range(2):
        client.store([key("child", number)], parent=keys[0], start=1)
    described = rig.depot.listing.describe_chunk(client.namespace, keys[0])
    assert (described.children, described.more_children) == (3, False)
    client.store([key("child", 9)], parent=keys[0], start=1)
    described = rig.depot.listing.describe_chunk(client.namespace, keys[0])
    assert (described.children, described.more_children) == (3, True)


@pytest.mark.requirement("I6")
def test_loans_name_engines_workers_and_the_checksum_worker() -> None:
    rig = Rig(data_pages=256, tier=COMMIT)
    client = rig.attach("reader", pid=77)
    (only,) = path("p", 1)
    writing, _ = client.reserve([only])
    (loan,) = objects(rig, client, only)["ram", 1].loans
    assert (loan.engine_id, loan.pids, loan.mode, loan.lease_id) == ("reader", (77,), "write", writing)
    assert objects(rig, client, only)["ram", 1].state == "incomplete"
    client.commit(writing, 0)
    reading, _ = client.acquire([only])
    rig.tier.begin(rig.tier.jobs[0])
    loans = {loan.engine_id: loan for loan in objects(rig, client, only)["ram", 1].loans}
    assert set(loans) == {"reader", "kvdepotd/io"}
    assert (loans["reader"].mode, loans["reader"].lease_id) == ("read", reading)
    assert loans["kvdepotd/io"].pids == (rig.worker_pids,)
    client.release(reading)
    rig.tier.run()
    assert objects(rig, client, only)["ram", 1].loans == ()


@pytest.mark.requirement("I6")
def test_the_checksum_workers_loan_is_its_own() -> None:
    rig = Rig()
    client = rig.attach()
    (only,) = path("p", 1)
    client.store([only])
    assert rig.depot.next_to_sum() is not None
    (loan,) = objects(rig, client, only)["ram", 1].loans
    assert (loan.engine_id, loan.mode) == ("kvdepotd/checksums", "checksum")


@pytest.mark.requirement("I1c")
def test_what_is_not_verified_yet_says_so() -> None:
    rig = Rig()
    client = rig.attach()
    (only,) = path("p", 1)
    client.store([only])
    rig.sum_all()
    rig.crash()
    found = objects(rig, client, only)["ram", 1]
    assert found.state == "unverified"
    assert found.checksum


def test_chunks_that_only_a_lower_tier_has_are_shown() -> None:
    client = on_tier_only(Rig(tier=COMMIT), path("p", 2))
    found = chunks_of(client.rig, client)
    assert [chunk.kinds for chunk in found] == [(b"", b"\x01")] * 2
    assert [chunk.size_bytes for chunk in found] == [(0, OBJECT)] * 2
    assert all(chunk.usable for chunk in found)


def test_a_listing_changes_nothing() -> None:
    rig = Rig(data_pages=256, tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    store(client, path("p", 5), kinds=BOTH)
    rig.tier.run()
    before = bytes(rig.tables)
    chunks_of(rig, client)
    for one in path("p", 5):
        rig.depot.listing.describe_chunk(client.namespace, one)
    rig.depot.listing.namespaces("", 64, "")
    assert bytes(rig.tables) == before
    audit(rig.depot)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """One takes the longer the more objects other tests have left."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.requirement("I2")
def test_a_page_of_a_large_index_takes_milliseconds(no_collection: None) -> None:
    """A quarter of a million nodes, made without an engine; most of what a page looks at is gone."""
    rig = Rig(data_pages=16, rows=262_144)
    client = rig.attach()
    tree = rig.depot._tree
    namespace = tree.namespaces.by_id[client.namespace]
    count = 250_000
    keys = np.random.default_rng(1).integers(0, 2**63, (count, 2)).astype(np.uint64)
    slots = np.full(count, namespace.slot, np.uint16)
    nodes = tree.index.add_many(slots, keys, np.full(count, CHUNK, np.uint32))
    namespace.nodes = count
    assert isinstance(rig.depot.listing, Listing)
    slowest, token, shown = 0.0, "", 0
    for _ in range(20):
        began = time.process_time()
        page = rig.depot.listing.chunks(client.namespace, "", 500, token)
        slowest = max(slowest, time.process_time() - began)
        token, shown = page.next_page_token, shown + len(page.chunks)
    assert shown == 20 * 500
    for node in nodes.tolist():
        if node % 1000:
            tree.index.remove(node)
            namespace.nodes -= 1
    shown, pages, token = 0, 0, ""
    while pages == 0 or token:
        began = time.process_time()
        page = rig.depot.listing.chunks(client.namespace, "", 500, token)
        slowest = max(slowest, time.process_time() - began)
        token, shown, pages = page.next_page_token, shown + len(page.chunks), pages + 1
    assert shown == 250
    assert slowest < 0.05, slowest
