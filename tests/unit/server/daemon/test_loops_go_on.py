"""What the daemon and its clients do again and again goes round again after an exception, with a pause."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from ctypes import addressof, c_char
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client import attachment as attachment_module
from kvdepot.client.attachment import Attachment, EngineProcess
from kvdepot.client.backoff import Backoff
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.transports.attach import Attached
from kvdepot.core.calls import AttachReply
from kvdepot.server.arena import populate
from kvdepot.server.arena.populate import Growth, Populator
from kvdepot.server.daemon.node import Node
from kvdepot.server.depot.counters import Counters
from kvdepot.server.io.child_stream import ChildStream
from kvdepot.server.platform.accepting import Acceptor
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.tiers.disk.scrub import Scrubber
from kvdepot.server.tiers.shared.coordinator.settings import CoordinatorSettings
from kvdepot.server.tiers.shared.coordinator_process import CoordinatorProcess
from kvdepot.server.tiers.shared.links import FROM_COORDINATOR, Message, Report

from tests.fakes.raising import Faults, Injected, Point
from tests.rigs.patience import wait_until

LOG = logging.getLogger("loops")
PIECE = 64 << 10


@pytest.mark.parametrize("name", ["after", "sequence", "stored_bytes", "usable", "note"])
def test_the_scrubber_reads_on_after_any_part_of_it_raised(name: str) -> None:
    """Its owner's guard catches what a tick raises."""
    faults, now, read = Faults(Point(name, 2, after=False)), 0.0, list[int]()
    handles = range(1, 401)

    def after(sequence: int, count: int) -> list[int]:
        return [handle for handle in handles if handle > sequence][:count]

    def verify(handle: int, done: Callable[[], None]) -> None:
        read.append(handle)
        done()

    def same(handle: int) -> int:
        return handle

    def second(_: int) -> int:
        return 1 << 20

    objects: Any = SimpleNamespace(
        after=faults.of("after", after), sequence=faults.of("sequence", same),
        stored_bytes=faults.of("stored_bytes", second),
    )  # fmt: skip
    scrubber = Scrubber(
        objects, bytes_per_second=1 << 20, clock=lambda: now, verify=verify, note=faults.of("note", lambda _: None),
        usable=faults.of("usable", lambda: True),
    )  # fmt: skip
    faults.armed = True
    for _ in range(800):
        now += 1.0
        with contextlib.suppress(Injected):
            scrubber.run_once()
    assert faults.raised == 1
    assert set(handles) - set(read) in ({2}, set()), "one may be skipped until the next pass"


async def _nothing(_: bool) -> None:
    pass


def node_with(grpc: Any, done: list[str]) -> Any:
    node: Any = object.__new__(Node)
    counters = Counters()
    node._tick_handle = SimpleNamespace(when=lambda: 0.0)
    node._trim_handle = node._health_task = None
    node._counters, node._guard = counters, engine_guard(counters.add)
    node._depot = SimpleNamespace(tick=lambda: False)
    node._checksums = SimpleNamespace(wake=lambda: None)
    node._log = logging.getLogger("kvdepotd")
    node._spare = SimpleNamespace(refill=lambda: None)
    node._verdicts = node._live = SimpleNamespace(note=lambda: None)
    node._notify = SimpleNamespace(alive=lambda: done.append("alive"))
    node._grpc, node._told_ready = grpc, False
    node._operators = SimpleNamespace(set_serving=_nothing)
    node.readiness = lambda: SimpleNamespace(ready=True)
    return node


def test_the_daemon_s_readiness_is_told_again_until_it_is_told() -> None:
    faults, told = Faults(Point("health", 1, after=False), Point("health", 2, after=True)), list[bool]()
    faults.armed = True

    async def set_serving(serving: bool) -> None:
        faults.through("health", told.append, serving)

    async def run() -> Counters:
        node = node_with(SimpleNamespace(set_serving=set_serving), [])
        node._loop = SimpleNamespace(
            call_later=lambda *_: SimpleNamespace(when=lambda: 0.0), time=lambda: 0.0,
            create_task=asyncio.get_running_loop().create_task,
        )  # fmt: skip
        for _ in range(5):
            node._tick()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        counters: Counters = node._counters
        return counters

    assert asyncio.run(run()).get("internal_errors.task") == 2
    assert told == [True, True], "the one whose answer was lost, and the one that worked"


def test_the_readiness_is_told_when_the_arena_has_grown_and_not_a_tick_later() -> None:
    told = list[bool]()

    async def set_serving(serving: bool) -> None:
        told.append(serving)

    async def run() -> None:
        node = node_with(SimpleNamespace(set_serving=set_serving), [])
        node._growing = SimpleNamespace(now=Growth(PIECE, done=True))
        node._depot.ready = lambda *_: None
        node._arena = SimpleNamespace(rooms=(PIECE,))
        node._notify = lambda _: None
        node._loop = asyncio.get_running_loop()
        for _ in range(2):
            node._grew(0, Growth(0, done=False), Growth(PIECE, done=True))
            await asyncio.sleep(0)

    asyncio.run(run())
    assert told == [True], "once"


def test_a_tick_whose_lag_cannot_be_noted_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    node = node_with(None, done)
    node._told_ready = True
    faults = Faults(Point("observe", 1, after=False))
    faults.armed = True
    monkeypatch.setattr(node._counters, "observe", faults.of("observe", lambda *_: None))
    node._loop = SimpleNamespace(call_later=lambda *_: done.append("again"), time=lambda: 0.0)
    node._tick()
    assert done == ["again", "alive"]
    assert node._counters.get("internal_errors.tick") == 1


def growth_of(path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[[Growth], bool]) -> list[Growth]:
    """What a small arena's populator reports until this is true of a report."""
    monkeypatch.setattr(populate, "PIECE_BYTES", PIECE)
    reports: list[Growth] = []
    with path.open("w+b") as file:
        file.truncate(8 * PIECE)
        mapped = mmap.mmap(file.fileno(), 8 * PIECE)
        populator = Populator(
            fd=file.fileno(), address=addressof(c_char.from_buffer(mapped)), size_bytes=8 * PIECE, threads=4,
            report=reports.append, retry_seconds=0.02,
        )  # fmt: skip
        populator.start()
        wait_until(lambda: bool(reports) and until(reports[-1]))
        populator.stop()
    return reports


@pytest.mark.parametrize("call", [1, 4, 8])
def test_a_piece_of_the_arena_whose_populating_raised_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    faults = Faults(Point("fallocate", call, after=False))
    faults.armed = True
    monkeypatch.setattr(os, "posix_fallocate", faults.of("fallocate", os.posix_fallocate))
    reports = growth_of(tmp_path / "arena", monkeypatch, lambda report: report.done)
    assert any("Injected" in report.reason for report in reports)
    assert (reports[-1].ready_bytes, reports[-1].reason) == (8 * PIECE, "")


def test_an_arena_grows_on_a_host_without_room_for_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("populate-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert growth_of(tmp_path / "arena", monkeypatch, lambda report: report.done)[-1].ready_bytes == 8 * PIECE


def test_a_listener_that_cannot_be_watched_is_watched_later(caplog: pytest.LogCaptureFixture) -> None:
    later: list[Callable[[], None]] = []
    watched: list[int] = []
    left = 3

    def add_reader(fd: int, _: object) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        watched.append(fd)

    loop: Any = SimpleNamespace(
        add_reader=add_reader, remove_reader=lambda _: None, call_later=lambda _, what: later.append(what)
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        Acceptor(listener, print, name="test", loop=loop, log=LOG, throttle=LogThrottle(lambda: 0.0))
        while later:
            later.pop()()
        assert watched == [listener.fileno()]
    assert [record.getMessage() for record in caplog.records] == [
        f"test: cannot accept: {OSError(28, os.strerror(28))}"
    ]


def test_what_a_coordinator_allowed_is_not_used_for_longer_although_every_heartbeat_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first one that does not raise is told what was published."""
    sent, messages, now, armed = list[bytes](), list[Message](), 100.0, list[Callable[[], None]]()
    monkeypatch.setattr(ChildStream, "running", True)
    monkeypatch.setattr(ChildStream, "unsent", False)
    monkeypatch.setattr(ChildStream, "send", lambda _, data: sent.append(data))
    loop: Any = SimpleNamespace(time=lambda: now, call_later=lambda _, what: armed.append(what))
    raises = True

    def heir() -> bool:
        if raises:
            raise Injected("heir")
        return False

    settings = CoordinatorSettings(tmp_path, 1 << 30)
    process = CoordinatorProcess(settings, loop, heir, lambda: now)
    process._message_at = now
    process._on_message = messages.append
    until = now + settings.unheard_seconds
    process._on_data(FROM_COORDINATOR.pack(Report("node", "node", True, 0, 0, 0, 9 << 20, True, 0, until=until)))
    process.publish(1 << 20)
    for _ in range(int(settings.unheard_seconds // settings.heartbeat_seconds) + 2):
        now += settings.heartbeat_seconds
        with pytest.raises(Injected):
            process._tick()
    assert any(isinstance(message, Report) and message.limit_bytes == 1 << 20 for message in messages[1:])
    assert not sent
    raises = False
    process._tick()
    assert len(sent) == 1
    assert set(armed) == {process._tick}


def test_an_attachment_that_failed_is_made_again_with_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(*(Point("hold", call, after=False) for call in (1, 2)))
    faults.armed = True
    pauses: list[float] = []
    ends: list[socket.socket] = []

    def attach(*_: object) -> Attached:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return Attached(ours, AttachReply(1, session=b"%d" % len(ends)), ())

    def jitter() -> float:
        pauses.append(time.monotonic())
        return 1.0

    monkeypatch.setattr(attachment_module, "attach", attach)
    attachment = Attachment(
        Endpoint("/tmp/none.sock"), EngineProcess("e", scheduler=True), map_arena=False,
        backoff=Backoff(0.01, 0.02, jitter), log=LOG,
    )  # fmt: skip
    monkeypatch.setattr(attachment, "_hold", faults.of("hold", attachment._hold))
    attachment.start()
    wait_until(lambda: attachment.session == b"3")
    attachment.close()
    assert len(pauses) == 2
    assert "the attachment failed: Injected('hold')" in caplog.text
    for end in ends:
        end.close()
