"""`kvdepotctl explain`: show what one request hit, and why the rest was a miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.as_json import echo_json
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.texts import say
from kvdepot.core.misses import MissReason, miss_reason
from kvdepot.core.records import UNUSED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.records import LoadRecord, Lookup, RequestRecord

MEANING: Final = {
    MissReason.UNKNOWN: "no engine has stored it, as far as the daemon remembers",
    MissReason.PROBE_ABSENT: "no engine has stored it here, and no shared tier has it",
    MissReason.PROBE_LATE: "a shared tier did not answer in time; the next request can use it",
    MissReason.PROBE_REFUSED: "too many probes of shared tiers at once",
    MissReason.EVICTED: "it was evicted to make room",
    MissReason.LOST: "its tier lost it, found it damaged, or could not read it",
    MissReason.CORRUPT: "its checksum was wrong",
    MissReason.DRIFT: "an audit found a difference to what an engine computed again, in it or in an ancestor",
    MissReason.NO_GRANT: "there was no room or no credit when an engine wanted to store it",
    MissReason.ABANDONED: "the engine abandoned its store",
    MissReason.PRUNED: "its store left nothing that a request can resume at",
    MissReason.OTHER_NAMESPACE: "another namespace has it: the engines differ in something that changes bytes",
    MissReason.UNVERIFIED: "it was adopted from an earlier run, and its checksum is not verified yet",
    MissReason.BEING_WRITTEN: "an engine is writing it",
    MissReason.TIER_UNAVAILABLE: "only a disabled tier has it, or a tier that has not opened yet may have it",
    MissReason.NO_CHECKPOINT: "it has attention, but no recurrent state to resume from",
    MissReason.INCOMPLETE: "it lacks a kind that the boundary needs",
    MissReason.NOT_IN_TIME: "it cannot be in RAM within the load's time budget",
    MissReason.NOT_WORTH_IT: "computing it is faster, or it is shorter than min_load_tokens",
    MissReason.LOADS_OFF: "loads were switched off: run `kvdepotctl loads on`",
    MissReason.DRAINING: "the daemon drained: run `kvdepotctl resume`",
    MissReason.STORES_OFF: "stores were off, or the daemon drained, when an engine wanted to store it",
    MissReason.DELETED: "an operator evicted it",
    MissReason.EPOCH_BUMPED: "an operator bumped the epoch: earlier stores are invalid",
    MissReason.UNREACHABLE: "the engine could not reach this daemon",
    MissReason.NOT_READY: "the engine had no namespace yet, or not all of its ranks",
    MissReason.TIMED_OUT: "the daemon did not answer within lookup_timeout_seconds",
    MissReason.FAILED_LATELY: "a load of this boundary had just failed",
    MissReason.TOO_MANY_LOADS: "the engine had its maximum of loads in flight",
    MissReason.EXCLUDED: "its hashes do not cover its content",
    MissReason.READS_NO_CACHE: "it reads no cache: prompt_logprobs, or skip_reading_prefix_cache was set",
    MissReason.GONE: "it was dropped between the lookup and the load",
    MissReason.NO_ROOM: "RAM had no room for it, by size or by quota",
    MissReason.REFUSED: "the daemon refused the load",
    MissReason.LOAD_TIMED_OUT: "the load did not end within load_timeout_seconds",
    MissReason.LOAD_FAILED: "a rank could not copy it",
    MissReason.WEIGHTS_CHANGED: "the engine's weights changed during the request",
    MissReason.OTHER: "the daemon has a reason that this kvdepotctl does not know",
}
"""What each reason means, for operators."""


@click.command()
@click.argument("request_id", metavar="REQUEST_ID")
@json_option
@click.pass_obj
def explain(connection: tuple[Endpoint, float], request_id: str, as_json: bool) -> int:
    """Explain what one request hit or missed.

    REQUEST_ID is the id in the engine's log or its beginning, or the id that a user or a gateway knows: that of an
    answer, or an X-Request-Id. vLLM adds `cmpl-` or `chatcmpl-` before the latter, and numbers around it.
    """
    with connect(*connection) as operator:
        records = operator.explain(request_id)
    if as_json:
        echo_json(records)
    else:
        say("\n\n".join("\n".join(record_lines(record)) for record in records))
    return 0


def record_lines(record: RequestRecord) -> Iterator[str]:
    """Yield the text of one request: lookup, hit, offer, miss, loads and stores."""
    yield f"request {record.request_id} of engine {record.engine_id}, namespace {record.namespace_id.hex()[:12]}"
    yield f"  began     {record.began_seconds_ago:.1f} s ago, {_ended(record)}"
    if record.lookup is not None:
        yield from _lookup_lines(record.lookup, record.lookups)
        yield from (f"              {line}" for line in record.differences)
    else:
        yield "  lookup    none"
    for load in record.loads:
        yield f"  load      {_load(load)}"
    if record.reserved:
        yield f"  stores    {_counts(record.reserved)}"
    if record.end is not None:
        yield f"  engine    had {record.end.local_tokens} tokens cached, loaded {record.end.loaded_tokens}"
        if record.end.miss:
            yield f"            {_meaning(record.end.miss)}"


def _ended(record: RequestRecord) -> str:
    return "in progress" if record.ended_seconds_ago is None else f"ended {record.ended_seconds_ago:.1f} s ago"


def _lookup_lines(lookup: Lookup, lookups: int) -> Iterator[str]:
    times = f", {lookups} times" if lookups > 1 else ""
    tokens = f"{lookup.chunks} chunks of {lookup.chunk_tokens} tokens"
    yield f"  lookup    of {tokens}, usable up to {lookup.high_tokens} tokens{times}"
    by_tier = _counts({tier: count for tier, count in lookup.chunks_by_tier.items() if count})
    yield f"  hit       {lookup.path_chunks} chunks from the start{f' ({by_tier})' if by_tier else ''}"
    if lookup.offered_tokens:
        slowest = f"slowest tier {lookup.offered_tier}, in RAM after {lookup.estimate_seconds:.3f} s"
        yield f"  offered   {lookup.offered_tokens} of {lookup.boundary_tokens} tokens, {slowest}"
    else:
        yield f"  offered   nothing of {lookup.boundary_tokens} tokens"
    if lookup.miss:
        key = lookup.missing_key.hex()[:12]
        yield f"  miss      chunk {lookup.missing_chunk}, {key}: {_meaning(lookup.miss)}"
    if lookup.other_namespace:
        yield f"            namespace {lookup.other_namespace.hex()[:12]} has it. Different fields:"


def _load(load: LoadRecord) -> str:
    outcome = "granted, released unused" if load.outcome == UNUSED else load.outcome
    answer = f"after {load.seconds:.3f} s: {outcome}" if load.outcome != "waiting" else "waiting"
    return f"of {load.objects} objects, {load.asked_seconds_ago:.1f} s ago, {answer}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _meaning(reason: str) -> str:
    return f"{reason}: {MEANING[miss_reason(reason)]}"
