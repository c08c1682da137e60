"""What systemd is told, and what it gives back: datagrams and descriptors."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.server.platform.service_notify import ServiceNotifier, take_kept

PID = 4711


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(os.fspath(tmp_path / "notify"))
        receiver.settimeout(0)
        yield receiver


def _notifier(receiver: socket.socket, clock: Clock, **environ: str) -> ServiceNotifier:
    address = receiver.getsockname()
    return ServiceNotifier({"NOTIFY_SOCKET": address, **environ}, pid=PID, clock=clock)


def _said(receiver: socket.socket) -> list[bytes]:
    said = []
    while True:
        try:
            said.append(receiver.recv(1000))
        except BlockingIOError:
            return said


def test_pings_come_as_often_as_the_watchdog_needs_and_no_oftener(supervisor: socket.socket) -> None:
    clock = Clock()
    notifier = _notifier(supervisor, clock, WATCHDOG_USEC="8000000", WATCHDOG_PID=str(PID))
    for _ in range(100):  # ten seconds of ticks
        notifier.alive()
        clock.now += 0.1
    assert _said(supervisor) == [b"WATCHDOG=1"] * 5


@pytest.mark.parametrize("environ", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}])
def test_no_ping_without_a_watchdog_of_this_process(supervisor: socket.socket, environ: dict[str, str]) -> None:
    _notifier(supervisor, Clock(), **environ).alive()
    assert _said(supervisor) == []


def test_a_watchdog_that_names_no_process_is_this_one_s(supervisor: socket.socket) -> None:
    _notifier(supervisor, Clock(), WATCHDOG_USEC="8000000").alive()
    assert _said(supervisor) == [b"WATCHDOG=1"]


def test_without_a_supervisor_it_is_silent(tmp_path: Path) -> None:
    for address in ({}, {"NOTIFY_SOCKET": os.fspath(tmp_path / "nobody")}):
        notifier = ServiceNotifier({"WATCHDOG_USEC": "1000", **address}, pid=PID, clock=Clock())
        notifier("READY=1")
        notifier.alive()
        notifier.keep("arena", 0)


@pytest.mark.requirement("I8")
def test_what_has_to_arrive_waits_for_room_in_a_queue_that_is_full(supervisor: socket.socket) -> None:
    """Without READY=1 a start fails, and without the descriptors RAM is lost."""
    clock = Clock()
    notifier = _notifier(supervisor, clock, WATCHDOG_USEC="8000000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others:
        others.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                others.sendto(b"STATUS=of another service", supervisor.getsockname())
    notifier.keep("arena", 0)
    for state in ("STATUS=1", "READY=1", "STATUS=2"):
        notifier(state)
    notifier.alive()
    assert set(_said(supervisor)) == {b"STATUS=of another service"}
    notifier.alive()
    kept = [b"FDSTOREREMOVE=1\nFDNAME=arena", b"FDSTORE=1\nFDNAME=arena"]
    assert _said(supervisor) == [*kept, b"READY=1", b"STATUS=2"]
    clock.now += 10
    notifier.alive()
    assert _said(supervisor) == [b"WATCHDOG=1"], "nothing is told twice"


def test_an_abstract_address_is_met() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # autobind: an abstract address
        receiver.settimeout(0)
        name = receiver.getsockname()[1:].decode()
        ServiceNotifier({"NOTIFY_SOCKET": f"@{name}"}, pid=PID, clock=Clock())("READY=1")
        assert _said(receiver) == [b"READY=1"]


def test_a_kept_descriptor_takes_the_place_of_those_before(supervisor: socket.socket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    with (tmp_path / "file").open("rb") as file:
        _notifier(supervisor, Clock()).keep("arena", file.fileno())
    assert supervisor.recv(1000) == b"FDSTOREREMOVE=1\nFDNAME=arena"
    said, (descriptor,), _, _ = socket.recv_fds(supervisor, 1000, 2)
    assert said == b"FDSTORE=1\nFDNAME=arena"
    assert os.read(descriptor, 100) == b"bytes"
    os.close(descriptor)


@pytest.fixture
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Two descriptors as they lie at a service's start, wherever that is in this process."""
    directory = os.open(tmp_path, os.O_RDONLY)
    low = fcntl.fcntl(directory, fcntl.F_DUPFD, 500)
    assert fcntl.fcntl(directory, fcntl.F_DUPFD, low + 1) == low + 1
    os.close(directory)
    monkeypatch.setattr("kvdepot.server.platform.service_notify._FIRST_DESCRIPTOR", low)
    return low, low + 1


def _is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


def test_what_was_kept_is_taken_by_name_and_the_rest_closed(passed: tuple[int, int]) -> None:
    environ = {"LISTEN_PID": str(PID), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "other:arena", "HOME": "/"}
    assert take_kept(environ, pid=PID, names=("data", "arena")) == ([], [passed[1]])
    assert environ == {"HOME": "/"}
    assert not os.get_inheritable(passed[1])
    assert not _is_open(passed[0])
    os.close(passed[1])


@pytest.mark.parametrize("addressee", [{"LISTEN_PID": "1"}, {}])
def test_what_is_for_another_process_is_left_alone(passed: tuple[int, int], addressee: dict[str, str]) -> None:
    environ = {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "arena:arena", **addressee}
    assert take_kept(environ, pid=PID, names=("arena",)) == ([],)
    assert environ == {}
    for descriptor in passed:
        assert _is_open(descriptor)
        os.close(descriptor)
