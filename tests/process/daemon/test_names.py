"""Names with control characters are refused at the door, so neither a terminal nor the log ever has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from kvdepot.core.calls import AcquireCall, AttachCall, EndRequestCall, Kind, RequestEnd
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.registration import RegisterCall
from kvdepot.proto import codec
from kvdepot.proto.methods import encode
from kvdepot.proto.status import from_status

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.raw_client import RawEngine, attach_socket, dense_spec, exchange, keys_of

_ESCAPES = "\x1b]0;PWNED\x07\x1b[2J\n2026-11-25T00:00:00.000+00:00 info forged"
"""Changes the title of a terminal, clears it, and begins a line of the log."""


@pytest.fixture(scope="module")
def engine(daemon: DaemonProcess) -> Iterator[RawEngine]:
    with RawEngine(daemon.socket, "honest") as attached:
        attached.store(keys_of("prompt", 2), "request")
        yield attached


def _check_refused(call: Any, message: object, field: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        call(message)
    metadata = [(entry.key, entry.value) for entry in raised.value.trailing_metadata()]
    error = from_status(raised.value.code(), raised.value.details(), metadata)
    assert isinstance(error, InvalidArgument)
    assert error.message == f"{field}: it has the control character U+001B, and no name may have one"


def _check_clean(daemon: DaemonProcess) -> None:
    """Neither what operators see nor the log has anything of the escapes."""
    for arguments in (["status"], ["ls"], ["explain"], ["requests"], ["status", "--json"]):
        printed = kvdepotctl(daemon, *arguments)
        assert "PWNED" not in printed.stdout + printed.stderr
    log = daemon.log
    assert "\x1b" not in log and "\x07" not in log
    assert not any(line.startswith("2026-11-25T00:00:00.000") for line in log.splitlines())


@pytest.mark.requirement("S6")
def test_an_engine_id_with_control_characters_attaches_nobody(daemon: DaemonProcess, engine: RawEngine) -> None:
    with attach_socket(daemon.attach_socket) as connection:
        call = AttachCall(1, 1, f"engine{_ESCAPES}", scheduler=True, rank=0, world_size=1)
        reply, descriptors = exchange(connection, codec.encode_attach_call(call))
    assert (reply.protocol, descriptors) == (0, [])
    assert "engine_id: it has the control character U+001B" in reply.error
    _check_clean(daemon)


@pytest.mark.requirement("S6")
@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.label", dense_spec(f"label{_ESCAPES}"[:90])),
        ("spec.tenant", replace(dense_spec(), tenant=f"tenant{_ESCAPES}")),
        ("spec.epoch", replace(dense_spec(), epoch=f"epoch{_ESCAPES}")),
        ("spec.identity", replace(dense_spec(), identity={f"model{_ESCAPES}": '"toy"'})),
        ("spec.identity[]", replace(dense_spec(), identity={"model": f'"toy{_ESCAPES}"'})),
    ],
)
def test_a_spec_with_control_characters_is_not_registered(
    daemon: DaemonProcess, engine: RawEngine, field: str, spec: NamespaceSpec
) -> None:
    _check_refused(engine.stub.RegisterNamespace, encode(RegisterCall(engine.session, spec)), field)
    _check_clean(daemon)


@pytest.mark.requirement("S6")
def test_requests_with_control_characters_leave_no_record(daemon: DaemonProcess, engine: RawEngine) -> None:
    keys, request = keys_of("prompt", 2), f"request{_ESCAPES}"
    kinds = bytes([Kind.ATTENTION]) * 2
    acquire = AcquireCall(engine.session, engine.new_lease_id(), engine.namespace, b"".join(keys), kinds, request)
    end = EndRequestCall(engine.session, "request", RequestEnd(1, 1, f"wrong{_ESCAPES}"))
    _check_refused(engine.stub.Locate, engine.locate_call(keys, request), "request_id")
    _check_refused(engine.stub.Acquire, encode(acquire), "request_id")
    _check_refused(engine.stub.EndRequest, encode(end), "end.miss")
    assert engine.load(keys, "request") is not None
    _check_clean(daemon)
