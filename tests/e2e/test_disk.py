"""The disk tier under a real engine: what RAM has lost comes back from segments, verified, or is computed again."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import HEADER_BYTES, MAGIC, ObjectHeader
from kvdepot.core.report import DaemonStatus

from demo.engine import ROOT, Engine
from demo.scenarios import await_lookups
from demo.toys import HYBRID
from tests.e2e.fleet import Fleet
from tests.e2e.hybrid import CHUNK, GROUPS, boundary, check_loads, digests_by_place, store, wrong
from tests.rigs.child_processes import children
from tests.rigs.stopping import stop

pytestmark = pytest.mark.long
LOAD_TIMEOUT_SECONDS = 4.0
WRITTEN_SECONDS = 60.0
TIER = """
[[tier]]
name = "nvme"
kind = "disk"
path = "{path}"
capacity = "1GiB"
write = "commit"
codec = "{codec}"
deadline = "10s"
"""


@pytest.fixture(scope="module", params=["none", "bitshuffle-lz4"])
def disk_fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("disk")
    tier = TIER.format(path=directory / "tier", codec=request.param)
    with Fleet(directory, ROOT / "build" / "toys", tier) as fleet:
        fleet.define("hybrid", HYBRID, {}, load_timeout_seconds=LOAD_TIMEOUT_SECONDS)
        yield fleet


@pytest.fixture
def fleet(disk_fleet: Fleet) -> Fleet:
    return disk_fleet


@pytest.fixture
def engine(fleet: Fleet) -> Engine:
    return fleet.engine("hybrid")


def on_disk(fleet: Fleet) -> DaemonStatus:
    """Everything that RAM has is on disk too."""
    fleet.daemon.settle()
    return fleet.daemon.wait(
        lambda status: status.tiers[1].objects >= status.tiers[0].objects and not status.tiers[1].queued_objects,
        WRITTEN_SECONDS,
        "done writing to disk",
    )


def lose_ram(fleet: Fleet, engine: Engine, *, kill: bool) -> None:
    """The daemon comes back with an empty arena, and the engine with an empty cache."""
    fleet.daemon.kill() if kill else fleet.daemon.stop()
    fleet.daemon.arena.unlink()
    fleet.daemon.start()
    fleet.daemon.wait(lambda status: status.tiers[1].state == "ready", WRITTEN_SECONDS, "back on its disk")
    fleet.wait_attached()
    assert fleet.daemon.status().tiers[0].objects == 0
    await_lookups(engine, fleet.daemon)  # it is attached before its namespace is registered
    fleet.forget(engine)


@pytest.mark.requirement("P4")
@pytest.mark.parametrize("kill", [False, True], ids=["orderly", "sigkill"])
def test_through_disk_tokens_and_bytes_are_equal(fleet: Fleet, engine: Engine, kill: bool) -> None:
    known = fleet.audited("hybrid")
    prompts = [fleet.prompt(tokens) for tokens in (3 * CHUNK + 1, 2 * CHUNK + 100, 8 * CHUNK + 20)]
    reference = store(fleet, engine, prompts)
    on_disk(fleet)
    lose_ram(fleet, engine, kill=kill)
    check_loads(fleet, engine, prompts, reference)
    counters = fleet.daemon.status().counters
    assert counters["promoted_objects"] == sum(boundary(len(ids)) // CHUNK + 1 for ids in prompts)
    fleet.forget(engine)
    digests = digests_by_place(fleet.audit("hybrid", known))
    assert {place[3] for place, found in digests.items() if found["loaded"]} == GROUPS
    assert wrong(digests) == {}


def stored_on(directory: Path, kind: Kind) -> list[tuple[Path, int, ObjectHeader]]:
    """Where objects of a kind lie: segment, offset, header; the last written one last."""
    found = []
    for segment in sorted((directory / "tier" / "segments").iterdir()):
        with segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(MAGIC)
            while at >= 0:
                if at % HEADER_BYTES == 0:
                    header = ObjectHeader.unpack(data[at : at + HEADER_BYTES])
                    if header.name.kind == kind:
                        found.append((segment, at, header))
                at = data.find(MAGIC, at + HEADER_BYTES)
    return sorted(found, key=lambda one: one[2].sequence)


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("kind", [Kind.ATTENTION, Kind.STATE])
def test_a_flipped_bit_on_disk_is_a_miss_and_is_quarantined(fleet: Fleet, engine: Engine, kind: Kind) -> None:
    ids = fleet.prompt(3 * CHUNK + 40)
    cold = engine.ask(ids)
    fleet.forget(engine)
    on_disk(fleet)
    segment, at, header = stored_on(fleet.directory, kind)[-1]
    lose_ram(fleet, engine, kill=True)
    with segment.open("r+b") as file:
        file.seek(at + HEADER_BYTES + header.stored_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    damaged = fleet.ask(engine, ids)
    assert damaged.tokens == cold.tokens
    assert (damaged.external_tokens, damaged.served.bytes) == (0, 0)
    status = fleet.daemon.status()
    reasons = {name: count for name, count in status.counters.items() if name.startswith("tier_damaged_objects.")}
    assert sum(reasons.values()) == 1, reasons
    assert status.tiers[1].quarantined_bytes > 0


@pytest.mark.requirement("P5")
def test_a_stalled_disk_ends_a_load_by_its_deadline(fleet: Fleet, engine: Engine) -> None:
    ids = fleet.prompt(4 * CHUNK + 40)
    cold = engine.ask(ids)
    fleet.forget(engine)
    on_disk(fleet)
    lose_ram(fleet, engine, kill=False)
    workers = io_workers(fleet.daemon.pid)
    assert workers
    for pid in workers:
        stop(pid)
    try:
        began = time.monotonic()
        stalled = fleet.ask(engine, ids)
        seconds = time.monotonic() - began
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    assert stalled.tokens == cold.tokens
    assert LOAD_TIMEOUT_SECONDS - 0.5 < seconds < LOAD_TIMEOUT_SECONDS + 1.0 + cold.completion.seconds
    fleet.daemon.settle()


def io_workers(daemon_pid: int) -> list[int]:
    return children(daemon_pid, b"kvdepot.server.io.worker")
