"""Large calls in turns of the loop: what is asked beside them is answered, and nothing of them is lost."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.calls import (
    AbandonCall,
    AcquireCall,
    AcquireOutcome,
    Capabilities,
    CommitCall,
    CommitItem,
    CommitOutcome,
    DeclareCall,
    ReleaseCall,
    ReserveOutcome,
)
from kvdepot.core.errors import InvalidArgument, KvDepotError, UnknownSession
from kvdepot.core.limits import OBJECTS_PER_LEASE_MAX, RESERVED_PER_CALL_MAX
from kvdepot.proto.methods import BY_CALL, encode
from kvdepot.server.depot.loads import acquires
from kvdepot.server.rpc import turns
from kvdepot.server.rpc.depot_calls import DepotCalls
from kvdepot.server.rpc.turns import STEP_OBJECTS, children_first, in_turns, pieces

from tests.rigs.engine_rig import Client, Rig, audit, path, u32
from tests.rigs.tier_rig import ATTENTION, COMMIT, on_tier_only

LOG = logging.getLogger("turns")


class Rounds:
    """Commands of the loop that others have had a turn for."""

    def __init__(self) -> None:
        self.count = 0

    def go_round(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self.go_round)


def calls_of(rig: Rig) -> tuple[DepotCalls, list[None]]:
    committed: list[None] = []
    calls = DepotCalls(
        rig.depot, capabilities=lambda: Capabilities(1, 1, "", 1, 0), committed=lambda: committed.append(None),
        counters=rig.depot.counters, log=LOG,
    )  # fmt: skip
    return calls, committed


def answered(calls: DepotCalls, call: object, between: Callable[[], object] = int) -> tuple[Any, int]:
    """The answer, and how many turns of others it took; `between` is done in the first of these."""
    method = BY_CALL[type(call)]

    async def run() -> tuple[Any, int]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        rounds = Rounds()
        calls.start(method, encode(call).SerializeToString(), answer.set_result)
        rounds.go_round()
        between()
        return await answer, rounds.count

    reply, turns_taken = asyncio.run(run())
    return reply if isinstance(reply, KvDepotError) else method.reply.parse(reply), turns_taken


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is over after one step, and a lease takes several."""
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(turns, "STEP_OBJECTS", 24)


def reserve(client: Client, prompt: str, chunks: int) -> tuple[int, int]:
    lease, reply = client.reserve(path(prompt, chunks))
    return lease, reply.outcomes.count(ReserveOutcome.GRANTED)


def test_of_a_large_reserve_the_first_objects_are_granted_and_the_others_come_later() -> None:
    rig = Rig(data_pages=2048, rows=1024, lent_rows=1024)
    client = rig.attach()
    keys = path("p", OBJECTS_PER_LEASE_MAX)
    lease, reply = client.reserve(keys, request="r")
    rest = OBJECTS_PER_LEASE_MAX - RESERVED_PER_CALL_MAX
    assert reply.outcomes == bytes([ReserveOutcome.GRANTED] * RESERVED_PER_CALL_MAX + [ReserveOutcome.LATER] * rest)
    assert rig.counter("reserved_objects.later") == rest
    (record,) = rig.depot.records.explain("r")
    assert dict(record.reserved) == {"granted": RESERVED_PER_CALL_MAX, "later": rest}
    outcomes = client.commit(lease, *range(OBJECTS_PER_LEASE_MAX))
    assert outcomes == bytes([CommitOutcome.COMMITTED] * RESERVED_PER_CALL_MAX + [CommitOutcome.LOST] * rest)
    _, reply = client.reserve(
        keys[RESERVED_PER_CALL_MAX:], start=RESERVED_PER_CALL_MAX, parent=keys[RESERVED_PER_CALL_MAX - 1]
    )
    assert reply.outcomes.count(ReserveOutcome.GRANTED) == RESERVED_PER_CALL_MAX
    audit(rig.depot)


@pytest.mark.usefixtures("impatient")
def test_a_large_commit_lets_others_be_answered_and_is_answered_whole() -> None:
    rig = Rig(data_pages=2048, rows=1024, lent_rows=1024)
    client, (calls, committed) = rig.attach(), calls_of(rig)
    leases = [reserve(client, f"p{number}", RESERVED_PER_CALL_MAX) for number in range(4)]
    items = tuple(CommitItem(lease, u32(*range(granted + 1))) for lease, granted in leases)
    reply, rounds = answered(calls, (CommitCall(client.session, items)))
    outcomes = reply.outcomes
    assert outcomes == (bytes([CommitOutcome.COMMITTED] * RESERVED_PER_CALL_MAX + [CommitOutcome.LOST]),) * 4
    assert rounds >= 4 * (RESERVED_PER_CALL_MAX // turns.STEP_OBJECTS) - 1
    assert len(committed) > 1, "what is committed is summed while the rest is on its way"
    audit(rig.depot)


@pytest.mark.usefixtures("impatient")
def test_a_large_abandon_gives_everything_back() -> None:
    rig = Rig(data_pages=2048, rows=1024, lent_rows=1024)
    client, (calls, _) = rig.attach(), calls_of(rig)
    leases = [reserve(client, f"p{number}", RESERVED_PER_CALL_MAX)[0] for number in range(4)]
    items = tuple(
        CommitItem(lease, b"" if number % 2 else u32(*range(RESERVED_PER_CALL_MAX)))
        for number, lease in enumerate(leases)
    )
    _, rounds = answered(calls, (AbandonCall(client.session, items)))
    assert rounds >= 2
    assert rig.depot.status().tier.lent_bytes == rig.depot.status().sessions[0].credit_used_bytes == 0
    audit(rig.depot)


@pytest.mark.usefixtures("impatient")
def test_a_large_release_counts_each_load_as_it_was_of_use() -> None:
    rig = Rig(data_pages=2048, rows=1024, lent_rows=1024)
    client, (calls, _) = rig.attach(), calls_of(rig)
    client.store(path("p", 8))
    leases = [client.acquire(path("p", 8))[0] for _ in range(20)]
    message = ReleaseCall(client.session, tuple(leases), tuple(leases[:5]))
    _, rounds = answered(calls, message)
    assert rounds >= len(leases) - 1
    assert (rig.counter("released_loads.used"), rig.counter("released_loads.unused")) == (15, 5)
    assert rig.depot.status().tier.lent_bytes == 0
    audit(rig.depot)


@pytest.mark.usefixtures("impatient")
def test_a_declaration_drops_lease_by_lease_and_then_says_what_is_lost() -> None:
    rig = Rig(data_pages=2048, rows=1024, lent_rows=1024)
    client, (calls, _) = rig.attach(), calls_of(rig)
    leases = [reserve(client, f"p{number}", 10)[0] for number in range(20)]
    message = DeclareCall(client.session, (leases[0], 12345))
    reply, rounds = answered(calls, message)
    assert reply.lost == (12345,)
    assert rounds >= 15
    assert rig.depot.status().sessions[0].leases == 1
    audit(rig.depot)


@pytest.mark.requirement("I6")
@pytest.mark.usefixtures("impatient")
def test_a_declaration_drops_nothing_that_was_granted_between_its_turns() -> None:
    """As where a client has waited for long enough, has declared again, and goes on."""
    rig = Rig(data_pages=2048, rows=1024, lent_rows=1024)
    client, (calls, _) = rig.attach(), calls_of(rig)
    for number in range(20):
        reserve(client, f"p{number}", 10)
    granted: list[int] = []
    message = DeclareCall(client.session, ())
    answered(calls, message, lambda: granted.append(reserve(client, "new", 10)[0]))
    assert client.commit(granted[0], *range(10)) == bytes([CommitOutcome.COMMITTED] * 10)
    audit(rig.depot)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("method", ["Commit", "Abandon", "Release", "Declare"])
def test_a_session_that_ends_between_two_turns_ends_the_call(method: str) -> None:
    rig = Rig(data_pages=2048, rows=1024, lent_rows=1024)
    client, (calls, _) = rig.attach(), calls_of(rig)
    leases = tuple(reserve(client, f"p{number}", RESERVED_PER_CALL_MAX)[0] for number in range(4))
    items = tuple(CommitItem(lease, u32(*range(RESERVED_PER_CALL_MAX))) for lease in leases)
    messages: dict[str, object] = {
        "Commit": (CommitCall(client.session, items)),
        "Abandon": (AbandonCall(client.session, items)),
        "Release": (ReleaseCall(client.session, leases)),
        "Declare": (DeclareCall(client.session, ())),
    }
    answer, _ = answered(calls, messages[method], lambda: rig.depot.process_dead(client.attachment))
    assert isinstance(answer, UnknownSession)
    for _ in range(20):
        rig.depot.tick()
    assert rig.depot.status().tier.lent_bytes == 0
    audit(rig.depot)


def test_room_for_a_large_load_is_made_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquires, "PLACED_AT_ONCE", 1)
    rig = Rig(data_pages=256, tier=COMMIT, prefetch_share=0.0)
    client = on_tier_only(rig, path("p", 8))
    calls, _ = calls_of(rig)
    call = AcquireCall(client.session, 1, client.namespace, b"".join(path("p", 8)), ATTENTION * 8)

    async def run() -> list[Any]:
        answers: list[Any] = []
        calls.start(BY_CALL[AcquireCall], encode(call).SerializeToString(), answers.append)
        assert len(rig.tier.jobs) == 1
        for _ in range(20):
            await asyncio.sleep(0)
        rig.tier.run()
        return answers

    (answer,) = asyncio.run(run())
    assert BY_CALL[AcquireCall].reply.parse(answer).outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


@pytest.mark.usefixtures("impatient")
def test_what_a_step_raises_ends_the_call_once() -> None:
    ends: list[Exception | None] = []

    def steps() -> Iterator[None]:
        yield
        yield
        raise InvalidArgument("in the third step")

    async def run() -> None:
        in_turns(steps(), ends.append)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [type(end) for end in ends] == [InvalidArgument]


@given(st.lists(st.lists(st.integers(0, 1 << 20), max_size=3 * STEP_OBJECTS), max_size=8))
def test_pieces_are_the_items_in_their_order_and_each_is_a_step(indices: list[list[int]]) -> None:
    items = [CommitItem(number + 1, u32(*part)) for number, part in enumerate(indices)]
    groups = list(pieces(items))
    joined = dict.fromkeys(range(len(items)), b"")
    for group in groups:
        assert sum(len(piece.indices) // 4 or 1 for _, piece in group) < 2 * STEP_OBJECTS
        for number, piece in group:
            assert piece.lease_id == items[number].lease_id
            assert bool(piece.indices) == bool(items[number].indices), "no index means all of them"
            joined[number] += piece.indices
    assert list(joined.values()) == [item.indices for item in items]


def test_an_abandon_names_children_before_their_parents() -> None:
    item = children_first(CommitItem(7, u32(3, 1, 2, 3, 300)))
    assert (item.lease_id, struct.unpack("<4I", item.indices)) == (7, (300, 3, 2, 1))
    assert children_first(CommitItem(7, b"")).indices == b""
