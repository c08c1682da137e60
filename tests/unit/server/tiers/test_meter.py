"""Budgets of a bucket: hard, corrected by what workers say, and new each day."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from kvdepot.core.object_keys import KeyRing
from kvdepot.core.objectfile import object_bytes
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import Answer, Job, Priority, PublishFile, ReadFile, StatFiles
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of
from kvdepot.server.tiers.object.meter import Meter, MeteredWorkers

DAY_SECONDS = 86_400.0
NAME = name_of(1, pages=2)
SIZE = object_bytes(NAME.raw_bytes)
"""What a worker receives that reads it: with its header."""
STAT = StatFiles(tuple(f"a/{number}.kvd" for number in range(8)))
READ = ReadFile("a/b.kvd", NAME, None, ".quarantine/x")
PUT = PublishFile("a/b.kvd", "t", 0, NAME, 0, 0, (), None, sync=False, quarantine=".quarantine/x")
OK = IoOutcome.OK


class Bucket:
    """`Workers` that answer at once, as a worker does that counted."""

    def __init__(self) -> None:
        self.breaker = Breaker(failures_max=1, probe_every_seconds=1.0, clock=lambda: 0.0)
        self.usable, self.why_unusable = True, ""
        self.jobs: list[Job] = []
        self.answer = Answer(OK, requests=1)

    def submit(self, job: Job, *, priority: Priority, done: object, loan: object = None) -> None:
        assert callable(done)
        self.jobs.append(job)
        done(self.answer)

    def renew(self, guard: str) -> None: ...

    async def close(self, seconds: float = 0.0) -> int:
        return 0


class Metered:
    """A bucket behind a meter, on a clock of its own."""

    def __init__(self, *, requests: int | None = None, read_bytes: int | None = None) -> None:
        self.now = 0.0
        self.counted: Counter[str] = Counter()
        self.bucket = Bucket()
        self.meter = Meter(requests=requests, read_bytes=read_bytes, wall_clock=lambda: self.now, count=self._count)

    def _count(self, name: str, amount: float) -> None:
        self.counted[name] += int(amount)

    def stops(self) -> tuple[bool, bool]:
        """Return whether it stops reading, and writing."""
        return self.meter.stops_reading, self.meter.stops_writing

    def ask(self, job: Job, answer: Answer) -> Answer:
        """Submit a job that a worker would answer so, and return the answer."""
        self.bucket.answer = answer

        async def run() -> Answer:
            loop = asyncio.get_running_loop()
            answered: asyncio.Future[Answer] = loop.create_future()
            MeteredWorkers(self.bucket, self.meter, loop).submit(job, priority=Priority.LOAD, done=answered.set_result)
            return await answered

        return asyncio.run(run())


def test_without_limits_everything_is_done_and_counted() -> None:
    metered = Metered()
    assert metered.ask(STAT, Answer(OK, requests=8)).outcome is OK
    assert metered.ask(READ, Answer(OK, requests=1, received_bytes=12_288)).outcome is OK
    assert metered.counted == {"bucket_requests": 9, "bucket_received_bytes": 12_288}
    assert metered.stops() == (False, False) and not metered.meter.reason


def test_a_job_that_would_pass_the_limit_is_refused_with_a_reason_and_no_worker_gets_it() -> None:
    metered = Metered(requests=10)
    metered.ask(STAT, Answer(OK, requests=8))
    assert metered.stops() == (False, False)
    refused = metered.ask(STAT, Answer(OK, requests=8))
    assert (refused.outcome, refused.detail) == (IoOutcome.CANCELLED, "the request budget of this day is spent")
    assert metered.bucket.jobs == [STAT]
    assert metered.stops() == (True, True), "two requests are left, which are too few"
    assert (metered.counted["bucket_requests"], metered.counted["bucket_refused_jobs.requests"]) == (8, 1)


def test_a_store_is_refused_before_it_can_take_more_than_is_left() -> None:
    """It reads what is in its place, and may put it again."""
    metered = Metered(requests=1)
    assert metered.ask(PUT, Answer(OK, requests=2)).outcome is IoOutcome.CANCELLED
    assert not metered.bucket.jobs and metered.counted == {"bucket_refused_jobs.requests": 1}


def test_a_store_with_keys_is_charged_for_what_it_may_read() -> None:
    keyed = replace(PUT, keys=KeyRing((b"k" * 32,)))
    metered = Metered(read_bytes=6 * SIZE)
    assert metered.ask(keyed, Answer(OK, requests=3, received_bytes=SIZE)).outcome is OK
    assert metered.stops() == (False, False)
    refused = metered.ask(keyed, Answer(OK, requests=1))
    assert metered.counted["bucket_refused_jobs.read"] == 1
    assert (refused.outcome, refused.detail) == (IoOutcome.CANCELLED, "the read budget of this day is spent")
    assert metered.stops() == (True, True)
    metered.now += DAY_SECONDS
    assert metered.stops() == (False, False)


def test_what_jobs_in_flight_may_take_ends_a_budget_until_they_have_ended() -> None:
    metered = Metered(requests=20)
    assert metered.meter.charge(PUT)
    assert not metered.meter.charge(PUT)
    assert metered.stops() == (True, True)
    metered.meter.settle(PUT, Answer(OK, requests=1))
    assert metered.stops() == (False, False)
    assert metered.meter.charge(PUT)


def test_bytes_that_were_read_stop_reading_alone() -> None:
    metered = Metered(read_bytes=SIZE)
    assert metered.ask(READ, Answer(OK, requests=1, received_bytes=SIZE)).outcome is OK
    assert metered.stops() == (True, False)
    assert metered.ask(READ, Answer(OK, requests=1)).outcome is IoOutcome.CANCELLED
    assert metered.ask(PUT, Answer(OK, requests=1)).outcome is OK


def test_a_read_that_was_refused_stops_reading_until_bytes_come_back_or_the_day_ends() -> None:
    metered = Metered(read_bytes=SIZE + 1)
    metered.ask(READ, Answer(OK, requests=1, received_bytes=SIZE))
    assert metered.stops() == (False, False), "nobody knows yet that the next one is too long"
    assert metered.ask(READ, Answer(OK)).outcome is IoOutcome.CANCELLED
    assert metered.stops() == (True, False)
    assert metered.meter.reason == "the read budget of this day is spent"
    metered.meter.settle(READ, Answer(OK, requests=1, received_bytes=0))
    assert metered.stops() == (False, False)
    metered.meter.settle(READ, Answer(OK, requests=1, received_bytes=2 * SIZE))
    assert metered.ask(READ, Answer(OK)).outcome is IoOutcome.CANCELLED
    metered.now += DAY_SECONDS
    assert metered.stops() == (False, False)


def test_two_jobs_of_one_worker_add_up_whichever_answer_has_the_requests() -> None:
    metered = Metered(requests=100)
    metered.ask(PUT, Answer(OK, requests=7))  # of which four are the next job's
    metered.ask(STAT, Answer(OK, requests=4))
    assert metered.ask(StatFiles(("a",) * 90), Answer(OK, requests=90)).outcome is IoOutcome.CANCELLED
    assert metered.ask(StatFiles(("a",) * 89), Answer(OK, requests=89)).outcome is OK
    assert metered.counted["bucket_requests"] == 100


def test_the_charge_of_a_worker_that_died_stays_and_that_of_a_job_without_a_worker_is_returned() -> None:
    metered = Metered(requests=6)
    metered.ask(READ, Answer(IoOutcome.CANCELLED))
    metered.ask(READ, Answer(IoOutcome.TIMEOUT))
    assert metered.stops() == (False, False)
    metered.ask(READ, Answer(IoOutcome.TIMEOUT))
    assert metered.stops() == (True, True)
    assert metered.counted["bucket_requests"] == 6


def test_a_day_later_the_budgets_are_whole_again() -> None:
    metered = Metered(requests=15)
    metered.ask(PUT, Answer(OK, requests=15))
    assert metered.stops() == (True, True)
    metered.now += DAY_SECONDS
    assert metered.stops() == (False, False)
    metered.meter.settle(STAT, Answer(IoOutcome.CANCELLED))  # charged the day before
    assert metered.ask(PUT, Answer(OK, requests=15)).outcome is OK
    assert metered.stops() == (True, True)
