"""A shared tier on a mount that hangs: RAM serves on, the daemon starts and stops in time, the tier comes back (T4)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvdepot.core.report import TierStatus

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.raw_client import RawEngine, keys_of, payload_of, status_of

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
STOP_SECONDS = 10.0
WAIT_SECONDS = 60.0
DEADLINE_MS = 2_000.0
"""A write that takes longer is given up and not offered again, also before the mount hangs."""
CONFIG = """
[[tier]]
name = "pool"
kind = "shared"
path = "{path}"
capacity = "256MiB"
write = "commit"
deadline = "{deadline:.0f}ms"
io_workers = 1
on_root_filesystem = true
[breaker]
failures = 2
probe_every = "300ms"
"""


@pytest.fixture
def daemon(fuse: FuseDirectory) -> Iterator[DaemonProcess]:
    (fuse.backing / "store").mkdir()
    config = CONFIG.format(path=fuse.path / "store", deadline=patient(DEADLINE_MS))
    daemon = DaemonProcess(ram="456MiB", config=config)
    try:
        yield daemon
    finally:
        daemon.close()


def _tier(daemon: DaemonProcess) -> TierStatus:
    return status_of(daemon.socket).tiers[1]


def _published(fuse: FuseDirectory) -> int:
    return len(list((fuse.backing / "store").glob("*/*/*.kvd")))


def _start_and_store(daemon: DaemonProcess, fuse: FuseDirectory, keys: list[bytes]) -> None:
    daemon.start()
    wait_until(lambda: _tier(daemon).state == "ready" and not _tier(daemon).reason, "it is writable", WAIT_SECONDS)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
    wait_until(lambda: _published(fuse) == len(keys), "all are published", WAIT_SECONDS)


@pytest.mark.requirement("T4")
def test_ram_serves_beside_a_hung_mount_and_the_tier_comes_back(daemon: DaemonProcess, fuse: FuseDirectory) -> None:
    keys, during, after = keys_of("before", 20), keys_of("during", 20), keys_of("after", 20)
    _start_and_store(daemon, fuse, keys)
    with RawEngine(daemon.socket) as engine:
        fuse.hang()
        engine.store(during)
        wait_until(lambda: _tier(daemon).breaker != "closed", "the breaker opens", WAIT_SECONDS)
        assert engine.load(keys) == [payload_of(key) for key in keys]
        assert engine.load(during) == [payload_of(key) for key in during]
        limit = Deadline(5)
        engine.locate(keys_of("elsewhere", 5))
        assert not limit.is_over(), "nothing is looked up on a mount that is out of use"
        assert _tier(daemon).reason
        fuse.go_on()
        wait_until(lambda: not _tier(daemon).reason, "the tier comes back", WAIT_SECONDS)
        before = _published(fuse)
        engine.store(after)
        wait_until(lambda: _published(fuse) >= before + len(after), "it is written again", WAIT_SECONDS)


@pytest.mark.requirement("T4")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "writing"])
def test_sigterm_ends_the_daemon_in_time_beside_a_hung_mount(
    daemon: DaemonProcess, fuse: FuseDirectory, busy: bool
) -> None:
    _start_and_store(daemon, fuse, keys_of("before", 5))
    with RawEngine(daemon.socket) as engine:
        fuse.hang()
        if busy:
            engine.store(keys_of("during", 20))
        limit = Deadline(STOP_SECONDS)
        assert daemon.stop() == 0
        assert not limit.is_over()


@pytest.mark.requirement("T4")
def test_a_daemon_starts_serves_and_stops_beside_a_mount_that_hangs_already(
    daemon: DaemonProcess, fuse: FuseDirectory
) -> None:
    fuse.hang()
    daemon.start()
    keys = keys_of("ram", 5)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]
    assert _tier(daemon).state in ("opening", "offline")
    wait_until(lambda: _tier(daemon).reason, "it says why", WAIT_SECONDS)
    limit = Deadline(STOP_SECONDS)
    assert daemon.stop() == 0
    assert not limit.is_over()
    daemon.start()
    fuse.go_on()
    wait_until(lambda: _tier(daemon).state == "ready", "the tier opens", WAIT_SECONDS)
