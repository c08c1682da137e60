"""Objects that are put where a damaged one is: what is read to find that out must not come into what is put."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.core.object_keys import NO_KEYS, KeyRing
from kvdepot.core.objectfile import HEADER_BYTES, Codec
from kvdepot.server.io.bucket import Bucket, BucketSettings
from kvdepot.server.io.bucket_objects import cost_max
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import PublishFile, ReadFile
from kvdepot.server.io.perform import perform
from kvdepot.server.storage.base import IoOutcome
from obstore.store import MemoryStore

from tests.rigs.io_rig import MIB, IoRig, object_name, pattern

FILE = "a/b.kvd"
NAME = object_name(1, MIB)
EXTENTS = ((0, MIB),)
PAYLOAD = pattern(MIB, 1)
KEYS = KeyRing((b"k" * 32,))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[IoRig]:
    rig = IoRig(tmp_path, segment_bytes=0)
    rig.fill(EXTENTS, PAYLOAD)
    yield rig
    rig.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def context(rig: IoRig, store: MemoryStore) -> Context:
    return Context("/", rig.arena, bucket=Bucket(BucketSettings("memory://"), store))


def put(codec: Codec = Codec.NONE, keys: KeyRing = NO_KEYS) -> PublishFile:
    return PublishFile(FILE, "t", 0, NAME, codec, 0, EXTENTS, None, sync=False, quarantine=".quarantine/x", keys=keys)


def served(context: Context, rig: IoRig, keys: KeyRing = NO_KEYS) -> bool:
    rig.fill(EXTENTS, bytes(MIB))
    answer = perform(ReadFile(FILE, NAME, EXTENTS, ".quarantine/x", keys=keys), context)
    return answer.outcome is IoOutcome.OK and rig.taken(EXTENTS) == PAYLOAD


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("keys", [NO_KEYS, KEYS], ids=["no-keys", "keys"])
@pytest.mark.parametrize("codec", list(Codec))
def test_a_damaged_object_is_replaced_by_one_that_can_be_served(
    context: Context, rig: IoRig, store: MemoryStore, codec: Codec, keys: KeyRing
) -> None:
    assert perform(put(codec, keys), context).outcome is IoOutcome.OK
    damaged = bytearray(store.get(FILE).bytes())
    damaged[HEADER_BYTES + 100 if keys else 100] ^= 1  # without keys, the header alone says what is there
    store.put(FILE, bytes(damaged))
    answer = perform(put(codec, keys), context)
    assert answer.outcome is IoOutcome.OK and answer.replaced is not IoOutcome.OK
    assert served(context, rig, keys)


class Changing(Bucket):
    """Whose objects are other ones whenever they are to be replaced."""

    def replace(self, key: str, views: object, version: object) -> None:
        self._opened()
        raise FileExistsError


@pytest.mark.parametrize("keys", [NO_KEYS, KEYS], ids=["no-keys", "keys"])
@pytest.mark.parametrize("damage", ["empty", "header", "payload"])
def test_no_job_takes_more_than_it_is_charged(rig: IoRig, store: MemoryStore, damage: str, keys: KeyRing) -> None:
    context = Context("/", rig.arena, bucket=Changing(BucketSettings("memory://"), store))
    perform(put(keys=keys), context)
    damaged = bytearray(store.get(FILE).bytes())
    damaged[100 if damage == "header" else HEADER_BYTES + 100] ^= 1
    store.put(FILE, b"" if damage == "empty" else bytes(damaged))
    for job in (put(keys=keys), ReadFile(FILE, NAME, EXTENTS, ".quarantine/x", keys=keys)):
        requests_max, bytes_max = cost_max(job)
        answer = perform(job, context)
        assert answer.outcome is not IoOutcome.OK or damage == "payload"
        assert 1 < answer.requests <= requests_max
        assert answer.received_bytes <= bytes_max + 3 * HEADER_BYTES


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES])
def test_an_object_without_a_payload_is_replaced(context: Context, rig: IoRig, store: MemoryStore, length: int) -> None:
    store.put(FILE, bytes(length))
    answer = perform(put(), context)
    assert answer.outcome is IoOutcome.OK and answer.replaced is not IoOutcome.OK
    assert served(context, rig)


@pytest.mark.requirement("I1")
def test_doubtful_bytes_that_cannot_be_moved_aside_are_no_damage_that_is_over(
    context: Context, rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_sum = perform(put(), context).raw_sum

    def refused(bucket: Bucket, key: str, to: str) -> None:
        raise PermissionError(13, f"{bucket.settings.url} keeps {key} from {to}", key)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "move", refused)
        answers = [
            perform(ReadFile(FILE, NAME, extents, ".quarantine/x", (raw_sum,)), context).outcome
            for extents in (None, EXTENTS)
        ]
    assert answers == [IoOutcome.IO_ERROR, IoOutcome.CORRUPT], "a load gets nothing either way"
    assert perform(ReadFile(FILE, NAME, None, ".quarantine/x", (raw_sum,)), context).outcome is IoOutcome.CORRUPT
    assert not served(context, rig)
