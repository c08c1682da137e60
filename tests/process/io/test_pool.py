"""The pool with real worker processes: order, what is handed ahead, the breaker, an end in bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from shutil import move

import pytest
from kvdepot.core.objectfile import Codec
from kvdepot.server.io import pool as pooling
from kvdepot.server.io.directory_guard import WORKERS_LOCK, renew_token
from kvdepot.server.io.jobs import (
    ABSENT,
    UNKNOWN,
    Allocate,
    Answer,
    Append,
    Priority,
    Probe,
    Remove,
    StatFiles,
)
from kvdepot.server.io.pool import processes_max
from kvdepot.server.io.worker_process import WorkerProcess
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.io_pool_rig import Lent, is_gone, pool_on, until
from tests.rigs.io_rig import MIB, IoRig, pattern, verify_only
from tests.rigs.patience import WAIT_SECONDS, Deadline
from tests.rigs.stopping import state, stop


@pytest.fixture
def until_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` waits for the deaths of workers: a busy machine may need more than a second to end a killed process."""
    monkeypatch.setattr(pooling, "_DEATH_SECONDS", WAIT_SECONDS)


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
@pytest.mark.usefixtures("until_dead")
def test_objects_go_out_and_come_back(rig: IoRig, codec: Codec) -> None:
    async def run() -> None:
        async with pool_on(rig, workers=2) as under:
            write = rig.write(1, 2 * MIB + 5, codec, fragments=2)
            out = under.lent()
            written = await under.ask(write, out, priority=Priority.STORE)
            assert (written.outcome, written.raw_sum, written.direct) == (IoOutcome.OK, write.raw_sum, True)
            read = rig.read_of(write)
            back = under.lent()
            answer = await under.ask(read, back)
            assert (answer.outcome, answer.raw_sum) == (IoOutcome.OK, write.raw_sum)
            assert read.extents is not None
            assert rig.taken(read.extents) == pattern(2 * MIB + 5, 1)
            assert (out.begun, out.held_by, back.begun, back.held_by) == (1, None, 1, None)
            assert under.counts["io_bytes.written"] == under.counts["io_bytes.read"] == answer.stored_bytes
            assert under.counts["io_answers.ok"] == 2
            assert under.counts["io_seconds.read"] > 0 < under.counts["io_seconds.write"]
            assert under.counts["io_buffered_jobs"] == 0
        assert not under.registry.pids

    asyncio.run(run())


def test_every_kind_of_job_is_done(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            for job in (
                Allocate("segments/1.seg", MIB),
                Append("journal/1.log", 0, b"record", sync=True),
                Probe(".probe"),
                Remove(("segments/1.seg",)),
            ):
                assert (await under.ask(job, priority=Priority.TEND)).outcome is IoOutcome.OK
            assert (await under.ask(verify_only(rig.read_of(rig.write(1, MIB))))).outcome is IoOutcome.MAGIC

    asyncio.run(run())


@pytest.mark.requirement("T5")
def test_a_name_that_cannot_be_looked_up_costs_neither_a_worker_nor_the_path(rig: IoRig) -> None:
    (rig.directory / "good").write_bytes(bytes(MIB))
    too_long = "x" * 256

    async def run() -> None:
        async with pool_on(rig) as under:
            answer = await under.ask(StatFiles(("good", too_long, "absent")))
            assert (answer.outcome, answer.lengths) == (IoOutcome.OK, (MIB, UNKNOWN, ABSENT))
            assert under.counts["io_workers.crashed"] == 0

    asyncio.run(run())


def test_loads_go_before_stores_and_both_before_tending(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Probe(".probe"))
            stop(under.pid)
            order: list[str] = []
            read = rig.read_of(rig.write(1, MIB))
            names = ["first", "second", "tend", "store", "load", "load2"]
            priorities = [Priority.TEND] * 3 + [Priority.STORE, Priority.LOAD, Priority.LOAD]
            asked = [
                under.ask(read, under.lent(log=order, name=name), priority=priority)
                for name, priority in zip(names, priorities, strict=True)
            ]
            assert order == ["first", "second"], "more than two jobs in a worker's hands"
            assert (under.pool.in_flight, under.pool.queued, under.pool.queued_bytes) == (2, 4, 4 * MIB)
            os.kill(under.pid, signal.SIGCONT)
            await asyncio.gather(*asked)
            assert order == ["first", "second", "load", "load2", "store", "tend"]
            assert (under.pool.in_flight, under.pool.queued, under.pool.queued_bytes) == (0, 0, 0)

    asyncio.run(run())


@pytest.mark.parametrize(("quick_seconds", "in_hand"), [(0.0, 2), (60.0, 16)])
def test_a_worker_whose_objects_are_quick_is_handed_more_than_it_has_threads_for(
    rig: IoRig, quick_seconds: float, in_hand: int
) -> None:
    async def run() -> None:
        async with pool_on(rig, quick_seconds=quick_seconds) as under:
            write = rig.write(1, MIB)
            await under.ask(Probe(".probe"))
            for handed in (2, in_hand):  # a probe says nothing about objects
                stop(under.pid)
                order: list[str] = []
                asked = [under.ask(write, under.lent(log=order, name=f"{number}")) for number in range(18)]
                assert (under.pool.in_flight, under.pool.queued) == (handed, 18 - handed)
                assert order == [f"{number}" for number in range(handed)]
                os.kill(under.pid, signal.SIGCONT)
                assert {(await answer).outcome for answer in asked} == {IoOutcome.OK}
                assert order == [f"{number}" for number in range(18)]

    asyncio.run(run())


@pytest.mark.requirement("T5")
def test_a_quick_worker_that_begins_to_hang_is_handed_nothing_ahead(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, workers=2, quick_seconds=0.5) as under:
            write = rig.write(1, MIB)
            for _ in range(8):
                await asyncio.gather(*(under.ask(write) for _ in range(4)))
            hanging, serving = under.pool._crew.serving
            assert hanging.queue_max and serving.queue_max
            stop(hanging.process.pid)
            first = [under.ask(write) for _ in range(4)]
            await until(lambda: not serving.inflight, "the other one has done its part")
            assert len(hanging.inflight) == 2
            await asyncio.sleep(0.6)
            others = [under.ask(write) for _ in range(20)]
            assert {answer.outcome for answer in await asyncio.gather(*others)} == {IoOutcome.OK}
            assert len(hanging.inflight) == 2 and sum(answer.done() for answer in first) == 2
            os.kill(hanging.process.pid, signal.SIGCONT)
            await asyncio.gather(*first)

    asyncio.run(run())


@pytest.mark.requirement("I6")
def test_what_a_stopped_worker_had_not_begun_is_done_by_the_next_one(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, quick_seconds=60.0) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            stop(under.pid)
            order: list[str] = []
            loans = [under.lent(log=order, name=name) for name in "abcd"]
            asked = [under.ask(rig.read_of(write), loan, deadline_seconds=0.3) for loan in loans]
            (worker,) = under.pool._crew.serving
            assert [task.timer is not None for task in worker.inflight.values()] == [True, True, False, False]
            assert [(await answer).outcome for answer in asked] == [IoOutcome.TIMEOUT] * 2 + [IoOutcome.OK] * 2
            assert order == [*"abcd", *"cd"]
            await until(lambda: [loan.held_by for loan in loans] == [None] * 4, "the stopped worker is dead")

    asyncio.run(run())


@pytest.mark.requirement("I6")
def test_a_refused_loan_means_that_no_worker_hears_of_the_job(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            write = rig.write(1, MIB)
            answer = await under.ask(write, under.lent(refuse=True))
            assert answer.outcome is IoOutcome.CANCELLED
            assert not any(rig.segment.read_bytes()[:MIB])

    asyncio.run(run())


def test_a_callback_that_raises_keeps_no_other_job_from_its_answer(rig: IoRig) -> None:
    def fail(_: Answer) -> None:
        raise RuntimeError("of the caller")

    async def run() -> None:
        async with pool_on(rig) as under:
            probe = Probe(".probe")
            await under.ask(probe)
            stop(under.pid)
            for _ in range(3):
                under.pool.submit(probe, priority=Priority.LOAD, done=fail)
            asked = under.ask(probe)
            os.kill(under.pid, signal.SIGCONT)
            assert (await asked).outcome is IoOutcome.OK
            stop(under.pid)
            under.pool.submit(probe, priority=Priority.LOAD, done=fail, deadline_seconds=0.3)
            await under.ask(probe, deadline_seconds=0.3)
        assert under.counts["io_failed_callbacks"] == 4

    asyncio.run(run())


@pytest.mark.requirement("I6")
def test_a_loan_whose_end_raises_costs_neither_an_answer_nor_a_worker(rig: IoRig) -> None:
    class Failing(Lent):
        def end(self) -> None:
            super().end()
            raise RuntimeError("of the caller")

    async def run() -> None:
        async with pool_on(rig) as under:
            write = rig.write(1, MIB)
            assert (await under.ask(write, Failing(under.registry))).outcome is IoOutcome.OK
            stop(under.pid)
            loans = [Failing(under.registry), Failing(under.registry), under.lent()]
            late = under.ask(rig.read_of(write), loans[0], deadline_seconds=0.3)
            others = [under.ask(rig.read_of(write), loan) for loan in loans[1:]]  # one in its hand, one waiting
            assert (await late).outcome is IoOutcome.TIMEOUT
            assert [(await answer).outcome for answer in others] == [IoOutcome.OK] * 2
            await until(lambda: len(under.registry.pids) == 1, "the dead worker is written off")
            assert [loan.held_by for loan in loans] == [None] * 3
            assert [loan.begun for loan in loans] == [1, 2, 1]
            assert under.counts["io_failed_callbacks"] == 4

    asyncio.run(run())


# The breaker.


@pytest.mark.requirement("T5")
def test_failures_in_a_row_take_the_path_out_of_use_until_a_probe_works(rig: IoRig, tmp_path: Path) -> None:
    async def run() -> None:
        failing = pooling.FAILING | {IoOutcome.GONE}
        elsewhere = tmp_path.with_name("elsewhere")
        async with pool_on(rig, workers=2, failing=failing) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            assert under.pool.usable
            before = set(under.pool.pids)
            read = rig.read_of(write)
            move(tmp_path, elsewhere)
            asked = [under.ask(read, under.lent()) for _ in range(30)]
            outcomes = [(await future).outcome for future in asked]
            assert set(outcomes) == {IoOutcome.GONE, IoOutcome.CANCELLED}
            assert 3 <= outcomes.count(IoOutcome.GONE) <= 6
            assert (await under.ask(read)).outcome is IoOutcome.CANCELLED
            assert under.pool.why_unusable.startswith("disabled: gone")
            await asyncio.sleep(0.7)  # several probes fail
            assert under.pool.why_unusable

            move(elsewhere, tmp_path)
            await until(lambda: under.pool.usable, "a probe worked")
            assert (await under.ask(read, under.lent())).outcome is IoOutcome.OK
            # A worker that had a job when the path was disabled finishes it, gets no other one, and ends.
            await until(lambda: not before & set(under.pool.pids), "files of before are closed")
            assert under.changes == [True, False, True]
            assert under.counts["io_breaker_openings"] == 1

    asyncio.run(run())


def test_a_prober_from_before_a_renewal_is_given_no_jobs(rig: IoRig, tmp_path: Path) -> None:
    """Its answer counts, but it has the settings of before: another certificate, or another lane."""

    async def run() -> None:
        elsewhere = tmp_path.with_name("elsewhere")
        async with pool_on(rig, failures=1, failing=pooling.FAILING | {IoOutcome.GONE}) as under:
            read = rig.read_of(rig.write(1, MIB))
            move(tmp_path, elsewhere)
            assert (await under.ask(read)).outcome is IoOutcome.GONE
            await until(lambda: not under.pool.pids, "its worker has ended")
            move(elsewhere, tmp_path)
            probers: list[int] = []

            def renewed(pid: int) -> None:
                under.registry.made = lambda _: None
                probers.append(pid)
                asyncio.get_running_loop().call_soon(under.pool.renew, "")  # before it can have answered

            under.registry.made = renewed
            await until(lambda: under.pool.usable, "a probe worked")
            await until(lambda: under.pool.pids and not set(probers) & set(under.pool.pids), "another worker serves")

    asyncio.run(run())


def test_what_is_wrong_with_objects_does_not_take_the_path_out_of_use(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            read = rig.read_of(rig.write(1, MIB))
            for _ in range(10):
                assert (await under.ask(read)).outcome is IoOutcome.MAGIC
            assert under.pool.usable

    asyncio.run(run())


# The end.


@pytest.mark.usefixtures("until_dead")
def test_close_lets_jobs_in_hand_finish_and_cancels_the_others(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Probe(".probe"))
            pid = under.pid
            stop(pid)
            asked = [under.ask(replace(rig.write(seed, MIB), raw_sum=None), under.lent()) for seed in range(4)]
            closing = asyncio.ensure_future(under.pool.close(10))
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
            assert await closing == 0
            outcomes = [(await future).outcome for future in asked]
            assert outcomes == [IoOutcome.OK] * 2 + [IoOutcome.CANCELLED] * 2
            assert state(pid) == ""
            assert (await under.ask(Probe(".probe"))).outcome is IoOutcome.CANCELLED
            assert not under.registry.pids

    asyncio.run(run())


@pytest.mark.usefixtures("until_dead")
def test_close_does_not_wait_for_workers_that_do_not_answer(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Probe(".probe"))
            stop(under.pid)
            loan = under.lent()
            asked = under.ask(rig.write(1, MIB), loan)
            limit = Deadline(10)
            assert await under.pool.close(0.3) == 0  # a stopped process dies of SIGKILL
            assert not limit.is_over(), "until the job's deadline"
            assert (await asked).outcome is IoOutcome.TIMEOUT
            assert loan.held_by is None

    asyncio.run(run())


@pytest.mark.requirement("I6")
def test_a_pool_that_leaves_ends_the_loan_of_a_worker_that_dies_late(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "_DEATH_SECONDS", 0.0)
    monkeypatch.setattr(WorkerProcess, "kill", lambda _: None)  # as for a process that hangs in the kernel

    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Probe(".probe"))
            pid = under.pid
            stop(pid)
            loan = under.lent()
            asked = under.ask(rig.write(1, MIB), loan)
            leaving = asyncio.ensure_future(under.pool.leave(0.1))
            assert (await asked).outcome is IoOutcome.TIMEOUT
            await asyncio.sleep(0.05)
            assert (leaving.done(), loan.held_by, under.registry.pids) == (False, 1, {1: pid})
            os.kill(pid, signal.SIGKILL)
            await leaving
            assert (loan.held_by, under.registry.pids) == (None, {})

    asyncio.run(run())


def test_close_after_an_unfinished_leave_ends_as_ever_and_leaves_the_loan(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "_DEATH_SECONDS", 0.0)

    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Probe(".probe"))
            pid = under.pid
            stop(pid)
            loan = under.lent()
            with monkeypatch.context() as patch:
                patch.setattr(WorkerProcess, "kill", lambda _: None)
                asked = under.ask(rig.write(1, MIB), loan)
                leaving = asyncio.ensure_future(under.pool.leave(0.1))
                assert (await asked).outcome is IoOutcome.TIMEOUT
                leaving.cancel()
                assert await under.pool.close(0.1) == 1
            os.kill(pid, signal.SIGKILL)
            await until(lambda: is_gone(pid), "it is dead")
            await asyncio.sleep(0.05)
            assert loan.held_by == 1, "the next daemon proves its death"

    asyncio.run(run())


def test_a_guarded_directory_is_changed_hands_only_when_the_last_worker_is_dead(rig: IoRig) -> None:
    lock = rig.directory / WORKERS_LOCK
    lock.write_text("mine\n")

    async def run() -> None:
        async with pool_on(rig, workers=2, guard="mine", failures=100) as under:
            asked = [under.ask(verify_only(rig.read_of(rig.write(1, MIB)))) for _ in range(4)]
            assert {(await future).outcome for future in asked} == {IoOutcome.MAGIC}
            assert renew_token(lock, "another daemon's") is None
            before = set(under.pool.pids)
            under.pool.renew("mine")  # new workers, same right
            assert (await under.ask(Probe(".probe"))).outcome is IoOutcome.OK
            await until(lambda: not before & set(under.pool.pids), "the workers of before have ended")
        assert renew_token(lock, "another daemon's") == "another daemon's"
        async with pool_on(rig, guard="mine") as under:
            write = rig.write(1, MIB)
            assert (await under.ask(write, under.lent())).outcome is IoOutcome.IO_ERROR
            assert not any(rig.segment.read_bytes()[:MIB])

    asyncio.run(run())


@pytest.mark.requirement("I4")
def test_the_number_of_processes_is_bounded() -> None:
    assert [processes_max(workers) for workers in (1, 2)] == [3, 5]
