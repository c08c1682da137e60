"""What is shown of a peer: its state, and the figures of what it answered."""

from __future__ import annotations

import pytest
from kvdepot.core.report import PeerStatus
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import Answer, Job, Probe, ReadFile, StatFiles
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.conformance_harness import name_of
from kvdepot.server.tiers.peer.figures import FAILURES, PeerFigures
from kvdepot.server.tiers.workers import Workers

LOOKUP = StatFiles(("x",))
LOAD = ReadFile("x", name_of(1), ((0, 4096),), "aside")


class Idle:
    """Workers that can be asked, as long as nothing is said against it."""

    def __init__(self, why_unusable: str = "") -> None:
        self.why_unusable = why_unusable
        self.breaker = Breaker(failures_max=1, probe_every_seconds=1.0, clock=lambda: 0.0)


class Peer:
    def __init__(self) -> None:
        self.figures = PeerFigures()

    def answers(self, job: Job, outcome: IoOutcome = IoOutcome.OK, **more: object) -> None:
        self.figures.asked(job)
        self.figures.answered(job, Answer(outcome, **more))  # type: ignore[arg-type]

    def status(self, why_unusable: str = "", *, itself: bool = False) -> PeerStatus:
        workers: Workers = Idle(why_unusable)  # type: ignore[assignment]
        return self.figures.status("h:1", workers, itself=itself)


def test_a_peer_is_new_until_it_has_answered_and_then_ready() -> None:
    peer = Peer()
    assert (peer.status().state, peer.status().arena_id) == ("new", 0)
    peer.answers(Probe(PROBE), source_id=9)
    assert (peer.status().state, peer.status().arena_id, peer.status().lookups) == ("ready", 9, 0)


@pytest.mark.parametrize("outcome", sorted(FAILURES))
@pytest.mark.parametrize("job", [LOOKUP, LOAD])
def test_a_peer_fails_until_it_answers_again(job: Job, outcome: IoOutcome) -> None:
    peer = Peer()
    peer.answers(job, outcome, detail="no route")
    assert (peer.status().state, peer.status().reason) == ("failing", "no route")
    assert peer.status("disabled: no route").state == "disabled"
    peer.answers(LOAD, IoOutcome.CANCELLED)
    assert peer.status().state == "failing", "nobody was asked"
    peer.answers(LOOKUP, source_id=9)
    assert (peer.status().state, peer.status().reason) == ("ready", "")


def test_a_peer_is_back_when_it_answers_after_a_failure_or_as_another_daemon() -> None:
    figures = PeerFigures()

    def answered(outcome: IoOutcome, source_id: int = 0) -> bool:
        return figures.answered(LOOKUP, Answer(outcome, source_id=source_id))

    assert not answered(IoOutcome.OK, 9), "it is new"
    assert not answered(IoOutcome.OK, 9) and not answered(IoOutcome.OK)
    assert answered(IoOutcome.OK, 8) and not answered(IoOutcome.OK, 8)
    assert not answered(IoOutcome.TIMEOUT) and not answered(IoOutcome.GONE)
    assert answered(IoOutcome.OK, 8) and not answered(IoOutcome.OK, 8)


def test_an_object_that_is_gone_does_not_speak_against_the_peer() -> None:
    peer = Peer()
    peer.answers(LOOKUP, source_id=9)
    for outcome in (IoOutcome.GONE, IoOutcome.FOREIGN, IoOutcome.GONE):
        peer.answers(LOAD, outcome)
    assert peer.status().state == "ready"
    assert peer.status().failed_objects == {"gone": 2, "foreign": 1}


def test_loads_and_lookups_are_counted_with_their_time_and_what_they_moved() -> None:
    peer = Peer()
    peer.answers(LOOKUP, seconds=0.5)
    peer.answers(LOOKUP, seconds=0.25)
    peer.answers(LOAD, seconds=2.0, stored_bytes=4096, lane="nixl")
    peer.answers(LOAD, IoOutcome.TIMEOUT, seconds=7.0)
    peer.figures.asked(LOAD)
    found = peer.status()
    assert (found.lookups, found.lookup_seconds) == (2, 0.75)
    assert (found.loaded_objects, found.loaded_bytes, found.load_seconds, found.lane) == (1, 4096, 2.0, "nixl")
    assert (found.failed_objects, found.reading_objects) == ({"timeout": 1}, 1)


def test_a_daemon_that_finds_itself_is_neither_failing_nor_disabled() -> None:
    peer = Peer()
    peer.answers(LOOKUP, IoOutcome.IO_ERROR, detail="why")
    assert (peer.status("the pool is closed", itself=True).state, peer.status(itself=True).reason) == ("itself", "")
