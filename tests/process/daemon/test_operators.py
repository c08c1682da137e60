"""Operators have a socket and roles of their own, and each of their calls is a line of the audit log."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.operators import Caller, lines_of_file, lines_of_log, methods, outcomes_as
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine, keys_of, payload_of

ADMIN, READER, STRANGER = 61001, 61002, 61003
READERS_GROUP = 61009
NAMES = [method.name for method in methods()]
STREAMS = [method.name for method in methods() if method.server_streaming]
READS = {
    "GetStatus", "ListNamespaces", "ListContents", "ListChunks", "DescribeNamespace", "DescribeChunk",
    "ExplainRequest", "RecordTrace", "ListRequests", "ListQuotas", "GetConfig",
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(options=("--log-level", "debug")) as running:
        yield running


@pytest.mark.requirement("S3")
def test_no_verb_is_without_its_line(daemon: DaemonProcess) -> None:
    seen = len(lines_of_log(daemon.log))
    expected: list[str] = []
    for name in NAMES:
        with Caller(daemon.admin_socket) as caller:
            outcome = caller.outcome(name)
        expected += [f"{name} {one}" for one in (("started", "cancelled") if outcome == "begun" else (outcome,))]
    wait_until(lambda: len(lines_of_log(daemon.log)) >= seen + len(expected), lambda: lines_of_log(daemon.log)[seen:])
    lines = lines_of_log(daemon.log)[seen:]
    # A stream that ended by itself before it was given up is "ok".
    found = Counter(f"{one['verb']} {one['outcome']}" for one in lines)
    ended = {f"{name} ok": f"{name} cancelled" for name in STREAMS if f"{name} started" in expected}
    assert Counter({ended.get(key, key): count for key, count in found.items()}) == Counter(expected)
    assert {one["verb"] for one in lines} == set(NAMES)
    for one in lines:
        assert (one["uid"], one["gid"], one["pid"], one["role"]) == (os.geteuid(), os.getegid(), os.getpid(), "admin")
        assert one["executable"] == str(Path("/proc/self/exe").readlink())
        assert one["command"] == Path("/proc/self/comm").read_text().strip()
        assert one["time"].endswith("+00:00")


@pytest.mark.requirement("S3")
def test_engines_have_no_method_of_operators(daemon: DaemonProcess) -> None:
    seen = len(lines_of_log(daemon.log))
    with Caller(daemon.socket) as caller:
        assert {caller.outcome(name) for name in NAMES} == {"UNIMPLEMENTED"}
    assert len(lines_of_log(daemon.log)) == seen


@pytest.mark.requirement("S2", "S3")
def test_who_goes_around_the_admin_socket_is_nobody(daemon: DaemonProcess) -> None:
    """Also root: only the kernel's word of an accepted connection counts."""
    seen = len(lines_of_log(daemon.log))
    inner = daemon.socket.with_name("d.sock.rpc")
    assert inner.stat().st_mode & 0o777 == daemon.admin_socket.stat().st_mode & 0o777 == 0o600
    with Caller(inner) as caller:
        assert caller.outcome("GetStatus") == "permission_denied"
    (line,) = lines_of_log(daemon.log)[seen:]
    assert (line["uid"], line["role"], line["outcome"]) == (None, None, "permission_denied")


def test_a_call_is_answered_after_its_line(daemon: DaemonProcess) -> None:
    with Caller(daemon.admin_socket) as caller:
        for _ in range(20):
            seen = len(lines_of_log(daemon.log))
            caller.outcome("ListQuotas")
            assert len(lines_of_log(daemon.log)) == seen + 1


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b""])
def test_garbage_on_the_admin_socket_harms_nobody(daemon: DaemonProcess, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger, Caller(daemon.admin_socket) as caller:
        stranger.connect(str(daemon.admin_socket))
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
        assert caller.outcome("GetStatus") == "ok"


@pytest.mark.requirement("I4")
def test_connections_are_bounded_and_leave_nothing_behind(daemon: DaemonProcess) -> None:
    """Those beyond the bound are closed, and those that are silent are closed after a while."""
    before = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
    opened = []
    for _ in range(100):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.connect(str(daemon.admin_socket))
        opened.append(one)
    wait_until(lambda: "64 connections are open" in daemon.log, "the rest is refused")
    with RawEngine(daemon.socket, "next to them") as engine:
        keys = keys_of("next to them", 2)
        engine.store(keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]
    for one in opened:
        one.close()
    wait_until(lambda: len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) <= before + 2, "descriptors are closed")
    with Caller(daemon.admin_socket) as caller:
        assert caller.outcome("GetStatus") == "ok"


@pytest.mark.requirement("S3")
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_roles_are_of_users_and_groups() -> None:
    roles = f'[operators]\nadmins = ["{ADMIN}"]\nreaders = ["@{READERS_GROUP}"]\n'
    config = '[daemon]\nadmin_mode = "0666"\n'
    verbs = [name for name in NAMES if name not in STREAMS]
    with DaemonProcess(config=config + roles, options=("--log-level", "debug")) as daemon:
        daemon.directory.chmod(0o755)
        assert "permission_denied" not in outcomes_as(ADMIN, [], daemon.admin_socket, *verbs).values()
        read = outcomes_as(READER, [READERS_GROUP], daemon.admin_socket, *verbs)
        assert {name for name, outcome in read.items() if outcome != "permission_denied"} == READS - {*STREAMS}
        assert set(outcomes_as(STRANGER, [], daemon.admin_socket, *verbs).values()) == {"permission_denied"}
        lines = lines_of_log(daemon.log)
        assert Counter((one["uid"], one["role"]) for one in lines) == {
            (ADMIN, "admin"): len(verbs), (READER, "reader"): len(verbs), (STRANGER, None): len(verbs),
        }  # fmt: skip
        # A reload takes effect for connections that are open.
        daemon.config = config + f'[operators]\nreaders = ["{STRANGER}"]\n'
        (daemon.directory / "kvdepot.toml").write_text(daemon.config)
        assert kvdepotctl(daemon, "reload").returncode == 0
        assert outcomes_as(STRANGER, [], daemon.admin_socket, "GetStatus") == {"GetStatus": "ok"}
        assert outcomes_as(ADMIN, [], daemon.admin_socket, "GetStatus") == {"GetStatus": "permission_denied"}


@pytest.mark.requirement("T9")
def test_a_reload_with_an_operator_whom_this_host_does_not_have_is_refused_as_a_start_is() -> None:
    """A start would be refused. And while a directory server is away, a reload takes no right of those it knows."""
    config = f'[operators]\nreaders = ["{READER}"]\n'
    with DaemonProcess(config=config) as daemon:
        file = daemon.directory / "kvdepot.toml"
        before = file.read_text()
        file.write_text(before.replace(f'"{READER}"', f'"{READER}", "no-such-user"'))
        for verb in (["reload"], ["config", "diff"]):
            refused = kvdepotctl(daemon, *verb)
            assert (refused.returncode, "no such user or group: no-such-user" in refused.stderr) == (1, True)
        assert "no-such-user" not in kvdepotctl(daemon, "config", "show").stdout
        file.write_text(before)
        assert kvdepotctl(daemon, "reload").returncode == 0


@pytest.mark.requirement("S3")
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_by_default_only_root_and_the_daemons_user_open_the_admin_socket(daemon: DaemonProcess) -> None:
    daemon.directory.chmod(0o755)
    assert outcomes_as(STRANGER, [], daemon.admin_socket, "GetStatus") == {"GetStatus": "UNAVAILABLE"}


@pytest.mark.requirement("S3")
def test_the_audit_file_gets_each_line_and_is_opened_again_by_a_reload(tmp_path: Path) -> None:
    path, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    with DaemonProcess(config=f'[audit]\npath = "{path}"\n') as daemon:
        assert path.stat().st_mode & 0o777 == 0o600
        assert kvdepotctl(daemon, "status").returncode == 0
        assert [one["verb"] for one in lines_of_file(path)] == ["GetStatus"]
        path.rename(moved)
        assert kvdepotctl(daemon, "reload").returncode == 0
        assert [one["verb"] for one in lines_of_file(moved) + lines_of_file(path)] == ["GetStatus", "Reload"]
        assert kvdepotctl(daemon, "loads", "off").returncode == 0
        last = lines_of_file(path)[-1]
        assert (last["verb"], last["outcome"], last["arguments"]["on"]) == ("SetSwitch", "ok", False)
        assert lines_of_log(daemon.log) == []
        lines = len(lines_of_file(path))
        assert daemon.stop() == 0
        daemon.start()
        assert kvdepotctl(daemon, "status").returncode == 0
        assert len(lines_of_file(path)) == lines + 1, "a restart appends"


@pytest.mark.parametrize("place", ["/dev/full", "gone/audit.jsonl"])
def test_an_audit_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, place: str) -> None:
    daemon = DaemonProcess(config=f'[audit]\npath = "{tmp_path / place}"\n')
    try:
        daemon.start(ready=False)
        wait_until(lambda: "cannot start: " in daemon.log, "it is refused")
        assert "audit.path: cannot use" in daemon.log
    finally:
        daemon.close()


@pytest.mark.requirement("S3")
def test_who_only_looks_fills_no_log_and_who_is_refused_or_changes_something_is_there() -> None:
    with DaemonProcess() as daemon, Caller(daemon.admin_socket) as caller:
        outcomes = [caller.outcome(name) for name in sorted(READS - {*STREAMS})]
        refused = [one for one in outcomes if one != "ok"]
        assert [one["outcome"] for one in lines_of_log(daemon.log)] == refused != outcomes
        assert caller.outcome("SetSwitch") == lines_of_log(daemon.log)[-1]["outcome"]
        with Caller(daemon.directory / "d.sock.rpc") as nobody:
            nobody.outcome("GetStatus")
        assert [one["outcome"] for one in lines_of_log(daemon.log)][len(refused) + 1 :] == ["permission_denied"]


def test_in_a_log_of_json_a_line_is_an_object_at_every_level() -> None:
    daemon = DaemonProcess(options=("--log-format", "json", "--log-level", "error"))
    try:
        daemon.start(ready=False)
        wait_until(daemon.admin_socket.exists, "it listens")
        with Caller(daemon.admin_socket) as caller:
            wait_until(lambda: caller.outcome("Reload") != "UNAVAILABLE", "it answers")
        *_, event = [json.loads(line) for line in daemon.log.splitlines()]
        audit = event["audit"]
        assert (event["event"], audit["verb"], audit["outcome"]) == ("operator call", "Reload", "config_error")
    finally:
        daemon.close()


def test_a_socket_of_another_name_is_used_and_named(tmp_path: Path) -> None:
    place = tmp_path / "operators.sock"
    with DaemonProcess(config=f'[daemon]\nadmin = "unix://{place}"\n') as daemon:
        assert not daemon.admin_socket.exists()
        refused = kvdepotctl(daemon, "status")
        assert (refused.returncode, "name it with --admin" in refused.stderr) == (3, True)
        assert kvdepotctl(daemon, "--admin", f"unix://{place}", "status").returncode == 0
        assert daemon.stop() == 0
        assert not place.exists()


@pytest.mark.requirement("T4")
def test_a_stop_ends_a_stream_and_leaves_no_socket() -> None:
    with DaemonProcess() as daemon:
        with grpc.insecure_channel(f"unix:{daemon.admin_socket}") as channel:
            replies: Any = channel.unary_stream("/kvdepot.v1.Operator/RecordTrace", None, None)(b"")
            next(replies)
            assert daemon.stop() == 0
            with pytest.raises(grpc.RpcError):
                list(replies)
        assert [one["outcome"] for one in lines_of_log(daemon.log)] == ["started", "cancelled"]
        assert not [path for path in daemon.directory.iterdir() if path.is_socket()]
