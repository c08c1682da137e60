"""Workers of a pool that die, do not start or do not answer: who does their jobs, and when their loans end (I6, T5)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from kvdepot.server.io import crew
from kvdepot.server.io.framing import FrameError
from kvdepot.server.io.jobs import ANSWERS, Append
from kvdepot.server.platform import backoff
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.io_pool_rig import Lent, pool_on, until
from tests.rigs.io_rig import MIB, IoRig, verify_only
from tests.rigs.patience import Deadline, patient
from tests.rigs.stopping import stop, stopped

# Workers that die.


@pytest.mark.requirement("I6")
def test_what_a_dead_worker_had_is_done_by_the_next_one(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            first = under.pid
            stop(first)
            loans = [under.lent(), under.lent()]
            asked = [under.ask(rig.read_of(write), loans[0]), under.ask(write, loans[1])]
            assert [loan.held_by for loan in loans] == [1, 1]
            os.kill(first, signal.SIGKILL)
            assert [(await future).outcome for future in asked] == [IoOutcome.OK] * 2
            assert [loan.begun for loan in loans] == [2, 2]
            assert under.pid != first
            assert under.counts["io_workers.crashed"] == 1

    asyncio.run(run())


def test_an_append_is_not_tried_again(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Append("j", 0, b"1", sync=False))
            stop(under.pid)
            asked = under.ask(Append("j", 1, b"2", sync=False))
            os.kill(under.pid, signal.SIGKILL)
            assert (await asked).outcome is IoOutcome.IO_ERROR

    asyncio.run(run())


def test_a_job_that_kills_two_workers_is_given_up(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "SECONDS_MIN", 0.01)

    async def run() -> None:
        async with pool_on(rig) as under:
            loan = under.lent(begins=lambda pid: os.kill(pid, signal.SIGKILL))
            asked = under.ask(rig.read_of(rig.write(1, MIB)), loan)
            assert (await asked).outcome is IoOutcome.IO_ERROR
            assert (loan.begun, loan.held_by) == (2, None)
            assert under.pool.usable

    asyncio.run(run())


def test_workers_that_die_at_once_are_not_made_without_end(rig: IoRig) -> None:
    pipe, other = os.pipe()  # cannot be mapped: every worker ends with an error

    async def run() -> None:
        async with pool_on(rig, arena_fd=pipe, started=False) as under:
            read = rig.read_of(rig.write(1, MIB))
            answers = await asyncio.gather(*[under.ask(read, under.lent()) for _ in range(6)])
            assert {answer.outcome for answer in answers} == {IoOutcome.CANCELLED}
            assert all(answer.detail.startswith("no worker serves: I/O worker ") for answer in answers)
            assert under.breaker.closed, "it says nothing about the path"
            assert under.counts["io_workers.started"] <= 6

    asyncio.run(run())
    os.close(pipe)
    os.close(other)


@pytest.mark.requirement("I4")
def test_without_room_in_the_attachment_table_workers_come_later(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            under.registry.full = True
            os.kill(under.pid, signal.SIGKILL)
            asked = under.ask(verify_only(rig.read_of(rig.write(1, MIB))), under.lent())
            await asyncio.sleep(0.5)
            assert not asked.done()
            under.registry.full = False
            assert (await asked).outcome is IoOutcome.MAGIC
            under.registry.full = True
            os.kill(under.pid, signal.SIGKILL)
            given_up = await under.ask(verify_only(rig.read_of(rig.write(1, MIB))), under.lent())
            why = "no worker serves: an I/O worker cannot be registered: the table is full"
            assert (given_up.outcome, given_up.detail) == (IoOutcome.CANCELLED, why)
            under.registry.full = False
            await until(lambda: under.pool.usable, "a worker could be started")

    asyncio.run(run())


def test_a_worker_that_talks_nonsense_is_ended(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            first = under.pid
            with monkeypatch.context() as patch:
                patch.setattr(ANSWERS, "take", _no_answer)
                asked = under.ask(rig.write(1, MIB), under.lent())
                await until(lambda: first not in under.pool.pids, "the worker is gone")
            assert (await asked).outcome is IoOutcome.OK

    asyncio.run(run())


def _no_answer(received: bytearray) -> None:
    raise FrameError("nonsense")


# Workers that do not answer.


@pytest.mark.requirement("I6")
def test_a_worker_that_misses_a_deadline_is_replaced_and_its_loan_ends_with_it(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "HANG_SECONDS", patient(10))

    async def run() -> None:
        async with pool_on(rig, workers=2) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            both = under.pool.pids
            for pid in both:
                stop(pid)
            loans: list[Lent] = [under.lent() for _ in range(4)]
            started, limit = time.monotonic(), Deadline(10)
            late = [under.ask(rig.read_of(write), loan, deadline_seconds=0.5) for loan in loans[:2]]  # one each
            others = [under.ask(rig.read_of(write), loan) for loan in loans[2:]]
            assert [(await answer).outcome for answer in late] == [IoOutcome.TIMEOUT] * 2
            assert time.monotonic() - started > 0.4 and not limit.is_over()
            assert [(await answer).outcome for answer in others] == [IoOutcome.OK] * 2, "by those in their place"
            await until(lambda: not set(both) & set(under.pool.pids), "the stopped workers are dead")
            assert [loan.held_by for loan in loans] == [None] * 4
            await until(lambda: not under.pool.abandoned, "nobody hangs")
            assert (under.counts["io_workers.overdue"], under.counts["io_workers.abandoned"]) == (2, 0)

    asyncio.run(run())


@pytest.mark.requirement("T5")
def test_a_worker_that_was_frozen_with_the_daemon_has_missed_no_deadline(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with pool_on(rig, failures=1) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            loop, pid = asyncio.get_running_loop(), under.pid
            real = loop.time
            with stopped(pid):
                answer = under.ask(rig.read_of(write), under.lent(), deadline_seconds=20.0)
                monkeypatch.setattr(loop, "time", lambda: real() + 600.0)
                await asyncio.sleep(0.1)
            assert (await answer).outcome is IoOutcome.OK
            assert (under.counts["io_workers.overdue"], under.breaker.closed, under.pid) == (0, True, pid)

    asyncio.run(run())


@pytest.mark.requirement("T5")
def test_the_start_of_a_worker_does_not_count_against_the_deadline_of_its_jobs(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, deadline=4.0, started=False) as under:
            stop(under.pid)
            loan = under.lent()
            asked = under.ask(rig.write(1, MIB), loan)
            await asyncio.sleep(4.5)
            assert not asked.done()
            assert not loan.begun, "a worker that may never start was lent something"
            os.kill(under.pid, signal.SIGCONT)
            assert (await asked).outcome is IoOutcome.OK
            assert not under.counts["io_workers.overdue"]

    asyncio.run(run())


@pytest.mark.requirement("T5")
def test_no_job_waits_for_a_worker_that_does_not_start_while_another_can_take_it(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, workers=2) as under:
            write = rig.write(1, MIB)
            assert (await under.ask(write)).outcome is IoOutcome.OK
            under.registry.made = stop
            os.kill(under.pool.pids[0], signal.SIGKILL)
            await until(lambda: under.pool.starting, "another one is being started")
            read = verify_only(rig.read_of(write))
            answers = await asyncio.gather(*[under.ask(read, under.lent()) for _ in range(8)])
            assert {answer.outcome for answer in answers} == {IoOutcome.OK}
            assert under.pool.starting == 1

    asyncio.run(run())


@pytest.mark.requirement("T5")
def test_a_worker_that_does_not_start_is_killed_and_another_does_its_work(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(crew, "START_SECONDS", 0.2)
            under_test = pool_on(rig, started=False)
            under = await under_test.__aenter__()
        try:
            stop(first := under.pid)
            assert (await under.ask(rig.write(1, MIB), under.lent())).outcome is IoOutcome.OK
            await until(lambda: first not in under.pool.pids, "the first one is gone")
            assert (under.counts["io_workers.overdue"], under.breaker.closed) == (1, True)
        finally:
            await under_test.__aexit__(None, None, None)

    asyncio.run(run())


@pytest.mark.requirement("I4", "T5")
def test_workers_that_never_start_in_time_get_more_of_it_until_one_does(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host with too much to do: else nothing would ever be written."""
    monkeypatch.setattr(crew, "START_SECONDS", 0.01)
    monkeypatch.setattr(backoff, "SECONDS_MAX", 0.1)

    async def run() -> None:
        async with pool_on(rig, started=False) as under:
            await until(lambda: under.counts["io_workers.overdue"], "one is late")
            await until(lambda: not under.pool.starting and under.pool.pids, "one has started")
            assert (await under.ask(rig.write(1, MIB), under.lent())).outcome is IoOutcome.OK

    asyncio.run(run())


@pytest.mark.requirement("I2", "T5")
def test_no_job_waits_for_a_worker_after_two_were_late(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "START_SECONDS", 0.0)  # none starts so soon

    async def run() -> None:
        async with pool_on(rig, started=False) as under:

            def made(pid: int) -> None:
                if under.registry.started_in_all == 3:  # it does not start, and its time is not over
                    monkeypatch.setattr(crew, "START_SECONDS", 1000.0)
                    stop(pid)

            under.registry.made = made
            asked = under.ask(rig.write(1, MIB), under.lent())
            assert (await asked).outcome is IoOutcome.CANCELLED
            await until(lambda: under.registry.started_in_all == 3, "a third one is made")
            assert "no worker serves: I/O worker " in under.pool.why_unusable
            assert "has not started within 0 s" in under.pool.why_unusable
            assert (await under.ask(rig.write(1, MIB), under.lent())).outcome is IoOutcome.CANCELLED
            assert under.changes[-1:] == [False]
            os.kill(under.registry.pids[3], signal.SIGCONT)
            await until(lambda: under.changes[-1], "it has started, and the tier is told")
            assert (await under.ask(rig.write(1, MIB), under.lent())).outcome is IoOutcome.OK

    asyncio.run(run())


@pytest.mark.requirement("T5")
def test_a_probe_whose_worker_does_not_start_has_failed(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with pool_on(rig, failures=1) as under:
            stop(under.pid)
            asked = under.ask(rig.write(1, MIB), under.lent(), deadline_seconds=0.1)
            assert (await asked).outcome is IoOutcome.TIMEOUT
            with monkeypatch.context() as patch:
                patch.setattr(crew, "START_SECONDS", 0.0)  # none starts so soon
                await until(lambda: "has not started" in under.pool.why_unusable, "a probe has failed")
            await until(lambda: under.pool.usable, "a later probe worked")

    asyncio.run(run())


@pytest.mark.requirement("I2")
def test_a_worker_gives_way_before_it_has_started(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, started=False) as under:
            assert under.pool.starting
            assert os.getpriority(os.PRIO_PROCESS, under.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)

    asyncio.run(run())


def test_a_worker_imports_only_what_it_needs() -> None:
    """Each one of a mount that hangs is replaced, and engines wait for the CPU that this takes."""
    unwanted = {
        "kvdepot.core.calls", "kvdepot.core.report", "kvdepot.server.depot.types", "kvdepot.server.io.peer_wire",
        "numpy", "grpc", "asyncio",
    }  # fmt: skip
    script = f"import sys, kvdepot.server.io.worker; print(sorted({unwanted!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


@pytest.mark.requirement("T5")
@pytest.mark.parametrize(
    ("failures", "outcome", "begun"),
    [pytest.param(3, IoOutcome.OK, 2, id="in-use"), pytest.param(1, IoOutcome.CANCELLED, 1, id="out-of-use")],
)
def test_what_a_killed_worker_had_besides_is_done_by_the_next_one_or_cancelled_with_the_path(
    rig: IoRig, failures: int, outcome: IoOutcome, begun: int
) -> None:
    """It was not its job that hung: an I/O error would speak against the object."""

    async def run() -> None:
        async with pool_on(rig, deadline=20, failures=failures, probe_seconds=20) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            stop(under.pid)
            late = under.ask(rig.read_of(write), under.lent(), deadline_seconds=0.2)
            loan = under.lent()
            other = under.ask(rig.read_of(write), loan)
            assert (await late).outcome is IoOutcome.TIMEOUT
            assert (await other).outcome is outcome
            assert (loan.begun, loan.held_by) == (begun, None)

    asyncio.run(run())


@pytest.mark.requirement("T5")
def test_a_job_whose_workers_were_killed_for_others_goes_on_being_tried(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, deadline=20, failures=5) as under:
            write = rig.write(1, MIB)
            await under.ask(write)

            def hang(pid: int) -> None:
                if loan.begun <= 3:
                    stop(pid)
                if loan.begun == 4:  # the first one that crashes
                    os.kill(pid, signal.SIGKILL)

            async def hangs_again(tries: int) -> None:
                await until(lambda: loan.begun == tries, "a worker has it, and hangs")

            loan = under.lent(begins=hang)
            asked = under.ask(rig.read_of(write), loan)
            for tries in (1, 2, 3):
                await hangs_again(tries)
                late = under.ask(rig.read_of(write), under.lent(), deadline_seconds=0.2)
                assert (await late).outcome is IoOutcome.TIMEOUT
            assert (await asked).outcome is IoOutcome.OK
            assert (loan.begun, loan.held_by) == (5, None)

    asyncio.run(run())
