"""fsck says beforehand what the tier will say of each object after its next start: after crashes, with damage."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from kvdepot.core.objectfile import Codec
from kvdepot.server.offline.fsck import check_store
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk import layout as names

from tests.rigs.disk_rig import PAGE, DiskRig, object_name
from tests.rigs.seeds import drawn


def churn(rig: DiskRig, draw: Random) -> None:
    """Writes of many sizes, drops, and objects written over the places of others."""
    for number in range(60):
        if rig.listener.held and draw.random() < 0.3:
            rig.drop(draw.choice(sorted(rig.listener.held)))
            rig.settle()
        raw_bytes = draw.choice((1, PAGE - 1, PAGE, 3 * PAGE + 5, 20 * PAGE))
        assert rig.write(object_name(number, raw_bytes)).outcome is IoOutcome.OK


def damage(rig: DiskRig, draw: Random) -> None:
    """Bits of objects, and the end of the journal."""
    for path in sorted((rig.config.path / names.SEGMENTS).glob("*.seg")):
        data = bytearray(path.read_bytes())
        for _ in range(12):
            data[draw.randrange(min(len(data), 200 * PAGE))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    (journal,) = (rig.config.path / names.JOURNALS).glob("*.log")
    content = journal.read_bytes()
    journal.write_bytes(content[: len(content) - draw.randrange(400)])


@pytest.mark.requirement("P6", "T2")
@pytest.mark.parametrize("seed", drawn(range(6)))
def test_fsck_and_the_tier_agree(seed: int, tmp_path: Path) -> None:
    draw = Random(f"agreement-{seed}")
    rig = DiskRig(tmp_path / "store", seed=seed, codec=draw.choice(list(Codec)))
    churn(rig, draw)
    if seed % 2:
        rig.crash()  # so that some are proven and others are not
        churn(rig, draw)
    damage(rig, draw)
    foreseen = check_store(tmp_path / "store").outcomes
    rig.crash()
    found = Counter(rig.read(handle)[0].outcome for handle in sorted(rig.listener.held))
    assert found == foreseen
    assert foreseen[IoOutcome.OK]
    assert foreseen.total() > foreseen[IoOutcome.OK]
