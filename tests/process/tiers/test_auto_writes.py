"""A daemon with `write = "auto"`: what RAM drops is written, and what it costs the drive is shown."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import OBJECT_BYTES, RawEngine, keys_of, payload_of, status_of

CHUNKS = 32
PROMPTS_MAX = 200
"""More than RAM has room for."""


@pytest.mark.requirement("T2")
def test_a_daemon_writes_what_ram_drops_and_shows_what_a_hit_costs() -> None:
    with tempfile.TemporaryDirectory(prefix="kvddisk", dir="/tmp") as name:
        tier = (
            f'[[tier]]\nname = "nvme"\nkind = "disk"\npath = "{Path(name) / "tier"}"\ncapacity = "512MiB"\n'
            'write = "auto"\ndrive_writes_per_day = 2\n'
        )
        with DaemonProcess(ram="448MiB", config=tier) as daemon, RawEngine(daemon.socket) as engine:
            wait_until(lambda: status_of(daemon.socket).tiers[1].state == "ready", "the disk opens")
            prompts = [keys_of(f"prompt {number}", CHUNKS) for number in range(PROMPTS_MAX)]
            stored = 0

            def settled() -> bool:
                ram, disk = status_of(daemon.socket).tiers
                return not ram.pending_checksums and not disk.queued_objects

            while "nvme" not in map(engine.tier_of, prompts[:stored]):
                wait_until(settled, "RAM may drop what it has")  # not what is without a sum, or being written
                engine.store(prompts[stored])
                stored += 1

            def served() -> bool:
                for keys in prompts[:stored]:
                    if engine.tier_of(keys) == "nvme" and (loaded := engine.load(keys)) is not None:
                        assert loaded == [payload_of(key) for key in keys]
                        return True
                return False  # RAM drops objects meanwhile, and may have no room for a moment

            wait_until(served, "a prompt of the disk is served")
            assert status_of(daemon.socket).counters["tier_admissions.nvme/admitted"] > 0

            def shown() -> bool:
                counters = status_of(daemon.socket).counters  # while writes continue, the table has a later figure
                hit_bytes = counters["tier_hit_bytes.nvme/"]
                assert hit_bytes > 0 == hit_bytes % OBJECT_BYTES
                cost = counters["tier_written_bytes.nvme/"] / hit_bytes
                return f" {cost:.2f} " in kvdepotctl(daemon, "status", "--wide").stdout

            wait_until(shown, "what a hit costs is shown")
