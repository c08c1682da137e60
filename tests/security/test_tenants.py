"""Tenants: who belongs to none is refused, and nobody reaches the KV of another one (S2, S7)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from kvdepot.core.calls import AcquireCall, Kind, LocateCall, ReserveCall
from kvdepot.core.keys import NamespaceSpec
from kvdepot.proto.methods import decode_reply, encode

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import (
    GROUP,
    HONEST,
    HOSTILE,
    Attached,
    Comparing,
    OtherUser,
    needs_root,
    open_to_group,
)
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CALL_SECONDS, CHUNK_TOKENS, RawEngine, dense_spec, keys_of, payload_of, status_of

pytestmark = needs_root
CONFIG: Final = f"""
[[tenant]]
name = "honest"
users = ["{HONEST}"]
[[tenant]]
name = "hostile"
users = ["{HOSTILE}"]
"""
_engine: list[Comparing] = []
_hostile: list[RawEngine] = []


# --- what the processes of the users do


def spec(tenant: str, label: str = "dense") -> NamespaceSpec:
    return replace(dense_spec(label), tenant=tenant)


def check(socket: str) -> int:
    """Store and load with the honest tenant's namespace. Return how many objects were right."""
    if not _engine:
        _engine.append(Comparing(Path(socket), "honest", spec=spec("honest")))
    return _engine[0].check()


def stored() -> list[bytes]:
    return _engine[0].keys(1, 4)


def load_stored(socket: str) -> bool:
    """Return whether the next daemon serves what was stored, with its bytes."""
    _engine.append(Comparing(Path(socket), "honest", spec=spec("honest")))
    return _engine[1].load(stored()) == [payload_of(key) for key in stored()]


def attach(socket: str) -> str:
    """Attach, and return why it is refused."""
    attached = Attached(socket, "stranger")
    attached.close()
    return attached.reply.error


def reach(socket: str, tenant: str, label: str, keys: list[bytes]) -> list[tuple[str, str]]:
    """Try to reach a namespace of another tenant. Return status and details of each answer."""
    if not _hostile:
        _hostile.append(RawEngine(Path(socket), f"hostile-{os.getpid()}", spec=spec("hostile")))
    engine, theirs = _hostile[0], spec(tenant, label)
    namespace, one = theirs.namespace_id(), bytes([Kind.ATTENTION])
    locate = LocateCall(engine.session, namespace, b"".join(keys), 1 << 30)
    acquire = AcquireCall(engine.session, engine.new_lease_id(), namespace, b"".join(keys), one * len(keys))
    reserve = ReserveCall(
        engine.session, engine.new_lease_id(), namespace, keys[0], bytes(16), one, CHUNK_TOKENS.to_bytes(4, "little")
    )
    answers = [_refusal(lambda: engine.register(theirs))]
    for method, call in ((engine.stub.Locate, locate), (engine.stub.Acquire, acquire), (engine.stub.Reserve, reserve)):
        answers.append(_refusal(lambda method=method, call=call: method(encode(call), timeout=patient(CALL_SECONDS))))
    return [(status, details.replace(namespace.hex(), "NAMESPACE")) for status, details in answers]


def look_up(keys: list[bytes]) -> tuple[int, str]:
    """Look the other tenant's chunks up in the own namespace."""
    engine = _hostile[0]
    reply = decode_reply(LocateCall, engine.stub.Locate(engine.locate_call(keys), timeout=patient(CALL_SECONDS)))
    return reply.boundary_tokens, reply.miss


def _refusal(call: Any) -> tuple[str, str]:
    try:
        call()
    except grpc.RpcError as error:
        refusal: Any = error
        return str(refusal.code().name), str(refusal.details())
    return "OK", ""


# --- the tests


@pytest.fixture
def tenants() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as daemon:
        open_to_group(daemon)
        yield daemon


@pytest.mark.requirement("S2", "S7")
def test_a_tenant_reaches_nothing_of_another_one_and_learns_nothing(
    tenants: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    socket = str(tenants.socket)
    assert honest.run("check", socket) == 4
    keys, absent = honest.run("stored"), keys_of("never", 4)
    theirs = hostile.run("reach", socket, "honest", "dense", keys)
    assert [status for status, _ in theirs] == ["PERMISSION_DENIED", "NOT_FOUND", "NOT_FOUND", "NOT_FOUND"]
    assert hostile.run("reach", socket, "honest", "never seen", absent) == theirs
    assert hostile.run("look_up", keys) == hostile.run("look_up", absent) == (0, "unknown")
    assert honest.run("check", socket) == 8


@pytest.mark.requirement("S2", "S7", "I8")
def test_a_tenant_reaches_nothing_of_another_one_after_a_restart(
    tenants: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    socket = str(tenants.socket)
    assert honest.run("check", socket) == 4
    keys = honest.run("stored")
    before = hostile.run("reach", socket, "honest", "dense", keys)
    # On a busy machine checksums take longer than an orderly stop waits: what has none is dropped.
    wait_until(lambda: not status_of(tenants.socket).tiers[0].pending_checksums, "checksums")
    tenants.stop()
    tenants.start()
    open_to_group(tenants)
    with OtherUser(HOSTILE, __name__) as again:
        assert again.run("reach", socket, "honest", "dense", keys) == before
        assert again.run("look_up", keys) == (0, "unknown")
    wait_until(lambda: not status_of(tenants.socket).tiers[0].unverified_objects, "verification")
    assert honest.run("load_stored", socket)


@pytest.mark.requirement("S2")
def test_who_is_in_no_tenant_cannot_attach(honest: OtherUser, hostile: OtherUser) -> None:
    config = CONFIG.replace(f'users = ["{HOSTILE}"]', 'users = ["1"]')
    with DaemonProcess(config=config) as daemon:
        open_to_group(daemon)
        assert f"uid {HOSTILE} is in no tenant" in hostile.run("attach", str(daemon.socket))
        assert honest.run("check", str(daemon.socket)) == 4
    config = f'[[tenant]]\nname = "a"\ngroups = ["{GROUP}"]\n[[tenant]]\nname = "b"\nusers = ["{HONEST}"]\n'
    with DaemonProcess(config=config) as daemon:
        open_to_group(daemon)
        assert hostile.run("attach", str(daemon.socket)) == "", "its group is in a tenant"
        with pytest.raises(RuntimeError, match="and the namespace says 'honest'"), OtherUser(HONEST, __name__) as user:
            user.run("check", str(daemon.socket))
