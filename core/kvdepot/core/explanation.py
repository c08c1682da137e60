"""What became of a request, and what to do: the sentences of `kvdepotctl explain` and of the live page."""

from __future__ import annotations

from typing import Final

from kvdepot.core.misses import MissReason, miss_reason
from kvdepot.core.records import Outcome, RequestRecord

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
    MissReason.OTHER: "the reason is one of another version of kvdepot",
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
    MissReason.OTHER_NAMESPACE: "give both engines the same settings in the fields that `kvdepotctl explain` lists",
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
    MissReason.OTHER: "upgrade what is older: the engine, the daemon or kvdepotctl",
}
"""What to do about each reason. A name that begins with KVDepot is an alert, with an entry in docs/operations.md."""

_FIRST_TIME: Final = frozenset({"", MissReason.UNKNOWN, MissReason.PROBE_ABSENT})
"""Reasons that need no remark where the rest of the prompt was a hit."""


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
    return meaning_of(reason_of(record))


def reason_of(record: RequestRecord) -> str:
    """Return why a request, or the rest of its prompt after a hit, was not loaded. Empty if there is nothing to say."""
    looked_up = record.lookup.miss if record.lookup is not None else ""
    if record.end is not None and record.end.miss:
        # The daemon tells an engine nothing of other tenants.
        return looked_up or record.end.miss if record.end.miss == MissReason.UNKNOWN else record.end.miss
    return looked_up if record.outcome is Outcome.HIT and looked_up not in _FIRST_TIME else ""


def fix_of(record: RequestRecord) -> str:
    """Return what to do, so that such a request is a hit. Empty if there is nothing to say."""
    reason = reason_of(record)
    return FIX[miss_reason(reason)] if reason else ""


def meaning_of(reason: str) -> str:
    """Return a reason, and what it means."""
    return f"{reason}: {MEANING[miss_reason(reason)]}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
