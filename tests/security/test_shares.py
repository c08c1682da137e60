"""No user takes what all engines share: sessions, specs of namespaces, stream proxies (S4, I4)."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from kvdepot.core.calls import ReserveOutcome
from kvdepot.core.limits import NAMESPACES_PER_SESSION_MAX

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import HONEST, HOSTILE, Attached, Comparing, OtherUser, needs_root, open_to_group
from tests.rigs.patience import WAIT_SECONDS, Deadline
from tests.rigs.raw_client import EXTENT, RawEngine, dense_spec, keys_of, status_of

pytestmark = needs_root
SHARE: Final = 256
"""Sessions of one user."""
STREAMS: Final = 3
"""Which a user may start at once."""
_kept: list[Any] = []
_engine: list[Comparing] = []


# --- what the processes of the users do


def check(socket: str, tenant: str = "") -> int:
    if not _engine:
        _engine.append(Comparing(Path(socket), "honest", spec=replace(dense_spec(), tenant=tenant)))
    return _engine[0].check()


def come_and_go(socket: str, times: int) -> str:
    """Attach and detach under ever new ids. Return the first refusal."""
    for number in range(times):
        attached = Attached(socket, f"e{number}")
        attached.close()
        if attached.reply.error:
            return attached.reply.error
    return ""


def take_sessions(socket: str, most: int) -> tuple[int, str]:
    """Attach under new ids until it is refused. Return how many were taken, and the refusal."""
    for number in range(most):
        attached = Attached(socket, f"e{number}")
        if attached.reply.error:
            attached.close()
            return number, attached.reply.error
        _kept.append(attached)
    return most, ""


def take_streams(socket: str, most: int) -> tuple[int, str]:
    """Attach as ranks that need proxies until it is refused."""
    for number in range(most):
        attached = Attached(socket, f"e{number}", scheduler=False, stream=True)
        _kept.append(attached)
        if attached.reply.error:
            return number, attached.reply.error
    return most, ""


def churn_streams(socket: str, seconds: float, refusal: str) -> tuple[int, list[str]]:
    """Attach as ranks that need a proxy, and end it, all the time, until it is refused so, and for these seconds.

    Return how many proxies started, and refusals. One thread alone may be too slow to be refused.
    """
    until = time.monotonic() + seconds
    refusals: set[str] = set()

    def churn(thread: int) -> int:
        started, limit = 0, Deadline(WAIT_SECONDS)
        while time.monotonic() < until or not (refusal in refusals or limit.is_over()):
            attached = Attached(socket, f"e{os.getpid()}-{thread}", scheduler=False, stream=True)
            attached.close()
            if attached.reply.error:
                refusals.add(attached.reply.error.partition(":")[0])
                time.sleep(0.01)
            else:
                started += 1
        return started

    with ThreadPoolExecutor(STREAMS) as threads:
        return sum(threads.map(churn, range(STREAMS))), sorted(refusals)


def take_specs(socket: str, most: int) -> tuple[int, str]:
    """Register large specs until it is refused."""
    engine = RawEngine(Path(socket), "specs")
    _kept.append(engine)
    for number in range(most):
        spec = replace(dense_spec(), identity={"model": f'"{number}"', "pad": '"' + "p" * 900_000 + '"'})
        try:
            engine.register(spec)
        except grpc.RpcError as error:
            refusal: Any = error
            return number, str(refusal.details())
    return most, ""


def take_namespaces(socket: str, most: int) -> tuple[int, str]:
    """Register small specs, in several sessions, until it is refused."""
    for number in range(most):
        if number % (NAMESPACES_PER_SESSION_MAX - 4) == 0:
            _kept.append(RawEngine(Path(socket), f"n{number}", label=f"{os.getpid()}"))
        try:
            _kept[-1].register(replace(dense_spec(), identity={"model": f'"{os.getpid()}-{number}"'}))
        except grpc.RpcError as error:
            refusal: Any = error
            return number, str(refusal.details())
    return most, ""


def hold(socket: str, sessions: int, how: str, tenant: str = "") -> int:
    """Reserve in several sessions, or load what they stored, until nothing is granted. Return the bytes that are held.

    Nothing is ended.
    """
    spec = replace(dense_spec("hog"), tenant=tenant)
    return sum(_held(RawEngine(Path(socket), f"hog{len(_kept)}", spec=spec), how) for _ in range(sessions))


def _held(engine: RawEngine, how: str) -> int:
    _kept.append(engine)
    held = 0
    for number in range(100):
        keys = keys_of(f"{os.getpid()}-{len(_kept)}-{number}", 20)
        lease, outcomes, extents = engine.reserve(keys)
        if how == "load":
            granted = outcomes.count(ReserveOutcome.GRANTED)
            engine.commit(lease, granted)
            _, _, extents = engine.acquire(keys[:granted] or keys)
        if not extents:
            break
        held += sum(length for _, _, _, length, _ in EXTENT.iter_unpack(extents))
    return held


# --- the tests


@pytest.mark.requirement("S4", "I4")
@pytest.mark.parametrize("how", ["reserve", "load"])
def test_a_user_cannot_hold_all_of_ram(daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser, how: str) -> None:
    """It reserves in four sessions, or loads what it has stored, and ends none of it."""
    socket = str(daemon.socket)
    assert honest.run("check", socket) == 4
    held, ram = hostile.run("hold", socket, 4, how), _ram_bytes(daemon)
    assert ram // 2 < held <= ram * 7 // 8
    assert [honest.run("check", socket) for _ in range(3)] == [8, 8, 8]
    assert honest.run("hold", socket, 1, "reserve") > 0
    assert hostile.run("hold", socket, 1, how) == 0, "its share has become smaller"


@pytest.mark.requirement("S4", "I4")
@pytest.mark.parametrize("how", ["reserve", "load"])
def test_a_tenant_holds_its_own_part_of_ram_only(honest: OtherUser, hostile: OtherUser, how: str) -> None:
    tenants = f'[[tenant]]\nname = "a"\nusers = ["{HONEST}"]\n[[tenant]]\nname = "b"\nusers = ["{HOSTILE}"]\n'
    with DaemonProcess(config=tenants) as daemon:
        open_to_group(daemon)
        socket = str(daemon.socket)
        assert honest.run("check", socket, "a") == 4
        held, ram = hostile.run("hold", socket, 4, how, "b"), _ram_bytes(daemon)
        assert ram // 3 < held <= ram // 2
        assert [honest.run("check", socket) for _ in range(3)] == [8, 8, 8]
        assert honest.run("hold", socket, 1, "reserve", "a") > ram // 3


def _ram_bytes(daemon: DaemonProcess) -> int:
    """Return the size of the arena, of which tables are a small part."""
    return status_of(daemon.socket).tiers[0].ready_bytes


@pytest.mark.requirement("S4", "I4")
@pytest.mark.long(seconds=20)
def test_a_process_that_attaches_under_ever_new_ids_keeps_nobody_out(
    daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    socket = str(daemon.socket)
    assert honest.run("check", socket) == 4
    assert hostile.run("come_and_go", socket, 5_000) == ""
    assert honest.run("check", socket) == 8
    assert honest.run("take_sessions", socket, 1) == (1, "")


@pytest.mark.requirement("S4", "I4")
def test_a_user_has_its_share_of_the_sessions(daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser) -> None:
    socket = str(daemon.socket)
    taken, refusal = hostile.run("take_sessions", socket, SHARE + 20)
    assert taken == SHARE and f"sessions of uid {HOSTILE}: {SHARE + 1} is more than {SHARE}" in refusal
    assert honest.run("check", socket) == 4


@pytest.mark.requirement("S4", "I4")
def test_a_user_has_its_share_of_the_namespaces(daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser) -> None:
    socket = str(daemon.socket)
    taken, refusal = hostile.run("take_namespaces", socket, 1024)
    assert 500 < taken < 512 and f"uid {HOSTILE} has 512 namespaces in use" in refusal
    assert honest.run("check", socket) == 4
    assert honest.run("take_namespaces", socket, 100) == (100, "")
    assert honest.run("check", socket) == 8


@pytest.mark.requirement("S4", "I4")
def test_a_tenant_has_its_share_of_the_sessions_and_its_user_no_other(honest: OtherUser, hostile: OtherUser) -> None:
    tenants = f'[[tenant]]\nname = "a"\nusers = ["{HONEST}"]\n[[tenant]]\nname = "b"\nusers = ["{HOSTILE}"]\n'
    with DaemonProcess(config=f"{tenants}sessions = 20\n") as daemon:
        open_to_group(daemon)
        socket = str(daemon.socket)
        taken, refusal = hostile.run("take_sessions", socket, 30)
        assert taken == 20 and "sessions of tenant 'b': 21 is more than 20" in refusal
        assert honest.run("check", socket, "a") == 4


@pytest.mark.requirement("S4", "I4")
def test_a_user_has_its_share_of_the_specs(daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser) -> None:
    socket = str(daemon.socket)
    taken, refusal = hostile.run("take_specs", socket, NAMESPACES_PER_SESSION_MAX - 1)
    assert 0 < taken < 20 and f"uid {HOSTILE}" in refusal and "16 MiB already" in refusal
    assert honest.run("check", socket) == 4
    assert honest.run("take_specs", socket, 10) == (10, "")
    assert honest.run("check", socket) == 8


@pytest.mark.requirement("S4", "I4")
def test_a_user_does_not_start_proxies_all_the_time(honest: OtherUser, hostile: OtherUser) -> None:
    """Each start costs 0.1 s of a core, although the proxy ends with its connection."""
    refusal = f"processes of uid {HOSTILE} start streams too often"
    with DaemonProcess(config=f"[sessions]\nstreams = {STREAMS}\n") as daemon:
        open_to_group(daemon)
        socket = str(daemon.socket)
        assert honest.run("check", socket) == 4
        begun = time.monotonic()
        started, refusals = hostile.run("churn_streams", socket, 6.0, refusal)
        assert STREAMS <= started <= STREAMS + (time.monotonic() - begun)
        assert refusal in refusals
        assert refusal in daemon.log
        assert status_of(daemon.socket).counters["refused_streams.rate"] > 0
        assert honest.run("take_streams", socket, 2) == (2, ""), "another user has a rate of its own"
        assert honest.run("check", socket) == 8


@pytest.mark.requirement("S4", "I4")
def test_a_user_has_its_share_of_the_stream_proxies(honest: OtherUser, hostile: OtherUser) -> None:
    with DaemonProcess(config="[sessions]\nstreams = 2\n") as daemon:
        open_to_group(daemon)
        socket = str(daemon.socket)
        taken, refusal = hostile.run("take_streams", socket, 4)
        assert taken == 2 and f"2 processes of uid {HOSTILE} use streams already" in refusal
        assert honest.run("take_streams", socket, 2) == (2, "")
        assert honest.run("check", socket) == 4
