"""Who may have a proxy, how many and how often, and what is left of one that ended."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.errors import NoRoom, NotReady
from kvdepot.server.attach import streams
from kvdepot.server.attach.streams import STARTS_PER_SECOND, StreamProxies, StreamProxy
from kvdepot.server.platform.identity import Owner

SLEEPER = [sys.executable, "-S", "-c", "import sys; sys.exit(len(sys.stdin.read()))"]
"""Ends when its standard input does, with the number of bytes there."""


class Loop:
    """As much of the loop as proxies need, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.readers: dict[int, Callable[[], None]] = {}

    def time(self) -> float:
        return self.now

    def add_reader(self, fd: int, callback: Callable[..., None], *arguments: object) -> None:
        self.readers[fd] = lambda: callback(*arguments)

    def remove_reader(self, fd: int) -> None:
        del self.readers[fd]


class Rig:
    """Proxies that are processes which do nothing. `spawned` has the descriptors that each got."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, count_max: int, tenants: int) -> None:
        self.loop = Loop()
        self.counted: Counter[str] = Counter()
        self.socket = folder / "d.sock"
        self.spawned: list[tuple[int, ...]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.fails = False
        monkeypatch.setattr(streams, "spawn", self._spawn)
        loop: Any = self.loop
        self.proxies = StreamProxies(
            arena_fds=(0, 1), parts=(2, 3), part_of=lambda tenant: int(tenant == "b"), count_max=count_max, mode=0o600,
            group_id=-1, loop=loop, log=logging.getLogger("kvdepot"), count=lambda name: self.counted.update([name]),
            tenants=tenants,
        )  # fmt: skip

    def _spawn(self, module: str, arguments: object, files: tuple[int, ...]) -> tuple[object, socket.socket, int]:
        if self.fails:
            raise OSError(11, "no room for processes")
        process = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE)
        self.processes.append(process)
        self.spawned.append(files)
        lifeline, other = socket.socketpair()
        other.close()
        return process, lifeline, os.pidfd_open(process.pid)

    def start(self, uid: int = 1, tenant: str | None = None) -> StreamProxy:
        proxy = self.proxies.start(self.socket, Owner(uid, tenant=tenant))
        self.socket.with_name(f"{self.socket.name}.{proxy.name}").touch()  # as the proxy makes it
        return proxy

    def end(self, number: int, data: bytes = b"") -> None:
        """Have a proxy end by itself, and the loop see it."""
        self.processes[number].communicate(data)
        self.loop.readers[self.pidfds[number]]()

    @property
    def pidfds(self) -> list[int]:
        return list(self.loop.readers)

    def close(self) -> None:
        self.proxies.close()
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Rig]]:
    made: list[Rig] = []

    def rig(count_max: int = 2, tenants: int = 0) -> Rig:
        made.append(Rig(tmp_path, monkeypatch, count_max, tenants))
        return made[-1]

    yield rig
    for one in made:
        one.close()


def test_a_user_has_its_share_and_four_users_have_all(make: Callable[..., Rig]) -> None:
    rig = make(2)
    started = [rig.start(uid) for uid in (1, 2, 3, 4) for _ in range(2)]
    assert [proxy.name for proxy in started] == [f"stream-{number}" for number in range(8)]
    with pytest.raises(NoRoom, match=r"2 processes of .*1"):
        rig.start(1)
    with pytest.raises(NoRoom, match="8 processes use streams already"):
        rig.start(5)
    assert rig.counted == {"refused_streams.share": 2}


@pytest.mark.parametrize(("count_max", "tenants", "share"), [(2, 2, 4), (2, 4, 2), (1, 64, 1)])
def test_a_tenant_has_an_equal_part_whatever_users_it_has(
    make: Callable[..., Rig], count_max: int, tenants: int, share: int
) -> None:
    rig = make(count_max, tenants)
    for number in range(share):
        assert rig.start(100 + number, "a").owner == Owner(100 + number, tenant="a")
    with pytest.raises(NoRoom, match=f"{share} processes of"):
        rig.start(200, "a")
    rig.start(300, "b")
    assert rig.spawned == [(0, 1, 2)] * share + [(0, 1, 3)], "each has the data of its tenant"


def test_without_tenants_a_name_is_no_share(make: Callable[..., Rig]) -> None:
    rig = make(1)
    for uid in range(4):
        rig.start(uid, "a")


def test_starts_of_a_user_are_as_many_at_once_as_its_share_and_then_one_a_second(make: Callable[..., Rig]) -> None:
    rig = make(2)
    for number in range(2):
        rig.start()
        rig.end(0)
        assert not rig.pidfds, number
        rig.processes.pop()
    with pytest.raises(NotReady, match="start streams too often: 2 at once"):
        rig.start()
    assert rig.counted == {"refused_streams.rate": 1}
    rig.start(2)
    rig.loop.now += 1 / STARTS_PER_SECOND
    rig.start()
    with pytest.raises(NotReady):
        rig.start()


def test_one_that_ends_is_told_of_and_leaves_nothing(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(1)
    proxy = rig.start()
    rig.end(0, b"123")
    assert f"proxy ended: stream-0, pid {proxy.pid}, status 3" in caplog.text
    assert proxy.lifeline.fileno() == -1 and not rig.pidfds
    assert list(rig.socket.parent.iterdir()) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(proxy.pidfd)
    rig.loop.now += 1 / STARTS_PER_SECOND
    assert rig.start().name == "stream-0"


def test_one_that_was_killed_is_not_told_of(make: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = make(1)
    proxy = rig.start()
    proxy.kill()
    rig.end(0)
    assert "proxy ended" not in caplog.text
    assert proxy.lifeline.fileno() == -1


def test_all_are_killed_at_the_end_and_leave_nothing(make: Callable[..., Rig]) -> None:
    rig = make(2)
    started = [rig.start(), rig.start()]
    rig.proxies.close()
    assert [process.wait() for process in rig.processes] == [-9, -9]
    assert [proxy.lifeline.fileno() for proxy in started] == [-1, -1]
    assert not rig.pidfds and list(rig.socket.parent.iterdir()) == []


def test_what_an_earlier_run_left_next_to_the_socket_is_removed_and_nothing_else(make: Callable[..., Rig]) -> None:
    rig = make()
    for name in ("d.sock.stream-0", "d.sock.stream-17", "d.sock", "d.sock.admin", "e.sock.stream-0"):
        (rig.socket.parent / name).touch()
    rig.proxies.tidy(rig.socket)
    assert {path.name for path in rig.socket.parent.iterdir()} == {"d.sock", "d.sock.admin", "e.sock.stream-0"}


def test_a_path_that_no_socket_can_have_and_a_host_without_room_are_told_and_take_no_place(
    make: Callable[..., Rig],
) -> None:
    rig = make(1)
    place, rig.socket = rig.socket, rig.socket.with_name("d" * 100)
    with pytest.raises(NotReady, match="longer than a socket's path"):
        rig.start()
    rig.socket, rig.fails = place, True
    with pytest.raises(NotReady, match=r"no proxy can be started: .*no room for processes"):
        rig.start()
    rig.fails = False
    rig.loop.now += 1 / STARTS_PER_SECOND
    rig.start()


def test_a_larger_share_of_a_reload_counts_for_proxies_and_for_starts(make: Callable[..., Rig]) -> None:
    rig = make(1)
    rig.start()
    rig.proxies.count_max = 3
    rig.loop.now += 2 / STARTS_PER_SECOND
    rig.start(), rig.start()
    with pytest.raises(NoRoom, match="3 processes"):
        rig.start()
