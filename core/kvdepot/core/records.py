"""What the daemon remembers of one request, for `kvdepotctl explain`, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

from kvdepot.core.bounds import (
    ChunkKey,
    Count,
    EngineId,
    Explanation,
    NamespaceId,
    NamespaceIdOrNone,
    RequestId,
    Seconds,
    Text,
)
from kvdepot.core.calls import KEY_BYTES, RequestEnd
from kvdepot.core.misses import UNHEARD_REASONS

RECORDS_MAX: Final = 4096
"""Requests remembered, the oldest is forgotten first: some 8 MiB."""
LOADS_PER_RECORD_MAX: Final = 4
RECORDS_PER_ANSWER_MAX: Final = 16
"""Of requests whose ids begin alike."""
LIST_MAX: Final = 128
"""Requests of one list."""
DIFFERENCES_MAX: Final = 8
UNUSED: Final = "unused"
"""Outcome of a load that was granted, and released without having brought anything."""
DIFFERENCE_BYTES_MAX: Final = 1 << 16
_NAMES_MAX: Final = 64
"""Tiers, or outcomes."""

Name = Annotated[str, Text(256)]
Difference = Annotated[str, Text(DIFFERENCE_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class ExplainCall:
    """Asks what the daemon remembers of a request."""

    request_id: RequestId  # or its beginning


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One Acquire, and its answer."""

    outcome: Name  # an `AcquireOutcome`, lower case, or UNUSED; "waiting" until there is one
    objects: int
    asked_seconds_ago: Seconds
    seconds: Seconds = 0.0  # until the answer


@dataclass(frozen=True, slots=True)
class Lookup:
    """The last Locate of a request, and its answer."""

    chunks: int  # of the prompt
    chunk_tokens: int
    high_tokens: int  # what ends after it is not usable for the engine
    path_chunks: int  # from the first on without a gap, in any tier
    chunks_by_tier: Annotated[Mapping[Name, int], Count(_NAMES_MAX)]
    """By tier: how many of those it has. Several may have the same."""
    boundary_tokens: int  # the longest that could be resumed at
    offered_tokens: int
    offered_tier: Name = ""  # the slowest that has to give something for it
    estimate_seconds: Seconds = 0.0
    miss: Name = ""  # a `MissReason`: why no more was offered
    missing_chunk: int = 0  # that it is about, with a reason
    missing_key: ChunkKey = b"\0" * KEY_BYTES
    other_namespace: NamespaceIdOrNone = b""  # that has the chunk
    source_id: int = 0  # arena of the daemon that the request's params name; 0: none
    source_tier: Name = ""  # that reads from it; empty: it is no peer
    offered_place: Explanation = ""  # which of several peers have the last object that `offered_tier` has to give


class Outcome(StrEnum):
    """What became of a request, in the words that operators see."""

    HIT = "HIT"
    MISS = "MISS"
    OWN_CACHE = "OWN CACHE"
    """The engine had all that could be loaded."""
    NOT_ASKED = "NOT ASKED"
    """The engine asked for nothing of it."""
    ABORTED = "ABORTED"
    """The engine never admitted it, or was gone before it could report."""
    RUNNING = "RUNNING"
    """The engine reports at its end."""


def outcome_of(lookup: Lookup | None, end: RequestEnd | None, *, loads: bool, over: bool) -> Outcome:
    """Return what became of a request with this last lookup and this report of its engine.

    `loads`: whether it asked for a load. `over`: whether it is over, with or without a report.
    """
    if end is None:
        return Outcome.ABORTED if over else Outcome.RUNNING
    if end.loaded_tokens:
        return Outcome.HIT
    if lookup is None and end.miss not in UNHEARD_REASONS:
        return Outcome.NOT_ASKED
    if end.miss:
        return Outcome.MISS
    return Outcome.OWN_CACHE if end.local_tokens and not loads else Outcome.ABORTED


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds before the answer."""

    engine_id: EngineId
    request_id: RequestId
    namespace_id: NamespaceId
    began_seconds_ago: Seconds
    lookups: int = 0
    looked_up_seconds_ago: Seconds = 0.0
    lookup: Lookup | None = None
    differences: Annotated[tuple[Difference, ...], Count(DIFFERENCES_MAX)] = ()
    """From the other namespace that has the missing chunk, as far as both are known."""
    loads: Annotated[tuple[LoadRecord, ...], Count(LOADS_PER_RECORD_MAX)] = ()
    reserved: Annotated[Mapping[str, int], Count(_NAMES_MAX)] = field(default_factory=dict)
    """Objects by `ReserveOutcome`, lower case."""
    ended_seconds_ago: Seconds | None = None
    end: RequestEnd | None = None  # also None if its engine was gone before it could report
    chunk_tokens: int = 0  # of its namespace; 0: it is gone

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.lookup, self.end, loads=bool(self.loads), over=self.ended_seconds_ago is not None)


@dataclass(frozen=True, slots=True)
class ExplainReply:
    """The records of the requests that match."""

    records: Annotated[tuple[RequestRecord, ...], Count(RECORDS_PER_ANSWER_MAX)]  # the latest first


@dataclass(frozen=True, slots=True)
class ListRequestsCall:
    """Asks for the latest requests."""

    last: int = 0  # how many; 0: LIST_MAX
    misses: bool = False  # only those with Outcome.MISS


@dataclass(frozen=True, slots=True)
class RequestList:
    """Records without their differences, the latest first."""

    records: Annotated[tuple[RequestRecord, ...], Count(LIST_MAX)]
