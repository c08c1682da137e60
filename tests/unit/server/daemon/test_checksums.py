"""The daemon's side of its checksum worker: what it is handed, when it is killed, and what follows its death."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.elements import ElementRun
from kvdepot.server.daemon import checksums
from kvdepot.server.daemon.checksums import ANSWER_SECONDS_MAX
from kvdepot.server.io.checksum_wire import Compare

from tests.fakes.checksum_worker import Checksums
from tests.rigs.engine_rig import DENSE, Rig, path
from tests.rigs.tier_rig import store

ELEMENTS = {Kind.ATTENTION: (ElementRun("bfloat16", 8192),)}


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checksums]:
    """Three objects wait for their checksums."""
    rig = Rig()
    store(rig.attach(), path("a", 3))
    under = Checksums(rig, monkeypatch)
    yield under
    under.service.close()


# What is handed out.


def test_each_object_is_sent_once_although_the_socket_takes_a_part_at_a_time(
    under: Checksums, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = socket.socket.send
    sent = iter([3, 0, 5])

    def some(self: socket.socket, data: bytearray) -> int:
        length = next(sent, len(data))
        if not length:
            raise BlockingIOError
        return send(self, data[:length])

    under.answer(*under.handed_out)
    under.jobs()
    monkeypatch.setattr(socket.socket, "send", some)
    store(under.rig.attach(), path("b", 2))
    under.service.wake()
    assert under.service._socket is not None
    fd = under.service._socket.fileno()
    for _ in range(3):
        assert fd in under.loop.writers, "there is more to send"
        under.loop.writers[fd]()
    assert fd not in under.loop.writers
    assert [row for row, _ in under.jobs()] == under.handed_out
    assert len(under.handed_out) == 2


def test_a_worker_gets_so_many_objects_at_once_and_the_next_one_after_each_answer(
    under: Checksums, monkeypatch: pytest.MonkeyPatch
) -> None:
    under.answer(*under.handed_out)
    monkeypatch.setattr(checksums, "_JOBS_MAX", 2)
    store(under.rig.attach(), path("b", 4))
    under.service.wake()
    first, second = under.handed_out
    under.answer(first)
    assert len(under.handed_out) == 2 and first not in under.handed_out and second in under.handed_out


def test_a_worker_gets_so_many_bytes_at_once_and_at_least_one_object(
    under: Checksums, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = under.service._jobs[under.handed_out[0]]
    under.answer(*under.handed_out)
    for most, objects in ((1, 1), (size, 1), (size + 1, 2), (2 * size + 1, 3)):
        monkeypatch.setattr(checksums, "_JOB_BYTES_MAX", most)
        store(under.rig.attach(), path(f"b{most}", 4))
        under.service.wake()
        assert len(under.handed_out) == objects
        monkeypatch.undo()
        while under.handed_out:
            under.answer(*under.handed_out)


def test_who_asks_whether_all_is_done_has_the_rest_handed_out(under: Checksums) -> None:
    def drained() -> bool:
        return under.service.drained

    under.answer(*under.handed_out)
    assert drained()
    store(under.rig.attach(), path("b", 1))
    assert not drained()
    under.answer(*under.handed_out)
    assert drained()


# Deadlines.


def test_a_worker_with_jobs_has_one_deadline_which_each_answer_renews(under: Checksums) -> None:
    def deadlines() -> list[float]:
        return [timer.seconds for timer in under.loop.deadlines if not timer.cancelled]

    assert deadlines() == [ANSWER_SECONDS_MAX]
    under.service.wake()
    assert deadlines() == [ANSWER_SECONDS_MAX], "it is not put off by new jobs"
    first, *others = under.handed_out
    armed = under.loop.timers[-1]
    under.answer(first)
    assert armed.cancelled and deadlines() == [ANSWER_SECONDS_MAX]
    under.answer(*others)
    assert deadlines() == [], "it has nothing to do"


def test_a_worker_that_misses_its_deadline_is_killed_once(under: Checksums) -> None:
    under.service._miss_deadline()
    under.service.wake()
    assert under.process.done == ["kill"]
    assert len(under.loop.deadlines) == 1, "it dies, or hangs in the kernel: no second kill helps"
    under.die()
    under.start_again()
    assert under.loop.deadlines[-1].seconds == ANSWER_SECONDS_MAX, "the next worker has one"


# Deaths.


def test_nothing_of_a_dead_worker_is_watched_and_the_next_one_gets_its_objects(under: Checksums) -> None:
    had = under.handed_out
    under.die()
    assert under.process.done == ["wait"]
    assert (under.loop.readers, under.loop.writers, under.service.pid) == ({}, {}, None)
    assert under.handed_out == []
    under.service.wake()
    assert under.handed_out == []
    under.start_again()
    assert under.service.pid == 101
    assert under.handed_out == had
    assert sorted(row for row, _ in under.jobs()) == sorted(had)


def test_what_a_dead_worker_had_begun_to_say_is_no_part_of_what_the_next_one_says(under: Checksums) -> None:
    under.say(b"\x01\x02")
    under.die()
    under.start_again()
    under.answer(*under.handed_out)
    assert not under.rig.depot.unsummed
    assert under.process.done == []


@pytest.mark.parametrize("last_words", [b"", b"\xff" * 64], ids=["end", "nonsense"])
def test_a_worker_is_not_listened_to_after_its_end_or_nonsense(under: Checksums, last_words: bytes) -> None:
    assert under.service._socket is not None
    fd = under.service._socket.fileno()
    if last_words:
        under.say(last_words)
    else:
        under.worker.close()
        under.readable()
    assert fd not in under.loop.readers, "it would be readable for ever"
    assert list(under.loop.readers) == [under.service._pidfd]


def test_workers_that_soon_die_are_started_less_and_less_often_until_one_lives_a_while(under: Checksums) -> None:
    def pause() -> float:
        under.die()
        (seconds,) = under.loop.due(under.service.start)
        under.start_again()
        return seconds

    assert [pause() for _ in range(3)] == [0.1, 0.2, 0.4]
    under.loop.now += 9.0
    assert pause() == 0.8
    assert [pause() for _ in range(8)] == [1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0, 30.0]
    under.loop.now += 10.5
    assert pause() == 0.1


@pytest.mark.parametrize(("refusal", "faults"), [(OSError("no process"), 0), (KeyError("a bug"), 1)])
def test_a_worker_that_cannot_start_is_tried_again_and_only_a_fault_of_the_daemon_counts_as_one(
    under: Checksums, refusal: Exception, faults: int
) -> None:
    under.die()
    under.refusal = refusal
    under.start_again()
    assert under.service.pid is None
    assert under.rig.counter("internal_errors.checksums") == faults
    under.start_again()
    assert len(under.handed_out) == 3


def test_a_closed_service_leaves_no_process_and_starts_none(under: Checksums) -> None:
    under.service.close()
    assert under.rig.depot.next_to_sum() is not None, "what it was lent came back"
    assert under.process.done == ["kill", "wait"]
    assert (under.loop.readers, under.loop.writers, under.service.pid) == ({}, {}, None)
    assert all(timer.cancelled for timer in under.loop.deadlines)
    under.service.close()
    assert under.process.done == ["kill", "wait"]


def test_a_service_that_is_closed_while_it_waits_to_start_a_worker_starts_none(under: Checksums) -> None:
    under.die()
    under.service.close()
    assert under.loop.due(under.service.start) == []


# Drift.


def test_drift_is_logged_once_a_minute_with_the_number_of_differences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(data_pages=256, audit_sample=1.0)
    under = Checksums(rig, monkeypatch)
    keys = path("p", 4)
    rig.attach("engine", 10, DENSE, ELEMENTS).store(keys)
    client = rig.attach("other", 11, DENSE, ELEMENTS)
    under.service.wake()
    under.answer(*under.handed_out)
    under.jobs()

    def drift(at: int) -> None:
        lease, _ = client.reserve(keys[at : at + 1], start=at, parent=keys[at - 1])
        client.commit(lease, 0)
        under.service.wake()
        (row,) = under.handed_out
        ((sent, job),) = under.jobs()
        assert sent == row and isinstance(job, Compare)
        assert job.runs == ELEMENTS[Kind.ATTENTION] and job.stored != job.recomputed
        assert under.service._jobs[row] == 2 * 8192, "it reads both"
        under.drift(row)

    with caplog.at_level(logging.ERROR, "checksums"):
        drift(3)
        drift(2)
        assert "; 1 differences since the last line" in caplog.text and len(caplog.records) == 1
        assert "by 2.50" in caplog.text and "beyond tolerance" in caplog.text
        under.loop.now += 60.0
        drift(1)
    assert "; 2 differences since the last line" in caplog.text and len(caplog.records) == 2
    assert len(under.quarantined) == 3
    under.service.close()
