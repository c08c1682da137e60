"""`kvdepotctl prefetch`: the real command against a real daemon whose memory was lost and whose disk was not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.calls import AcquireOutcome
from kvdepot.core.errors import LoadsOff, NotFound

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.ctl_process import answered, kvdepotctl, record
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import OBJECT_BYTES, RawEngine, dense_spec, keys_of, payload_of, status_of

CHUNKS = 12
KEYS, OTHER = keys_of("prompt", CHUNKS), keys_of("other", 4)
SPEC = dense_spec("a-model")
PATH = keys_of("path", 3)


def config(directory: Path, *, share: float = 0.25, deadline: str = "10s") -> str:
    return (
        f'[[tier]]\nname = "nvme"\nkind = "disk"\npath = "{directory}"\ncapacity = "128MiB"\nwrite = "commit"\n'
        f'deadline = "{deadline}"\n[breaker]\nfailures = 2\nprobe_every = "200ms"\n[scrub]\nrate = "0"\n'
        f"[policy]\nprefetch_share = {share}\n"
    )


def tier_objects(daemon: DaemonProcess, number: int) -> int:
    return int(status_of(daemon.socket).tiers[number].objects)


def fill(daemon: DaemonProcess) -> str:
    """Two prompts on the disk and not in RAM, and no engine is there. Returns the namespace."""
    with RawEngine(daemon.socket, spec=SPEC) as engine:
        wait_until(lambda: engine.status().tiers[1].state == "ready", "the disk opens", 60)
        engine.store(KEYS)
        engine.store(OTHER)
        wait_until(lambda: engine.status().tiers[1].objects == CHUNKS + len(OTHER), "they are on the disk", 60)
        name = engine.namespace.hex()
    daemon.stop()
    daemon.arena.unlink()
    daemon.start()
    wait_until(lambda: tier_objects(daemon, 1) == CHUNKS + len(OTHER), "the disk opens again", 60)
    assert tier_objects(daemon, 0) == 0
    return name


@pytest.fixture
def daemon(directory: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(ram="512MiB", config=config(directory)) as running:
        yield running


def prefetched(daemon: DaemonProcess, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The last line of `--json`."""
    printed = kvdepotctl(daemon, "prefetch", *arguments, "--json")
    assert printed.returncode == code, printed.stdout + printed.stderr
    last: dict[str, Any] = json.loads(printed.stdout.splitlines()[-1])
    assert last["finished"]
    return last


def test_a_path_and_then_a_namespace_are_in_ram_before_an_engine_asks(daemon: DaemonProcess) -> None:
    name = fill(daemon)
    found = prefetched(daemon, f"{name[:8]}/{KEYS[3].hex()}")
    assert found == {
        "chunks": 0, "examined": 4, "present": 0, "read": 4, "read_bytes": 4 * OBJECT_BYTES, "refused": {},
        "failed": {}, "finished": True, "reason": "",
    }  # fmt: skip
    assert tier_objects(daemon, 0) == 4
    found = prefetched(daemon, name)
    assert (found["chunks"], found["examined"], found["present"], found["read"]) == (16, 16, 4, 12)
    assert "16" in answered(daemon, "prefetch", name), "all of it is there"
    with RawEngine(daemon.socket, spec=SPEC) as engine:
        assert engine.tier_of(KEYS) == engine.tier_of(OTHER) == "ram"
        assert engine.load(KEYS) == [payload_of(key) for key in KEYS]
        assert engine.counter("tier_reads.nvme/ok") == 16
        assert engine.counter("prefetch_wasted_objects.operator") == 16
    assert f"operator prefetch started: namespace {name}" in daemon.log
    assert "operator prefetch ended: 12 objects read, 3145728 bytes; 4 already in RAM" in daemon.log


@pytest.mark.requirement("I4")
@pytest.mark.long(seconds=8)
def test_within_the_share_and_neither_pins_nor_leases_are_evicted_for_it(directory: Path) -> None:
    with DaemonProcess(ram="512MiB", config=config(directory, share=0.01)) as daemon:
        name = fill(daemon)
        at_most = int(status_of(daemon.socket).tiers[0].ready_bytes * 0.01) // OBJECT_BYTES
        assert 0 < at_most < CHUNKS - 2
        with RawEngine(daemon.socket, spec=SPEC) as engine:
            assert engine.load(OTHER) is not None
            assert record(daemon, "pin", f"{name}/{OTHER[-1].hex()}")["objects"] == len(OTHER)
            lease, outcome, _ = engine.acquire(KEYS[:2])
            assert outcome is AcquireOutcome.GRANTED
            found = prefetched(daemon, name, code=1)
            assert found["present"] == 6 and 1 <= found["read"] <= at_most
            assert found["refused"] == {"share": CHUNKS - 2 - found["read"]}
            assert engine.tier_of(OTHER) == "ram"
            assert status_of(daemon.socket).tiers[0].pinned_objects == len(OTHER)
            engine.release(lease)
            assert engine.load(KEYS) == [payload_of(key) for key in KEYS]


def test_what_an_operator_has_switched_off_is_refused_and_so_is_what_is_not_there(daemon: DaemonProcess) -> None:
    name = fill(daemon)
    answered(daemon, "loads", "off", name)
    with pytest.raises(LoadsOff):
        answered(daemon, "prefetch", name)
    refused = kvdepotctl(daemon, "prefetch", name)
    assert (refused.returncode, "the operator has switched loads off" in refused.stderr) == (1, True)
    answered(daemon, "loads", "on", name)
    for arguments in ("0" * 32, f"{name}/{'f' * 32}"):
        with pytest.raises(NotFound):
            answered(daemon, "prefetch", arguments)
    assert kvdepotctl(daemon, "prefetch").returncode == 2
    assert tier_objects(daemon, 0) == 0


@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse() or "FUSE")
class TestHungMount:
    @pytest.mark.requirement("T4")
    def test_it_ends_with_what_could_not_be_read(self) -> None:
        with (
            FuseDirectory() as mount,
            # Not shorter: on a busy machine two late writes disable the tier, and what was to be written is dropped.
            DaemonProcess(ram="512MiB", config=config(mount.path, deadline="4s")) as daemon,
        ):
            name = fill(daemon)
            mount.hang()
            try:
                found = prefetched(daemon, name, code=1)
            finally:
                mount.go_on()
            assert found["read"] + sum(found["failed"].values()) == CHUNKS + len(OTHER), found
            assert found["failed"]["out_of_use"] > 0

    def test_an_interrupt_ends_it_in_the_daemon_too_and_there_is_one_at_a_time(self) -> None:
        with (
            FuseDirectory() as mount,
            DaemonProcess(ram="512MiB", config=config(mount.path, deadline="60s")) as daemon,
        ):
            name = fill(daemon)
            mount.fault(read=0, seconds=20)
            command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", daemon.endpoint, "prefetch"]
            slow = subprocess.Popen(
                [*command, name, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert slow.stdout is not None
            assert not json.loads(slow.stdout.readline())["finished"]
            refused = kvdepotctl(daemon, "prefetch", name)
            assert (refused.returncode, "prefetches at once" in refused.stderr) == (1, True)
            slow.send_signal(signal.SIGINT)
            assert slow.wait(patient(30)) == 130
            daemon.wait_for_log("the rest was not read: cancelled")
            assert "Traceback" not in daemon.log and "call failed" not in daemon.log
            mount.fault()
            mount.let_go()
            wait_until(lambda: status_of(daemon.socket).tiers[0].lent_bytes == 0, "nothing is lent", 60)
            assert prefetched(daemon, name)["failed"] == {}
            assert tier_objects(daemon, 0) == CHUNKS + len(OTHER)
