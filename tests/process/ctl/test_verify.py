"""`kvdepotctl verify`: the real command against a real daemon, with bytes that were changed behind its back."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from kvdepot.core.calls import AcquireOutcome, ReserveOutcome
from kvdepot.core.errors import LimitExceeded, NotFound

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.ctl_process import answered, kvdepotctl, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.raw_client import EXTENT, OBJECT_BYTES, RawEngine, dense_spec, keys_of, payload_of, status_of

CHUNKS = 8
KEYS, OTHER = keys_of("prompt", CHUNKS), keys_of("other", 3)
SPEC, OTHER_SPEC = dense_spec("a-model"), dense_spec("other-model", 128 << 10)


def config(directory: Path, deadline: str = "10s") -> str:
    """Whoever finds damage is not the scrubber."""
    return (
        f'[[tier]]\nname = "nvme"\nkind = "disk"\npath = "{directory}"\ncapacity = "128MiB"\nwrite = "commit"\n'
        f'deadline = "{deadline}"\n[breaker]\nfailures = 2\nprobe_every = "200ms"\n[scrub]\nrate = "0"\n'
    )


@pytest.fixture
def daemon(directory: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(ram="512MiB", config=config(directory)) as running:
        yield running


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[RawEngine]:
    """Eight objects of one namespace and three of another, in RAM and on the disk, all with their sums."""
    with RawEngine(daemon.socket, "engine-0", spec=SPEC) as one, RawEngine(daemon.socket, "1", spec=OTHER_SPEC) as two:
        wait_until(lambda: one.status().tiers[1].state == "ready", "the disk opens", 60)
        one.store(KEYS)
        lease, outcomes, _ = two.reserve(OTHER)
        assert set(outcomes) == {ReserveOutcome.GRANTED}
        two.commit(lease, len(OTHER))
        wait_stored(one, CHUNKS + len(OTHER))
        yield one


def wait_stored(engine: RawEngine, objects: int) -> None:
    """With their sums: a write takes one where the checksum worker has not yet."""
    wait_until(lambda: engine.status().tiers[1].objects == objects, "they are on the disk", 60)
    wait_until(lambda: engine.status().tiers[0].lent_bytes == 0, "nothing of them is read any more", 60)


def verified(daemon: DaemonProcess, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The last line of `--json`, by tier."""
    printed = kvdepotctl(daemon, "verify", *arguments, "--json")
    assert printed.returncode == code, printed.stdout + printed.stderr
    lines = [json.loads(line) for line in printed.stdout.splitlines()]
    assert all(tier["finished"] for tier in lines[-1]["tiers"])
    return {tier["tier"]: tier for tier in lines[-1]["tiers"]}


def sound(tier: dict[str, Any]) -> int:
    """How many objects were verified, where nothing else is to be said."""
    assert (tier["damaged"], tier["skipped"], tier["reason"]) == ({}, {}, "")
    return int(tier["verified"])


def damage_in_ram(engine: RawEngine, key: bytes) -> None:
    """Through the mapping that an engine has."""
    lease, outcome, extents = engine.acquire([key])
    assert outcome is AcquireOutcome.GRANTED
    _, _, offset, _, _ = EXTENT.unpack(extents)
    engine.arena[offset + 5000] ^= 1
    engine.release(lease)


def damage_on_disk(directory: Path, key: bytes) -> None:
    found = 0
    for segment in directory.rglob("*.seg"):
        data = segment.read_bytes()
        at = data.find(payload_of(key)[:64])
        if at >= 0:
            found += 1
            with segment.open("r+b") as file:
                file.seek(at + 5000)
                file.write(bytes([data[at + 5000] ^ 1]))
    assert found == 1


def test_everything_is_read_in_every_tier_or_what_is_named(daemon: DaemonProcess, engine: RawEngine) -> None:
    name = engine.namespace.hex()
    found = verified(daemon)
    assert {tier: sound(found[tier]) for tier in found} == {"ram": 11, "nvme": 11}
    assert found["ram"]["objects"] == found["nvme"]["objects"] == 11
    assert found["nvme"]["verified_bytes"] == CHUNKS * OBJECT_BYTES + 3 * (128 << 10)
    found = verified(daemon, name[:8])
    assert {tier: sound(found[tier]) for tier in found} == {"ram": 8, "nvme": 8}
    found = verified(daemon, f"{name}/{KEYS[5].hex()}", "--tier", "nvme")
    assert {tier: sound(found[tier]) for tier in found} == {"nvme": 3}, "the chunk and what follows it"
    shown = text(daemon, "verify", "--tier", "ram")
    assert "verified" in shown and "nvme" not in shown
    assert (
        "verification started: all namespaces in tier ram" in daemon.log
        and "11 objects verified in tier ram" in daemon.log
    )


@pytest.mark.requirement("I1")
def test_what_was_changed_in_ram_and_on_the_disk_is_found_and_served_from_where_it_is_whole(
    daemon: DaemonProcess, engine: RawEngine, directory: Path
) -> None:
    damage_in_ram(engine, KEYS[2])
    damage_in_ram(engine, KEYS[7])
    damage_on_disk(directory, KEYS[4])
    found = verified(daemon, code=1)
    assert (found["ram"]["verified"], found["ram"]["damaged"]) == (9, {"corrupt": 2})
    assert found["nvme"]["verified"] == 10
    assert sum(found["nvme"]["damaged"].values()) == 1 and set(found["nvme"]["damaged"]) <= {"corrupt", "torn"}
    assert engine.counter("corrupt_objects") == 2
    assert sum(engine.counter(f"tier_damaged_objects.nvme/{why}") for why in ("corrupt", "torn")) == 1
    wait_until(lambda: engine.status().tiers[1].quarantined_bytes > 0, "it is quarantined", 60)
    assert engine.load(KEYS) == [payload_of(key) for key in KEYS]
    wait_until(lambda: engine.status().tiers[1].objects == 11, "what the disk lost is written again", 60)
    again = verified(daemon)
    assert {tier: sound(again[tier]) for tier in again} == {"ram": 11, "nvme": 11}


@pytest.mark.requirement("I1")
def test_damage_that_nobody_has_whole_takes_what_is_below_it() -> None:
    with DaemonProcess() as daemon, RawEngine(daemon.socket, spec=SPEC) as engine:
        engine.store(KEYS)
        wait_until(lambda: engine.counter("checksummed_objects") == CHUNKS, "the sums", 60)
        damage_in_ram(engine, KEYS[3])
        printed = kvdepotctl(daemon, "verify", engine.namespace.hex())
        assert (printed.returncode, "1 corrupt" in printed.stdout) == (1, True)
        assert engine.locate(KEYS) == 3 * 256
        assert engine.load(KEYS[:3]) == [payload_of(key) for key in KEYS[:3]]


def test_what_is_lent_is_read_and_what_is_being_written_is_not(daemon: DaemonProcess, engine: RawEngine) -> None:
    read_lease, outcome, _ = engine.acquire(KEYS)
    assert outcome is AcquireOutcome.GRANTED
    write_lease, _, _ = engine.reserve(keys_of("fresh", 2))
    found = verified(daemon)["ram"]
    assert (found["verified"], found["damaged"], found["skipped"]) == (11, {}, {"being_written": 2})
    damage = engine.acquire(KEYS[6:7])
    _, _, offset, _, _ = EXTENT.unpack(damage[2])
    engine.arena[offset] ^= 1
    found = verified(daemon, "--tier", "ram", code=1)["ram"]
    assert (found["damaged"], status_of(daemon.socket).tiers[0].lent_bytes) == ({"corrupt": 1}, 10 * OBJECT_BYTES)
    engine.release(read_lease)
    engine.release(damage[0])
    engine.abandon(write_lease)
    wait_until(lambda: status_of(daemon.socket).tiers[0].lent_bytes == 0, "nothing is lent")
    assert engine.load(KEYS) == [payload_of(key) for key in KEYS]


def test_an_interrupt_ends_it_in_the_daemon_too_and_there_is_one_at_a_time(
    daemon: DaemonProcess, engine: RawEngine
) -> None:
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", daemon.endpoint, "verify"]
    slow = subprocess.Popen(
        [*command, "--rate", "64KiB/s", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert slow.stdout is not None
    first = json.loads(slow.stdout.readline())
    assert [tier["finished"] for tier in first["tiers"]] == [False, False]
    refused = kvdepotctl(daemon, "verify")
    assert (refused.returncode, "verifications at once" in refused.stderr) == (1, True)
    with pytest.raises(LimitExceeded):
        answered(daemon, "verify")
    slow.send_signal(signal.SIGINT)
    assert slow.wait(patient(30)) == 130
    daemon.wait_for_log("the rest was not read: cancelled")
    assert "Traceback" not in daemon.log and "call failed" not in daemon.log
    assert {tier: sound(one) for tier, one in verified(daemon).items()} == {"ram": 11, "nvme": 11}


@pytest.mark.long(seconds=6)
def test_progress_is_shown_on_a_terminal(daemon: DaemonProcess, engine: RawEngine) -> None:
    terminal, its = pty.openpty()
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", daemon.endpoint, "verify"]
    shown = subprocess.Popen(
        [*command, "--rate", "1MiB/s"], stdout=its, stderr=its, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(its)
    output = b""
    while True:
        try:
            output += os.read(terminal, 4096)
        except OSError:
            break
    os.close(terminal)
    assert shown.wait(patient(30)) == 0
    assert b"/11" in output and b"0 damaged" in output
    assert "verified" in output.decode().split("/11")[-1], "the table, when the bars are gone"


def test_what_is_no_sense_is_refused(daemon: DaemonProcess, engine: RawEngine) -> None:
    for wrong, arguments in (
        (NotFound, ("--tier", "floppy")),
        (NotFound, ("0" * 32,)),
        (NotFound, (f"{engine.namespace.hex()}/{'f' * 32}",)),
        (click.BadParameter, ("--rate", "fast")),
        (click.BadParameter, ("--rate", "0")),
    ):
        with pytest.raises(wrong):
            answered(daemon, "verify", *arguments)
    assert kvdepotctl(daemon, "verify", f"/{KEYS[0].hex()}").returncode == 2


def test_a_daemon_that_stops_answering_is_not_waited_for(daemon: DaemonProcess, engine: RawEngine) -> None:
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", daemon.endpoint, "--timeout", "2"]
    slow = subprocess.Popen(
        [*command, "verify", "--rate", "1B/s", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert slow.stdout is not None and slow.stderr is not None
    slow.stdout.readline()
    daemon.suspend()
    try:
        assert slow.wait(patient(30)) == 3
        assert "no word from the daemon for 2 s" in slow.stderr.read()
    finally:
        daemon.resume()


@pytest.mark.requirement("T4")
@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse() or "FUSE")
def test_a_tier_that_hangs_is_skipped_with_its_reason_and_the_others_are_read() -> None:
    with (
        FuseDirectory() as mount,
        # Not shorter: on a busy machine two late writes disable the tier, and what was to be written is dropped.
        DaemonProcess(ram="512MiB", config=config(mount.path, deadline="4s")) as daemon,
        RawEngine(daemon.socket, spec=SPEC) as engine,
    ):
        wait_until(lambda: engine.status().tiers[1].state == "ready", "the disk opens", 60)
        engine.store(KEYS)
        wait_stored(engine, CHUNKS)
        mount.hang()
        try:
            limit = Deadline(30)
            found = verified(daemon, code=1)
            assert not limit.is_over()
        finally:
            mount.go_on()
        assert sound(found["ram"]) == CHUNKS
        assert found["nvme"]["reason"] and not found["nvme"]["damaged"]
        wait_until(lambda: status_of(daemon.socket).tiers[1].breaker == "closed", "it is in use", 60)
