"""Real daemons that load from each other over NIXL: sources that lie, stop, die, or do not lend (ADR 82)."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.peer_fleet import (
    BORROWING,
    LENT,
    Fleet,
    chosen_by,
    counter,
    filled,
    located,
    payloads,
    port_of,
    served_again,
    stored,
    tier_of,
)
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, dense_spec, keys_of, payload_of, status_of
from tests.rigs.stopping import stop

LENDER = b"kvdepot.server.io.nixl_lender"
WORKER = b"kvdepot.server.io.worker"
LARGE = 4 << 20


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two hosts. On one host UCX would copy by itself, whatever the source does."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def lending(fleet: Fleet) -> DaemonProcess:
    """Start a source, and wait until it lends over NIXL."""
    source = fleet.source(lends=True)
    source.wait_for_log(LENT)
    return source


def none_lent(*daemons: DaemonProcess) -> None:
    for daemon in daemons:
        wait_until(lambda: status_of(daemon.socket).tiers[0].lent_bytes == 0, "nothing is lent")  # noqa: B023


@pytest.mark.requirement("T3")
def test_what_one_daemon_stored_another_one_reads_over_nixl(fleet: Fleet) -> None:
    keys = keys_of("peer", 12)
    source = lending(fleet)
    stored(source, keys)
    reader = fleet.reader(port_of(source), of_tier=BORROWING)
    with RawEngine(reader.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) == payloads(keys)
        assert engine.tier_of(keys) == "ram"
    assert counter(reader, "peer_loaded_bytes.peer-0/nixl") == 12 * OBJECT_BYTES
    wait_until(lambda: counter(source, "peer_pulls.whole") == 12, "all leases have ended")
    assert counter(source, "peer_sent_bytes.nixl") == 12 * OBJECT_BYTES
    assert counter(source, "peer_sent_bytes.stream") == counter(reader, "io_workers.peer-0/crashed") == 0
    none_lent(source, reader)
    assert "objects come over nixl" in reader.log


@pytest.mark.requirement("N2")
def test_bytes_that_changed_at_the_source_are_refused_and_count_against_it(fleet: Fleet) -> None:
    keys, good = keys_of("flipped", 4), keys_of("good", 4)
    source = lending(fleet)
    with RawEngine(source.socket) as owner:
        lease_id, _, extents = owner.reserve(keys)
        owner.write(keys, extents)
        owner.commit(lease_id, len(keys))
        owner.store(good)
        wait_until(lambda: status_of(source.socket).tiers[0].pending_checksums == 0, "all have checksums")
        owner.write(keys, extents, lambda key: payload_of(key)[:-1] + b"!")  # as memory that was damaged
        reader = fleet.reader(port_of(source), of_tier=BORROWING)
        with RawEngine(reader.socket) as engine:
            located(engine, keys)
            assert engine.load(keys) is None
            assert engine.counter("tier_damaged_objects.peer-0/corrupt") >= 1
            assert served_again(engine, good) == payloads(good)
    assert counter(reader, "peer_loaded_bytes.peer-0/nixl") == 4 * OBJECT_BYTES
    none_lent(source, reader)


@pytest.mark.requirement("T3")
@pytest.mark.parametrize(
    ("why", "of_reader"),
    [
        ("the peer lends nothing over NIXL", "tcp"),
        ("NIXL does not start", "no_such_transport"),
    ],
)
def test_without_nixl_on_one_side_objects_come_over_the_stream_and_the_log_says_why(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, why: str, of_reader: str
) -> None:
    keys = keys_of("stream", 4)
    source = fleet.source() if why.startswith("the peer") else lending(fleet)
    stored(source, keys)
    monkeypatch.setenv("UCX_TLS", of_reader)
    reader = fleet.reader(port_of(source), of_tier=BORROWING)
    with RawEngine(reader.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) == payloads(keys)
    assert counter(reader, "peer_loaded_bytes.peer-0/stream") == 4 * OBJECT_BYTES
    assert f"objects come over stream: {why}" in reader.log


@pytest.mark.requirement("T3", "B3")
@pytest.mark.parametrize("named", [False, True])
def test_a_daemon_that_joins_for_one_lookup_is_read_over_nixl_too(fleet: Fleet, tmp_path: Path, named: bool) -> None:
    sources = {port_of(source): source for source in (lending(fleet), lending(fleet))}
    for port, source in sources.items():
        stored(source, keys_of(f"of {port}", 3))
    file = tmp_path / "peers"
    file.write_text("".join(f"127.0.0.1:{port}\n" for port in sources))
    reader = fleet.reader(
        url=f"file://{file}", ram="1GiB", of_tier=f"{BORROWING}io_workers = 1\npeers_max = 1\n", deadline="20s",
        under=("tests.fakes.peer_waits",),
    )  # fmt: skip
    wait_until(lambda: counter(reader, "peer_summaries.peer-0/new") >= 2, "both have given a summary")
    (port,) = sources.keys() - chosen_by(reader).keys()
    arena_id = status_of(sources[port].socket).arena_id
    keys = keys_of("later" if named else f"of {port}", 3)
    with RawEngine(reader.socket) as engine:
        if named:  # and no summary has it
            stored(sources[port], keys)
            assert engine.located_at(keys, arena_id).boundary_tokens == 3 * CHUNK_TOKENS
        else:
            located(engine, keys)
        assert chosen_by(reader)[port] in (("by name",) if named else ("by lookup", "by summary"))
        assert engine.load(keys) == payloads(keys)
    assert counter(reader, "peer_loaded_bytes.peer-0/nixl") == 3 * OBJECT_BYTES
    assert counter(reader, "peer_loaded_bytes.peer-0/stream") == 0
    none_lent(*sources.values(), reader)


# Sources that stop or end


def _large(owner: RawEngine, source: DaemonProcess, keys: list[bytes]) -> list[bytes]:
    lease_id, _, extents = owner.reserve(keys)
    owner.write(keys, extents, lambda key: payload_of(key, LARGE))
    owner.commit(lease_id, len(keys))
    wait_until(lambda: status_of(source.socket).tiers[0].pending_checksums == 0, "all have checksums")
    return [payload_of(key, LARGE) for key in keys]


@pytest.mark.requirement("N1", "N3")
def test_a_stopped_lender_costs_its_request_alone_and_nothing_arrives_late(fleet: Fleet) -> None:
    keys, own, spec = keys_of("stops", 2), keys_of("own", 3), dense_spec("large", LARGE)
    source = lending(fleet)
    (lender,) = children(source.pid, LENDER)
    with RawEngine(source.socket, spec=spec) as owner:
        expected = _large(owner, source, keys)
        reader = fleet.reader(port_of(source), of_tier=BORROWING, deadline=f"{patient(3.0):.0f}s")
        workers = set(children(reader.pid, WORKER))
        with RawEngine(reader.socket, spec=spec) as engine, RawEngine(reader.socket, "other") as other:
            other.store(own)
            located(engine, keys)
            stop(lender)
            try:
                assert engine.load(keys) is None
                assert counter(reader, "io_workers.peer-0/overdue") >= 1
                none_lent(reader)
                assert workers - set(children(reader.pid, WORKER)), "a worker was killed, and is reaped"
                prompts = filled(other, reader, "fill")
            finally:
                os.kill(lender, signal.SIGCONT)
            assert other.load(own) == payloads(own)
            wait_until(lambda: tier_of(reader).breaker == "closed", "the peer is back")
            assert served_again(engine, keys) == expected
            for prompt in prompts:
                loaded = other.load(prompt)
                assert loaded is None or loaded == payloads(prompt), "bytes of an object changed after it was stored"
        none_lent(source, reader)


@pytest.mark.requirement("N3", "T3")
def test_while_the_lender_hangs_objects_come_over_the_stream_and_the_log_says_why(fleet: Fleet) -> None:
    """Its daemon does not hang. So the peer is of use, whatever keeps NIXL from answering: a firewall does the same."""
    keys, spec = keys_of("hangs", 4), dense_spec("large", LARGE)
    source = lending(fleet)
    (lender,) = children(source.pid, LENDER)
    with RawEngine(source.socket, spec=spec) as owner:
        expected = _large(owner, source, keys)
        reader = fleet.reader(port_of(source), of_tier=BORROWING, deadline=f"{patient(3.0):.0f}s")
        workers = children(reader.pid, WORKER)
        with RawEngine(reader.socket, spec=spec) as engine:
            located(engine, keys)
            stop(lender)
            try:
                assert engine.load(keys) is None
                wait_until(lambda: tier_of(reader).breaker == "closed", "the peer can be asked")
                assert served_again(engine, keys) == expected
                assert counter(reader, "io_workers.peer-0/overdue") <= len(workers), "no further read has hung"
            finally:
                os.kill(lender, signal.SIGCONT)
    assert counter(reader, "peer_loaded_bytes.peer-0/stream") == 4 * LARGE
    assert counter(reader, "peer_loaded_bytes.peer-0/nixl") == 0
    assert "objects come over stream: the last read over NIXL had no answer in time" in reader.log
    none_lent(source, reader)


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("ended", ["lender", "daemon"])
def test_a_source_that_was_killed_serves_again(fleet: Fleet, ended: str) -> None:
    first, second, port = keys_of("first", 4), keys_of("second", 4), fleet.port()
    source = fleet.source(port=port, lends=True)
    source.wait_for_log(LENT)
    stored(source, first)
    stored(source, second)
    reader = fleet.reader(port, of_tier=BORROWING, deadline=f"{patient(5.0):.0f}s")
    with RawEngine(reader.socket) as engine:
        located(engine, first)
        assert engine.load(first) == payloads(first)
        (lender,) = children(source.pid, LENDER)
        before = len(source.log)
        if ended == "lender":
            os.kill(lender, signal.SIGKILL)
        else:
            source.kill()
            source.start()
        source.wait_for_log(LENT, before)
        assert served_again(engine, second) == payloads(second)
        assert counter(reader, "peer_loaded_bytes.peer-0/nixl") >= 4 * OBJECT_BYTES
    none_lent(source, reader)


@pytest.mark.requirement("N1", "N3")
def test_a_lender_that_dies_within_a_read_ends_the_worker_and_the_object_is_loaded_again(fleet: Fleet) -> None:
    first, keys, spec = keys_of("first", 4), keys_of("dies", 2), dense_spec("large", LARGE)
    source = lending(fleet)
    with RawEngine(source.socket, spec=spec) as owner:
        expected = _large(owner, source, keys)
        before = _large(owner, source, first)
        reader = fleet.reader(port_of(source), of_tier=BORROWING, deadline=f"{patient(10.0):.0f}s")
        with RawEngine(reader.socket, spec=spec) as engine, ThreadPoolExecutor(1) as pool:
            assert served_again(engine, first) == before  # by both workers, which are connected now
            none_lent(source)
            located(engine, keys)
            (lender,) = children(source.pid, LENDER)
            stop(lender)  # the reads begin, and cannot be done before it dies
            try:
                load = pool.submit(engine.load, keys)
                wait_until(lambda: status_of(source.socket).tiers[0].lent_bytes == 2 * LARGE, "reads are under way")
            finally:
                os.kill(lender, signal.SIGKILL)
            assert load.result() in (None, expected)
            wait_until(lambda: tier_of(reader).breaker == "closed", "the peer is back")
            assert served_again(engine, keys) == expected
        assert counter(reader, "io_workers.peer-0/crashed") >= 1, "its end alone proves that nothing is written"
    none_lent(reader)
