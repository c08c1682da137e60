"""The reasons why a request, or the rest of its prompt, was not served from the depot.

The daemon's counters, its answers, `kvdepotctl explain` and the engine's metrics share this vocabulary. So each label
of a counter is bounded, and means the same everywhere.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import takewhile
from typing import Final


class MissReason(StrEnum):
    """Why the first missing chunk was not served. The values are labels of counters."""

    # The daemon's, of a lookup.
    UNKNOWN = "unknown"  # no engine has stored it, as far as the daemon remembers
    PROBE_ABSENT = "probe_absent"  # no engine has stored it here, and no shared tier has it
    PROBE_LATE = "probe_late"  # a shared tier did not answer in time
    PROBE_REFUSED = "probe_refused"  # too many probes of shared tiers at once
    EVICTED = "evicted"
    LOST = "lost"  # its tier lost it, or could not read it
    CORRUPT = "corrupt"
    DRIFT = "drift"  # an audit found a difference to recomputed data; dropped with every chunk after it
    NO_GRANT = "no_grant"  # there was no room or no credit to store it
    ABANDONED = "abandoned"  # the engine abandoned its store
    PRUNED = "pruned"  # its store left nothing that a request can resume at
    OTHER_NAMESPACE = "other_namespace"  # another namespace has it: the engines differ in something that changes bytes
    UNVERIFIED = "unverified"  # adopted, and its checksum is not verified yet
    BEING_WRITTEN = "being_written"
    TIER_UNAVAILABLE = "tier_unavailable"  # only a disabled tier has it, or a tier that has not opened may have it
    NO_CHECKPOINT = "no_checkpoint"  # attention without a state to resume from
    INCOMPLETE = "incomplete"  # it lacks a kind that the boundary needs
    NOT_IN_TIME = "not_in_time"  # cannot be in RAM within the load's budget
    NOT_WORTH_IT = "not_worth_it"  # computing it is faster, or it is shorter than min_load_tokens
    NO_ROOM = "no_room"  # RAM had no room for the load, or too many loads were in flight
    LOADS_OFF = "loads_off"  # an operator switched loads off
    DRAINING = "draining"  # the daemon drains
    STORES_OFF = "stores_off"  # stores were off, or the daemon drained, when an engine wanted to store it
    DELETED = "deleted"  # an operator evicted it, with every chunk after it
    EPOCH_BUMPED = "epoch_bumped"  # an operator bumped the epoch: earlier stores are invalid
    # The engine's.
    UNREACHABLE = "unreachable"  # no daemon, or not attached to it
    NOT_READY = "not_ready"  # the engine has no namespace yet, or not all of its ranks
    TIMED_OUT = "timed_out"  # the daemon did not answer in time
    FAILED_LATELY = "failed_lately"  # a load of this boundary has just failed
    TOO_MANY_LOADS = "too_many_loads"  # in flight
    EXCLUDED = "excluded"  # its hashes do not cover its content, or its adapter is not known
    TOO_SHORT = "too_short"  # shorter than a chunk, or than min_load_tokens: nothing of it can be loaded
    READS_NO_CACHE = "reads_no_cache"  # it asks for prompt_logprobs, or says so: vLLM computes all of it
    GONE = "gone"  # lost between the lookup and the load
    REFUSED = "refused"
    LOAD_TIMED_OUT = "load_timed_out"
    LOAD_FAILED = "load_failed"  # a rank could not copy it, or the engine's blocks moved
    WEIGHTS_CHANGED = "weights_changed"
    OTHER = "other"  # of another version


LOOKUP_REASONS: Final = tuple(takewhile(lambda reason: reason is not MissReason.UNREACHABLE, MissReason))
"""The reasons of the daemon."""
UNHEARD_REASONS: Final = frozenset({MissReason.UNREACHABLE, MissReason.NOT_READY})
"""Reasons of requests that wanted to call the daemon, and could not."""
UNASKED_REASONS: Final = UNHEARD_REASONS | {MissReason.EXCLUDED, MissReason.READS_NO_CACHE, MissReason.TOO_SHORT}
"""Reasons of requests that the daemon may never hear of. It gets them at the end of the request, for `explain`."""
_KNOWN: Final = {reason.value: reason for reason in MissReason}


def miss_reason(text: str) -> MissReason:
    """Return the reason that another process names; OTHER for one that this version does not know."""
    return _KNOWN.get(text, MissReason.OTHER)
