"""A disk tier on a mount that hangs: RAM serves on, the daemon stops in time, no extent is reused early (T4, I1a)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.io_pool_rig import is_gone
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, keys_of, payload_of, status_of

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
STOP_SECONDS = 10.0
DEADLINE_MS = 2_000.0
"""A write that takes longer is given up and not offered again, also before the mount hangs."""
CONFIG = """
[[tier]]
name = "slow"
kind = "disk"
path = "{path}"
capacity = "512MiB"
write = "commit"
deadline = "{deadline:.0f}ms"
io_workers = 1
[breaker]
failures = 2
probe_every = "300ms"
[scrub]
rate = "0"
quarantine_capacity = "32MiB"
"""


@pytest.fixture
def daemon(fuse: FuseDirectory) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(ram="456MiB", config=CONFIG.format(path=fuse.path / "store", deadline=patient(DEADLINE_MS)))
    try:
        yield daemon.start()
    finally:
        daemon.close()


def _wait_durable(daemon: DaemonProcess, count: int) -> None:
    wait_until(lambda: status_of(daemon.socket).tiers[1].objects >= count, f"{count} objects on disk")


def _workers(daemon: DaemonProcess) -> list[int]:
    """I/O workers with an arena: not the journal's."""
    return [
        pid
        for pid in children(daemon.pid, b"kvdepot.server.io.worker\0")
        if b"kvdepot.server.io.worker\0\0" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.requirement("T4")
def test_ram_serves_beside_a_hung_mount_and_the_tier_comes_back(daemon: DaemonProcess, fuse: FuseDirectory) -> None:
    keys, more = keys_of("before", 20), keys_of("during", 20)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        _wait_durable(daemon, 20)
        fuse.hang()
        engine.store(more)
        wait_until(lambda: status_of(daemon.socket).tiers[1].breaker != "closed", "the breaker opens")
        assert engine.load(keys) == [payload_of(key) for key in keys]
        assert engine.load(more) == [payload_of(key) for key in more]
        assert status_of(daemon.socket).tiers[1].reason
        given_up = engine.counter("io_workers.slow/overdue")
        wait_until(lambda: engine.counter("io_workers.slow/overdue") >= given_up + 2, "probes hang too", 60)
        assert daemon.log.count("it is killed") <= given_up, "probes are not worth a line each"
        fuse.go_on()
        wait_until(lambda: not status_of(daemon.socket).tiers[1].reason, "the tier comes back")
        again = keys_of("after", 20)
        engine.store(again)
        _wait_durable(daemon, 40)


@pytest.mark.requirement("T4")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "writing"])
def test_sigterm_ends_the_daemon_in_time_beside_a_hung_mount(
    daemon: DaemonProcess, fuse: FuseDirectory, busy: bool
) -> None:
    with RawEngine(daemon.socket) as engine:
        engine.store(keys_of("before", 20))
        _wait_durable(daemon, 20)
        fuse.hang()
        if busy:
            engine.store(keys_of("during", 20))
        limit = Deadline(STOP_SECONDS)
        assert daemon.stop() == 0
        assert not limit.is_over()


@pytest.mark.requirement("I1a", "I6")
def test_a_worker_stuck_when_the_daemon_is_killed_keeps_what_it_was_lent(
    daemon: DaemonProcess, fuse: FuseDirectory
) -> None:
    keys = keys_of("lent", 20)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys_of("before", 1))
        _wait_durable(daemon, 1)
        [worker] = _workers(daemon)
        fuse.fault(write=0, seconds=90)  # late: the server has the request, and the kernel waits for it
        engine.store(keys)
        wait_until(lambda: fuse.is_late, "the worker is in the kernel")
        daemon.kill()
    fuse.fault()
    daemon.start()
    assert not is_gone(worker)
    with RawEngine(daemon.socket) as engine:
        assert status_of(daemon.socket).tiers[0].lent_bytes >= OBJECT_BYTES
        assert status_of(daemon.socket).tiers[1].state == "opening"
        fuse.let_go()
        wait_until(lambda: is_gone(worker), "the stuck worker is gone")
        wait_until(lambda: not status_of(daemon.socket).tiers[0].lent_bytes, "nothing is lent")
        wait_until(lambda: status_of(daemon.socket).tiers[1].state == "ready", "the tier is open")
        assert engine.locate(keys_of("before", 1)) == CHUNK_TOKENS
