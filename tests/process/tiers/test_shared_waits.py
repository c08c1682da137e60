"""A real daemon over a shared directory whose mount hangs: lookups that wait, reading ahead, offers (T3, T4, P5)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
import pytest
from kvdepot.core.calls import LocateCall, LocateReply
from kvdepot.core.report import DaemonStatus, TierStatus
from kvdepot.proto.methods import decode_reply

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.fakes.shared_directory import publish
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_process import EngineProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, dense_spec, keys_of, payload_of, status_of

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
WAIT_SECONDS = 60.0
BUDGET_SECONDS = 600.0
LONG_CHUNKS = 1_100
LONG_OBJECT_BYTES = 4_096
CONFIG = """
[[tier]]
name = "pool"
kind = "shared"
path = "{path}"
capacity = "256MiB"
write = "evict"
io_workers = 1
deadline = "60s"
on_root_filesystem = true
"""


@dataclass
class Depot:
    """A daemon, and what another node put into the directory that it has by a mount."""

    daemon: DaemonProcess
    mount: FuseDirectory

    def engine(self, engine_id: str = "engine", object_bytes: int = OBJECT_BYTES) -> RawEngine:
        return RawEngine(self.daemon.socket, engine_id, spec=dense_spec("shared", object_bytes))

    @property
    def status(self) -> DaemonStatus:
        return status_of(self.daemon.socket)

    @property
    def pool(self) -> TierStatus:
        return self.status.tiers[1]

    def counters(self, prefix: str) -> dict[str, float]:
        """By label."""
        found = self.status.counters.items()
        return {name.rpartition("/")[2].rpartition(".")[2]: n for name, n in found if name.startswith(prefix) and n}

    def publish(self, namespace: bytes, keys: Sequence[bytes], object_bytes: int = OBJECT_BYTES) -> None:
        publish(self.mount.backing / "shared", namespace, keys, object_bytes)

    def nothing_is_left(self, *engines: str) -> bool:
        """No other session, no lease, loan, credit, or hold for a request."""
        status = self.status
        sessions = {one.engine_id for one in status.sessions}
        used = any(one.leases or one.lent_objects or one.credit_used_bytes for one in status.sessions)
        ram = status.tiers[0]
        held = ram.lent_bytes or ram.prefetched_objects or ram.prefetching_requests
        return sessions <= set(engines) and not used and not held


@pytest.fixture(scope="module")
def started() -> Iterator[Depot]:
    with FuseDirectory() as mount:
        (mount.backing / "shared").mkdir()
        with DaemonProcess(ram="456MiB", config=CONFIG.format(path=mount.path / "shared")) as daemon:
            depot = Depot(daemon, mount)
            wait_until(lambda: depot.pool.state == "ready", "the tier is ready", WAIT_SECONDS)
            yield depot


@pytest.fixture
def depot(started: Depot) -> Iterator[Depot]:
    yield started
    started.mount.go_on()
    wait_until(lambda: (started.pool.state, started.pool.breaker) == ("ready", "closed"), "it is in use", WAIT_SECONDS)
    wait_until(lambda: started.nothing_is_left("engine", "other"), "nothing is left", WAIT_SECONDS)


def _located(engine: RawEngine, keys: Sequence[bytes], chunks: int, request: str = "") -> None:
    """A look-up that takes longer than a Locate waits is for the next one."""
    wait_until(lambda: engine.locate(keys, request) == chunks * CHUNK_TOKENS, f"{chunks} are found", WAIT_SECONDS)


def _ask(engine: RawEngine, keys: Sequence[bytes], request: str = "", wait_seconds: float = 0.0) -> LocateReply:
    call = engine.locate_call(keys, request, budget_seconds=BUDGET_SECONDS, wait_seconds=wait_seconds)
    reply: LocateReply = decode_reply(LocateCall, engine.stub.Locate(call, timeout=patient(WAIT_SECONDS)))
    return reply


@pytest.mark.requirement("I2", "I5")
def test_an_engine_that_is_killed_while_its_locate_waits_leaves_nothing(depot: Depot) -> None:
    keys = keys_of("killed", 6)
    with depot.engine() as engine:
        depot.publish(engine.namespace, keys)
        before = depot.counters("tier_probed_objects"), depot.counters("locate_waits")
        with EngineProcess(depot.daemon.socket, "killed", "reserve", "its own", 3) as other:
            assert not depot.nothing_is_left("engine", "killed"), "it has a lease, and credit in use"
            depot.mount.hang()
            other.say(f"locate {'killed':>12} 6 6")
            wait_until(lambda: depot.counters("tier_probed_objects") != before[0], "it is asked for", WAIT_SECONDS)
            assert depot.counters("locate_waits") == before[1], "it waits"
            other.kill()
            wait_until(lambda: depot.nothing_is_left("engine", "other"), "nothing is left", WAIT_SECONDS)
            late = before[1].get("late", 0) + 1
            wait_until(lambda: depot.counters("locate_waits").get("late") == late, "nobody waits", WAIT_SECONDS)
        depot.mount.go_on()
        _located(engine, keys, 6)
        assert engine.load(keys) == [payload_of(key) for key in keys]

        def all_answered() -> bool:
            asked = depot.counters("tier_probed_objects")
            return asked.pop("asked") == sum(asked.values())

        wait_until(all_answered, "every name that was asked for was answered", WAIT_SECONDS)


@pytest.mark.requirement("I2", "I5")
def test_a_client_that_gives_up_its_locate_is_served_on(depot: Depot) -> None:
    keys, others = keys_of("given up", 5), keys_of("meanwhile", 5)
    with depot.engine() as engine:
        depot.publish(engine.namespace, keys)
        depot.mount.hang()
        with pytest.raises(grpc.RpcError) as refusal:
            engine.stub.Locate(engine.locate_call(keys, "given up", wait_seconds=10), timeout=0.3)
        assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        engine.store(others)
        assert engine.load(others) == [payload_of(key) for key in others]
        engine.end_request("given up")
        depot.mount.go_on()
        _located(engine, keys, 5)
        assert engine.load(keys) == [payload_of(key) for key in keys]
        wait_until(lambda: depot.nothing_is_left("engine", "other"), "nothing is left", WAIT_SECONDS)


@pytest.mark.requirement("P5")
def test_ten_queued_requests_for_one_prefix_cause_one_read_and_load_from_ram(depot: Depot) -> None:
    keys = keys_of("ten", 8)
    with depot.engine() as engine, depot.engine("other") as other:
        depot.publish(engine.namespace, keys)
        reads, asked = (depot.counters(name) for name in ("tier_reads.pool", "tier_probed_objects"))
        requests = [(one, f"r{number}") for number in range(5) for one in (engine, other)]
        at_once = [one.stub.Locate.future(one.locate_call(keys, request)) for one, request in requests]
        assert all(answer.result(timeout=patient(WAIT_SECONDS)) is not None for answer in at_once)
        for one, request in requests:
            _located(one, keys, 8, request)
        wait_until(lambda: depot.status.tiers[0].prefetched_objects == 8, "they are read ahead", WAIT_SECONDS)
        read = reads | {"ok": reads.get("ok", 0) + 8}
        wait_until(lambda: depot.counters("tier_reads.pool") == read, "none is on its way any more", WAIT_SECONDS)
        assert depot.counters("tier_probed_objects")["asked"] == asked.get("asked", 0) + 8, "one look-up"
        depot.mount.hang()
        for one, request in requests:
            reply = _ask(one, keys, request)
            assert (reply.boundary_tokens, reply.tier, reply.estimate_seconds) == (8 * CHUNK_TOKENS, "ram", 0.0)
            assert one.load(keys, request) == [payload_of(key) for key in keys]
        assert depot.counters("tier_reads.pool") == read, "one read of each"
        wait_until(lambda: depot.nothing_is_left("engine", "other"), "nothing is left", WAIT_SECONDS)


@pytest.mark.requirement("T4", "P5")
@pytest.mark.long(seconds=4)
def test_a_mount_that_hangs_while_it_is_read_ahead_shortens_the_offer_to_what_ram_has(depot: Depot) -> None:
    keys, unknown = keys_of("hung", 8), keys_of("not asked", 8)
    with depot.engine() as engine:
        for prompt in (keys, unknown):
            depot.publish(engine.namespace, prompt)
            engine.store(prompt[:3])
        _located(engine, keys, 8)
        wait_until(lambda: _ask(engine, keys).boundary_tokens == 8 * CHUNK_TOKENS, "all is in time", WAIT_SECONDS)
        depot.mount.hang()
        _ask(engine, keys, "r")  # reading ahead begins, and nothing comes
        wait_until(
            lambda: _ask(engine, keys, "r").boundary_tokens == 3 * CHUNK_TOKENS, "nothing is hoped for", WAIT_SECONDS
        )
        assert depot.pool.breaker == "closed", "no deadline has passed"
        assert _ask(engine, keys, "r").tier == "ram"
        assert engine.load(keys[:3]) == [payload_of(key) for key in keys[:3]]

        shortest = WAIT_SECONDS
        tries = 0
        while shortest >= 1.0:  # a busy machine is late now and then; what waits for the mount is, always
            tries += 1
            assert tries < 10, f"{shortest:.2f} s at least"
            began = time.monotonic()
            reply = _ask(engine, unknown, "u", wait_seconds=1.0)
            shortest = min(shortest, time.monotonic() - began)
            assert (reply.boundary_tokens, reply.tier) == (3 * CHUNK_TOKENS, "ram")

        depot.mount.go_on()
        for prompt, request in ((keys, "r"), (unknown, "u")):
            wait_until(lambda: _ask(engine, prompt, request).tier == "ram", "what was begun comes", WAIT_SECONDS)  # noqa: B023
            _located(engine, prompt, 8, request)
            assert engine.load(prompt, request) == [payload_of(key) for key in prompt]


@pytest.mark.requirement("T3")
@pytest.mark.long(seconds=4)
def test_a_prefix_of_more_than_a_thousand_chunks_is_found_and_loaded_byte_for_byte(depot: Depot) -> None:
    keys = keys_of("long", LONG_CHUNKS)
    with depot.engine(object_bytes=LONG_OBJECT_BYTES) as engine:
        depot.publish(engine.namespace, keys, LONG_OBJECT_BYTES)
        _located(engine, keys, LONG_CHUNKS)
        assert engine.load(keys) == [payload_of(key, LONG_OBJECT_BYTES) for key in keys]
