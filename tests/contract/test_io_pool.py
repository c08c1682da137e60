"""The pool with real worker processes: order, deadlines, death (I6), the breaker, an end in bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
    LookUpFiles,
    Priority,
    Probe,
    Remove,
)
from kvdepot.server.io.pool import processes_max
from kvdepot.server.tiers.base import IoOutcome

from tests.io_pool_rig import Lent, pool_on, state, stop, until
from tests.io_rig import MIB, IoRig, pattern, verify_only


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[IoRig]:
    rig = IoRig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
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
                Probe(".probe", write=True),
                Remove(("segments/1.seg",)),
            ):
                assert (await under.ask(job, priority=Priority.TEND)).outcome is IoOutcome.OK
            assert (await under.ask(verify_only(rig.read_of(rig.write(1, MIB))))).outcome is IoOutcome.MAGIC

    asyncio.run(run())


def test_t5_a_name_that_cannot_be_looked_up_costs_neither_a_worker_nor_the_path(rig: IoRig) -> None:
    (rig.directory / "good").write_bytes(bytes(MIB))
    (rig.directory / "folder").symlink_to("folder")

    async def run() -> None:
        async with pool_on(rig) as under:
            answer = await under.ask(LookUpFiles(("good", "folder/bad", "absent")))
            assert (answer.outcome, answer.lengths) == (IoOutcome.OK, (MIB, UNKNOWN, ABSENT))
            assert under.counts["io_workers.crashed"] == 0

    asyncio.run(run())


def test_loads_go_before_stores_and_both_before_tending(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Probe(".probe", write=True))
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


@pytest.mark.parametrize(("quick_seconds", "in_hand"), [(0.0, 2), (60.0, 4)])
def test_a_worker_whose_objects_are_quick_is_handed_more_than_it_has_threads_for(
    rig: IoRig, quick_seconds: float, in_hand: int
) -> None:
    async def run() -> None:
        async with pool_on(rig, quick_seconds=quick_seconds) as under:
            write = rig.write(1, MIB)
            await under.ask(Probe(".probe", write=True))
            for handed in (2, in_hand):  # a probe says nothing about objects
                stop(under.pid)
                order: list[str] = []
                asked = [under.ask(write, under.lent(log=order, name=f"{number}")) for number in range(6)]
                assert (under.pool.in_flight, under.pool.queued) == (handed, 6 - handed)
                assert order == ["0", "1", "2", "3"][:handed]
                os.kill(under.pid, signal.SIGCONT)
                assert {(await answer).outcome for answer in asked} == {IoOutcome.OK}
                assert order == ["0", "1", "2", "3", "4", "5"]

    asyncio.run(run())


def test_t5_a_quick_worker_that_begins_to_hang_is_handed_nothing_ahead(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, workers=2, quick_seconds=0.5) as under:
            write = rig.write(1, MIB)
            for _ in range(8):
                await asyncio.gather(*(under.ask(write) for _ in range(4)))
            hanging, serving = under.pool._serving
            assert hanging.quick and serving.quick
            stop(hanging.process.pid)
            first = [under.ask(write) for _ in range(4)]
            await until(lambda: not serving.hand, "the other one has done its part")
            assert len(hanging.hand) == 2
            await asyncio.sleep(0.6)
            others = [under.ask(write) for _ in range(20)]
            assert {answer.outcome for answer in await asyncio.gather(*others)} == {IoOutcome.OK}
            assert len(hanging.hand) == 2 and sum(answer.done() for answer in first) == 2
            os.kill(hanging.process.pid, signal.SIGCONT)
            await asyncio.gather(*first)

    asyncio.run(run())


def test_i6_what_a_stopped_worker_had_not_begun_is_done_by_the_next_one(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, quick_seconds=60.0) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            stop(under.pid)
            order: list[str] = []
            loans = [under.lent(log=order, name=name) for name in "abcd"]
            asked = [under.ask(rig.read_of(write), loan, deadline_seconds=0.3) for loan in loans]
            (worker,) = under.pool._serving
            assert [task.tried for task in worker.hand.values()] == [1, 1, 0, 0]
            assert [(await answer).outcome for answer in asked] == [IoOutcome.TIMEOUT] * 2 + [IoOutcome.OK] * 2
            assert order == [*"abcd", *"cd"]
            await until(lambda: [loan.held_by for loan in loans] == [None] * 4, "the stopped worker is dead")

    asyncio.run(run())


def test_i6_a_refused_loan_means_that_no_worker_hears_of_the_job(rig: IoRig) -> None:
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
            probe = Probe(".probe", write=True)
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


def test_i6_a_loan_whose_end_raises_costs_neither_an_answer_nor_a_worker(rig: IoRig) -> None:
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


# Workers that die.


def test_i6_what_a_dead_worker_had_is_done_by_the_next_one(rig: IoRig) -> None:
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
    monkeypatch.setattr(pooling, "_BACKOFF_SECONDS_MIN", 0.01)

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
            told = {(answer.outcome, answer.detail) for answer in answers}
            assert told == {(IoOutcome.CANCELLED, "no worker can be started")}
            assert under.breaker.closed, "it says nothing about the path"
            assert under.counts["io_workers.started"] <= 6

    asyncio.run(run())
    os.close(pipe)
    os.close(other)


def test_i4_without_room_in_the_attachment_table_workers_come_later(rig: IoRig) -> None:
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
            assert (given_up.outcome, given_up.detail) == (IoOutcome.CANCELLED, "no worker can be started")
            under.registry.full = False
            await until(lambda: under.pool.usable, "a worker could be started")

    asyncio.run(run())


def test_a_worker_that_talks_nonsense_is_ended(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdepot.server.io import worker_process

    async def run() -> None:
        async with pool_on(rig) as under:
            first = under.pid
            with monkeypatch.context() as patch:
                patch.setattr(worker_process, "take_answers", _no_answer)
                asked = under.ask(rig.write(1, MIB), under.lent())
                await until(lambda: first not in under.pool.pids, "the worker is gone")
            assert (await asked).outcome is IoOutcome.OK

    asyncio.run(run())


def _no_answer(received: bytearray) -> None:
    from kvdepot.server.io.wire import WireError

    raise WireError("nonsense")


# Workers that do not answer.


def test_i6_a_worker_that_misses_a_deadline_is_replaced_and_its_loan_ends_with_it(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, workers=2) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            both = under.pool.pids
            for pid in both:
                stop(pid)
            loans: list[Lent] = [under.lent() for _ in range(4)]
            started = time.monotonic()
            late = [under.ask(rig.read_of(write), loan, deadline_seconds=0.5) for loan in loans[:2]]  # one each
            others = [under.ask(rig.read_of(write), loan) for loan in loans[2:]]
            assert [(await answer).outcome for answer in late] == [IoOutcome.TIMEOUT] * 2
            assert 0.4 < time.monotonic() - started < 10
            assert [(await answer).outcome for answer in others] == [IoOutcome.OK] * 2, "by those in their place"
            await until(lambda: not set(both) & set(under.pool.pids), "the stopped workers are dead")
            assert [loan.held_by for loan in loans] == [None] * 4
            assert under.counts["io_workers.abandoned"] == 2
            await until(lambda: not under.pool.abandoned, "nobody hangs")

    asyncio.run(run())


def test_t5_the_start_of_a_worker_does_not_count_against_the_deadline_of_its_jobs(rig: IoRig) -> None:
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
            assert not under.counts["io_workers.abandoned"]

    asyncio.run(run())


def test_t5_no_job_waits_for_a_worker_that_does_not_start_while_another_can_take_it(rig: IoRig) -> None:
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


def test_t5_a_worker_that_does_not_start_is_abandoned_and_another_does_its_work(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(pooling, "_START_SECONDS", 0.2)
            under_test = pool_on(rig, started=False)
            under = await under_test.__aenter__()
        try:
            stop(first := under.pid)
            assert (await under.ask(rig.write(1, MIB), under.lent())).outcome is IoOutcome.OK
            await until(lambda: first not in under.pool.pids, "the first one is gone")
            assert (under.counts["io_workers.abandoned"], under.breaker.closed) == (1, True)
        finally:
            await under_test.__aexit__(None, None, None)

    asyncio.run(run())


def test_t5_a_probe_whose_worker_does_not_start_has_failed(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with pool_on(rig, failures=1) as under:
            stop(under.pid)
            asked = under.ask(rig.write(1, MIB), under.lent(), deadline_seconds=0.1)
            assert (await asked).outcome is IoOutcome.TIMEOUT
            with monkeypatch.context() as patch:
                patch.setattr(pooling, "_START_SECONDS", 0.0)  # none starts so soon
                await until(lambda: "has not started" in under.pool.why_unusable, "a probe has failed")
            await until(lambda: under.pool.usable, "a later probe worked")

    asyncio.run(run())


def test_i2_a_worker_gives_way_before_it_has_started(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, started=False) as under:
            assert under.pool.starting
            assert os.getpriority(os.PRIO_PROCESS, under.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)

    asyncio.run(run())


def test_a_worker_imports_only_what_it_needs() -> None:
    """Each one of a mount that hangs is replaced, and engines wait for the CPU that this takes."""
    unwanted = {"kvdepot.core.calls", "kvdepot.core.report", "kvdepot.server.engine.types", "numpy", "grpc", "asyncio"}
    script = f"import sys, kvdepot.server.io.worker; print(sorted({unwanted!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_the_other_job_of_a_killed_worker_is_done_by_the_next_one(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, deadline=20) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            stop(under.pid)
            late = under.ask(rig.read_of(write), under.lent(), deadline_seconds=0.2)
            loan = under.lent()
            other = under.ask(rig.read_of(write), loan)
            assert (await late).outcome is IoOutcome.TIMEOUT
            assert (await other).outcome is IoOutcome.OK
            assert loan.begun == 2

    asyncio.run(run())


def test_t5_what_killed_workers_had_besides_is_cancelled_where_the_path_went_out_of_use(rig: IoRig) -> None:
    """It was not their job that hung: an I/O error would speak against the object."""

    async def run() -> None:
        async with pool_on(rig, deadline=20, failures=1) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            stop(under.pid)
            late = under.ask(rig.read_of(write), under.lent(), deadline_seconds=0.2)
            loan = under.lent()
            other = under.ask(rig.read_of(write), loan)
            assert (await late).outcome is IoOutcome.TIMEOUT
            assert (await other).outcome is IoOutcome.CANCELLED
            assert (loan.begun, loan.held_by) == (1, None)

    asyncio.run(run())


def test_t5_a_job_whose_workers_were_killed_for_others_goes_on_being_tried(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, deadline=20, failures=5) as under:
            write = rig.write(1, MIB)
            await under.ask(write)

            def hang(pid: int) -> None:
                if loan.begun <= 3:
                    stop(pid)

            async def hangs_again(tries: int) -> None:
                await until(lambda: loan.begun == tries, "a worker has it, and hangs")

            loan = under.lent(begins=hang)
            asked = under.ask(rig.read_of(write), loan)
            for tries in (1, 2, 3):
                await hangs_again(tries)
                late = under.ask(rig.read_of(write), under.lent(), deadline_seconds=0.2)
                assert (await late).outcome is IoOutcome.TIMEOUT
            assert (await asked).outcome is IoOutcome.OK
            assert (loan.begun, loan.held_by) == (4, None)

    asyncio.run(run())


def test_t5_failures_in_a_row_take_the_path_out_of_use_until_a_probe_works(rig: IoRig, tmp_path: Path) -> None:
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
            assert under.pool.why_unusable.startswith("out of use: gone")
            await asyncio.sleep(0.7)  # several probes fail
            assert under.pool.why_unusable

            move(elsewhere, tmp_path)
            await until(lambda: under.pool.usable, "a probe worked")
            assert (await under.ask(read, under.lent())).outcome is IoOutcome.OK
            assert not before & set(under.pool.pids), "files of before are still open"
            assert under.changes == [True, False, True]
            assert under.counts["io_breaker_openings"] == 1

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


def test_close_lets_jobs_in_hand_finish_and_cancels_the_others(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Probe(".probe", write=True))
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
            assert (await under.ask(Probe(".probe", write=True))).outcome is IoOutcome.CANCELLED
            assert not under.registry.pids

    asyncio.run(run())


def test_close_does_not_wait_for_workers_that_do_not_answer(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            await under.ask(Probe(".probe", write=True))
            stop(under.pid)
            loan = under.lent()
            asked = under.ask(rig.write(1, MIB), loan)
            started = time.monotonic()
            assert await under.pool.close(0.3) == 0  # a stopped process dies of SIGKILL
            assert time.monotonic() - started < 10, "until the job's deadline"
            assert (await asked).outcome is IoOutcome.TIMEOUT
            assert loan.held_by is None

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
            assert (await under.ask(Probe(".probe", write=True))).outcome is IoOutcome.OK
            await until(lambda: not before & set(under.pool.pids), "the workers of before have ended")
        assert renew_token(lock, "another daemon's") == "another daemon's"
        async with pool_on(rig, guard="mine") as under:
            write = rig.write(1, MIB)
            assert (await under.ask(write, under.lent())).outcome is IoOutcome.IO_ERROR
            assert not any(rig.segment.read_bytes()[:MIB])

    asyncio.run(run())


def test_i4_the_number_of_processes_is_bounded() -> None:
    assert [processes_max(workers) for workers in (1, 2)] == [3, 5]
