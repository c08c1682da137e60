"""Pins: the real command against a real daemon whose RAM is too small for all that engines store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

import pytest
from kvdepot.core.errors import InvalidArgument, NotFound

from tests.rigs.ctl_process import answered, record, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, dense_spec, keys_of, status_of

SPEC = dense_spec("a-model", 256 << 10)
CONFIG = '[policy]\neviction = "lru"\npin_share = 0.125\n'
CHUNKS = 4
NUMBERS = count()


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(ram="320MiB", config=CONFIG) as running:
        yield running


def press(engine: RawEngine) -> None:
    """240 MiB, through an arena of less."""
    for _ in range(16):
        engine.store(keys_of(f"x{next(NUMBERS)}", 60))


def held_chunks(engine: RawEngine, keys: list[bytes]) -> int:
    return engine.locate(keys) // CHUNK_TOKENS


@pytest.mark.requirement("I4")
def test_a_pinned_path_stays_while_all_else_goes_and_ends_when_it_is_unpinned(daemon: DaemonProcess) -> None:
    kept, other = keys_of("system-prompt", CHUNKS), keys_of("other", CHUNKS)
    with RawEngine(daemon.socket, "engine-0", spec=SPEC) as engine:
        engine.store(kept)
        engine.store(other)
        wait_until(lambda: engine.counter("checksummed_objects") == 2 * CHUNKS, "the sums: till then none may go", 60)
        name, tip = engine.namespace.hex(), kept[-1].hex()
        found = record(daemon, "pin", f"{name[:8]}/{tip}", "--ttl", "1h")
        assert (found["namespace_id"], found["key"], found["chunks"], found["objects"]) == (name, tip, CHUNKS, CHUNKS)
        assert found["size_bytes"] >= CHUNKS * (256 << 10) and found["not_persisted"] == ""
        press(engine)
        assert (held_chunks(engine, kept), held_chunks(engine, other)) == (CHUNKS, 0)
        shown = answered(daemon, "status", "--wide")
        assert tip[:12] in shown
        assert "59 min" in shown or "1 h" in shown
        assert json.loads(answered(daemon, "describe", name, "--json"))["pins"][0]["key"] == tip
        (in_ram,) = json.loads(answered(daemon, "describe", f"{name}/{tip}", "--json"))["objects"]
        assert in_ram["pinned"]
        assert status_of(daemon.socket).tiers[0].pinned_objects == CHUNKS
        assert f"unpinned the path to chunk {tip[:12]}" in answered(daemon, "unpin", f"{name[:4]}/{tip[:4]}")
        press(engine)
        assert held_chunks(engine, kept) == 0


@pytest.mark.requirement("I4")
def test_a_pinned_namespace_takes_its_share_and_no_more(daemon: DaemonProcess) -> None:
    with RawEngine(daemon.socket, "engine-0", spec=SPEC) as engine:
        long = keys_of("long", 120)
        engine.store(long)
        shown = text(daemon, "pin", engine.namespace.hex()[:6])
        assert "pinned namespace" in shown and "of 120 chunks" in shown
        tier = status_of(daemon.socket).tiers[0]
        assert 40 <= tier.pinned_objects < 120 and tier.pinned_bytes <= tier.capacity_bytes / 8
        press(engine)
        assert tier.pinned_objects <= held_chunks(engine, long)
        assert status_of(daemon.socket).tiers[0].pinned_bytes <= tier.capacity_bytes / 8


@pytest.mark.requirement("I8")
def test_a_pin_outlives_the_daemon_and_ends_by_itself(daemon: DaemonProcess) -> None:
    kept = keys_of("system-prompt", CHUNKS)
    with RawEngine(daemon.socket, "engine-0", spec=SPEC) as engine:
        engine.store(kept)
        wait_until(lambda: engine.counter("checksummed_objects") == CHUNKS, "the sums", 60)
        name = engine.namespace.hex()
    answered(daemon, "pin", name, "--ttl", "1h")
    daemon.kill()
    daemon.start()
    assert "restored pin: " in daemon.log and ", for 3" in daemon.log and name in daemon.log
    with RawEngine(daemon.socket, "engine-0", spec=SPEC) as engine:
        wait_until(lambda: held_chunks(engine, kept) == CHUNKS, "verification", 60)
        wait_until(lambda: status_of(daemon.socket).tiers[0].pinned_objects == CHUNKS, "they are pinned again", 60)
        press(engine)
        assert held_chunks(engine, kept) == CHUNKS
        answered(daemon, "pin", name, "--ttl", "10ms")
        wait_until(lambda: not status_of(daemon.socket).pins, "its end", 60)
        press(engine)
        assert held_chunks(engine, kept) == 0


def test_what_is_not_there_or_has_no_end_is_refused(daemon: DaemonProcess) -> None:
    with RawEngine(daemon.socket, "engine-0", spec=SPEC) as engine:
        engine.store(keys_of("prompt", 2))
        name = engine.namespace.hex()
        for wrong, arguments in (
            (NotFound, ("unpin", name)),
            (NotFound, ("pin", f"{name}/ffffffff")),
            (InvalidArgument, ("pin", name, "--ttl", "0s")),
            (InvalidArgument, ("pin", name, "--ttl", "400d")),
            (InvalidArgument, ("pin", name, "--ttl", "soon")),
        ):
            with pytest.raises(wrong):
                answered(daemon, *arguments)
        assert not status_of(daemon.socket).pins
