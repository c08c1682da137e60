"""Real daemons with an object tier: S3 as moto's server speaks it, behind a proxy that fails (N3, N4, T3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from kvdepot.core.objectfile import HEADER_BYTES
from kvdepot.core.report import TierStatus

from demo.bucket import BUCKET, CREDENTIALS
from tests.fakes.faulty_proxy import FaultyProxy
from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, payload_of, status_of
from tests.rigs.s3_server import S3Server

WAIT_SECONDS = 60.0
CONFIG = """
[[tier]]
name = "bucket"
kind = "object"
url = "s3://{bucket}"
prefix = "fleet/one"
endpoint = "{endpoint}"
region = "us-east-1"
allow_http = true
credentials_file = "{credentials}"
capacity = "64MiB"
write = "commit"
io_workers = 2
deadline = "{deadline}"
[breaker]
probe_every = "1s"
"""


class Fleet:
    """Daemons on one bucket."""

    def __init__(self, server: S3Server, proxy: FaultyProxy, folder: Path) -> None:
        self.server = server
        self.proxy = proxy
        self._credentials = folder / "credentials"
        self._credentials.write_text(CREDENTIALS)
        self._credentials.chmod(0o600)
        self.daemons: list[DaemonProcess] = []

    def start(self, *, ready: bool = True, deadline: str = "10s", more: str = "") -> DaemonProcess:
        config = CONFIG.format(
            bucket=BUCKET, endpoint=self.proxy.url, credentials=self._credentials, deadline=deadline
        ).replace("[breaker]", f"{more}\n[breaker]")
        daemon = DaemonProcess(ram="456MiB", config=config)
        self.daemons.append(daemon)
        daemon.start()
        if ready:
            wait_until(lambda: tier_of(daemon).state == "ready", "the tier is ready", WAIT_SECONDS)
        return daemon

    def store(self, daemon: DaemonProcess, keys: list[bytes]) -> None:
        before = len(self.server.names())
        with RawEngine(daemon.socket) as engine:
            engine.store(keys)
            wait_until(lambda: len(self.server.names()) == before + len(keys), "all are there", WAIT_SECONDS)

    def filled(self, keys: list[bytes]) -> None:
        """A daemon has stored these, and is gone."""
        daemon = self.start()
        self.store(daemon, keys)
        daemon.close()


def tier_of(daemon: DaemonProcess) -> TierStatus:
    return status_of(daemon.socket).tiers[1]


def located(engine: RawEngine, keys: list[bytes]) -> None:
    """A look-up that takes longer than a Locate waits is for the next one."""
    wait_until(lambda: engine.locate(keys) == len(keys) * CHUNK_TOKENS, "all of them are found", WAIT_SECONDS)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def fleet(server: S3Server, tmp_path: Path) -> Iterator[Fleet]:
    server.clear()
    with FaultyProxy(server.port) as proxy:
        fleet = Fleet(server, proxy, tmp_path)
        yield fleet
        proxy.clear()
        for daemon in fleet.daemons:
            daemon.close()


@pytest.mark.requirement("T3")
def test_what_one_daemon_stored_another_one_with_empty_ram_loads(fleet: Fleet) -> None:
    keys = keys_of("bucket", 12)
    fleet.filled(keys)
    second = fleet.start()
    with RawEngine(second.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]
    assert tier_of(second).kind == "object"
    assert {key.rpartition("/")[0].partition("/")[0] for key in fleet.server.names()} == {"fleet"}


@pytest.mark.requirement("N4")
def test_a_server_that_ignores_conditions_is_refused_and_said(fleet: Fleet) -> None:
    fleet.proxy.strips_conditions = True
    daemon = fleet.start(ready=False)
    wait_until(lambda: "ignores If-None-Match" in tier_of(daemon).reason, "it is said", WAIT_SECONDS)
    assert tier_of(daemon).state == "offline"
    fleet.proxy.clear()
    wait_until(lambda: tier_of(daemon).state == "ready", "it is tried again", WAIT_SECONDS)


@pytest.mark.requirement("N4")
def test_a_server_that_ignores_conditions_serves_who_says_so(fleet: Fleet) -> None:
    fleet.proxy.strips_conditions = True
    fleet.start(more="unconditional = true")


@pytest.mark.requirement("N3")
def test_a_spent_budget_ends_requests_and_says_so_while_ram_serves(fleet: Fleet) -> None:
    keys, later, there = keys_of("before", 4), keys_of("later", 4), keys_of("there", 4)
    fleet.filled(there)
    before = fleet.proxy.answers
    daemon = fleet.start(more="request_budget = 100")
    with RawEngine(daemon.socket) as engine:
        fleet.store(daemon, keys)  # a probe of 4, and 4 puts
        engine.store(there)  # more than a put each
        engine.store(later)
        more = count()  # on a busy machine a put may be given up before it is a request

        def spent() -> bool:
            engine.store(keys_of(f"more {next(more)}", 1))
            return "request budget of this day is spent" in tier_of(daemon).reason

        wait_until(spent, "it is said", WAIT_SECONDS)
        assert engine.locate(keys_of("nobody", 6)) == 0
        assert engine.load(keys) == [payload_of(key) for key in keys]
        assert engine.load(later) == [payload_of(key) for key in later]
        assert engine.counter("bucket_requests.bucket/") <= 100
        assert fleet.proxy.answers - before <= 100
        assert tier_of(daemon).state == "ready"


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "corrupt": lambda data, _: _flipped(data, HEADER_BYTES + 77),
    "header": lambda data, _: _flipped(data, 100),
    "too_short": lambda data, _: data[: HEADER_BYTES // 2],
    "identity": lambda _, other: other,
}


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_object_is_a_miss_and_goes_to_quarantine(fleet: Fleet, reason: str) -> None:
    keys = keys_of("damaged", 6)
    fleet.filled(keys)
    names = fleet.server.names()
    (bad,) = [name for name in names if keys[3].hex() in name]
    data = DAMAGES[reason](fleet.server.get(bad), fleet.server.get(next(name for name in names if name != bad)))
    fleet.server.put(bad, data)
    daemon = fleet.start()
    with RawEngine(daemon.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) is None
        wait_until(lambda: bad not in fleet.server.names(), "it is quarantined", WAIT_SECONDS)
        (kept,) = fleet.server.quarantined()
        assert kept.endswith(f".{reason}.kvd") and fleet.server.get(kept) == data
        located(engine, keys[:3])
        assert engine.load(keys[:3]) == [payload_of(key) for key in keys[:3]]
        assert engine.counter(f"tier_damaged_objects.bucket/{reason}") == 1


@pytest.mark.requirement("N3")
def test_a_store_replaces_a_damaged_object_of_its_name(fleet: Fleet) -> None:
    keys = keys_of("replaced", 4)
    fleet.filled(keys)
    (bad,) = [name for name in fleet.server.names() if keys[1].hex() in name]
    data = fleet.server.get(bad)
    fleet.server.put(bad, _flipped(data, 100))
    daemon = fleet.start()
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        wait_until(lambda: _same_payload(fleet.server.get(bad), data), "it is replaced", WAIT_SECONDS)
        wait_until(lambda: engine.counter("shared_publications.bucket/already_there") == 3, "others are", WAIT_SECONDS)
        wait_until(lambda: engine.counter("tier_damaged_objects.bucket/header") == 1, "it is counted", WAIT_SECONDS)


def _same_payload(one: bytes, other: bytes) -> bool:
    return one[HEADER_BYTES:] == other[HEADER_BYTES:] and one[:100] == other[:100]


@pytest.mark.requirement("S5")
def test_an_object_of_somebody_without_the_key_is_a_miss_and_stays(fleet: Fleet, tmp_path: Path) -> None:
    keys = keys_of("unkeyed", 1)  # of several, two workers may each read one before the load ends
    fleet.filled(keys)
    names = fleet.server.names()
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32 + "\n")
    key_file.chmod(0o600)
    daemon = fleet.start(more=f'key_file = "{key_file}"')
    with RawEngine(daemon.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) is None
        assert engine.counter("tier_damaged_objects.bucket/unkeyed") == 1
    assert fleet.server.names() == names


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("fault", ["hangs", pytest.param("drops", marks=pytest.mark.long(seconds=10))])
def test_a_bucket_that_fails_is_disabled_while_ram_serves_and_comes_back(fleet: Fleet, fault: str) -> None:
    keys, others = keys_of("there", 6), keys_of("in-ram", 6)
    fleet.filled(keys)
    daemon = fleet.start(deadline="1s")
    with RawEngine(daemon.socket) as engine:
        fleet.store(daemon, others)
        setattr(fleet.proxy, fault, True)
        wait_until(lambda: _asked(engine, keys, others, daemon), "the breaker is open", WAIT_SECONDS)
        assert engine.load(others) == [payload_of(key) for key in others]
        fleet.proxy.clear()
        wait_until(lambda: tier_of(daemon).breaker == "closed", "the breaker is closed", WAIT_SECONDS)
        located(engine, keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]


def _asked(engine: RawEngine, keys: list[bytes], others: list[bytes], daemon: DaemonProcess) -> bool:
    """Ask for what is not in RAM; what is there stays served."""
    assert engine.locate(others) == len(others) * CHUNK_TOKENS
    assert engine.locate(keys) < len(keys) * CHUNK_TOKENS
    return tier_of(daemon).breaker != "closed"


def test_no_argument_of_a_process_has_a_credential(fleet: Fleet) -> None:
    daemon = fleet.start()
    workers = children(daemon.pid, b"kvdepot.server.io.worker")
    arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in workers]
    assert any(b"s3://kvdepot" in one for one in arguments)
    assert not any(b"testing" in one for one in arguments)
