"""What a line of the audit log says: everything, bounded, escaped, and no secret."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.control import PinCall, QuotaSubject, ReloadCall, SetQuotaCall, Switch, SwitchCall
from kvdepot.core.errors import InvalidArgument, PermissionDenied
from kvdepot.core.records import ExplainCall
from kvdepot.proto.methods import BY_CALL, CONTROL, OPERATOR
from kvdepot.server.config.operators import Operators, Role, resolve
from kvdepot.server.platform import audit_log
from kvdepot.server.platform.audit_log import AuditLog
from kvdepot.server.platform.peers import Peer
from kvdepot.server.rpc.operator_calls import TEXT_MAX, OperatorCalls, shown

PEER = Peer(7, 61001, 61001, frozenset({61001, 61005}), "/bin/x", "x\x1b[2J")
LOG = logging.getLogger("tests.audit")


class Lines(AuditLog):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__("", LOG, lambda _: None)
        self.lines: list[dict[str, Any]] = []

    def put(self, fields: Any, *, level: int = logging.INFO) -> None:
        self.lines.append(json.loads(json.dumps(fields)))


def made(call: object, operators: Operators, raises: BaseException | None = None) -> dict[str, Any]:
    """Return the line of a call that PEER makes, and whose handler raises."""
    lines = Lines()
    method = BY_CALL[type(call)]
    request = method.call.encode(call).SerializeToString()

    async def run() -> None:
        async with OperatorCalls(lambda _: PEER, operators, lines).call(method, "name") as one:
            one.decode(request)
            if raises is not None:
                raise raises

    with contextlib.suppress(PermissionDenied, InvalidArgument, ZeroDivisionError, asyncio.CancelledError):
        asyncio.run(run())
    (line,) = lines.lines
    return line


def test_arguments_are_named_bounded_and_masked() -> None:
    line = made(SwitchCall(Switch.LOADS, on=False, namespace_id=b"\x01" * 16), resolve(["61001"], ()))
    assert line["arguments"] == {"switch": "loads", "on": False, "namespace_id": "01" * 16}
    subject = QuotaSubject("t", "https://me:s3cret@host/x?token=t0ken", "*")
    quota = json.dumps(shown(SetQuotaCall(subject, 1)))
    assert "s3cret" not in quota and "t0ken" not in quota
    assert len(shown(ExplainCall("x" * 400))["request_id"]) == TEXT_MAX
    assert len(json.dumps(shown({str(number): b"x" * 400 for number in range(1000)}))) < 64 << 10


def test_a_line_is_one_line_whatever_it_names() -> None:
    line = json.dumps({"arguments": shown(ExplainCall("a\r\n\x1b[2J\u202e"))})
    assert line.isprintable() and line.isascii()
    assert json.loads(line)["arguments"]["request_id"] == "a\r\n\x1b[2J\u202e"


@pytest.mark.parametrize(
    ("raises", "outcome"),
    [
        (None, "ok"),
        (InvalidArgument("no"), "invalid_argument"),
        (ZeroDivisionError(), "internal"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_the_outcome_is_the_code_of_the_refusal(raises: BaseException | None, outcome: str) -> None:
    line = made(ReloadCall(dry_run=False), resolve(["@61005"], ()), raises)
    assert (line["outcome"], line["verb"], line["role"]) == (outcome, "Reload", "admin")
    assert (line["uid"], line["gid"], line["pid"], line["executable"]) == (61001, 61001, 7, "/bin/x")


@pytest.mark.requirement("S3")
def test_a_reader_changes_nothing() -> None:
    reader = resolve((), ["@61005"])
    assert made(ExplainCall("r"), reader)["outcome"] == "ok"
    assert made(ReloadCall(dry_run=True), reader)["outcome"] == "ok"
    for call in (ReloadCall(dry_run=False), PinCall(bytes(16), b"", 60.0), SwitchCall(Switch.LOADS, on=True)):
        line = made(call, reader)
        assert (line["outcome"], line["role"]) == ("permission_denied", "reader")
        assert line["arguments"], "what was tried is said"
    assert made(ExplainCall("r"), resolve((), ()))["outcome"] == "permission_denied"


def test_a_message_that_is_none_has_a_line() -> None:
    lines = Lines()
    calls = OperatorCalls(lambda _: PEER, resolve(["61001"], ()), lines)

    async def run() -> None:
        async with calls.call(CONTROL["Evict"], "name") as one:
            one.decode(b"\xff\xff\xff")

    with pytest.raises(InvalidArgument):
        asyncio.run(run())
    assert [(one["verb"], one["arguments"]) for one in lines.lines] == [("Evict", None)]


@pytest.mark.requirement("S3")
@pytest.mark.parametrize(("method", "error"), [("Evict", PermissionDenied), ("GetStatus", InvalidArgument)])
def test_a_reader_s_message_that_is_none_is_denied_where_it_would_change_something(
    method: str, error: type[Exception]
) -> None:
    calls = OperatorCalls(lambda _: PEER, resolve((), ["61001"]), Lines())

    async def run() -> None:
        async with calls.call({**OPERATOR, **CONTROL}[method], "name") as one:
            one.decode(b"\xff\xff\xff")

    with pytest.raises(error):
        asyncio.run(run())


def test_names_of_operators_are_users_groups_and_ids() -> None:
    found = resolve(["root", "@root", "61001"], ["@61002", "nobody-of-this-name", "@no-such-group"])
    assert found.users[Role.ADMIN] == {0, 61001} and found.groups[Role.ADMIN] == {0}
    assert found.groups[Role.READER] == {61002}
    assert found.unknown == ("nobody-of-this-name", "@no-such-group")
    assert found.role(61007, [5, 61002]) is Role.READER
    assert found.role(61001, [61002]) is Role.ADMIN
    assert found.role(61008, [5]) is None
    assert found.role(os.geteuid(), []) is Role.ADMIN


def test_every_method_has_a_role() -> None:
    assert not OPERATOR.keys() & CONTROL.keys(), "a name of Operator would make a change of Control readable"


# The file


def _open(tmp_path: Path, count: Callable[[str], None] = lambda _: None) -> AuditLog:
    return AuditLog(str(tmp_path / "audit"), LOG, count)


@pytest.mark.requirement("I4")
def test_a_full_device_loses_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counted: list[str] = []
    log = _open(tmp_path, counted.append)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._fd)
    os.close(full)

    async def run() -> None:
        await log.write({"verb": "Evict"})
        await log.close()

    asyncio.run(run())
    assert 'No space left on device: {"verb": "Evict"}' in caplog.text
    assert counted == ["failed_audit_lines"]


@pytest.mark.requirement("I4")
def test_a_device_that_hangs_holds_up_nobody_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "WAIT_SECONDS", 0.05)
    goes_on = threading.Event()
    log = _open(tmp_path)
    log._work.put(goes_on.wait)  # type: ignore[arg-type]

    async def run() -> None:
        await log.write({"verb": "Evict"})
        assert "audit line not written to its file: the audit file took none" in caplog.text
        log.reopen()
        goes_on.set()
        monkeypatch.setattr(audit_log, "WAIT_SECONDS", 60.0)
        await log.write({"verb": "Pin"})
        await log.close()

    asyncio.run(run())
    assert [json.loads(line)["verb"] for line in (tmp_path / "audit").read_text().splitlines()] == ["Evict", "Pin"]


@pytest.mark.requirement("I4")
def test_a_device_that_hangs_holds_up_no_callback_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "WAIT_SECONDS", 60.0)
    goes_on = threading.Event()
    log = _open(tmp_path)
    log._work.put(goes_on.wait)  # type: ignore[arg-type]

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        await asyncio.wait_for(log.close(), 30.0)

    asyncio.run(run())
    assert log._ended.is_set()


def test_a_line_that_fails_at_the_end_is_in_the_daemons_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counted: list[str] = []
    log = _open(tmp_path, counted.append)

    async def run() -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, log._fd)
        os.close(full)
        log.put({"verb": "Evict"})
        await log.close()

    asyncio.run(run())
    assert 'No space left on device: {"verb": "Evict"}' in caplog.text
    assert counted == ["failed_audit_lines"]


def test_a_file_that_cannot_be_opened_again_stays_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, moved = _open(tmp_path), tmp_path / "moved"

    async def run() -> None:
        await log.write({"verb": "Evict"})
        (tmp_path / "audit").rename(moved)
        (tmp_path / "audit").symlink_to("/dev/null")
        log.reopen()
        await log.write({"verb": "Pin"})
        await log.close()

    asyncio.run(run())
    assert len(moved.read_text().splitlines()) == 2
    assert "audit file not opened again" in caplog.text
