"""Power losses of the disk tier, simulated on copies: what was not synced is cut off, zeroed or scrambled.

Row T2: whatever is served afterwards verifies; it is torn or missing otherwise, and never something else.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from random import Random

import pytest
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.jobs import WriteObject
from kvdepot.server.storage.base import DAMAGED, IoOutcome
from kvdepot.server.tiers.disk.layout import DiskLayout
from kvdepot.server.tiers.disk.recovery import read_index, read_store

from tests.rigs.disk_live import live
from tests.rigs.disk_rig import PAGE, DiskRig, object_name
from tests.rigs.seeds import RUN_SEED, drawn

SEEDS = range(6)


def test_a_crash_at_every_byte_of_the_journal_leaves_a_prefix(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path / "tier")
    states: list[tuple[int, set[bytes]]] = []  # (bytes of the journal, keys that are served then)
    (journal,) = (rig.config.path / "journal").iterdir()

    def note() -> None:
        states.append((journal.stat().st_size, {name.key for name in rig.names()}))

    note()
    for number in range(6):
        rig.stored(number)
        note()
        if number % 2:
            rig.drop(sorted(rig.listener.held)[number % len(rig.listener.held)])
            rig.settle()
            note()
    whole, root = journal.read_bytes(), rig.config.path
    store = read_store(root)
    assert store is not None
    layout = DiskLayout.plan(rig.config.capacity_bytes, rig.config.quarantine_bytes, store.segment_bytes)
    random = Random(f"{RUN_SEED} tails")
    for at in range(len(whole) + 1):
        for tail in (b"", random.choice([bytes(len(whole) - at), random.randbytes(len(whole) - at)])):
            written = whole[:at] + tail
            different = (number for number, pair in enumerate(zip(whole, written, strict=False)) if len(set(pair)) > 1)
            kept = next(different, len(written))  # the tail may begin as what it replaces
            journal.write_bytes(written)
            found = {put.name.key for put in read_index(root, store, layout).puts}
            expected = [keys for length, keys in states if length <= kept]
            assert found == (expected[-1] if expected else set()), f"cut at byte {at}"


@pytest.mark.parametrize("seed", drawn(SEEDS))
def test_copies_of_a_tier_at_work_are_never_wrong(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    rig = DiskRig(tmp_path / "tier", capacity_bytes=16 << 20, seed=seed)
    payloads: dict[bytes, set[bytes]] = {}
    for number in range(30):
        name = object_name(number, raw_bytes=random.randrange(1, 8 * PAGE))
        payloads[name.key] = {rig.payload(name)}
        assert rig.write(name).outcome is IoOutcome.OK
    rig.crash()  # up to here all is synced
    synced = rig.names()
    rig.data.done.clear()
    for number in range(30, 90):
        name = object_name(number, raw_bytes=random.randrange(1, 8 * PAGE))
        payloads[name.key] = {rig.payload(name)}
        rig.submit_write(name)
        for _ in range(random.randrange(8)):
            rig.step()
        if random.random() < 0.5:
            rig.drop(random.choice(sorted(rig.listener.held)))
        if random.random() < 0.1:
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(rig.config.path, copy)
            written = [part for job, _ in rig.data.done if isinstance(job, WriteObject) for part in job.parts]
            kept = {name for name in synced if name in rig.names()}
            _spoil(copy, [(part.file, part.offset, part.length) for part in written], random)
            _open_and_check(copy, payloads, kept)
            shutil.rmtree(copy)
        rig.settle()


def test_copies_of_a_running_daemon_s_tier_are_never_wrong(tmp_path: Path) -> None:
    """Its processes go on while the files are copied one after the other, so the copy is of no moment at all."""
    payloads: dict[bytes, set[bytes]] = {}

    async def scenario() -> None:
        random = Random(f"{RUN_SEED} payloads")
        async with live(tmp_path / "tier", capacity_bytes=16 << 20, deadline_seconds=60.0) as under:
            for number in range(120):
                payload = random.randbytes(2 * PAGE)
                payloads[object_name(number, raw_bytes=len(payload)).key] = {payload}
                assert (await under.write(number, payload)).outcome is IoOutcome.OK
                if random.random() < 0.5:
                    handle = random.choice(sorted(under.listener.held))
                    del under.listener.held[handle]
                    under.tier.drop(handle)
                if number % 30 == 29:
                    copying = asyncio.to_thread(shutil.copytree, tmp_path / "tier", tmp_path / f"copy-{number}")
                    await asyncio.gather(copying, asyncio.sleep(0))

    asyncio.run(scenario())
    copies = sorted(tmp_path.glob("copy-*"))
    assert len(copies) == 4
    for copy in copies:
        _spoil(copy, [], Random(f"{RUN_SEED} {copy.name}"))
        _open_and_check(copy, payloads, set())


def _spoil(copy: Path, written: list[tuple[str, int, int]], random: Random) -> None:
    journal = max((copy / "journal").iterdir())
    data = bytearray(journal.read_bytes())
    at = random.randrange(len(data) + 1)
    data[at:] = random.choice([b"", bytes(len(data) - at), random.randbytes(len(data) - at)])
    journal.write_bytes(bytes(data))
    for file, offset, length in written:
        if random.random() < 0.4:
            start = random.randrange(length // PAGE) * PAGE
            with (copy / file).open("r+b") as segment:
                segment.seek(offset + start)
                segment.write(random.choice([bytes(length - start), random.randbytes(length - start)]))


def _open_and_check(copy: Path, payloads: dict[bytes, set[bytes]], kept: set[ObjectName]) -> None:
    """`kept`: synced, and not dropped since: they are there, whatever was lost."""
    rig = DiskRig(copy, capacity_bytes=16 << 20)
    assert rig.writable()
    assert kept <= rig.names()
    for handle, name in sorted(rig.listener.held.items()):
        read, data = rig.read(handle)
        if read.outcome is IoOutcome.OK:
            assert data in payloads[name.key]
        else:
            assert read.outcome in DAMAGED
            assert name not in kept
    rig.check()
    assert rig.write(object_name(5000)).outcome is IoOutcome.OK
    rig.crash()
    for handle in sorted(rig.listener.held):
        assert rig.read(handle)[0].outcome is IoOutcome.OK
