"""A daemon whose shared tier lies on a file system with a quota below the capacity (ADR 0097)."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from kvdepot.core.report import TierStatus

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import OBJECT_BYTES, RawEngine, keys_of, status_of
from tests.rigs.shared_node import CONFIG, WAIT_SECONDS

QUOTA_BYTES = 12 * OBJECT_BYTES


def _tier(daemon: DaemonProcess) -> TierStatus:
    return status_of(daemon.socket).tiers[1]


def _published(root: Path) -> set[bytes]:
    return {bytes.fromhex(path.name.partition(".")[0]) for path in root.rglob("*.kvd") if ".tmp" not in path.parts}


@pytest.mark.requirement("T5")
@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse() or "FUSE")
def test_a_daemon_works_within_a_quota_that_statfs_does_not_show() -> None:
    with FuseDirectory() as mount:
        root = mount.path / "shared"
        root.mkdir()
        daemon = DaemonProcess(ram="456MiB", config=CONFIG.format(path=root))
        try:
            daemon.start()
            wait_until(lambda: not _tier(daemon).reason, "the janitor has granted room", WAIT_SECONDS)
            mount.fault(quota_bytes=QUOTA_BYTES)
            with RawEngine(daemon.socket) as engine:
                engine.store(keys_of("more than fits", 2 * QUOTA_BYTES // OBJECT_BYTES))
                wait_until(lambda: "full" in _tier(daemon).reason, "the quota is used up", WAIT_SECONDS)
                first, numbers = _published(mount.backing), count()

                def stored_since() -> bool:
                    engine.store(keys_of(f"later {next(numbers)}", 1))
                    return bool(_published(mount.backing) - first)

                wait_until(stored_since, lambda: f"objects make room for others: {_tier(daemon)}", 2 * WAIT_SECONDS)
            assert first - _published(mount.backing)
        finally:
            daemon.close()
