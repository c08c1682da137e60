"""Where peers are: lines of a file, addresses of a name (ADR 84)."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from kvdepot.server.tiers.peer.places import FILE_BYTES_MAX, DnsName, Finder, Place, PlacesFile

from tests.fakes.thread_room import no_room_for_threads
from tests.rigs.patience import until, wait_until

NODES = [(f"10.0.0.{number}", 7448) for number in range(1, 33)]


def test_each_line_of_a_file_is_a_peer(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    file.write_text("# the fleet\n\n10.0.0.2:7448\n  node-a:7449  # in the next rack\n[fd00::1]:7448\n10.0.0.2:7448\n")
    assert PlacesFile(file).find() == (("10.0.0.2", 7448), ("fd00::1", 7448), ("node-a", 7449))
    file.write_text("")
    assert PlacesFile(file).find() == ()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"10.0.0.1:7448\nnode-a\n", "line 2: "),
        (b"10.0.0.1:99999", "line 1: "),
        (b"\xff\xfe", "utf-8"),
        (b"#" * (FILE_BYTES_MAX + 1), "more than"),
    ],
)
def test_a_file_with_a_line_that_is_no_address_is_refused_as_a_whole(tmp_path: Path, data: bytes, why: str) -> None:
    file = tmp_path / "peers"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=why):
        PlacesFile(file).find()


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "peers")
    assert PlacesFile(tmp_path / "peers").find() == ()


def test_each_address_of_a_name_is_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(host: str, port: int, type: int) -> list[Any]:  # noqa: A002
        assert (host, port, type) == ("kvdepot-peers", 7448, socket.SOCK_STREAM)
        addresses = [("10.0.0.2", port), ("fd00::1", port, 0, 0), ("10.0.0.1", port), ("10.0.0.2", port)]
        return [(socket.AF_INET, type, 6, "", address) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert DnsName("kvdepot-peers", 7448).find() == (("10.0.0.1", 7448), ("10.0.0.2", 7448), ("fd00::1", 7448))


def test_the_resolver_of_this_host_is_asked() -> None:
    assert ("127.0.0.1", 7448) in DnsName("localhost", 7448).find()


class Where:
    """Places that a test decides about."""

    def __init__(self) -> None:
        self.now: tuple[Place, ...] | Exception = ()
        self.looks = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def find(self) -> tuple[Place, ...]:
        self.looks += 1
        self.may_go_on.wait()
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def finding() -> tuple[Where, list[tuple[Place, ...]], list[str], Finder]:
    """Return a finder that looks all the time, where it looks, and what it tells: places and failures."""
    where, found, failed = Where(), list[tuple[Place, ...]](), list[str]()
    loop = asyncio.get_running_loop()
    return where, found, failed, Finder(where.find, loop, every_seconds=0.01, found=found.append, failed=failed.append)


def test_places_are_looked_up_again_and_again_and_a_failure_is_told() -> None:
    async def test() -> None:
        where, found, failed, finder = finding()
        finder.start()
        await until(lambda: found, "it looks at once")
        where.now = tuple(NODES[:2])
        await until(lambda: found[-1] == where.now, "what is new is found")
        where.now = OSError("no such name")
        await until(lambda: "no such name" in failed, "a failure is told")
        where.now = tuple(NODES[:1])
        await until(lambda: found[-1] == where.now, "it goes on after a failure")
        finder.close()
        looks = where.looks
        told = len(found)
        await asyncio.sleep(0.05)
        assert where.looks <= looks + 1 and len(found) == told, "nothing is told after its end"

    asyncio.run(test())


def test_places_are_looked_up_again_after_the_host_had_no_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        _, found, failed, finder = finding()
        with no_room_for_threads(monkeypatch):
            finder.start()
            await until(lambda: failed, "the failure is told")
        await until(lambda: found, "it goes on")
        finder.close()

    asyncio.run(test())


def test_a_look_that_hangs_is_told_again_and_again_until_it_ends() -> None:
    where = Where()
    where.now = tuple(NODES[:1])
    where.may_go_on.clear()

    async def test() -> None:
        found: list[tuple[Place, ...]] = []
        failed: list[str] = []
        finder = Finder(
            where.find, asyncio.get_running_loop(), every_seconds=0.01, found=found.append, failed=failed.append
        )
        finder.start()
        await until(lambda: len(failed) >= 3, "it is told that nothing answers")
        assert set(failed) == {"no answer within 0.01 s"} and not found
        assert where.looks == 1, "no other look begins, which would hang too"
        where.may_go_on.set()
        await until(lambda: found, "its answer is taken, however late")
        finder.close()

    asyncio.run(test())


def test_a_look_that_hangs_holds_up_nobody_and_no_end() -> None:
    where = Where()
    where.may_go_on.clear()

    async def test() -> None:
        finder = Finder(where.find, asyncio.get_running_loop(), every_seconds=0.01, found=lambda _: None, failed=print)
        finder.start()
        await until(lambda: where.looks, "it looks")
        finder.close()

    asyncio.run(test())
    where.may_go_on.set()
    wait_until(lambda: all(one.name != "kvdepot-file" for one in threading.enumerate()), "its thread ends")
