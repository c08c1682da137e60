"""Each reason for which a daemon serves no more of a prompt, caused once in a real one and read back (row P10).

It is read back in all three places: the engine's answer, `kvdepot_misses_total`, and `kvdepotctl explain --json`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from types import MappingProxyType
from typing import Final

import pytest
from kvdepot.core.calls import Kind, LocateCall, ReserveOutcome
from kvdepot.core.elements import ElementRun, Elements
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.misses import LOOKUP_REASONS, MissReason
from kvdepot.core.planner import GroupSpec
from kvdepot.core.report import DaemonStatus
from kvdepot.proto.methods import decode_reply
from kvdepot.server.depot.loads.lookups import WALKS_MAX

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.fakes.shared_directory import publish
from tests.rigs import waiting_sums
from tests.rigs.child_processes import children
from tests.rigs.ctl_process import answered
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.known_objects import hybrid
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, dense_spec, status_of
from tests.rigs.stopping import state

OBJECT_BYTES: Final = 16 << 10
TIGHT_TENANT, TIGHT_OBJECTS = "tight", 2
NONE_TENANT = "none"
WAIT_SECONDS = 60.0
SPEC = dense_spec("a-model", OBJECT_BYTES)
TIGHT = replace(SPEC, tenant=TIGHT_TENANT)
HYBRID = hybrid(OBJECT_BYTES, OBJECT_BYTES)
WINDOWS = replace(
    SPEC,
    groups=(*SPEC.groups, GroupSpec(Kind.WINDOW, 16, window_tokens=16, rank_block_bytes=(OBJECT_BYTES,))),
    object_bytes=dict(SPEC.object_bytes) | {Kind.WINDOW: OBJECT_BYTES},
)
RAM_CONFIG = f"""
[policy]
audit_sample = 1.0
[[quota]]
tenant = "{TIGHT_TENANT}"
tier = "ram"
capacity = "{TIGHT_OBJECTS * OBJECT_BYTES}B"
"""
POOL_CONFIG = f"""
[[tier]]
name = "pool"
kind = "shared"
path = "{{path}}"
capacity = "256MiB"
write = "evict"
deadline = "60s"
on_root_filesystem = true
[[quota]]
tenant = "{NONE_TENANT}"
tier = "ram"
capacity = "{OBJECT_BYTES // 2}B"
[breaker]
failures = 2
probe_every = "200ms"
"""


@dataclass
class Depot:
    """A daemon, and the directory that its shared tier has by a mount, if it has one."""

    daemon: DaemonProcess
    mount: FuseDirectory | None = None
    _names: Iterator[int] = field(default_factory=count)

    def engine(self, spec: NamespaceSpec = SPEC, elements: Elements = MappingProxyType({})) -> RawEngine:
        return RawEngine(self.daemon.socket, f"engine-{next(self._names)}", spec=spec, elements=elements)

    def keys(self, chunks: int = 2) -> list[bytes]:
        """Of a prompt of its own."""
        name = next(self._names)
        return [blake2b(f"{name}/{chunk}".encode(), digest_size=16).digest() for chunk in range(chunks)]

    @property
    def status(self) -> DaemonStatus:
        return status_of(self.daemon.socket)

    @property
    def fuse(self) -> FuseDirectory:
        assert self.mount is not None
        return self.mount

    def publish(self, engine: RawEngine, keys: Sequence[bytes]) -> list[bytes]:
        """Another node has put the prompt into the shared directory, and this daemon has found it there."""
        publish(self.fuse.backing / "shared", engine.namespace, keys, OBJECT_BYTES)
        wait_until(lambda: engine.locate(keys) == len(keys) * CHUNK_TOKENS, "it is found", WAIT_SECONDS)
        return list(keys)

    def wait_summed(self) -> None:
        """All have their checksums, and nothing of RAM is lent to the worker any more."""

        def are_summed() -> bool:
            ram = self.status.tiers[0]
            return ram.pending_checksums == ram.lent_bytes == 0

        wait_until(are_summed, "all have their checksums", WAIT_SECONDS)

    def misses(self) -> Counter[str]:
        """By reason, as Prometheus gets them."""
        with urllib.request.urlopen(f"{self.daemon.metrics}/metrics") as answer:
            found = re.findall(r'^kvdepot_misses_total\{reason="(\w+)"\} (\S+)$', answer.read().decode(), re.MULTILINE)
        return Counter({reason: int(float(value)) for reason, value in found})


@dataclass
class Asked:
    """A lookup that is due a reason, and what it says of the engine."""

    engine: RawEngine
    keys: list[bytes]
    budget_seconds: float = 0.0
    token_seconds: float = 0.0
    wait_seconds: float = 10.0


def check(depot: Depot, asked: Asked, reason: MissReason) -> None:
    """Ask, and read the reason back."""
    request, before, engine = f"r-{reason}", depot.misses(), asked.engine
    call = engine.locate_call(
        asked.keys, request, budget_seconds=asked.budget_seconds, token_seconds=asked.token_seconds,
        wait_seconds=asked.wait_seconds,
    )  # fmt: skip
    reply = decode_reply(LocateCall, engine.stub.Locate(call, timeout=patient(WAIT_SECONDS)))
    assert (reply.boundary_tokens, reply.miss) == (0, reason)
    assert depot.misses() - before == {reason: 1}, "of this reason, and of no other"
    (record,) = json.loads(answered(depot.daemon, "explain", request, "--json"))
    lookup = record["lookup"]
    assert (lookup["miss"], lookup["missing_chunk"], lookup["missing_key"]) == (reason, 0, asked.keys[0].hex())
    engine.end_request(request)


# --- of a daemon that has RAM alone


@contextmanager
def unknown(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        yield Asked(engine, depot.keys())


@contextmanager
def evicted(depot: Depot) -> Iterator[Asked]:
    with depot.engine(TIGHT) as engine:
        keys = depot.keys(TIGHT_OBJECTS)
        engine.store(keys)
        depot.wait_summed()
        engine.store(depot.keys(TIGHT_OBJECTS))
        yield Asked(engine, keys)


@contextmanager
def drift(depot: Depot) -> Iterator[Asked]:
    """Another engine has computed something else of it, and nobody knows who is right."""
    elements = {Kind.ATTENTION: (ElementRun("bfloat16", OBJECT_BYTES),)}
    spec = replace(SPEC, label="audited")  # what a spec's objects are made of is true of all its engines
    with depot.engine(spec, elements) as engine:
        keys = depot.keys()
        engine.store(keys)
        lease_id, outcomes, extents = engine.reserve(keys[:1])
        assert outcomes == [ReserveOutcome.GRANTED]
        engine.write(keys[:1], extents, lambda key: bytes(OBJECT_BYTES))
        engine.commit(lease_id, 1)
        wait_until(lambda: engine.counter("audits.drifted"), "it is compared", WAIT_SECONDS)
        answered(depot.daemon, "loads", "on", engine.namespace.hex())  # out of quarantine
        yield Asked(engine, keys)


@contextmanager
def no_grant(depot: Depot) -> Iterator[Asked]:
    with depot.engine(replace(TIGHT, label="full")) as engine:
        depot.wait_summed()
        lease_id, outcomes, _ = engine.reserve(depot.keys(TIGHT_OBJECTS))
        assert set(outcomes) == {ReserveOutcome.GRANTED}
        keys = depot.keys()
        assert engine.reserve(keys)[1][0] is ReserveOutcome.LATER
        yield Asked(engine, keys)
        engine.abandon(lease_id)


@contextmanager
def abandoned(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        keys = depot.keys()
        engine.abandon(engine.reserve(keys)[0])
        yield Asked(engine, keys)


@contextmanager
def pruned(depot: Depot) -> Iterator[Asked]:
    with depot.engine(HYBRID) as engine:
        keys = depot.keys()
        engine.store(keys, "attention alone")
        depot.wait_summed()
        engine.end_request("attention alone")
        yield Asked(engine, keys)


@contextmanager
def no_checkpoint(depot: Depot) -> Iterator[Asked]:
    with depot.engine(HYBRID) as engine:
        keys = depot.keys()
        engine.store(keys)
        yield Asked(engine, keys)


@contextmanager
def incomplete(depot: Depot) -> Iterator[Asked]:
    with depot.engine(WINDOWS) as engine:
        keys = depot.keys()
        engine.store(keys)
        yield Asked(engine, keys)


@contextmanager
def other_namespace(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine, depot.engine(replace(SPEC, epoch="later")) as other:
        keys = depot.keys()
        other.store(keys)
        yield Asked(engine, keys)


@contextmanager
def being_written(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        keys = depot.keys()
        lease_id, _, _ = engine.reserve(keys)
        yield Asked(engine, keys)
        engine.abandon(lease_id)


@contextmanager
def loads_off(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        keys = depot.keys()
        engine.store(keys)
        answered(depot.daemon, "loads", "off")
        try:
            yield Asked(engine, keys)
        finally:
            answered(depot.daemon, "loads", "on")


@contextmanager
def draining(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        keys = depot.keys()
        engine.store(keys)
        answered(depot.daemon, "drain", "--wait", "30")
        try:
            yield Asked(engine, keys)
        finally:
            answered(depot.daemon, "resume")


@contextmanager
def stores_off(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        keys = depot.keys()
        answered(depot.daemon, "stores", "off")
        assert set(engine.reserve(keys)[1]) == {ReserveOutcome.REFUSED}
        answered(depot.daemon, "stores", "on")
        yield Asked(engine, keys)


@contextmanager
def deleted(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        keys = depot.keys()
        engine.store(keys)
        answered(depot.daemon, "evict", f"{engine.namespace.hex()}/{keys[0].hex()}", "--yes")
        yield Asked(engine, keys)


@contextmanager
def epoch_bumped(depot: Depot) -> Iterator[Asked]:
    spec = replace(SPEC, label="bumped")
    with depot.engine(spec) as engine:
        keys = depot.keys()
        engine.store(keys)
        answered(depot.daemon, "epoch", "bump", engine.namespace.hex(), "--yes")
    with depot.engine(replace(spec, bumps=1)) as engine:
        yield Asked(engine, keys)


@contextmanager
def corrupt(depot: Depot) -> Iterator[Asked]:
    """What lies in the arena is not what was stored when the next daemon compares the checksum."""
    with depot.engine() as engine:
        keys = depot.keys()
        lease_id, _, extents = engine.reserve(keys)
        engine.write(keys, extents)
        engine.commit(lease_id, len(keys))
        depot.wait_summed()
        engine.write(keys[::-1], extents)
    depot.daemon.kill()
    depot.daemon.start()
    with depot.engine() as engine:
        wait_until(lambda: depot.status.counters.get("corrupt_objects"), "it is compared", WAIT_SECONDS)
        depot.wait_summed()  # all of it: the first chunk, which is asked for, need not have been the first
        yield Asked(engine, keys)


@contextmanager
def unverified(depot: Depot) -> Iterator[Asked]:
    """The next daemon's checksum worker stops before it has begun."""
    daemon, keys = depot.daemon, depot.keys()
    with depot.engine() as engine:
        engine.store(keys)
        depot.wait_summed()
    daemon.kill()
    daemon.under = (waiting_sums.MODULE,)
    daemon.start()
    daemon.under = ()
    with depot.engine() as engine:
        (worker,) = children(daemon.pid, waiting_sums.MODULE.encode())
        wait_until(lambda: state(worker) == "T", "it has stopped", WAIT_SECONDS)
        try:
            yield Asked(engine, keys)
        finally:
            os.kill(worker, signal.SIGCONT)
        wait_until(lambda: engine.locate(keys) == len(keys) * CHUNK_TOKENS, "it is verified", WAIT_SECONDS)


# --- of one with a shared tier


@contextmanager
def probe_absent(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        yield Asked(engine, depot.keys())


@contextmanager
def probe_late(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        depot.fuse.hang()
        yield Asked(engine, depot.keys(), wait_seconds=0.1)


@contextmanager
def probe_refused(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        depot.fuse.hang()
        calls = [engine.stub.Locate.future(engine.locate_call(depot.keys(1))) for _ in range(WALKS_MAX)]
        misses = {decode_reply(LocateCall, call.result(patient(WAIT_SECONDS))).miss for call in calls}
        assert misses <= {"probe_late", "probe_refused"}, "a walk of before may still be going"
        yield Asked(engine, depot.keys())


@contextmanager
def lost(depot: Depot) -> Iterator[Asked]:
    """Another node's janitor has evicted it."""
    with depot.engine() as engine:
        keys = depot.publish(engine, depot.keys())
        for file in (depot.fuse.backing / "shared").rglob(f"*{keys[0].hex()}*"):
            file.unlink()
        assert engine.load(keys) is None
        yield Asked(engine, keys)


@contextmanager
def tier_unavailable(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        keys, *others = (depot.publish(engine, depot.keys()) for _ in range(4))
        depot.fuse.fault(read=5)
        for other in others:  # a load whose read has failed is not offered again, and two failures are needed
            assert engine.load(other) is None
        wait_until(lambda: depot.status.tiers[1].breaker != "closed", "it is out of use", WAIT_SECONDS)
        yield Asked(engine, keys)


@contextmanager
def not_in_time(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        yield Asked(engine, depot.publish(engine, depot.keys()), budget_seconds=1e-9)


@contextmanager
def not_worth_it(depot: Depot) -> Iterator[Asked]:
    with depot.engine() as engine:
        yield Asked(engine, depot.publish(engine, depot.keys()), token_seconds=1e-12)


@contextmanager
def no_room(depot: Depot) -> Iterator[Asked]:
    with depot.engine(replace(SPEC, tenant=NONE_TENANT)) as engine:
        yield Asked(engine, depot.keys())


Cause = Callable[[Depot], AbstractContextManager[Asked]]
OF_RAM: Final[dict[MissReason, Cause]] = {
    MissReason.UNKNOWN: unknown,
    MissReason.EVICTED: evicted,
    MissReason.NO_GRANT: no_grant,
    MissReason.ABANDONED: abandoned,
    MissReason.PRUNED: pruned,
    MissReason.OTHER_NAMESPACE: other_namespace,
    MissReason.BEING_WRITTEN: being_written,
    MissReason.NO_CHECKPOINT: no_checkpoint,
    MissReason.INCOMPLETE: incomplete,
    MissReason.LOADS_OFF: loads_off,
    MissReason.DRAINING: draining,
    MissReason.STORES_OFF: stores_off,
    MissReason.DELETED: deleted,
    MissReason.EPOCH_BUMPED: epoch_bumped,
    MissReason.CORRUPT: corrupt,
    MissReason.DRIFT: drift,
    MissReason.UNVERIFIED: unverified,
}
OF_POOL: Final[dict[MissReason, Cause]] = {
    MissReason.PROBE_ABSENT: probe_absent,
    MissReason.PROBE_LATE: probe_late,
    MissReason.PROBE_REFUSED: probe_refused,
    MissReason.LOST: lost,
    MissReason.TIER_UNAVAILABLE: tier_unavailable,
    MissReason.NOT_IN_TIME: not_in_time,
    MissReason.NOT_WORTH_IT: not_worth_it,
    MissReason.NO_ROOM: no_room,
}


@pytest.fixture(scope="module")
def of_ram() -> Iterator[Depot]:
    with DaemonProcess(config=RAM_CONFIG) as daemon:
        yield Depot(daemon)


@pytest.fixture(scope="module")
def of_pool() -> Iterator[Depot]:
    with FuseDirectory() as mount:
        (mount.backing / "shared").mkdir()
        with DaemonProcess(ram="512MiB", config=POOL_CONFIG.format(path=mount.path / "shared")) as daemon:
            yield Depot(daemon, mount)


@pytest.mark.requirement("P10")
def test_every_reason_of_the_daemon_has_a_cause() -> None:
    assert OF_RAM.keys() | OF_POOL.keys() == {*LOOKUP_REASONS}


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("reason", OF_RAM, ids=str)
def test_a_reason_is_answered_counted_and_explained(of_ram: Depot, reason: MissReason) -> None:
    with OF_RAM[reason](of_ram) as asked:
        check(of_ram, asked, reason)


@pytest.mark.requirement("P10")
@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
@pytest.mark.parametrize("reason", OF_POOL, ids=str)
def test_a_reason_of_a_shared_tier_is_answered_counted_and_explained(of_pool: Depot, reason: MissReason) -> None:
    def in_use() -> bool:
        pool = of_pool.status.tiers[1]
        return (pool.state, pool.breaker) == ("ready", "closed")

    wait_until(in_use, "the tier is in use", WAIT_SECONDS)
    try:
        with OF_POOL[reason](of_pool) as asked:
            check(of_pool, asked, reason)
    finally:
        of_pool.fuse.go_on()
        of_pool.fuse.fault()
