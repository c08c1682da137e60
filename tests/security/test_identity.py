"""Engines of other users: an engine id is its owner's, and so are session and token (S2, I5, I6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from kvdepot.core.calls import DeclareCall
from kvdepot.proto.methods import decode_reply, encode
from kvdepot.proto.v1 import depot_pb2_grpc as pb_grpc

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import (
    HONEST,
    IN_A_PID_NAMESPACE,
    Attached,
    Comparing,
    OtherUser,
    needs_root,
    needs_unshare,
    open_to_group,
)
from tests.rigs.patience import patient
from tests.rigs.raw_client import CALL_SECONDS, EXTENT, RawEngine, keys_of, payload_of

pytestmark = needs_root
ENGINE: Final = "prod"
KEYS: Final = keys_of("reserved", 4)


# --- what the processes of the users do

_kept: list[Any] = []
_engine: list[Comparing] = []
_reserved: list[tuple[int, bytes]] = []


def begin(socket: str, world_size: int) -> None:
    _engine[:] = [Comparing(Path(socket), ENGINE, world_size=world_size)]


def check() -> int:
    return _engine[0].check()


def ranks_attached() -> int:
    return _engine[0].register(_engine[0].spec).ranks_attached


def reserve() -> set[int]:
    """Reserve, and return the rows that the engine may write from now on."""
    lease, _, extents = _engine[0].reserve(KEYS)
    _reserved[:] = [(lease, extents)]
    return _rows(extents)


def come_back(socket: str) -> list[int]:
    """Attach to the next daemon, and return which lease is lost."""
    _kept.extend(_engine)
    begin(socket, 1)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        return list(_declare(channel, _engine[0].session, _reserved[0][0]).lost)


def write_reserved() -> bool:
    """Return whether what was written under the grant is served with its bytes."""
    lease, extents = _reserved[0]
    _engine[0].write(KEYS, extents)
    _engine[0].commit(lease, len(KEYS))
    return _engine[0].load(KEYS) == [payload_of(key) for key in KEYS]


def attach(socket: str, scheduler: bool, rank: int, world_size: int) -> tuple[bytes, str]:
    """Attach under the engine's id. Return the token, or why it was refused."""
    _kept.append(Attached(socket, ENGINE, scheduler=scheduler, rank=rank, world_size=world_size))
    return _kept[-1].reply.session, _kept[-1].reply.error


def declare_nothing(socket: str, token: bytes) -> str:
    """Say that the engine holds no lease. Return the status of a refusal."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            _declare(channel, token)
        except grpc.RpcError as error:
            refusal: Any = error
            return str(refusal.code().name)
    return ""


def reserve_as(socket: str, engine_id: str) -> set[int]:
    engine = RawEngine(Path(socket), engine_id, label=engine_id)
    _kept.append(engine)
    return _rows(engine.reserve(keys_of("theirs", 4))[2])


def _declare(channel: grpc.Channel, token: bytes, *leases: int) -> Any:
    stub = pb_grpc.DepotStub(channel)  # type: ignore[no-untyped-call]
    return decode_reply(DeclareCall, stub.Declare(encode(DeclareCall(token, leases)), timeout=patient(CALL_SECONDS)))


def _rows(extents: bytes) -> set[int]:
    return {row for _, row, _, _, _ in EXTENT.iter_unpack(extents)}


# --- the tests


@pytest.mark.requirement("S2", "I5", "I6")
def test_another_user_neither_joins_an_engine_nor_ends_its_leases(
    daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    """It takes the place of the rank that is missing, declares that the engine holds nothing, and reserves."""
    socket = str(daemon.socket)
    honest.run("begin", socket, 2)
    token, error = hostile.run("attach", socket, False, 1, 2)
    assert token and not error, "an engine of its own"
    assert honest.run("ranks_attached") == 1
    honest_token, error = honest.run("attach", socket, False, 1, 2)
    assert honest_token and not error and honest_token != token
    granted = honest.run("reserve")
    assert len(granted) == 4
    hostile_token, _ = hostile.run("attach", socket, True, 0, 2)
    assert hostile.run("declare_nothing", socket, hostile_token) == ""
    theirs = hostile.run("reserve_as", socket, "other")
    assert theirs and not theirs & granted, "granted to two"
    assert honest.run("write_reserved")
    assert honest.run("check") == 4


@pytest.mark.requirement("S2", "I5", "I6")
def test_a_rank_of_the_engine_does_not_end_its_leases(daemon: DaemonProcess, honest: OtherUser) -> None:
    """A token is its attachment's, and a rank's is not good for calls."""
    socket = str(daemon.socket)
    honest.run("begin", socket, 2)
    with OtherUser(HONEST, __name__) as rank:
        token, _ = rank.run("attach", socket, False, 1, 2)
        granted = honest.run("reserve")
        assert rank.run("declare_nothing", socket, token) == "PERMISSION_DENIED"
        theirs = rank.run("reserve_as", socket, "other")
        assert theirs and not theirs & granted, "granted to two"
        assert honest.run("write_reserved")
        assert honest.run("check") == 4


@pytest.mark.requirement("S2", "I5", "I6")
def test_another_user_cannot_take_an_engine_id_from_its_engine(
    daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    socket = str(daemon.socket)
    assert hostile.run("attach", socket, True, 0, 3)[1] == ""
    honest.run("begin", socket, 1)
    assert honest.run("check") == 4


@pytest.mark.requirement("S2", "I5", "I6")
def test_after_a_restart_an_engine_is_still_its_owners(
    daemon: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    """The other user attaches first, and says that the engine has more ranks."""
    socket = str(daemon.socket)
    honest.run("begin", socket, 1)
    granted = honest.run("reserve")
    daemon.kill()
    daemon.start()
    open_to_group(daemon)
    tokens = [hostile.run("attach", socket, scheduler, rank, 2)[0] for scheduler, rank in ((True, 0), (False, 1))]
    for token in tokens:
        assert token
    assert hostile.run("declare_nothing", socket, tokens[0]) == ""
    assert not hostile.run("reserve_as", socket, "other") & granted, "granted to two"
    assert honest.run("come_back", socket) == []
    assert honest.run("write_reserved")
    assert honest.run("check") == 4


@needs_unshare
@pytest.mark.requirement("S2", "I5", "I6")
def test_an_engine_of_another_pid_namespace_is_another_engine(daemon: DaemonProcess, honest: OtherUser) -> None:
    """Containers often run as one user, and with one pid for each engine."""
    socket = str(daemon.socket)
    honest.run("begin", socket, 1)
    with OtherUser(HONEST, __name__, under=IN_A_PID_NAMESPACE) as contained:
        contained.run("begin", socket, 1)
        assert contained.run("check") == honest.run("check") == 4
