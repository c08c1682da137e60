"""Each reason for which the daemon serves no more of a prompt, caused once and read back (P10), and its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from kvdepot.client.ctl.as_json import to_json
from kvdepot.client.ctl.explaining import record_lines
from kvdepot.core.calls import EndRequestCall, Kind, RequestEnd, ReserveOutcome
from kvdepot.core.elements import ElementRun
from kvdepot.core.errors import NotFound
from kvdepot.core.misses import UNASKED_REASONS, MissReason, miss_reason
from kvdepot.core.planner import GroupSpec
from kvdepot.core.records import (
    LIST_MAX,
    LOADS_PER_RECORD_MAX,
    RECORDS_PER_ANSWER_MAX,
    ExplainCall,
    ExplainReply,
    Lookup,
    Outcome,
    RequestList,
    RequestRecord,
)
from kvdepot.proto.methods import BY_CALL, OPERATOR
from kvdepot.server.depot.loads import records as records_module
from kvdepot.server.depot.tree.lost_keys import LostKeys
from kvdepot.server.depot.types import Quota, TierConfig, WritePolicy

from tests.fakes.memory_tier import MemoryTier
from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, key, path, spec_of

KEYS = path("p", 4)


def told(rig: Rig, request: str = "r") -> RequestRecord:
    """As an operator gets it."""
    codec = BY_CALL[ExplainCall].reply
    (record,) = codec.decode(codec.encode(ExplainReply(rig.depot.records.explain(request)))).records
    assert isinstance(record, RequestRecord)
    return record


def lookup(rig: Rig, request: str = "r") -> Lookup:
    found = told(rig, request).lookup
    assert found is not None
    return found


def unknown(rig: Rig) -> Client:
    return rig.attach()


def evicted(rig: Rig) -> Client:
    client = rig.attach()
    client.store(KEYS)
    rig.depot._ram.evictor.evict_to(rig.depot._ram.rooms[0], 0, 100, "watermark")
    return client


def corrupt(rig: Rig) -> Client:
    client = rig.attach()
    client.store(KEYS)
    rig.sum_all()
    rig.crash()
    client = rig.attach()
    rig.sum_all(lambda row: row + 1)
    return client


def no_grant(rig: Rig) -> Client:
    client = rig.attach()
    rig.depot.configure(replace(rig.config, credit_bytes=1), {})
    assert set(client.reserve(KEYS)[1].outcomes) <= {ReserveOutcome.REFUSED, ReserveOutcome.LATER}
    return client


def abandoned(rig: Rig) -> Client:
    client = rig.attach()
    lease, _ = client.reserve(KEYS)
    client.abandon(lease, 0, 1, 2, 3)
    return client


def pruned(rig: Rig) -> Client:
    client = rig.attach(spec=HYBRID)
    client.store(KEYS, (Kind.ATTENTION,), request="before")
    client.end_request("before")
    return client


def other_namespace(rig: Rig) -> Client:
    rig.attach("other", 11, spec=replace(DENSE, identity={"model": '"b"'})).store(KEYS)
    return rig.attach()


def being_written(rig: Rig) -> Client:
    client = rig.attach()
    client.reserve(KEYS)
    return client


def unverified(rig: Rig) -> Client:
    client = rig.attach()
    client.store(KEYS)
    rig.sum_all()
    rig.crash()
    return rig.attach()


def no_checkpoint(rig: Rig) -> Client:
    client = rig.attach(spec=HYBRID)
    client.store(KEYS, (Kind.ATTENTION,))
    return client


def drift(rig: Rig) -> Client:
    elements = {Kind.ATTENTION: (ElementRun("bfloat16", 8192),)}
    client = rig.attach(elements=elements)
    client.store(KEYS)
    rig.depot.configure(replace(rig.config, audit_sample=1.0), {})
    rig.depot._audits.ram_share_max = 1.0
    client.store(KEYS[:1])
    pair = rig.depot.next_to_compare()
    assert pair is not None
    rig.depot.compared(pair.row, drifted=True)
    return client


CAUSES: dict[MissReason, Callable[[Rig], Client]] = {
    MissReason.DRIFT: drift,
    MissReason.UNKNOWN: unknown,
    MissReason.EVICTED: evicted,
    MissReason.CORRUPT: corrupt,
    MissReason.NO_GRANT: no_grant,
    MissReason.ABANDONED: abandoned,
    MissReason.PRUNED: pruned,
    MissReason.OTHER_NAMESPACE: other_namespace,
    MissReason.BEING_WRITTEN: being_written,
    MissReason.UNVERIFIED: unverified,
    MissReason.NO_CHECKPOINT: no_checkpoint,
}


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("reason", CAUSES, ids=str)
def test_each_reason_is_answered_counted_and_explained(reason: MissReason) -> None:
    rig = Rig()
    client = CAUSES[reason](rig)
    reply = client.locate(KEYS, request="r")
    assert (reply.boundary_tokens, reply.miss) == (0, reason)
    counted = {one: rig.counter(f"misses.{one}") for one in MissReason}
    assert counted == {one: float(one is reason) for one in MissReason}
    found = lookup(rig)
    assert (found.miss, found.missing_chunk, found.missing_key) == (reason, 0, KEYS[0])


@pytest.mark.requirement("P10")
def test_what_a_tier_has_is_not_known_before_it_has_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryTier, "open", lambda _: None)
    rig = Rig(tier=TierConfig(WritePolicy.COMMIT))
    client = rig.attach()
    assert client.locate(KEYS, request="r").miss == MissReason.TIER_UNAVAILABLE
    monkeypatch.undo()
    rig.tier.open()
    assert client.locate(KEYS, request="r").miss == MissReason.UNKNOWN
    rig.tier.readable = False  # its path is out of use, and its index is known
    assert client.locate(KEYS, request="r").miss == MissReason.UNKNOWN


@pytest.mark.requirement("P10")
def test_another_namespace_is_named_with_the_field_that_differs() -> None:
    rig = Rig()
    client = other_namespace(rig)
    client.locate(KEYS, request="r")
    assert told(rig).differences == ('identity.model: "a" != "b"',)
    assert lookup(rig).other_namespace == replace(DENSE, identity={"model": '"b"'}).namespace_id()


@pytest.mark.requirement("P10")
def test_an_engine_is_not_told_what_other_tenants_have() -> None:
    rig = Rig()
    rig.attach("other", 11, spec=replace(DENSE, tenant="them")).store(KEYS)
    reply = rig.attach().locate(KEYS, request="r")
    assert reply.miss == MissReason.UNKNOWN
    assert lookup(rig).miss == MissReason.OTHER_NAMESPACE, "an operator is"
    assert told(rig).differences == ('tenant: "" != "them"',)


@pytest.mark.requirement("P10")
def test_what_a_quota_never_lets_into_ram_is_no_room() -> None:
    rig = Rig(tier=TierConfig(write=WritePolicy.COMMIT), quotas=(Quota(capacity_bytes=2 * 8192),))
    client = rig.attach()
    client.store(KEYS[:2])
    reply = client.locate(KEYS)
    assert (reply.boundary_tokens, reply.miss) == (2 * CHUNK, MissReason.NO_ROOM)


@pytest.mark.requirement("P10")
def test_attention_without_its_windows_is_incomplete() -> None:
    windows = spec_of(
        GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)),
        GroupSpec(Kind.WINDOW, 16, window_tokens=16, rank_block_bytes=(4096,)),
        name="windows",
    )
    client = Rig().attach(spec=windows)
    client.store(KEYS, (Kind.ATTENTION,))
    assert client.locate(KEYS).miss == MissReason.INCOMPLETE


@pytest.mark.requirement("P10")
def test_a_hole_behind_what_is_served_has_its_reason_too() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS[:2])
    reply = client.locate(KEYS, request="r")
    assert (reply.boundary_tokens, reply.miss) == (2 * CHUNK, MissReason.UNKNOWN)
    found = lookup(rig)
    assert (found.path_chunks, found.missing_chunk, found.missing_key) == (2, 2, KEYS[2])
    assert dict(found.chunks_by_tier) == {"ram": 2}
    assert (found.offered_tokens, found.offered_tier, found.chunks) == (2 * CHUNK, "ram", 4)
    assert sum(rig.counter(f"misses.{one}") for one in MissReason) == 0, "requests that found nothing are counted"


@pytest.mark.requirement("P10")
def test_a_whole_hit_has_no_reason() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS)
    assert client.locate(KEYS, request="r").miss == ""
    assert client.locate(KEYS, high_tokens=2 * CHUNK, request="r").miss == ""
    assert told(rig).lookups == 2


@pytest.mark.requirement("P10")
def test_a_record_tells_of_loads_stores_and_the_engines_own_word() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS[:2])
    client.locate(KEYS, request="r")
    rig.now += 1.0
    lease, _ = client.acquire(KEYS[:2], request="r")
    client.store(KEYS, request="r")
    client.release(lease)
    rig.now += 1.0
    rig.depot.end_request(EndRequestCall(client.session, "r", RequestEnd(CHUNK, 2 * CHUNK, "not_worth_it")))
    rig.now += 1.0
    record = told(rig)
    assert (record.engine_id, record.namespace_id) == ("engine", client.namespace)
    assert record.began_seconds_ago == 3.0
    assert [(load.outcome, load.objects, load.asked_seconds_ago) for load in record.loads] == [("granted", 2, 2.0)]
    assert dict(record.reserved) == {"present": 2, "granted": 2}
    assert record.ended_seconds_ago == 1.0
    assert record.end == RequestEnd(CHUNK, 2 * CHUNK, "not_worth_it")
    client.locate(KEYS, request="r")
    assert told(rig).end is None, "an id that comes again is another request"


@pytest.mark.parametrize("reason", sorted(UNASKED_REASONS), ids=str)
def test_a_request_for_which_nothing_was_asked_is_explained_by_its_end(reason: MissReason) -> None:
    rig = Rig()
    client = rig.attach()
    ends = EndRequestCall(client.session, "r", RequestEnd(CHUNK, 0, reason))
    rig.depot.end_request(ends)
    first = told(rig)
    assert (first.namespace_id, first.lookup, first.end) == (client.namespace, None, ends.end)
    rig.now += 1.0
    rig.depot.end_request(ends)  # its answer was lost
    assert told(rig).ended_seconds_ago == 1.0
    assert len(rig.depot.records) == 1


def test_what_reads_no_cache_is_explained_with_the_word_of_its_user() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS, request="r")
    rig.depot.end_request(EndRequestCall(client.session, "r", RequestEnd(0, 0, MissReason.READS_NO_CACHE)))
    text = "\n".join(record_lines(told(rig), 250))
    assert "reads no cache: prompt_logprobs" in text
    assert "granted 4" in text, "what it computed is stored"


def test_only_requests_for_which_nothing_is_asked_are_remembered_by_their_end() -> None:
    rig = Rig()
    client = rig.attach()
    for reason in (*MissReason, ""):
        if reason not in UNASKED_REASONS:
            rig.depot.end_request(EndRequestCall(client.session, "r", RequestEnd(0, 0, reason)))
    rig.depot.end_request(EndRequestCall(client.session, "", RequestEnd(0, 0, MissReason.EXCLUDED)))
    assert not len(rig.depot.records)


def test_the_latest_requests_are_listed_and_those_that_missed() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS[:1])
    ends = {
        "hit": RequestEnd(0, CHUNK, "", 3 * CHUNK, "ram", 0.01),
        "miss": RequestEnd(0, 0, MissReason.TIMED_OUT, 3 * CHUNK, waited_seconds=0.05),
        "own": RequestEnd(CHUNK, 0, "", 3 * CHUNK),
        "short": RequestEnd(0, 0, MissReason.TOO_SHORT, 7),
        "late": RequestEnd(0, 0, MissReason.UNREACHABLE, 7),
    }
    for name, end in ends.items():
        if end.miss not in UNASKED_REASONS:
            client.locate(KEYS, request=name)
        rig.depot.end_request(EndRequestCall(client.session, name, end))
        rig.now += 1.0
    client.locate(KEYS, request="running")
    records = rig.depot.records
    latest = records.latest(0, misses=False)
    assert [(one.request_id, one.outcome) for one in latest] == [
        ("running", Outcome.RUNNING), ("late", Outcome.MISS), ("short", Outcome.NOT_ASKED), ("own", Outcome.OWN_CACHE),
        ("miss", Outcome.MISS), ("hit", Outcome.HIT),
    ]  # fmt: skip
    assert [one.end for one in latest] == [None, *reversed(ends.values())]
    assert {one.chunk_tokens for one in latest} == {CHUNK}
    assert [one.request_id for one in records.latest(2, misses=False)] == ["running", "late"]
    assert [one.request_id for one in records.latest(0, misses=True)] == ["late", "miss"]
    assert [one.request_id for one in records.latest(1, misses=True)] == ["late"]


@pytest.mark.requirement("P10")
def test_requests_of_a_killed_engine_do_not_run_for_ever() -> None:
    rig = Rig()
    killed, other = rig.attach(pid=1), rig.attach("other", pid=2)
    for client in (killed, other):
        client.locate(KEYS, request=f"of {client.attachment}")
    rig.now += 2.0
    rig.depot.process_dead(killed.attachment)
    rig.now += 3.0
    running, gone = rig.depot.records.latest(0, misses=False)
    assert (running.outcome, running.ended_seconds_ago) == (Outcome.RUNNING, None)
    assert (gone.outcome, gone.ended_seconds_ago, gone.end) == (Outcome.ABORTED, 3.0, None)
    assert not rig.depot.records.latest(0, misses=True)
    back = rig.attach(pid=3)
    back.locate(KEYS, request=gone.request_id)
    again, _ = rig.depot.records.latest(0, misses=False)
    assert (again.request_id, again.outcome) == (gone.request_id, Outcome.RUNNING), "it is another request"


def test_a_list_of_requests_fits_a_message() -> None:
    rig = Rig()
    client = rig.attach()
    for number in range(LIST_MAX + 5):
        client.locate(KEYS, request=f"{number}{'r' * 200}")
    for last in (0, LIST_MAX + 1, 1 << 31):
        assert len(rig.depot.records.latest(last, misses=False)) == LIST_MAX
    found = RequestList(rig.depot.records.latest(0, misses=False))
    codec = OPERATOR["ListRequests"].reply
    assert codec.decode(codec.encode(found)) == found
    assert codec.encode(found).ByteSize() < 1 << 20


def test_an_id_that_comes_again_and_is_not_asked_for_is_another_request() -> None:
    rig = Rig()
    client = rig.attach()
    client.locate(KEYS, request="r")
    rig.depot.end_request(EndRequestCall(client.session, "r", RequestEnd(0, 0, MissReason.UNKNOWN)))
    rig.depot.end_request(EndRequestCall(client.session, "r", RequestEnd(0, 0, MissReason.READS_NO_CACHE)))
    assert (told(rig).lookup, told(rig).end) == (None, RequestEnd(0, 0, MissReason.READS_NO_CACHE))


@pytest.mark.requirement("P10")
def test_a_request_is_found_by_the_beginning_of_its_id_in_every_engine() -> None:
    rig = Rig()
    client, other = rig.attach(), rig.attach("other", 11)
    for one, request in ((client, "cmpl-1-aa"), (other, "cmpl-1-bb"), (other, "cmpl-2")):
        one.locate(KEYS, request=request)
    found = rig.depot.records.explain("cmpl-1")
    assert [(one.engine_id, one.request_id) for one in found] == [("other", "cmpl-1-bb"), ("engine", "cmpl-1-aa")]
    with pytest.raises(NotFound, match="cmpl-9"):
        rig.depot.records.explain("cmpl-9")


@pytest.mark.requirement("I4")
def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "RECORDS_MAX", 64)
    rig = Rig()
    client = rig.attach()
    for number in range(64 + 10):
        client.locate(KEYS[:1], request=f"r{number}")
    assert len(rig.depot.records) == 64
    assert len(rig.depot.records.explain("r")) == RECORDS_PER_ANSWER_MAX
    with pytest.raises(NotFound):
        rig.depot.records.explain("r0")
    client.store(KEYS)
    for _ in range(LOADS_PER_RECORD_MAX + 3):
        client.acquire(KEYS, request="many")
    assert len(told(rig, "many").loads) == LOADS_PER_RECORD_MAX
    client.locate(KEYS)
    assert len(rig.depot.records) == 64


def test_lost_keys_forget_rather_than_grow_or_mix_up() -> None:
    lost = LostKeys()
    many = [key(number) for number in range(50_000)]
    for number, one in enumerate(many):
        lost.note(bytes(16), one, MissReason.EVICTED if number % 2 else MissReason.NO_GRANT)
    remembered = [lost.reason(bytes(16), one) for one in many]
    expected = [MissReason.EVICTED if number % 2 else MissReason.NO_GRANT for number in range(len(many))]
    assert all(found in (None, right) for found, right in zip(remembered, expected, strict=True))
    assert sum(found is not None for found in remembered) > 30_000
    assert lost.reason(b"n" * 16, many[-1]) is None
    assert lost.reason(bytes(16), bytes(16)) is None


def test_explain_says_in_words_what_the_record_has() -> None:
    rig = Rig()
    client = other_namespace(rig)
    client.locate(KEYS, request="r")
    client.store(path("q", 2))
    lease, _ = client.acquire(path("q", 2), request="r")
    client.release(lease, unused=(lease,))
    rig.depot.end_request(EndRequestCall(client.session, "r", RequestEnd(CHUNK, 0, "timed_out")))
    text = "\n".join(record_lines(told(rig), 250))
    for words in (
        "request r of engine engine", "4 chunks of 32 tokens", "hit       0 chunks", "nothing of 0 tokens",
        f"chunk 0, {KEYS[0].hex()[:12]}: other_namespace: another namespace has it", 'identity.model: "a" != "b"',
        "of 2 objects, 0.0 s ago, after 0.000 s: granted, released unused",
        "had 32 tokens cached, loaded 0: timed_out",
    ):  # fmt: skip
        assert words in text, words
    assert to_json(told(rig))["lookup"]["missing_key"] == KEYS[0].hex()


def test_a_reason_of_another_version_is_other() -> None:
    assert miss_reason("no_such") is MissReason.OTHER
    assert miss_reason("evicted") is MissReason.EVICTED
