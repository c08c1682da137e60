"""Why a request, or the rest of its prompt, was not served from the depot.

One vocabulary for the daemon's counters, its answers, `kvdepotctl explain` and the engine's
metrics, so that the label of a counter is bounded and means the same everywhere.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import takewhile
from typing import Final


class MissReason(StrEnum):
    """The values are labels of counters. About the first chunk that was not served."""

    # The daemon's, of a lookup.
    UNKNOWN = "unknown"  # nobody has stored it, as far as is remembered
    LOOKED_UP_ABSENT = "looked_up_absent"  # likewise, and no shared tier has it
    LOOK_UP_LATE = "look_up_late"  # a shared tier did not say in time
    LOOK_UP_REFUSED = "look_up_refused"  # too many lookups in shared tiers at once
    EVICTED = "evicted"
    LOST = "lost"  # a tier has lost it, or could not read it
    CORRUPT = "corrupt"
    DRIFT = "drift"  # an engine that computed it again found something else: dropped, with what followed it
    NO_GRANT = "no_grant"  # the daemon had no room or no credit for it when it was to be stored
    ABANDONED = "abandoned"  # its store was begun and given up
    PRUNED = "pruned"  # stored without what a request could resume at
    OTHER_NAMESPACE = "other_namespace"  # another one has it: the engines differ in something that changes bytes
    UNVERIFIED = "unverified"  # adopted, its checksum was not compared yet
    BEING_WRITTEN = "being_written"
    TIER_UNAVAILABLE = "tier_unavailable"  # only a tier that is out of use has it, or one that has not opened may
    NO_CHECKPOINT = "no_checkpoint"  # attention without a state to resume from
    INCOMPLETE = "incomplete"  # a kind that the boundary needs is not there
    NOT_IN_TIME = "not_in_time"  # cannot be in RAM within the load's budget
    NOT_WORTH_IT = "not_worth_it"  # computing it is faster, or it is shorter than min_load_tokens
    NO_ROOM = "no_room"  # the daemon had none for the load, or too many were in flight
    LOADS_OFF = "loads_off"  # an operator lets nothing be loaded
    DRAINING = "draining"  # likewise, as the daemon drains
    STORES_OFF = "stores_off"  # one let nothing be stored, or drained the daemon, when it was to be
    REMOVED = "removed"  # one had it evicted, with what followed it
    EPOCH_BUMPED = "epoch_bumped"  # one has made void all that was stored before
    # The engine's.
    UNREACHABLE = "unreachable"  # no daemon, or not attached to it
    NOT_READY = "not_ready"  # namespace or ranks were not known yet
    TIMED_OUT = "timed_out"  # the daemon did not answer in time
    FAILED_LATELY = "failed_lately"  # a load of this boundary has just failed
    TOO_MANY_LOADS = "too_many_loads"  # in flight
    EXCLUDED = "excluded"  # its hashes do not cover its content, or its adapter is not known
    READS_NO_CACHE = "reads_no_cache"  # it asks for prompt_logprobs, or says so: vLLM computes all of it
    GONE = "gone"  # lost between the lookup and the load
    REFUSED = "refused"
    LOAD_TIMED_OUT = "load_timed_out"
    LOAD_FAILED = "load_failed"  # a rank could not copy it, or the engine's blocks moved
    WEIGHTS_CHANGED = "weights_changed"
    OTHER = "other"  # of another version


LOOKUP_REASONS: Final = tuple(takewhile(lambda reason: reason is not MissReason.UNREACHABLE, MissReason))
"""Those of the daemon."""
UNASKED_REASONS: Final = frozenset({MissReason.EXCLUDED, MissReason.READS_NO_CACHE})
"""Those of requests for which the daemon is asked nothing; it is told of them when they are over, to explain them."""
_KNOWN: Final = {reason.value: reason for reason in MissReason}


def miss_reason(text: str) -> MissReason:
    """The reason that another process names; OTHER for one that this version does not know."""
    return _KNOWN.get(text, MissReason.OTHER)
