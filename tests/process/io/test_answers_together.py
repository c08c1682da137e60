"""Answers of a worker with many jobs wait for each other, and none is lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from kvdepot.server.io import proven_child
from kvdepot.server.io.jobs import Answer
from kvdepot.server.io.worker_process import WorkerProcess
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.io_pool_rig import PoolRig, is_gone, pool_on, until
from tests.rigs.io_rig import IoRig

_SIZE_BYTES = 8192
_JOBS = 16


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many answers were taken at once, each time. They wait for as long as any machine needs for all."""
    found: list[int] = []
    take = WorkerProcess.take

    def counting(process: WorkerProcess, received: bytearray) -> list[tuple[int, Answer]]:
        messages = take(process, received)
        found.append(len(messages))
        return messages

    monkeypatch.setattr(WorkerProcess, "take", counting)
    monkeypatch.setattr(proven_child, "_PAUSE_SECONDS", 1.0)
    return found


async def read_many(under: PoolRig, rig: IoRig) -> list[asyncio.Future[Answer]]:
    """Ask for many objects at once, of a worker whose last one was quick."""
    write = rig.write(1, _SIZE_BYTES)
    assert (await under.ask(write)).outcome is IoOutcome.OK
    return [under.ask(rig.read_of(write), under.lent()) for _ in range(_JOBS)]


def test_answers_of_a_worker_with_many_jobs_are_taken_at_once(rig: IoRig, taken: list[int]) -> None:
    async def run() -> None:
        async with pool_on(rig, quick_seconds=60.0) as under:
            asked = await read_many(under, rig)
            taken.clear()
            assert {answer.outcome for answer in await asyncio.gather(*asked)} == {IoOutcome.OK}
            assert taken == [_JOBS]

    asyncio.run(run())


def test_an_answer_waits_for_no_other_where_few_jobs_are_in_flight(rig: IoRig, taken: list[int]) -> None:
    async def run() -> None:
        async with pool_on(rig, quick_seconds=60.0) as under:
            write = rig.write(1, _SIZE_BYTES)
            started = asyncio.get_running_loop().time()
            for _ in range(4):
                await asyncio.gather(*(under.ask(write) for _ in range(4)))
            assert asyncio.get_running_loop().time() - started < 4 * proven_child._PAUSE_SECONDS

    asyncio.run(run())


@pytest.mark.requirement("I6")
def test_answers_that_wait_count_although_their_worker_has_died(rig: IoRig, taken: list[int]) -> None:
    async def run() -> None:
        async with pool_on(rig, quick_seconds=60.0) as under:
            pid = under.pid
            asked = await read_many(under, rig)
            taken.clear()
            await until(lambda: bool(under.pool._crew.serving[0].process._child._pause), "answers wait")
            await asyncio.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
            assert {answer.outcome for answer in await asyncio.gather(*asked)} == {IoOutcome.OK}
            assert taken[0] > 1 and is_gone(pid)
            assert under.counts["io_workers.crashed"] == 1
            assert not under.registry.pids.keys() & {1}

    asyncio.run(run())


def test_a_pool_is_closed_while_answers_wait(rig: IoRig, taken: list[int]) -> None:
    failures: list[object] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        async with pool_on(rig, quick_seconds=60.0) as under:
            asked = await read_many(under, rig)
            await until(lambda: bool(under.pool._crew.serving[0].process._child._pause), "answers wait")
            await under.pool.close(0.0)
            assert all(answer.done() for answer in asked)
        await asyncio.sleep(1.5 * proven_child._PAUSE_SECONDS)

    asyncio.run(run())
    assert not failures
