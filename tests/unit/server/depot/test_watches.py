"""Who owns what tells of a process's death, and whose death it is."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from kvdepot.core.calls import DeclareCall
from kvdepot.core.errors import EngineIdInUse
from kvdepot.server.depot.types import Attached, Liveness, Membership, ProcessIdentity
from kvdepot.server.platform import processes

from tests.rigs.engine_rig import BOOT, DENSE, Client, Rig, audit, path, process

UNKNOWN = ProcessIdentity(0, 0, BOOT)


def numbered(number: int) -> ProcessIdentity:
    """A process without a visible pid that the kernel numbers."""
    return ProcessIdentity(0, number, BOOT)


@dataclass
class Watch:
    ended: bool = False
    closed: int = 0

    def close(self) -> None:
        self.closed += 1


def watched(rig: Rig, who: ProcessIdentity, engine_id: str) -> tuple[Attached, Watch]:
    attached = rig.depot.attach(who, Membership(engine_id, scheduler=True, rank=0, world_size=1))
    watch = Watch()
    rig.depot.watch(attached.attachment, watch)
    return attached, watch


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("who", [UNKNOWN, numbered(7), process(10)], ids=["unknown", "numbered", "visible"])
def test_a_slot_that_is_freed_is_watched_no_more_for_its_former_process(who: ProcessIdentity) -> None:
    rig = Rig(grace_seconds=60.0)
    attached, watch = watched(rig, who, "a")
    rig.depot.disconnected(attached.attachment)
    rig.now += 61
    rig.depot.tick()
    assert watch.closed == 1, "the process lives on, and its slot is free"
    after, its_watch = watched(rig, process(11), "b")
    assert after.attachment == attached.attachment
    assert rig.depot.watch_of(after.attachment) is its_watch
    assert not its_watch.closed
    audit(rig.depot)


def test_a_process_is_watched_once_for_each_attachment() -> None:
    rig = Rig()
    attached, first = watched(rig, process(10), "e")
    again, second = watched(rig, process(10), "e")
    assert again == attached
    assert (first.closed, second.closed) == (0, 1)
    rank = rig.depot.attach(process(11), Membership("ranks", scheduler=False, rank=0, world_size=2))
    other = rig.depot.attach(process(11), Membership("ranks", scheduler=False, rank=1, world_size=2))
    watches = [Watch(), Watch()]
    for slot, watch in zip((rank.attachment, other.attachment), watches, strict=True):
        rig.depot.watch(slot, watch)
    assert [watch.closed for watch in watches] == [0, 0]


@pytest.mark.requirement("I6")
def test_the_end_of_a_process_ends_its_watch_and_nobody_elses() -> None:
    rig = Rig()
    attached, watch = watched(rig, process(10), "e")
    _, other = watched(rig, process(11), "f")
    rig.depot.process_dead(attached.attachment)
    assert (watch.closed, other.closed) == (1, 0)
    assert rig.depot.watch_of(attached.attachment) is None
    rig.depot.unwatch()
    rig.depot.unwatch()
    assert (watch.closed, other.closed) == (1, 1)
    assert [session.engine_id for session in rig.depot.status().sessions] == ["f"], "nothing is freed by that"


def test_an_adopted_process_that_comes_back_is_watched_from_then_on() -> None:
    rig = Rig()
    lease, _ = Client(rig, watched(rig, numbered(7), "e")[0], DENSE).reserve(path("p", 1))
    rig.crash()
    (info,) = rig.depot.attachments()
    assert rig.depot.watch_of(info.attachment) is None
    again, watch = watched(rig, numbered(7), "e")
    assert again.attachment == info.attachment
    assert rig.depot.watch_of(again.attachment) is watch
    assert rig.depot.declare(DeclareCall(again.session, (lease,))).lost == ()


def test_a_process_without_a_visible_pid_comes_back_to_its_session_by_its_number() -> None:
    rig = Rig(grace_seconds=60.0)
    client = Client(rig, watched(rig, numbered(7), "e")[0], DENSE)
    lease, _ = client.reserve(path("p", 1))
    rig.depot.disconnected(client.attachment)
    with pytest.raises(EngineIdInUse, match="a process without a visible pid is already the scheduler"):
        watched(rig, numbered(8), "e")
    again, _ = watched(rig, numbered(7), "e")
    assert again == Attached(client.session, client.attachment)
    rig.depot.disconnected(again.attachment)
    rig.now += 61
    rig.depot.tick()
    revived, _ = watched(rig, numbered(7), "e")
    assert revived.attachment == client.attachment
    assert rig.depot.declare(DeclareCall(revived.session, (lease,))).lost == ()


def test_only_what_is_known_of_a_process_tells_it_from_others() -> None:
    assert not UNKNOWN.is_same(UNKNOWN)
    assert numbered(7).is_same(numbered(7))
    assert not numbered(7).is_same(numbered(8))
    assert not numbered(7).is_same(ProcessIdentity(0, 7, bytes(16)))
    assert process(10).is_same(process(10))
    assert not process(10).is_same(ProcessIdentity(10, 7, BOOT)), "the pid was used again"


def test_the_kernel_numbers_processes_and_not_descriptors() -> None:
    own, again, parent = os.pidfd_open(os.getpid()), os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid())
    try:
        numbers = [processes.process_number(pidfd) for pidfd in (own, again, parent)]
        hidden = processes.identify(0, own, BOOT)
    finally:
        for pidfd in (own, again, parent):
            os.close(pidfd)
    assert numbers[0] == numbers[1]
    assert numbers[0] != numbers[2] or numbers == [0, 0, 0], "before Linux 6.9 there are none"
    assert hidden == ProcessIdentity(0, numbers[0], BOOT)
    assert processes.identify(os.getpid(), None, BOOT).pid == os.getpid()
    assert not processes.identify(0, None, BOOT).known


@pytest.mark.requirement("I6")
def test_without_a_descriptor_nobody_is_taken_for_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the death of a process that attached just then would go unnoticed."""
    connection: Any = SimpleNamespace(getsockopt=Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
    with pytest.raises(OSError, match="too many"):
        processes.peer_pidfd(connection, os.getpid())
    connection.getsockopt.side_effect = OSError(errno.ENOPROTOOPT, "a kernel before 6.5")
    pidfd = processes.peer_pidfd(connection, os.getpid())
    assert pidfd is not None
    os.close(pidfd)
    assert processes.peer_pidfd(connection, 0) is None
    me = processes.identify(os.getpid(), None, BOOT)
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
    with pytest.raises(OSError, match="too many"):
        processes.peer_pidfd(connection, os.getpid())
    assert processes.liveness(me, BOOT) is Liveness.UNKNOWN
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=ProcessLookupError))
    assert processes.peer_pidfd(connection, os.getpid()) is None
