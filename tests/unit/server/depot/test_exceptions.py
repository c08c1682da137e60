"""An exception at any boundary between the engine, its tiers and its callers: nothing jams, leaks or waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvdepot.core.arena import LentMode
from kvdepot.core.calls import AcquireCall, AcquireOutcome, Kind, LocateCall, LocateReply, ReserveOutcome
from kvdepot.server.depot.departures import Departures
from kvdepot.server.depot.loads.lookups import LookUps
from kvdepot.server.depot.operators.invalidation import Invalidation
from kvdepot.server.depot.operators.pins import Pins
from kvdepot.server.depot.sessions.requests import Requests
from kvdepot.server.depot.sessions.workers import ObjectLoan
from kvdepot.server.depot.tiering.prefetch import Prefetch
from kvdepot.server.depot.tiering.prefetch_requests import PrefetchRequest
from kvdepot.server.depot.tiering.promotions import Promotion, Promotions
from kvdepot.server.depot.tiering.tiering import Tiering
from kvdepot.server.depot.tiering.write_queue import WriteQueue
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.types import TierConfig, WritePolicy
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import Tier, UnknownWorker, WorkerRegistry

from tests.fakes.raising import Faults, Injected, Point, points
from tests.rigs.engine_rig import DENSE, Client, Rig, audit, path, spec_of
from tests.rigs.tier_rig import COMMIT, reboot, store, verify

TIER_CALLS = ("write", "read", "look_up", "used", "tick", "drop")
INNER = (
    (WriteQueue, "offer"), (WriteQueue, "_following"), (WriteQueue, "_finish"), (Promotions, "_take_in"),
    (Promotion, "end"), (Prefetch, "_step"), (Prefetch, "pump"), (LookUps, "_count_done"), (LookUps, "_ask_slices"),
    (Tiering, "_take_in"), (Tiering, "lost_copy"), (Requests, "expire"), (Pins, "tick"), (Invalidation, "tick"),
    (Tree, "reclaim"), (Tiering, "trim"), (Departures, "_expire"),
)  # fmt: skip
"""What the engine calls as a callback, or as a part of its tick."""
AFTER = {
    "answer",
    "write",
    "read",
    "look_up",
    "used",
    "tick",
    "drop",
    "pump",
    "offer",
    "_count_done",
    "expire",
    "reclaim",
}
"""May raise after the effect: then a tier has a job of which the engine is told that it has not."""


class RaisingRig(Rig):
    """Every call of a tier goes through the faults."""

    faults: Faults

    def _tiers(self, registry: WorkerRegistry) -> list[tuple[Tier, TierConfig]]:
        tiers = super()._tiers(registry)
        for tier in self.lower_tiers:
            for name in TIER_CALLS:
                if hasattr(tier, name):
                    setattr(tier, name, self.faults.of(name, getattr(tier, name)))
        return tiers


class Story:
    """One client's calls, and what it was answered."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        RaisingRig.faults = faults
        self.rig = RaisingRig(
            data_pages=40, tier=COMMIT, shared=COMMIT, tier_bytes=12 * 12288, provisional_seconds=1.0,
            lease_deadline_seconds=20.0,
        )  # fmt: skip
        self.owed: list[list[Any]] = []
        self.client: Client = self.rig.attach()

    def call(self, made: Callable[[], object]) -> None:
        """As a service does: what raises is this call's error."""
        try:
            made()
        except Injected:
            return

    def ask(self, made: Callable[[Callable[[Any], None]], object]) -> None:
        answers: list[Any] = []
        self.owed.append(answers)
        try:
            made(self.faults.of("answer", answers.append))
        except Injected:  # the answer's own
            return

    def acquire(self, keys: list[bytes]) -> None:
        lease = self.client.lease()
        call = AcquireCall(self.client.session, lease, self.client.namespace, b"".join(keys), b"\1" * len(keys), "r")
        self.ask(lambda answer: self.rig.depot.acquire(call, answer))

    def locate(self, keys: list[bytes], request: str = "") -> None:
        call = LocateCall(self.client.session, self.client.namespace, b"".join(keys), 1 << 30, request, 10.0)
        self.ask(lambda answer: self.rig.depot.locate(call, answer))

    def run(self, ticks: int = 2) -> None:
        for _ in range(ticks):
            for tier in (self.rig.tier, self.rig.shared):
                tier.run()
            self.rig.now += 0.5
            self.rig.depot.tick()
        verify(self.rig)

    def release(self) -> None:
        session = self.rig.depot._sessions.of(self.client.session)
        self.client.release(*list(session.leases))


def tell(faults: Faults) -> Story:
    story = Story(faults)
    rig = story.rig
    faults.armed = True
    for name in "ab":
        story.call(lambda name=name: store(story.client, path(name, 3)))  # type: ignore[misc]
        story.run()
    reboot(rig)
    story.client = rig.attach()
    story.run()
    story.locate([*path("a", 3), *path("nobody", 2)])
    story.run()
    story.acquire(path("a", 3))
    story.acquire(path("b", 2))
    story.run()
    story.release()
    story.locate(path("b", 3), "waits")
    story.run()
    story.locate(path("b", 3), "waits too")
    story.locate(path("elsewhere", 20), "asks")
    story.run()
    if rig.tier.handles:
        story.call(lambda: rig.tier.lose(min(rig.tier.handles)))
    for name in "cdef":
        story.call(lambda name=name: store(story.client, path(name, 4)))  # type: ignore[misc]
        story.run()
    for name in "abc":
        story.acquire(path(name, 2))
    story.run(60)
    return story


def check(story: Story) -> None:
    story.faults.armed = False
    rig = story.rig
    for tier in rig.lower_tiers:
        tier.readable = tier.writable = True
    story.run(20)
    story.release()
    story.run(4)
    assert sum(not answers for answers in story.owed) == story.faults.swallowed("answer"), story.owed
    assert max(map(len, story.owed)) == 1
    engine = rig.depot
    audit(engine)
    assert not any(len(queue) or queue._writing for queue in engine._tiering._queues.values())
    assert not len(engine._tiering.promotions)
    assert not len(engine._locates._look_ups) and not engine._locates._look_ups._asked
    assert not any(tier._writing[slot][kind] for tier in engine._tree.tiers for slot in range(4) for kind in Kind)
    lent = engine._ram.lent
    assert lent.free_count == lent.count, "a loan leaks"
    assert not (lent.modes == LentMode.WRITE).any()
    rig.tier.capacity_bytes = rig.tier_bytes = 1 << 20  # so that nothing of it has to go
    before = rig.counter("tier_writes.memory/ok")
    store(story.client, path("next", 2))
    story.run()
    assert rig.counter("tier_writes.memory/ok") == before + 2, "the next object is not written"
    reboot(rig)
    story.client = rig.attach()
    story.acquire(path("next", 2))
    story.run()
    assert [one.outcome for one in story.owed[-1]] == [AcquireOutcome.GRANTED], "the next load is not answered"


def test_an_exception_at_any_call_of_a_tier_or_answer_to_a_caller_jams_nothing() -> None:
    plain = Faults()
    check(tell(plain))
    assert set(plain.calls) >= {"write", "read", "look_up", "tick", "drop", "answer"}
    for point in points(plain.calls, after=AFTER.__contains__):
        if point.name == "drop" and not point.after:
            continue  # a tier forgets first: nobody could tell it again, as the handle may be another object's by then
        faults = Faults(point)
        story = tell(faults)
        assert faults.raised == 1, point
        try:
            check(story)
        except BaseException as error:
            error.add_note(f"raising at {point}")
            raise


@pytest.mark.parametrize(("owner", "name"), INNER, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_an_exception_in_any_part_of_the_engine_s_own_jams_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: type[Any], name: str
) -> None:
    faults = Faults()
    inner = getattr(owner, name)

    def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
        return faults.through(name, inner, self, *args, **kwargs)

    counted: list[str] = []
    caught = Guard.caught

    def counting(self: Guard, place: str, error: Exception) -> None:
        counted.append(place)
        caught(self, place, error)

    monkeypatch.setattr(owner, name, raising)
    monkeypatch.setattr(Guard, "caught", counting)
    check(tell(faults))
    assert not counted, "raises by itself"
    assert faults.calls[name], "the story does not come here"
    for point in points(faults.calls, after=AFTER.__contains__):
        if point.name == name:
            faults = Faults(point)
            story = tell(faults)
            assert faults.raised == 1, point
            assert len(counted) == 1, f"{point} was counted as {counted}"
            counted.clear()
            try:
                check(story)
            except BaseException as error:
                error.add_note(f"raising at {point}")
                raise


# --- cases ---


def test_prefetch_goes_on_past_a_namespace_whose_spec_was_forgotten() -> None:
    """As `Namespaces.define` forgets those of idle ones: nobody says any more what a boundary of it needs."""
    loaded, forgotten, served = (path(number, 3) for number in range(3))
    rig = Rig(data_pages=128, tier=COMMIT)
    spec = spec_of(*DENSE.groups, name="b")
    first, others = rig.attach("first", 11, spec), rig.attach("others", 12)
    store(first, forgotten)
    store(others, loaded)
    store(others, served)
    for _ in range(3):
        rig.tier.run()
        rig.depot.tick()
    reboot(rig)
    first, others = rig.attach("first", 11, spec), rig.attach("others", 12)
    others.acquire_later(loaded, b"\1" * 3, others.lease())  # nothing is begun ahead while that is read
    first.locate(forgotten, request="forgotten")
    others.locate(served, request="served")
    rig.depot._tree.namespaces.by_id[first.namespace].forget_spec()
    rig.tier.run()
    assert {job.key for job in rig.tier.medium.names.values()} >= {*forgotten, *served}
    assert rig.counter("prefetched_objects") == 3, "the second request is not served"
    assert not any(name.startswith("internal_errors.") for name in rig.depot.counters.snapshot())
    audit(rig.depot)


@pytest.mark.requirement("I6")
def test_a_worker_that_lost_its_slot_is_lent_nothing_and_its_death_frees_nobody_else_s() -> None:
    """The slot may be another process's by now: what that one is lent would come back with the wrong death."""
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, path("a", 1))
    number, sessions = rig.tier._worker, rig.depot._sessions
    attachment = sessions.attachments[number]
    sessions.remove_attachment(attachment)
    sessions.remove(attachment.session)
    (job,) = rig.tier.jobs
    assert isinstance(job.loan, ObjectLoan)
    with pytest.raises(UnknownWorker):
        job.loan.begin(number)
    assert not job.loan.begun
    next_one = rig.attach("next", 12)
    assert next_one.attachment == number, "it has the slot now"
    with pytest.raises(UnknownWorker):
        job.loan.begin(number)
    rig.tier.registry.dead(number)
    assert number in sessions.attachments
    rig.tier._worker = rig.tier.registry.started(5999)
    rig.tier.run()
    assert rig.counter("tier_writes.memory/ok") == 1
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_a_tier_whose_writes_all_raise_keeps_no_queue_and_works_when_they_do_not() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    write = rig.tier.write

    def raising(*_: Any) -> None:
        raise ValueError("a field is out of range")

    rig.tier.write = raising  # type: ignore[assignment]
    store(client, path("a", 3))
    assert rig.counter("tier_writes.memory/cancelled") == rig.counter("internal_errors.tier") == 1
    assert rig.counter("tier_writes_dropped.memory/no_parent") == 2
    (tier,) = rig.depot.status().lower_tiers
    assert (tier.queued_objects, tier.queued_bytes) == (0, 0)
    rig.tier.write = write  # type: ignore[method-assign]
    store(client, path("b", 3))
    rig.tier.run()
    assert rig.counter("tier_writes.memory/ok") == 3
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_what_a_tier_wrote_although_it_raised_is_dropped_there() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    write = rig.tier.write

    def written_and_raised(*arguments: Any) -> None:
        write(*arguments)
        raise ValueError("behind it")

    rig.tier.write = written_and_raised  # type: ignore[assignment]
    store(client, path("a", 1))
    rig.tier.write = write  # type: ignore[method-assign]
    rig.tier.run()
    assert not rig.tier.handles
    audit(rig.depot)


@pytest.mark.requirement("I3")
def test_a_read_that_raises_is_a_miss_and_the_next_one_is_read() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, path("a", 2))
    rig.tier.run()
    reboot(rig)
    client, read = rig.attach(), rig.tier.read

    def raising(*_: Any) -> None:
        raise OSError("not now")

    rig.tier.read = raising  # type: ignore[assignment]
    assert client.acquire(path("a", 2))[1].outcome is AcquireOutcome.MISSING
    audit(rig.depot)
    rig.tier.read = read  # type: ignore[method-assign]
    answers = client.acquire_later(path("a", 2), b"\1\1", client.lease())
    rig.tier.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.GRANTED]
    audit(rig.depot)


@pytest.mark.requirement("I3")
def test_a_locate_that_fails_behind_its_lookup_is_answered_with_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(shared=TierConfig(WritePolicy.COMMIT))
    client = rig.attach()
    answers = client.locate_later(path("a", 2), request="r")
    assert not answers
    monkeypatch.setattr(rig.depot._locates, "_see", lambda *_: 1 / 0)
    rig.shared.run()
    assert answers == [LocateReply(0)]
    assert rig.counter("internal_errors.lookup") == 1


def test_a_grant_that_raises_gives_its_pins_back_and_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tier=COMMIT)
    store(rig.attach(), path("a", 2))
    rig.tier.run()
    reboot(rig)
    client = rig.attach()
    answers = client.acquire_later(path("a", 2), b"\1\1", client.lease())
    monkeypatch.setattr(rig.depot._loads, "_pack", lambda *_: 1 / 0)
    rig.tier.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    lent = rig.depot._ram.lent
    assert lent.free_count == lent.count
    audit(rig.depot)


def test_a_load_whose_prefetch_cannot_be_ended_is_answered_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tier=COMMIT)
    store(rig.attach(), path("a", 2))
    rig.tier.run()
    reboot(rig)
    client = rig.attach()
    monkeypatch.setattr(rig.depot._prefetch, "acquired", lambda *_: 1 / 0)
    lease = client.lease()
    answers = client.acquire_later(path("a", 2), b"\1\1", lease)
    rig.tier.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.GRANTED]
    client.release(lease)
    audit(rig.depot)


@pytest.mark.requirement("I4", "I6")
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_reservation_that_raises_leaves_nothing_lent_or_reserved(
    monkeypatch: pytest.MonkeyPatch, call: int
) -> None:  # fmt: skip
    rig = Rig()
    client, keys = rig.attach(), path("p", 3)
    faults = Faults(Point("note", call, True))
    faults.armed = True
    monkeypatch.setattr(rig.depot._requests, "note", faults.of("note", rig.depot._requests.note))
    with pytest.raises(Injected):
        client.reserve(keys, request="r")
    session = rig.depot._sessions.of(client.session)
    assert (rig.depot.status().tier.lent_bytes, session.credit_used_bytes, session.leases) == (0, 0, {})
    assert not any(room.attention_bytes for room in rig.depot._ram.rooms)
    audit(rig.depot)
    _, reply = client.reserve(keys, request="r")
    assert set(reply.outcomes) == {ReserveOutcome.GRANTED}
    audit(rig.depot)


def test_a_reservation_that_raises_at_its_very_end_is_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    client = rig.attach()
    monkeypatch.setattr(rig.depot._stores, "_here", _raises)
    with pytest.raises(Injected):
        client.reserve(path("p", 1))
    assert not rig.depot._sessions.of(client.session).leases
    assert rig.depot.status().tier.lent_bytes == 0


def _raises(*_: object) -> bool:
    raise Injected


@pytest.mark.parametrize("requests", [1, 2])
def test_a_prefetch_request_that_raises_after_it_left_the_queue_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    """It needs nothing of the tier by its turn, and its end raises."""
    loaded, *waiting = (path(number, 2) for number in range(requests + 1))
    rig = Rig(data_pages=128, tier=COMMIT)
    client = rig.attach()
    for keys in (loaded, *waiting):
        store(client, keys)
    rig.tier.run()
    reboot(rig)
    client = rig.attach()
    client.acquire_later(loaded, b"\1" * 2, client.lease())  # nothing is begun ahead while that is read
    prefetch = rig.depot._prefetch
    missing, end = prefetch.missing, prefetch._end
    faults, ended = Faults(Point("end", 1, False)), []
    for number, keys in enumerate(waiting):
        client.locate(keys, request=f"r{number}")
    first = next(iter(prefetch._requests.values()))
    first.todo.clear()
    monkeypatch.setattr(
        prefetch, "missing", lambda ns, keys, tier: missing(ns, keys, tier) if keys != first.keys else []
    )

    def ends(request: PrefetchRequest, why: str) -> None:
        ended.append((request is first, why))
        faults.through("end", end, request, why)

    monkeypatch.setattr(prefetch, "_end", ends)
    faults.armed = True
    rig.tier.run()
    assert rig.counter("internal_errors.prefetch") == 1
    assert ended[:2] == [(True, "renewed"), (True, "failed")]
    assert all(is_first for is_first, why in ended if why == "failed"), "another request was ended for it"
    assert rig.counter("prefetched_objects") == 2 * (requests - 1)
    audit(rig.depot)


def test_a_write_whose_end_cannot_be_counted_is_not_under_way_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tier=COMMIT)
    store(rig.attach(), path("p", 1))
    (lower,) = rig.depot._tree.tiers
    queue = rig.depot._tiering._queues[lower.number]
    monkeypatch.setattr(lower, "writing", _raises)
    rig.tier.run()
    assert not queue._writing
    assert rig.counter("internal_errors.write_queue") == 1
    assert rig.depot.status().lower_tiers[0].objects == 1, "it was written all the same"
