"""What operators read about one request: what became of it, what to do, and the history that shows it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from kvdepot.core.misses import MissReason, miss_reason
from kvdepot.core.records import UNUSED, Outcome
from kvdepot.core.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvdepot.core.records import LoadRecord, Lookup, RequestRecord

MEANING: Final = {
    MissReason.UNKNOWN: "no engine has stored it, as far as the daemon remembers",
    MissReason.PROBE_ABSENT: "no engine has stored it here, and no shared tier has it",
    MissReason.PROBE_LATE: "a shared tier did not answer in time",
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
    MissReason.NOT_WORTH_IT: "computing it is faster, or what is left to load is below min_load_tokens",
    MissReason.LOADS_OFF: "loads were switched off",
    MissReason.DRAINING: "the daemon drained",
    MissReason.STORES_OFF: "stores were off, or the daemon drained, when an engine wanted to store it",
    MissReason.DELETED: "an operator evicted it",
    MissReason.EPOCH_BUMPED: "an operator bumped the epoch: earlier stores are invalid",
    MissReason.UNREACHABLE: "the engine could not reach this daemon",
    MissReason.NOT_READY: "the engine had no namespace yet, or not all of its ranks",
    MissReason.TIMED_OUT: "the daemon did not answer the lookup in time",
    MissReason.FAILED_LATELY: "a load of this boundary had just failed",
    MissReason.TOO_MANY_LOADS: "the engine had its maximum of loads in flight",
    MissReason.EXCLUDED: "its hashes do not cover its content",
    MissReason.TOO_SHORT: "it has no whole chunk to load, or fewer tokens than min_load_tokens",
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

FIX: Final = {
    MissReason.UNKNOWN: "send it again; a repetition has to begin with the same tokens, and to reach an equal engine",
    MissReason.PROBE_ABSENT: "send it again; a repetition has to begin with the same tokens",
    MissReason.PROBE_LATE: "send it again; if it happens often, see KVDepotOffersLate",
    MissReason.PROBE_REFUSED: "see the shared tiers in `kvdepotctl status --wide`",
    MissReason.EVICTED: "give RAM or a tier more capacity; `kvdepotctl trace record` shows what it brings",
    MissReason.LOST: "see the tiers in `kvdepotctl health`",
    MissReason.CORRUPT: "check the machine's memory: KVDepotCorruptMemory",
    MissReason.DRIFT: "find the cause before you switch loads on again: KVDepotDrift",
    MissReason.NO_GRANT: "give RAM more capacity, or use a faster tier below it: KVDepotStoresRefused",
    MissReason.ABANDONED: "see the engine's log",
    MissReason.PRUNED: "nothing to do: a longer prompt is stored",
    MissReason.OTHER_NAMESPACE: "give both engines the same settings; the fields that differ are below",
    MissReason.UNVERIFIED: "wait: the daemon verifies what it adopted",
    MissReason.BEING_WRITTEN: "send it again",
    MissReason.TIER_UNAVAILABLE: "see the tiers in `kvdepotctl health`",
    MissReason.NO_CHECKPOINT: "set prefix_cache_retention_interval: docs/vllm.md#hybrid-models",
    MissReason.INCOMPLETE: "give RAM or a tier more capacity",
    MissReason.NOT_IN_TIME: "raise load_timeout_seconds, or use a faster tier: KVDepotOffersLate",
    MissReason.NOT_WORTH_IT: "nothing to do; load_weight and min_load_tokens set what is worth a load",
    MissReason.LOADS_OFF: "kvdepotctl loads on",
    MissReason.DRAINING: "kvdepotctl resume",
    MissReason.STORES_OFF: "kvdepotctl stores on; then send it again",
    MissReason.DELETED: "send it again",
    MissReason.EPOCH_BUMPED: "send it again",
    MissReason.UNREACHABLE: "see the lines of kvdepot in the engine's log",
    MissReason.NOT_READY: "wait until the engine's log says `attached to`",
    MissReason.TIMED_OUT: "raise lookup_min_seconds or lookup_timeout_seconds, or see KVDepotLoopLate",
    MissReason.FAILED_LATELY: "see why the load before it failed: `kvdepotctl requests --misses`",
    MissReason.TOO_MANY_LOADS: "raise loads_in_flight of the engine, or use a faster tier",
    MissReason.EXCLUDED: "see docs/vllm.md#reasons-of-misses",
    MissReason.TOO_SHORT: "send a longer prompt, or set a smaller chunk_tokens or min_load_tokens",
    MissReason.READS_NO_CACHE: "ask without prompt_logprobs",
    MissReason.GONE: "send it again; if it happens often, give RAM more capacity",
    MissReason.NO_ROOM: "raise [ram] capacity or the quota",
    MissReason.REFUSED: "see `kvdepotctl health`",
    MissReason.LOAD_TIMED_OUT: "raise load_timeout_seconds, or see the tiers in `kvdepotctl health`",
    MissReason.LOAD_FAILED: "see the engine's log",
    MissReason.WEIGHTS_CHANGED: "send it again",
    MissReason.OTHER: "upgrade kvdepotctl",
}
"""What to do about each reason. A name that begins with KVDepot is an alert, with an entry in docs/operations.md."""

_FIRST_TIME: Final = frozenset({"", MissReason.UNKNOWN, MissReason.PROBE_ABSENT})
"""Reasons that need no remark where the rest of the prompt was a hit."""
_LABEL: Final = max(map(len, Outcome)) + 2
_INDENT: Final = 12
"""Of the history, after its labels."""


def record_lines(record: RequestRecord, columns: int) -> Iterator[str]:
    """Yield the text of one request: what became of it and what to do, then its history."""
    yield from _wrapped(f"{record.outcome:<{_LABEL}}{answer(record)}", columns, _LABEL)
    if reason := reason_of(record):
        yield from _wrapped(f"{'':<{_LABEL}}-> {FIX[miss_reason(reason)]}", columns, _LABEL + 3)
    for line in _history(record):
        yield from _wrapped(line, columns, _INDENT)


def answer(record: RequestRecord) -> str:
    """Return what became of a request, in one sentence."""
    lookup, end = record.lookup, record.end
    if end is None:
        offered = f"{lookup.offered_tokens} tokens were offered" if lookup is not None else "nothing was looked up"
        if record.outcome is Outcome.ABORTED:
            return f"{offered}; the engine was gone before it could report"
        return f"{offered} so far; the engine reports at its end"
    of = f" of {end.prompt_tokens}" if end.prompt_tokens else ""
    match record.outcome:
        case Outcome.HIT:
            source = f" from {end.source} in {_seconds(end.load_seconds)}" if end.source else ""
            rest = f"; the rest: {reason}" if (reason := reason_of(record)) else ""
            return f"{end.loaded_tokens}{of} tokens{source}{rest}"
        case Outcome.OWN_CACHE:
            return f"{end.local_tokens}{of} tokens were in the engine; nothing to load"
        case Outcome.ABORTED:
            return "it ended before the engine computed it"
    if not end.miss:
        return "the engine asked for nothing: its role is to store, or its load_weight is 0"
    if end.miss == MissReason.TOO_SHORT and end.prompt_tokens and record.chunk_tokens:
        return f"prompt of {end.prompt_tokens} tokens, a chunk has {record.chunk_tokens}"
    if end.miss == MissReason.TIMED_OUT:
        after = f" after {_seconds(end.waited_seconds)}" if end.waited_seconds else ""
        late = f"; {lookup.offered_tokens}{of} tokens were in {lookup.offered_tier}" if lookup is not None else ""
        return f"timed_out: no answer{after}{late if lookup is not None and lookup.offered_tokens else ''}"
    if reason_of(record) == MissReason.UNKNOWN and lookup is not None and not lookup.path_chunks:
        return "unknown: first time, no engine has stored this prompt as far as the daemon remembers"
    return _meaning(reason_of(record))


def reason_of(record: RequestRecord) -> str:
    """Return why a request, or the rest of its prompt after a hit, was not loaded. Empty if there is nothing to say."""
    looked_up = record.lookup.miss if record.lookup is not None else ""
    if record.end is not None and record.end.miss:
        # The daemon tells an engine nothing of other tenants.
        return looked_up or record.end.miss if record.end.miss == MissReason.UNKNOWN else record.end.miss
    return looked_up if record.outcome is Outcome.HIT and looked_up not in _FIRST_TIME else ""


def table_lines(records: Sequence[RequestRecord], columns: int) -> Iterator[str]:
    """Yield a line a request. Ids are cut to what the width has room for; their beginnings can be asked about."""
    rows = [("AGE", "TOKENS", "HIT", "SOURCE", "REASON"), *map(_cells, records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(columns - sum(widths) - 2 * len(widths), len("ID"))
    room = min(room, max((len(record.request_id) for record in records), default=0))
    for request_id, cells in zip(("ID", *(record.request_id for record in records)), rows, strict=True):
        age, tokens, hit, source, reason = (
            cell.rjust(width) if number < 3 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield f"{request_id[:room]:<{room}}  {age}  {tokens}  {hit}  {source}  {reason}".rstrip()


def _cells(record: RequestRecord) -> tuple[str, str, str, str, str]:
    end, outcome = record.end, record.outcome
    plain = outcome in (Outcome.HIT, Outcome.MISS, Outcome.NOT_ASKED)
    return (
        duration_text(record.began_seconds_ago),
        str(end.prompt_tokens or "-") if end is not None else "-",
        str(end.loaded_tokens) if end is not None else "-",
        (end.source if end is not None else "") or "-",
        (reason_of(record) or "-") if plain else outcome.lower(),
    )


def _history(record: RequestRecord) -> Iterator[str]:
    yield f"request {record.request_id} of engine {record.engine_id}, namespace {record.namespace_id.hex()[:12]}"
    yield f"  began     {_ago(record.began_seconds_ago)}, {_ended(record)}"
    if record.lookup is not None:
        yield from _lookup_lines(record.lookup, record.lookups)
        yield from (f"{'':<{_INDENT}}  {line}" for line in record.differences)
    else:
        yield "  lookup    none"
    for load in record.loads:
        yield f"  load      {_load(load)}"
    if record.reserved:
        yield f"  stores    {_counts(record.reserved)}"
    if record.end is not None:
        miss = f": {record.end.miss}" if record.end.miss else ""
        yield f"  engine    had {record.end.local_tokens} tokens cached, loaded {record.end.loaded_tokens}{miss}"


def _ended(record: RequestRecord) -> str:
    return "in progress" if record.ended_seconds_ago is None else f"ended {_ago(record.ended_seconds_ago)}"


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s ago" if seconds < 60 else f"{duration_text(seconds)} ago"


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
    after = f"after {load.seconds:.3f} s: {outcome}" if load.outcome != "waiting" else "waiting"
    return f"of {load.objects} objects, {_ago(load.asked_seconds_ago)}, {after}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _meaning(reason: str) -> str:
    return f"{reason}: {MEANING[miss_reason(reason)]}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _wrapped(text: str, columns: int, indent: int) -> list[str]:
    """Break a line between words. The lines after the first are indented."""
    return textwrap.wrap(
        text, max(columns, indent + 20), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
