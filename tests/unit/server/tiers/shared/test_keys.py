"""A shared tier with keys: what its counters, log and look-ups make of objects of other keys (P6, S5)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.core.object_keys import NO_KEYS, KeyRing, key_id
from kvdepot.core.objectfile import HEADER_BYTES, ObjectHeader, payload_sum
from kvdepot.server.storage import shared_layout as layout
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of, payload_of

from tests.rigs.shared_rig import SharedRig

NAME = name_of(1)
KEYED, OTHER = KeyRing((b"k" * 32,)), KeyRing((b"o" * 32,))


@pytest.fixture
def rig(tmp_path: Path) -> SharedRig:
    return SharedRig(tmp_path / "shared", keys=KEYED)


def forge(path: Path) -> None:
    """Write other bytes under right checksums."""
    data = path.read_bytes()
    header = ObjectHeader.unpack(data[:HEADER_BYTES])
    payload = b"X" * header.stored_bytes
    total = payload_sum([payload])
    path.write_bytes(replace(header, raw_sum=total, stored_sum=total).pack() + payload)


def quarantined(rig: SharedRig) -> list[str]:
    return [file.name.split(".")[-2] for file in (rig.root / layout.QUARANTINE).iterdir()]


@pytest.mark.requirement("S5", "I1", "P6")
def test_nodes_with_one_key_serve_each_other_s_objects_and_no_forged_one(rig: SharedRig) -> None:
    other = rig.another(keys=KEYED)
    handle = rig.stored(NAME)
    ((name, theirs),) = other.look_up(NAME).items()
    assert other.read(theirs, name) == (IoOutcome.OK, payload_of(name))
    forge(rig.path_of(NAME))
    found: list[IoOutcome] = []
    rig.tier.verify(handle, found.append)
    rig.settle()
    assert found == [IoOutcome.FORGED] and quarantined(rig) == ["forged"]
    assert rig.counts["tier_damaged_objects.forged"] == 1
    assert other.read(theirs, name)[0] is IoOutcome.GONE


@pytest.mark.requirement("S5", "T3")
def test_a_store_finds_a_planted_object_and_counts_it(rig: SharedRig, caplog: pytest.LogCaptureFixture) -> None:
    """The id of a key is public. A header that has it proves nothing."""
    rig.stored(NAME)
    forge(rig.path_of(NAME))
    other = rig.another(keys=KEYED)
    handle = other.stored(NAME)
    assert other.counts["tier_damaged_objects.forged"] == 1 and quarantined(rig) == ["forged"]
    assert other.counts["shared_publications.written"] == 1
    assert other.read(handle, NAME) == (IoOutcome.OK, payload_of(NAME))
    assert "is forged" in caplog.text
    third = rig.another(keys=KEYED)
    third.stored(NAME)
    assert third.counts["shared_publications.already_there"] == 1 and not third.counts["tier_damaged_objects.forged"]


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("keys", [NO_KEYS, OTHER], ids=["no key", "another key"])
def test_a_node_of_other_keys_misses_and_leaves_the_object_to_the_others(
    rig: SharedRig, keys: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    names = [name_of(number) for number in range(1, 5)]
    for name in names:
        rig.stored(name)
    other = rig.another(keys=keys)
    with caplog.at_level(logging.WARNING):
        for name, handle in other.look_up(*names).items():
            assert other.read(handle, name)[0] is IoOutcome.UNKNOWN_KEY
            assert other.read(handle, name)[0] is IoOutcome.CANCELLED, "the handle is dead"
    assert [record.getMessage().count("unknown_key") for record in caplog.records] == [1], "one line for all"
    left = other.tier._directory.grant.left_bytes
    assert other.write(NAME).outcome is IoOutcome.UNKNOWN_KEY
    assert other.tier._directory.grant.left_bytes == left and other.tier.writable
    assert not quarantined(rig)
    for name, handle in rig.another(keys=KEYED).look_up(*names).items():
        assert other.path_of(name).exists() and handle is not None


def test_an_object_of_other_keys_is_not_offered_again_for_a_minute(rig: SharedRig) -> None:
    rig.stored(NAME)
    other = rig.another(keys=OTHER)
    ((name, handle),) = other.look_up(NAME).items()
    assert other.read(handle, name)[0] is IoOutcome.UNKNOWN_KEY
    other.tick(59.0)
    assert not other.look_up(NAME)
    other.tick(2.0)
    assert other.look_up(NAME)


@pytest.mark.requirement("T9")
def test_other_keys_count_at_once(rig: SharedRig) -> None:
    rig.stored(NAME)
    other = rig.another(keys=OTHER)
    ((name, handle),) = other.look_up(NAME).items()
    assert other.read(handle, name)[0] is IoOutcome.UNKNOWN_KEY
    other.tier.use_keys(KeyRing((*OTHER.keys, *KEYED.keys)))
    ((name, handle),) = other.look_up(NAME).items()
    assert other.read(handle, name) == (IoOutcome.OK, payload_of(name))
    other.tier.use_keys(KeyRing(OTHER.keys, (key_id(KEYED.keys[0]),)))
    assert other.read(handle, name)[0] is IoOutcome.UNKNOWN_KEY
    handle = other.stored(NAME)
    assert other.read(handle, NAME) == (IoOutcome.OK, payload_of(NAME)), "a retired key's object is replaced"


@pytest.mark.requirement("T3")
def test_a_tier_that_gets_a_key_heals_by_use(tmp_path: Path) -> None:
    SharedRig(tmp_path / "shared").stored(NAME)
    rig = SharedRig(tmp_path / "shared", keys=KEYED)
    ((name, handle),) = rig.look_up(NAME).items()
    assert rig.read(handle, name)[0] is IoOutcome.UNKEYED
    assert rig.path_of(NAME).exists() and not quarantined(rig)
    assert rig.read(rig.stored(NAME), NAME) == (IoOutcome.OK, payload_of(NAME))
    assert rig.look_up(NAME) or rig.tier._directory.holdings.count == 1


@pytest.mark.requirement("I4")
def test_doubtful_bytes_of_another_key_are_named_because_they_stay(
    rig: SharedRig, caplog: pytest.LogCaptureFixture
) -> None:
    written = rig.write(NAME)
    rig.tier.drop(written.handle)
    rig.tier.use_keys(OTHER)
    rig.tier.quarantine(NAME, (written.raw_sum,))
    rig.settle()
    assert "delete its file" in caplog.text and rig.path_of(NAME).exists()
    assert not rig.counts["tier_damaged_objects.unknown_key"]


@pytest.mark.parametrize("flip", [lambda at: at % 97 == 0, lambda at: at < 200], ids=["payload", "header"])
@pytest.mark.requirement("I1")
def test_a_flipped_bit_is_never_served_with_keys_either(rig: SharedRig, flip: Callable[[int], bool]) -> None:
    other = rig.another(keys=KEYED, negative_ttl_seconds=0.0)
    rig.stored(NAME)
    whole = rig.path_of(NAME).read_bytes()
    for at in filter(flip, range(HEADER_BYTES + ObjectHeader.unpack(whole[:HEADER_BYTES]).stored_bytes)):
        rig.path_of(NAME).parent.mkdir(exist_ok=True)
        rig.path_of(NAME).write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
        ((name, handle),) = other.look_up(NAME).items()
        assert other.read(handle, name)[0] not in (IoOutcome.OK, IoOutcome.FOREIGN), at
