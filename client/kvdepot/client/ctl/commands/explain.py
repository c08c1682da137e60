"""`kvdepotctl explain`: what became of one request, and why no more of it was served."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.core.misses import MissReason, miss_reason
from kvdepot.core.records import UNUSED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.records import LoadRecord, Lookup, RequestRecord

MEANING: Final = {
    MissReason.UNKNOWN: "nobody has stored it, as far as is remembered",
    MissReason.LOOKED_UP_ABSENT: "nobody has stored it, and no shared tier has it",
    MissReason.LOOK_UP_LATE: "a shared tier did not say in time whether it has it; the next request finds it",
    MissReason.LOOK_UP_REFUSED: "too many lookups in shared tiers at once",
    MissReason.EVICTED: "it was evicted to make room",
    MissReason.LOST: "the tier that had it has lost it, found it damaged, or could not read it",
    MissReason.CORRUPT: "its checksum was wrong",
    MissReason.DRIFT: "an audit found it, or what it followed from, to be other than what an engine computed again",
    MissReason.NO_GRANT: "there was no room or no credit for it when it was to be stored",
    MissReason.ABANDONED: "its store was begun and given up by the engine",
    MissReason.PRUNED: "what was stored held nothing that a request could resume at",
    MissReason.OTHER_NAMESPACE: "another namespace has it: the engines differ in something that changes bytes",
    MissReason.UNVERIFIED: "adopted from an earlier run, its checksum was not compared yet",
    MissReason.BEING_WRITTEN: "it was just being written",
    MissReason.TIER_UNAVAILABLE: "only a tier that is out of use has it, or one that has not opened yet may have it",
    MissReason.NO_CHECKPOINT: "attention is there, but no recurrent state to resume from",
    MissReason.INCOMPLETE: "a kind that the boundary needs is not there",
    MissReason.NOT_IN_TIME: "it cannot be in RAM within the load's time",
    MissReason.NOT_WORTH_IT: "computing it is faster, or it is shorter than min_load_tokens",
    MissReason.LOADS_OFF: "loads were switched off: `kvdepotctl loads on` ends that",
    MissReason.DRAINING: "the daemon drained: `kvdepotctl resume` ends that",
    MissReason.STORES_OFF: "stores were switched off, or the daemon drained, when it was to be stored",
    MissReason.REMOVED: "an operator had it evicted",
    MissReason.EPOCH_BUMPED: "an operator has bumped the epoch: what was stored before is void",
    MissReason.UNREACHABLE: "the engine could not reach this daemon",
    MissReason.NOT_READY: "the engine's namespace or its ranks were not known yet",
    MissReason.TIMED_OUT: "no answer within lookup_timeout_seconds",
    MissReason.FAILED_LATELY: "a load of this boundary had just failed",
    MissReason.TOO_MANY_LOADS: "as many loads as may be were in flight",
    MissReason.EXCLUDED: "its hashes do not cover its content",
    MissReason.READS_NO_CACHE: "it reads no cache: prompt_logprobs, or skip_reading_prefix_cache was set",
    MissReason.GONE: "it went between the lookup and the load",
    MissReason.NO_ROOM: "there was no room in RAM for it, by size or by quota",
    MissReason.REFUSED: "the daemon refused the load",
    MissReason.LOAD_TIMED_OUT: "the load was not over within load_timeout_seconds",
    MissReason.LOAD_FAILED: "a rank could not copy it",
    MissReason.WEIGHTS_CHANGED: "the engine's weights changed meanwhile",
    MissReason.OTHER: "a reason of another version",
}


@click.command()
@click.argument("request_id", metavar="REQUEST_ID")
@json_option
@click.pass_obj
def explain(connection: tuple[Endpoint, float], request_id: str, as_json: bool) -> int:
    """Show what the daemon remembers of a request.

    REQUEST_ID is the one in the engine's log, its beginning, or what a user or gateway knows: the id of an answer, or
    an X-Request-Id. vLLM puts `cmpl-` or `chatcmpl-` before the latter, and numbers around it.
    """
    with connect(*connection) as operator:
        records = operator.explain(request_id)
    if as_json:
        click.echo(json.dumps([record_json(record) for record in records], indent=2))
    else:
        click.echo("\n\n".join("\n".join(record_lines(record)) for record in records))
    return 0


def record_json(record: RequestRecord) -> dict[str, Any]:
    """The same fields, JSON-safe."""
    found: dict[str, Any] = asdict(record)
    found["namespace_id"] = record.namespace_id.hex()
    if record.lookup is not None:
        found["lookup"]["missing_key"] = record.lookup.missing_key.hex()
        found["lookup"]["other_namespace"] = record.lookup.other_namespace.hex()
    return found


def record_lines(record: RequestRecord) -> Iterator[str]:
    """For people: what was asked, found, missing, offered, loaded and stored."""
    yield f"request {record.request_id} of engine {record.engine_id}, namespace {record.namespace_id.hex()[:12]}"
    yield f"  began     {record.began_seconds_ago:.1f} s ago, {_ended(record)}"
    if record.lookup is not None:
        yield from _lookup_lines(record.lookup, record.lookups)
        yield from (f"              {line}" for line in record.differences)
    else:
        yield "  asked     nothing of what it needs"
    for load in record.loads:
        yield f"  load      {_load(load)}"
    if record.reserved:
        yield f"  stores    {_counts(record.reserved)}"
    if record.end is not None:
        yield f"  engine    had {record.end.local_tokens} tokens itself, loaded {record.end.loaded_tokens}"
        if record.end.miss:
            yield f"            {_meaning(record.end.miss)}"


def _ended(record: RequestRecord) -> str:
    return "not over" if record.ended_seconds_ago is None else f"over {record.ended_seconds_ago:.1f} s ago"


def _lookup_lines(lookup: Lookup, lookups: int) -> Iterator[str]:
    times = f", {lookups} times" if lookups > 1 else ""
    tokens = f"{lookup.chunks} chunks of {lookup.chunk_tokens} tokens"
    yield f"  asked     for {tokens}, of use up to {lookup.high_tokens}{times}"
    held = _counts({tier: count for tier, count in lookup.held.items() if count})
    yield f"  found     {lookup.path_chunks} chunks without a gap{f' ({held})' if held else ''}"
    if lookup.offered_tokens:
        slowest = f"the slowest tier {lookup.offered_tier}, ready in {lookup.estimate_seconds:.3f} s"
        yield f"  offered   {lookup.offered_tokens} of {lookup.boundary_tokens} tokens, {slowest}"
    else:
        yield f"  offered   nothing of {lookup.boundary_tokens} tokens"
    if lookup.miss:
        key = lookup.missing_key.hex()[:12]
        yield f"  missing   chunk {lookup.missing_chunk}, {key}: {_meaning(lookup.miss)}"
    if lookup.other_namespace:
        yield f"            namespace {lookup.other_namespace.hex()[:12]} has it, and differs in"


def _load(load: LoadRecord) -> str:
    outcome = "granted, and given back unused" if load.outcome == UNUSED else load.outcome
    answer = f"after {load.seconds:.3f} s: {outcome}" if load.outcome != "waiting" else "waiting"
    return f"of {load.objects} objects, {load.asked_seconds_ago:.1f} s ago, {answer}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _meaning(reason: str) -> str:
    return f"{reason}: {MEANING[miss_reason(reason)]}"
