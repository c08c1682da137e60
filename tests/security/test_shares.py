"""No user takes what all engines share: sessions, specs of namespaces, stream proxies (S4, I4)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from kvdepot.core.limits import NAMESPACES_PER_SESSION_MAX

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import HOSTILE, Attached, Comparing, OtherUser, needs_root, open_to_group
from tests.rigs.raw_client import RawEngine, dense_spec

pytestmark = needs_root
SHARE: Final = 256
"""Sessions of one user."""
_kept: list[Any] = []
_engine: list[Comparing] = []


# --- what the processes of the users do


def check(socket: str) -> int:
    if not _engine:
        _engine.append(Comparing(Path(socket), "honest"))
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


# --- the tests


@pytest.mark.requirement("S4", "I4")
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
def test_a_user_has_its_share_of_the_specs(daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser) -> None:
    socket = str(daemon.socket)
    taken, refusal = hostile.run("take_specs", socket, NAMESPACES_PER_SESSION_MAX - 1)
    assert 0 < taken < 20 and f"uid {HOSTILE}" in refusal and "16 MiB already" in refusal
    assert honest.run("check", socket) == 4
    assert honest.run("take_specs", socket, 10) == (10, "")
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
