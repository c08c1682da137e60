"""A janitor that is late, and leases that say how long they last: on servers whose requests take time (ADR 0052)."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.server.storage.shared_layout import JANITOR, node_file
from kvdepot.server.tiers.shared.coordinator import nodes as nodes_module
from kvdepot.server.tiers.shared.coordinator import spare
from kvdepot.server.tiers.shared.coordinator.files import ServerClock, replace_small, taken_bytes
from kvdepot.server.tiers.shared.coordinator.janitor import Janitor
from kvdepot.server.tiers.shared.coordinator.main import Turns
from kvdepot.server.tiers.shared.coordinator.pace import LEASE_SECONDS_MAX
from kvdepot.server.tiers.shared.coordinator.records import JanitorRecord, Lease, NodeRecord
from kvdepot.server.tiers.shared.links import Report

from tests.fakes.shared_directory import MIB, Nodes, lease_of, put
from tests.fakes.slow_server import SlowServer

FILES = 1_200
"""More than two steps of a count meet."""


def record_of(nodes: Nodes) -> JanitorRecord:
    record = JanitorRecord.unpack((nodes.root / JANITOR).read_bytes())
    assert record is not None
    return record


def test_a_node_that_renews_its_file_falls_silent_for_no_janitor_that_looks_seldom(tmp_path: Path) -> None:
    """A look and the pause after it may take longer than a node may be silent; what it has renewed is seen then."""
    now = 1_000.0
    for folder in (".nodes", ".tmp"):
        (tmp_path / folder).mkdir()
    server = ServerClock(lambda: now)

    def renew(node: str) -> None:
        replace_small(tmp_path, node_file(node), NodeRecord(0, 0, Lease()).pack(), f"{node}-1.tmp")
        os.utime(tmp_path / node_file(node), (now, now))
        server.stamped(int(now) * 1_000_000_000)

    found = nodes_module.Nodes(tmp_path, lambda: now, server, silent_seconds=600.0)
    renew("ended")
    renew("alive")
    list(found.look(()))
    gone: list[str] = []
    for _ in range(5):
        now += 700
        renew("alive")
        assert found.gone() == gone, "nobody has looked meanwhile"
        list(found.look(()))
        gone = ["ended"]
        assert found.gone() == gone


def begin_count(nodes: Nodes) -> Janitor:
    """The janitor has met some files of a count, and not all."""
    janitor = nodes.coordinators[nodes.janitor].janitor
    for number in range(FILES):
        put(nodes.root, number)
    janitor._counted_at = None
    assert janitor.work()
    assert janitor.counting is not None
    return janitor


@pytest.mark.requirement("I4")
def test_a_late_janitor_goes_on_with_its_count_by_a_later_term(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    janitor, term = begin_count(nodes), lease_of(nodes.root).term
    nodes.clock.seconds += 30
    assert janitor.work(), "counting needs no lease"
    assert not janitor.holding
    nodes.go_on(1)
    assert nodes.reports[0].objects == 0, "what was counted is told by a janitor alone"
    nodes.go_on(4)
    assert nodes.reports[0].is_janitor
    assert lease_of(nodes.root).term == term + 1
    assert nodes.reports[0].objects == FILES
    assert janitor._count_began < nodes.clock.seconds - 30, "the same count"


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(("errors", "ends"), [(6, True), (1_000, False)])
def test_a_count_asks_again_where_a_server_answers_errors_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: int, *, ends: bool
) -> None:
    """A soft mount does so while its server pauses. Each file is counted once."""
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    janitor, look = begin_count(nodes), os.stat
    began, left = janitor._count_began, [errors]

    def fails(*arguments: Any, **named: Any) -> os.stat_result:
        if "dir_fd" in named and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return look(*arguments, **named)

    monkeypatch.setattr(os, "stat", fails)
    nodes.go_on(14)
    assert (janitor._count_began == began) == ends
    assert ("given up" in nodes.reports[0].reason) != ends
    if ends:
        on_disk = sum(taken_bytes(path.lstat()) for path in (nodes.root, *nodes.root.rglob("*")))
        assert nodes.reports[0].objects == FILES
        assert on_disk <= nodes.reports[0].used_bytes <= on_disk + (1 << 16)


@pytest.mark.requirement("T3")
def test_a_late_janitor_drops_its_count_when_another_was_janitor(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(20)
    janitor, late = begin_count(nodes), nodes.janitor
    nodes.stopped.add(late)
    nodes.go_on(20)
    nodes.stopped.clear()
    nodes.go_on(1)
    assert janitor.counting is None
    assert janitor._counted_at is None, "it did not end"


@pytest.mark.requirement("T3")
def test_a_late_janitor_drops_its_count_when_a_node_has_seen_a_later_lease(tmp_path: Path) -> None:
    """The lease file of another may have been written over by one that came late."""
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    janitor = begin_count(nodes)
    later = NodeRecord(0, MIB, Lease("other-1", lease_of(nodes.root).term + 1))
    (nodes.root / node_file("other-2")).write_bytes(later.pack())
    nodes.clock.seconds += 30
    nodes.coordinators[0].heartbeat()
    assert janitor.counting is None
    assert lease_of(nodes.root).term > later.lease.term


@pytest.mark.requirement("T3")
def test_a_renewal_that_took_longer_than_the_lease_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    janitor = nodes.coordinators[0].janitor

    def hangs(root: Path, file: str, data: bytes, temporary: str) -> None:
        replace_small(root, file, data, temporary)
        nodes.clock.seconds += 20 * (file == JANITOR)

    with monkeypatch.context() as patched:
        patched.setattr(spare, "replace_small", hangs)
        nodes.coordinators[0].heartbeat()
    assert not janitor.holding
    nodes.go_on(6)
    assert janitor.holding


@pytest.mark.requirement("T3")
@pytest.mark.parametrize(("lasts", "holds"), [(0, 10), (100, 100), (1 << 40, LEASE_SECONDS_MAX)])
def test_a_lease_is_followed_when_it_is_older_than_it_says(tmp_path: Path, lasts: int, holds: float) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(10)
    dead = nodes.janitor
    nodes.stopped.add(dead)
    (nodes.root / JANITOR).write_bytes(replace(record_of(nodes), lasts_seconds=lasts).pack())
    lease = lease_of(nodes.root)
    nodes.go_on(6, each=holds / 10)
    assert lease_of(nodes.root) == lease
    nodes.go_on(6, each=holds / 10)
    assert lease_of(nodes.root).term > lease.term
    assert lease_of(nodes.root).holder != lease.holder


def test_a_lease_of_a_version_that_does_not_say_how_long_it_lasts_is_understood(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    record = record_of(nodes)
    values = json.loads(record.pack())
    for name in ("lasts", "counting", "counted"):
        del values[name]
    old = JanitorRecord.unpack(json.dumps(values).encode())
    assert old == replace(record, lasts_seconds=0)


@pytest.mark.requirement("I4")
def test_a_janitor_grants_nothing_before_it_has_read_the_nodes_files(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(20)
    heir = 1 - nodes.janitor
    nodes.stopped.add(nodes.janitor)
    shares = record_of(nodes).shares
    nodes.coordinators[heir].publish(0, 8 * MIB)
    for _ in range(12):
        nodes.clock.seconds += 2
        nodes._grow_older(2)
        nodes.coordinators[heir].heartbeat()  # and no step of work
    assert nodes.coordinators[heir].janitor.holding
    assert record_of(nodes).shares == shares
    nodes.coordinators[heir].work()
    assert record_of(nodes).shares != shares


@pytest.mark.requirement("I4")
def test_a_grant_that_could_not_be_written_is_not_in_the_lease_that_is_contended_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    coordinator, shares = nodes.coordinators[0], record_of(nodes).shares
    coordinator.publish(0, 8 * MIB)
    nodes.clock.seconds += 2
    coordinator.heartbeat()
    with monkeypatch.context() as patched:
        patched.setattr(spare, "replace_small", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        coordinator.work()
    nodes.clock.seconds += 30
    message = coordinator.heartbeat()
    assert isinstance(message, Report)
    assert lease_of(nodes.root).term == 2
    assert record_of(nodes).shares == shares
    nodes.go_on(6)
    assert record_of(nodes).shares != shares


def test_the_janitor_does_not_hurry_and_who_waits_for_it_does(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    coordinator = nodes.coordinators[0]
    coordinator.publish(1 << 40)
    assert not coordinator.allowed
    assert not coordinator.hurried
    coordinator.janitor.resign()
    assert coordinator.hurried


def test_a_heartbeat_has_as_many_requests_however_many_nodes_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for number in (1, 6):
        nodes = Nodes(tmp_path / str(number), number)
        nodes.go_on(20)
        with monkeypatch.context() as patched:
            server = SlowServer(patched, 1, latency=0.05)
            server.client(nodes.coordinators[nodes.janitor].heartbeat)
            server.run(100)
            server.close()
        counts.append(server.requests)
    assert 0 < counts[0] == counts[1] <= 14


def test_work_has_half_of_the_time_whatever_a_heartbeat_takes() -> None:
    now = [0.0]
    spent = {"heartbeat": 0.0, "work": 0.0}

    class Slow:
        hurried = False

        def heartbeat(self) -> str:
            now[0] += 5
            spent["heartbeat"] += 5
            return "message"

        def work(self) -> bool:
            now[0] += 0.5
            spent["work"] += 0.5
            return True

    messages: list[object] = []
    turns = Turns(Slow(), 2.0, lambda: now[0])  # type: ignore[arg-type]
    while now[0] < 1_000:
        pause = turns.turn(messages.append)
        now[0] += pause
    assert spent["work"] >= 0.45 * now[0]
    assert len(messages) == spent["heartbeat"] / 5


def test_every_node_says_since_when_a_count_runs_and_how_far_it_is(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(20)
    begin_count(nodes)
    nodes.clock.seconds += 2
    messages = [
        coordinator.heartbeat()
        for coordinator in (nodes.coordinators[nodes.janitor], nodes.coordinators[1 - nodes.janitor])
    ]
    for message in messages:
        assert isinstance(message, Report)
        assert message.counting_seconds is not None
        assert 1 <= message.counting_seconds <= 4
        assert 0 < message.counted_files < FILES
    nodes.go_on(3)
    assert [report.counting_seconds for report in nodes.reports] == [None, None]
