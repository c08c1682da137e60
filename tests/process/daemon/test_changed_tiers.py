"""A change of the tiers below RAM keeps RAM's objects over a restart (T6)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from kvdepot.core.calls import AcquireOutcome
from kvdepot.core.units import size_text
from kvdepot.server.config.config import load
from kvdepot.server.daemon.start_checks import arena_outlook
from kvdepot.server.platform.processes import read_boot_id

from tests.rigs.ctl_process import answered
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.disk_node import config, wait_ready, wait_written
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, EXTENT, RawEngine, dense_spec, keys_of, payload_of, status_of

RAM = "700MiB"
MIB = 1 << 20
LARGE = 4 * MIB
"""Of an object, where RAM is full."""
LONG_LEASES = '[policy]\nlease_deadline = "1h"\n[sessions]\ngrace = "1h"\n'
"""All of RAM is verified before they end, on a busy machine too."""
Change = Callable[[Path], tuple[str, str]]
"""Returns the configuration before and after, for a directory."""


def disk(directory: Path, name: str = "a", **keys: str) -> str:
    (directory / name).mkdir(exist_ok=True)
    return config(directory / name, **keys)


def shared(directory: Path) -> str:
    (directory / "s").mkdir(exist_ok=True)
    return f'[[tier]]\nname = "nfs"\nkind = "shared"\npath = "{directory / "s"}"\ncapacity = "128MiB"\n'


CHANGES: dict[str, Change] = {
    "add": lambda path: ("", disk(path)),
    "add shared": lambda path: ("", shared(path)),
    "remove": lambda path: (disk(path), ""),
    "larger": lambda path: (disk(path), disk(path, capacity='"4GiB"')),
    "smaller": lambda path: (disk(path, capacity='"4GiB"'), disk(path)),
    "path": lambda path: (disk(path), disk(path, "b", io_workers="5")),
    "name": lambda path: (disk(path), disk(path).replace('"nvme"', '"fast"')),
    "codec": lambda path: (disk(path), disk(path, codec='"lz4"')),
}


IN_SHORT = {("add", True), ("remove", False), ("larger", False), ("path", True)}
"""Changes, and whether the daemon is killed, that `make test` tries too."""


def cases(*changes: str) -> list[ParameterSet]:
    """Return names of changes, each with a stop and with a kill."""
    return [
        pytest.param(
            change, kill, id=f"{change}-{'kill' if kill else 'stop'}",
            marks=() if (change, kill) in IN_SHORT else pytest.mark.long(seconds=6),
        )
        for change in changes
        for kill in (False, True)
    ]  # fmt: skip


@pytest.fixture
def node() -> Iterator[DaemonProcess]:
    one = DaemonProcess(ram=RAM, config="", touched=True)
    yield one
    one.close()


def check(node: DaemonProcess) -> tuple[str, str]:
    """Return what `check-config` knows: why RAM begins empty, and what else changes."""
    file = node.directory / "next.toml"
    file.write_text(node.config or "")
    outlook = arena_outlook(
        load(
            file,
            {
                "daemon": {"listen": [f"unix://{node.socket}"]},
                "ram": {"path": str(node.arena_directory), "capacity": node.ram},
            },
        ),
        read_boot_id(),
    )
    return outlook.loss, outlook.note


def wait_summed(engine: RawEngine) -> None:
    wait_until(lambda: not engine.status().tiers[0].pending_checksums, "sums", seconds=60)


def restart(node: DaemonProcess, text: str, *, kill: bool) -> str:
    """Return what the new run has logged."""
    node.kill() if kill else node.stop()
    before = len(node.log)
    node.config = text
    node.start()
    wait_until(lambda: not status_of(node.socket).tiers[0].unverified_objects, "verification")
    return node.log[before:]


@pytest.mark.requirement("T6", "I1")
@pytest.mark.parametrize(("change", "kill"), cases(*CHANGES))
def test_a_changed_tier_keeps_what_ram_has(node: DaemonProcess, directory: Path, change: str, kill: bool) -> None:
    before, after = CHANGES[change](directory)
    keys = keys_of("kept", 24)
    node.config = before
    node.start()
    with RawEngine(node.socket) as engine:
        engine.store(keys)
        wait_summed(engine)
    node.config = after
    assert check(node)[0] == ""
    log = restart(node, after, kill=kill)
    assert " adopted" in log and "recreated" not in log
    with RawEngine(node.socket) as engine:
        if '"disk"' in after:
            wait_ready(engine)
        assert engine.locate(keys) == 24 * CHUNK_TOKENS and engine.tier_of(keys) == "ram"
        assert engine.load(keys) == [payload_of(key) for key in keys]
        names = {tier.name for tier in engine.status().tiers} - {"ram"}
        assert names == ({"nvme", "nfs", "fast"} & set(after.replace('"', " ").split()))
        engine.store(keys_of("stored after", 24))
        assert engine.load(keys_of("stored after", 24)) == [payload_of(key) for key in keys_of("stored after", 24)]


@pytest.mark.requirement("T6", "I8")
@pytest.mark.parametrize("kill", [False, True])
def test_pins_and_epochs_are_those_of_before_a_changed_tier(node: DaemonProcess, directory: Path, kill: bool) -> None:
    """Added, then removed again: what is pinned stays so, and no object of an ended epoch comes back."""
    pinned, ended = keys_of("pinned", 8), dense_spec("another")
    node.config = ""
    node.start()
    with RawEngine(node.socket) as engine, RawEngine(node.socket, spec=ended) as other:
        engine.store(pinned)
        other.store(pinned)
        wait_summed(engine)
        answered(node, "pin", f"{engine.namespace.hex()}/{pinned[-1].hex()}", "--ttl", "1h")
        answered(node, "epoch", "bump", other.namespace.hex(), "--yes")
    for after in (disk(directory), ""):
        assert " adopted" in restart(node, after, kill=kill)
        with RawEngine(node.socket) as engine, RawEngine(node.socket, spec=replace(ended, bumps=1)) as other:
            wait_until(lambda at=engine: at.status().tiers[0].pinned_objects == len(pinned), "all are pinned again")
            assert engine.load(pinned) == [payload_of(key) for key in pinned]
            assert other.locate(pinned) == 0 and other.load(pinned) is None
            wait_until(
                lambda at=engine: at.status().tiers[0].objects == len(pinned), "those of the ended epoch are gone"
            )


@pytest.mark.requirement("T6", "I1")
@pytest.mark.parametrize(("change", "kill"), cases("remove", "path"))
def test_what_only_the_former_tier_had_is_neither_offered_nor_counted(
    node: DaemonProcess, directory: Path, change: str, kill: bool
) -> None:
    before, after = CHANGES[change](directory)
    on_disk, in_ram = keys_of("on disk", 8), keys_of("in RAM", 8)
    node.config = before
    node.start()
    with RawEngine(node.socket) as engine:
        wait_ready(engine)
        engine.store(on_disk)
        wait_written(engine, 8)
    node.stop()
    node.arena.unlink()  # as a reboot
    node.start()
    with RawEngine(node.socket) as engine:
        wait_ready(engine)
        assert engine.locate(on_disk) == 8 * CHUNK_TOKENS
        engine.store(in_ram)
        wait_summed(engine)
    restart(node, after, kill=kill)
    with RawEngine(node.socket) as engine:
        if '"disk"' in after:
            wait_ready(engine)
        assert engine.locate(on_disk) == 0 and engine.load(on_disk) is None
        assert engine.load(in_ram) == [payload_of(key) for key in in_ram]
        assert engine.status().tiers[0].objects == 8
        if '"disk"' in after:
            wait_written(engine, 8)  # what RAM kept, and nothing of the former tier
        else:
            assert len(engine.status().tiers) == 1
    restart(node, before, kill=kill)  # the tier comes back with what it had
    with RawEngine(node.socket) as engine:
        wait_ready(engine)
        assert engine.load(on_disk) == [payload_of(key) for key in on_disk]
        assert engine.load(in_ram) == [payload_of(key) for key in in_ram]


def wait_populated(node: DaemonProcess, mib: str) -> None:
    wait_until(lambda: status_of(node.socket).tiers[0].ready_bytes // MIB == int(mib), "pages")


def fill(engine: RawEngine) -> list[list[bytes]]:
    """Fill RAM with prompts of one chunk, and return them, the oldest first."""
    room = engine.status().tiers[0].ready_bytes // LARGE
    prompts = [keys_of(f"full {number}", 1) for number in range(room - 2)]
    for keys in prompts:
        lease, _, extents = engine.reserve(keys)
        engine.write(keys, extents, payload=lambda key: payload_of(key, LARGE))
        engine.commit(lease, 1)
    wait_summed(engine)
    return prompts


@pytest.mark.requirement("T6", "I1")
@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.long(seconds=15)), True], ids=["stop", "kill"])
def test_a_tier_that_is_added_to_a_full_ram_takes_its_memory_from_the_end(
    node: DaemonProcess, directory: Path, kill: bool
) -> None:
    spec = dense_spec(object_bytes=LARGE)
    node.config = "[ram]\nhigh_watermark = 1.0\nlow_watermark = 0.99\n"
    node.start()
    with RawEngine(node.socket, spec=spec) as engine:
        prompts = fill(engine)
        whole = engine.status().tiers[0]
        there = [keys for keys in prompts if engine.locate(keys)]
        engine.arena.close()
    assert len(there) > 100
    added = node.config + disk(directory, io_workers="4")
    with (node.directory / "kvdepot.toml").open("a") as file:
        file.write(disk(directory, io_workers="4"))
    (announced,) = re.findall(
        r"RAM will be (.*B) smaller after a restart with this file", answered(node, "config", "diff")
    )
    node.config = added
    assert check(node)[0] == "" and "RAM shrinks" in check(node)[1]
    log = restart(node, added, kill=kill)
    assert "are not used, because tiers below RAM need them" in log
    with RawEngine(node.socket, spec=spec) as engine:
        less = engine.status().tiers[0]
        assert less.used_bytes <= less.ready_bytes < whole.ready_bytes
        assert announced == size_text(whole.ready_bytes - less.ready_bytes)
        assert 512 * node.data.stat().st_blocks <= less.ready_bytes
        kept = [keys for keys in there if engine.locate(keys)]
        lost = engine.counter("adopted_objects.beyond_capacity")
        assert lost > 0 and len(kept) == len(there) - lost
        for keys in kept:
            assert engine.load(keys) == [payload_of(keys[0], LARGE)]
        engine.arena.close()
    restart(node, "[ram]\nhigh_watermark = 1.0\nlow_watermark = 0.99\n", kill=kill)
    with RawEngine(node.socket, spec=spec) as engine:
        assert engine.status().tiers[0].ready_bytes == whole.ready_bytes
        assert [keys for keys in there if engine.locate(keys)] == kept
        for keys in kept[::8]:
            assert engine.load(keys) == [payload_of(keys[0], LARGE)]


@pytest.mark.requirement("T6", "I1", "I1a")
def test_an_engine_that_reads_beyond_the_new_capacity_sees_its_bytes_and_no_valid_generation(
    node: DaemonProcess, directory: Path
) -> None:
    spec = dense_spec(object_bytes=LARGE)
    node.config = LONG_LEASES
    node.start()
    with RawEngine(node.socket, spec=spec) as engine:
        prompts = fill(engine)
        leases: dict[bytes, list[tuple[int, ...]]] = {}
        for keys in reversed(prompts):  # the last lie at the end
            _, outcome, extents = engine.acquire(keys)
            if outcome is AcquireOutcome.GRANTED:
                leases[keys[0]] = list(EXTENT.iter_unpack(extents))
        log = restart(node, LONG_LEASES + disk(directory, io_workers="4"), kill=False)
        assert "arena keeps memory beyond its capacity until the next start" in log
        capacity = status_of(node.socket).tiers[0].ready_bytes
        beyond = 0
        for key, granted in leases.items():
            for _, row, offset, length, generation in granted:
                outside = offset + length > capacity
                beyond += outside
                assert (engine.generations[row] == generation) is not outside
                assert engine.arena[offset : offset + length] == payload_of(key, LARGE)[:length]
        assert beyond > 0


@pytest.mark.requirement("T6", "I1")
def test_memory_that_was_freed_under_an_engine_is_used_again_only_after_its_end(
    node: DaemonProcess, directory: Path
) -> None:
    """The engine's driver may have pinned pages that are not the file's any more."""
    added = disk(directory, io_workers="4")
    node.start()
    with RawEngine(node.socket) as engine:
        node.config = added
        sizes = re.search("RAM shrinks from ([0-9]+) to ([0-9]+) MiB", check(node)[1])
        assert sizes is not None
        whole, less = sizes.groups()
        restart(node, added, kill=True)
        wait_populated(node, less)
        told = f"it has {less} of {whole} MiB, because memory of it was freed"
        assert told in restart(node, "", kill=True) and told in check(node)[1]
        wait_populated(node, less)
        engine.arena.close()
    restart(node, "", kill=False)
    wait_populated(node, whole)
    assert check(node) == ("", "")
