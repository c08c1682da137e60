"""An exception at any callback of a pool: its caller is answered, no loan leaks, and the next job works (I4, I6)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.server.io import pool as pooling
from kvdepot.server.io.jobs import (
    APPEND_BYTES_MAX,
    EXTENTS_MAX,
    FILES_MAX,
    Answer,
    Append,
    Job,
    Priority,
    Remove,
)
from kvdepot.server.storage.base import IoOutcome, UnknownWorker

from tests.fakes.raising import Faults, Point, points
from tests.rigs.io_pool_rig import Lent, PoolRig, pool_on, until
from tests.rigs.io_rig import MIB, IoRig
from tests.rigs.stopping import stop


async def works(under: PoolRig, rig: IoRig) -> None:
    """The next job, with a loan, and nobody has anything any more."""
    loan = under.lent()
    assert (await under.ask(rig.write(1, MIB), loan)).outcome is IoOutcome.OK
    assert loan.held_by is None
    assert (under.pool.in_flight, under.pool.queued, under.pool.queued_bytes) == (0, 0, 0)
    assert under.pool.usable


# What cannot be packed.


def over_limits(rig: IoRig) -> list[Job]:
    write = rig.write(1, MIB)
    part = write.parts[0]
    many = tuple(replace(part, file=f"segments/{number}.seg") for number in range(FILES_MAX + 1))
    return [
        replace(write, created_at=-1),
        replace(write, created_at=1 << 64),
        replace(write, sequence=-1),
        replace(write, raw_sum=1 << 128),
        replace(write, raw_sum=-1),
        replace(write, codec=-1),
        replace(write, extents=((0, 4096),) * (EXTENTS_MAX + 1)),
        replace(write, extents=((-4096, 4096),)),
        replace(write, parts=many),
        replace(write, parts=(replace(part, file="../elsewhere"),)),
        replace(write, parts=(replace(part, file="a\ud800"),)),
        replace(write, parts=(replace(part, file="x" * 600),)),
        replace(write, name=replace(write.name, raw_bytes=OBJECT_BYTES_MAX + 1)),
        replace(write, name=replace(write.name, boundary_tokens=1 << 32)),
        replace(write, name=replace(write.name, key=b"short")),
        Append("journal/1.log", 0, bytes(APPEND_BYTES_MAX + 1), sync=False),
        Remove(tuple(f"quarantine/{number}" for number in range(FILES_MAX + 1))),
        Remove((None,)),  # type: ignore[arg-type]
        object(),  # type: ignore[list-item]
    ]


@pytest.mark.requirement("I4")
def test_a_job_that_cannot_be_packed_is_answered_and_the_next_one_works(
    rig: IoRig, unexpected_errors: list[str]
) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            jobs = over_limits(rig)
            loans = [under.lent() for _ in jobs]
            asked = [under.ask(job, loan) for job, loan in zip(jobs, loans, strict=True)]
            assert (under.pool.in_flight, under.pool.queued) == (0, 0)
            for job, loan, answer in zip(jobs, loans, asked, strict=True):
                assert (await answer).outcome is IoOutcome.CANCELLED, job
                assert (loan.begun, loan.held_by) == (0, None), job
            assert under.counts["io_failed_callbacks"] == under.counts["io_answers.cancelled"] == len(jobs)
            await works(under, rig)

    asyncio.run(run())
    assert [said.split(":")[0] for said in unexpected_errors] == ["packing Remove", "packing object"]
    unexpected_errors.clear()


def test_files_whose_names_are_no_text_are_removed(rig: IoRig) -> None:
    """A name is bytes: here some that are no UTF-8, and as many as there can be."""

    async def run() -> None:
        async with pool_on(rig) as under:
            folder = rig.directory / "quarantine"
            folder.mkdir()
            names = [os.fsdecode(b"\xff\xfe.kvd"), "x" * 255, "\n"]
            for name in names:
                (folder / name).touch()
            answer = await under.ask(Remove(tuple(f"quarantine/{name}" for name in names)))
            assert answer.outcome is IoOutcome.OK
            assert not list(folder.iterdir())

    asyncio.run(run())


# Loans.


class Unlucky(Lent):
    def begin(self, worker: int) -> bool:
        raise KeyError(worker)


@pytest.mark.requirement("I6")
def test_a_loan_whose_begin_raises_is_answered_and_the_next_one_works(rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig) as under:
            pids = under.pool.pids
            loans = [Unlucky(under.registry) for _ in range(5)]
            asked = [under.ask(rig.write(2, MIB), loan) for loan in loans]
            assert {(await answer).outcome for answer in asked} == {IoOutcome.CANCELLED}
            assert not any(rig.segment.read_bytes()[:MIB]), "a worker was told of it"
            assert under.counts["io_failed_callbacks"] == 5
            await works(under, rig)
            assert under.pool.pids == pids

    asyncio.run(run())


@pytest.mark.requirement("I6")
def test_a_worker_that_nothing_can_be_lent_to_is_replaced(rig: IoRig) -> None:
    """Its entry in the attachment table is gone: it would fail every job, and always be the one that is free."""

    async def run() -> None:
        async with pool_on(rig, workers=2) as under:
            await until(lambda: len(under.registry.pids) == 2, "both are written down")
            first = min(under.registry.pids)
            lost = under.registry.pids[first]

            class Table(Lent):
                def begin(self, worker: int) -> bool:
                    if worker == first:
                        raise UnknownWorker(f"worker {worker}")
                    return super().begin(worker)

            outcomes = [(await under.ask(rig.write(2, MIB), Table(under.registry))).outcome for _ in range(6)]
            assert outcomes == [IoOutcome.OK] * 6, "another one does its jobs"
            await until(lambda: lost not in under.pool.pids and len(under.pool.pids) == 2, "another has its place")
            await works(under, rig)

    asyncio.run(run())


# All of them in turn.


class RaisingRig(PoolRig):
    """Every callback of the pool goes through the faults."""

    faults = Faults()

    def _count(self, name: str, amount: float) -> None:
        self.faults.through("count", super()._count, name, amount)

    def lent(self, **options: Any) -> Lent:
        loan = super().lent(**options)
        loan.begin = self.faults.of("loan begin", loan.begin)  # type: ignore[method-assign]
        loan.end = self.faults.of("loan end", loan.end)  # type: ignore[method-assign]
        return loan


class Changes(list[bool]):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def append(self, usable: bool) -> None:
        self._faults.through("changed", super().append, usable)


async def scenario(under: PoolRig, rig: IoRig, faults: Faults) -> None:
    """Objects out and back, a refused loan, a crash, a hang, and a path that goes out of use and comes back."""
    write = rig.write(1, MIB)
    owed: list[tuple[list[Answer], Lent]] = []

    def ask(job: Job, **options: Any) -> list[Answer]:
        answers: list[Answer] = []
        loan = under.lent()
        owed.append((answers, loan))
        options.setdefault("priority", Priority.LOAD)
        under.pool.submit(job, done=faults.of("done", answers.append), loan=loan, **options)
        return answers

    async def settled() -> None:
        await until(lambda: not (under.pool.queued or under.pool.in_flight), "all is answered")
        await asyncio.sleep(0.01)

    ask(write)
    ask(rig.read_of(write))
    await settled()
    await until(lambda: len(under.pool.pids) == 1, "a worker is there")
    os.kill(under.pid, signal.SIGKILL)
    ask(rig.read_of(write))
    await settled()
    await until(lambda: not under.pool.starting and under.pool.usable, "a worker has started")
    stop(under.pid)
    ask(rig.read_of(write), deadline_seconds=0.2)
    ask(rig.read_of(write), deadline_seconds=0.2)
    await settled()
    await until(lambda: not under.breaker.closed or under.pool.usable, "it goes on")
    elsewhere = rig.directory.with_name(f"{rig.directory.name}-elsewhere")
    rig.directory.rename(elsewhere)
    for _ in range(4):
        ask(rig.read_of(write))
        await settled()
    elsewhere.rename(rig.directory)
    await until(lambda: under.breaker.closed and not under.pool.starting, "the path is in use again")
    ask(rig.read_of(write))
    await settled()
    faults.armed = False
    await until(lambda: under.pool.usable and len(under.pool.pids) == 1, "it can be used, and nobody hangs")
    assert len(under.registry.pids) == 1 + faults.swallowed("dead")
    assert sum(not answers for answers, _ in owed) == faults.swallowed("done")
    assert all(len(answers) <= 1 for answers, _ in owed)
    assert sum(loan.held_by is not None for _, loan in owed) == faults.swallowed("loan end")
    await works(under, rig)


def run_scenario(rig: IoRig, monkeypatch: pytest.MonkeyPatch, faults: Faults) -> PoolRig:
    async def run() -> PoolRig:
        monkeypatch.setattr("tests.rigs.io_pool_rig.PoolRig", RaisingRig)
        monkeypatch.setattr(RaisingRig, "faults", faults)
        failing = pooling.FAILING | {IoOutcome.GONE}
        async with pool_on(rig, failing=failing, failures=3, probe_seconds=0.1) as under:
            under.changes = Changes(faults)
            under.registry.started = faults.of("started", under.registry.started)  # type: ignore[method-assign]
            under.registry.dead = faults.of("dead", under.registry.dead)  # type: ignore[method-assign]
            faults.armed = True
            await asyncio.wait_for(scenario(under, rig, faults), 60)
            faults.armed = False
            return under

    return asyncio.run(run())


def has_effect(name: str) -> bool:
    """Whether it may raise after its effect: what begins has not begun where it raises."""
    return name not in ("loan begin", "started")


NAMES = ("changed", "count", "dead", "done", "loan begin", "loan end", "started")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2])
def test_an_exception_at_each_callback_of_a_pool_jams_nothing(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch, unexpected_errors: list[str], call: int, after: bool
) -> None:
    faults = Faults(*(Point(name, call, after) for name in NAMES if has_effect(name) or not after))
    under = run_scenario(rig, monkeypatch, faults)
    assert faults.calls.keys() == set(NAMES)
    assert faults.raised == len(NAMES) - 2 * after
    assert under.counts["io_failed_callbacks"] >= faults.raised - 2  # counting is one, and may have counted another
    end_raised = "the begin of a loan: AssertionError()"  # so that the test's loan had not ended when it began again
    unexpected_errors[:] = [said for said in unexpected_errors if said != end_raised]


def lazily(plain: Faults) -> Iterator[Point]:
    """What the first scenario has called, once it is over."""
    yield from points(plain.calls, after=has_effect)


@pytest.mark.long(seconds=20)
@pytest.mark.timeout(1800)
def test_an_exception_at_any_callback_of_a_pool_jams_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Faults()
    for point in chain([None], lazily(plain)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        rig = IoRig(folder)
        try:
            run_scenario(rig, monkeypatch, plain if point is None else Faults(point))
        except BaseException as error:
            error.add_note(f"raising at {point}")
            raise
        finally:
            rig.close()
