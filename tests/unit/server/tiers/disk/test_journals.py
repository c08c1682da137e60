"""The disk tier's journals: rotated, compacted, and numbers in them never repeat."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.disk_rig import DiskRig, object_name


@pytest.fixture
def rig(tmp_path: Path) -> DiskRig:
    return DiskRig(tmp_path / "tier")


def test_journals_rotate_and_are_compacted_offline(rig: DiskRig) -> None:
    kept = [rig.stored(number) for number in range(20)]
    for number in range(2000):
        rig.drop(rig.stored(1000 + number, raw_bytes=100))
    rig.settle()
    journals = sorted(path.name for path in (rig.config.path / "journal").iterdir())
    snapshots = sorted(path.name for path in (rig.config.path / "snapshots").iterdir())
    assert len(journals) == len(snapshots) == 1
    assert journals[0][:8] == snapshots[0][:8]
    assert int(journals[0][:8]) > 1
    assert rig.disk_usage_bytes() <= rig.config.capacity_bytes
    rig.check()
    rig.crash()
    assert rig.names() == {object_name(number) for number in range(20)}
    assert len(kept) == 20


def test_while_compaction_lags_only_one_rotation_is_made(rig: DiskRig) -> None:
    say, rig.opener.step = rig.opener.step, lambda: False  # type: ignore[method-assign]
    number = 0
    while rig.writable():
        handle = rig.stored(number, raw_bytes=100)
        number += 1
        rig.drop(handle)
        assert number < 10_000
    assert "not compacted" in rig.tier.status().reason
    assert len(list((rig.config.path / "journal").iterdir())) == 2
    rig.opener.step = say  # type: ignore[method-assign]
    rig.settle()
    assert rig.writable()
    rig.check()


@pytest.mark.requirement("P6")
def test_without_a_snapshot_all_journals_in_a_row_are_read(rig: DiskRig) -> None:
    rig.opener.step = lambda: False  # type: ignore[method-assign]
    rig.stored(0)
    number = 1
    while len(list((rig.config.path / "journal").iterdir())) < 2:
        rig.drop(rig.stored(number, raw_bytes=100))
        number += 1
    rig.stored(number)
    (snapshot,) = (rig.config.path / "snapshots").iterdir()
    snapshot.unlink()
    rig.crash()
    assert rig.names() == {object_name(0), object_name(number)}


def test_sequences_and_generations_never_repeat(rig: DiskRig) -> None:
    seen: set[int] = set()
    for round_number in range(5):
        for number in range(5):
            sequence = rig.tier._medium.sequence
            rig.stored(10 * round_number + number)
            assert sequence not in seen
            seen.add(sequence)
        if round_number % 2:  # a power loss takes the journal
            (journal,) = (rig.config.path / "journal").iterdir()
            journal.unlink()
        rig.crash()
        assert rig.tier._medium.sequence > max(seen)
