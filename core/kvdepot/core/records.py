"""What the daemon remembers of one request, for `kvdepotctl explain`. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.calls import KEY_BYTES, RequestEnd

RECORDS_MAX: Final = 4096
"""Requests remembered, the oldest is forgotten first: some 8 MiB."""
LOADS_PER_RECORD_MAX: Final = 4
RECORDS_PER_ANSWER_MAX: Final = 16
"""Of requests whose ids begin alike."""
DIFFERENCES_MAX: Final = 8
UNUSED: Final = "unused"
"""Outcome of a load that was granted, and given back without having brought anything."""


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One Acquire, and its answer."""

    outcome: str  # an `AcquireOutcome`, lower case, or UNUSED; "waiting" until there is one
    objects: int
    asked_seconds_ago: float
    seconds: float = 0.0  # until the answer


@dataclass(frozen=True, slots=True)
class Lookup:
    """The last Locate of a request, and its answer."""

    chunks: int  # of the prompt
    chunk_tokens: int
    high_tokens: int  # what ends behind it is of no use to the engine
    path_chunks: int  # from the first on without a gap, in any tier
    held: Mapping[str, int]  # by tier: how many of those it has; several may have the same
    boundary_tokens: int  # the longest that could be resumed at
    offered_tokens: int
    offered_tier: str = ""  # the slowest that has to give something for it
    estimate_seconds: float = 0.0
    miss: str = ""  # a `MissReason`: why no more was offered
    missing_chunk: int = 0  # that it is about, with a reason
    missing_key: bytes = b"\0" * KEY_BYTES
    other_namespace: bytes = b""  # that has the chunk


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds before the answer."""

    engine_id: str
    request_id: str
    namespace_id: bytes
    began_seconds_ago: float
    lookups: int = 0
    looked_up_seconds_ago: float = 0.0
    lookup: Lookup | None = None
    differences: tuple[str, ...] = ()  # from the other namespace that has the missing chunk, as far as both are known
    loads: tuple[LoadRecord, ...] = ()
    reserved: Mapping[str, int] = field(default_factory=dict)  # objects by `ReserveOutcome`, lower case
    ended_seconds_ago: float | None = None
    end: RequestEnd | None = None
