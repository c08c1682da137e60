"""The calls between client and daemon, as plain values.

One definition for both sides: the client builds these, `kvdepot.proto.codec`
is the only translator to and from the wire, the engine answers them. Lists that
grow with a prompt are packed bytes, because a Python object per entry costs
milliseconds at 1,000 objects.

Packed forms (all little-endian):

* keys: 16 bytes a chunk key (`kvdepot.core.keys.chunk_key`)
* kinds: 1 byte a `Kind`
* extents: `EXTENT_WORDS` u64 a fragment: object index within the call, row in the
  arena's extent table, byte offset in the arena, length in bytes, generation.
  Fragments of one object follow each other in object order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import numpy as np
from kvdepot.core import limits
from kvdepot.core.bounds import KEY_BYTES as KEY_BYTES
from kvdepot.core.bounds import (
    Count,
    EngineId,
    Exactly,
    Explanation,
    Kinds,
    LeaseId,
    NamespaceId,
    OneOf,
    Packed,
    Reason,
    RequestId,
    Seconds,
    SessionToken,
    Version,
    bad,
)
from kvdepot.core.kinds import Kind as Kind  # part of these calls

EXTENT_WORDS = 5
CHECKSUM_BYTES = 16
ROOT_KEY = b"\0" * KEY_BYTES
"""The parent of a prompt's first chunk."""
STREAM_READY = b"\1"
"""The one thing a proxy says on its lifeline: it serves."""
_STREAM = re.compile(r"stream-[0-9]{1,4}")
_INDEX_BYTES = 4
_BOUNDARY_BYTES = 4
_LIMIT_NAMES_MAX = 256


class ReserveOutcome(IntEnum):
    """The daemon's answer for one object of a reservation."""

    GRANTED = 1  # extents follow
    PRESENT = 2  # already committed: nothing to copy
    PENDING = 3  # another reservation writes it
    LATER = 4  # no credit at the moment
    NO_ROOM = 5  # nothing evictable
    NO_PARENT = 6  # the parent chunk is neither resident nor reserved
    REFUSED = 7  # namespace off, ranks missing, tombstoned lease


class AcquireOutcome(IntEnum):
    """The daemon's answer to an Acquire."""

    GRANTED = 1
    MISSING = 2  # an object went away since the lookup
    LATER = 3  # too many loads in flight
    REFUSED = 4  # ranks missing, loads off, tombstoned lease


class CommitOutcome(IntEnum):
    """The daemon's answer for one committed object."""

    COMMITTED = 1
    LOST = 2  # the lease is unknown: the daemon restarted, or it was released
    EXPIRED = 3  # the deadline has passed; the extents were taken back at this call
    NO_PARENT = 4  # its parent is not resident


class Nearest(IntEnum):
    """Where the daemon has the attention of a chunk. Of two tiers, the nearer one has the smaller number."""

    ABSENT = 0  # not in the index: lost, or never stored; a shared tier may have it
    RAM = 1
    BELOW_RAM = 2  # in a tier below
    UNKNOWN = 3  # a disk that has not opened yet may have it, or it is in RAM and waits for that disk


Extents = Annotated[bytes, Packed(8 * EXTENT_WORDS, limits.FRAGMENTS_PER_REPLY_MAX)]
Checksums = Annotated[bytes, Packed(CHECKSUM_BYTES, limits.OBJECTS_PER_LEASE_MAX)]
ObjectKeys = Annotated[bytes, Packed(KEY_BYTES, limits.OBJECTS_PER_LEASE_MAX)]
ReserveOutcomes = Annotated[bytes, OneOf(bytes(ReserveOutcome), limits.OBJECTS_PER_LEASE_MAX)]
CommitOutcomes = Annotated[bytes, OneOf(bytes(CommitOutcome), limits.OBJECTS_PER_LEASE_MAX)]
LeaseIds = Annotated[tuple[int, ...], Count(limits.LEASES_PER_CALL_MAX)]
AllLeaseIds = Annotated[tuple[int, ...], Count(limits.LEASES_PER_SESSION_MAX)]


def _check_length(field_name: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise bad(field_name, f"{len(value)} bytes, not {length}")


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """What the engine says of a request when it is over."""

    local_tokens: int = 0  # that it had itself when it was last asked
    loaded_tokens: int = 0
    miss: Reason = ""  # a `core.misses.MissReason`: why it loaded nothing, or not what it was offered
    prompt_tokens: int = 0  # 0: the engine never admitted it, or is older than the field
    source: Reason = ""  # of its load: the slowest tier that had to supply something
    load_seconds: Seconds = 0.0  # from its blocks to the last copy
    waited_seconds: Seconds = 0.0  # with `timed_out`: for the lookup's answer


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Tokens of the prompts that have ended since the engine's last report, and where they came from."""

    number: int = 0  # rising within a session: a repeated report is not counted again; 0: no report
    prompt_tokens: int = 0
    engine_tokens: int = 0  # of these: from the engine's own cache
    loaded_tokens: Annotated[Mapping[Reason, int], Count(limits.TOKEN_SOURCES_MAX)] = field(default_factory=dict)
    """Of these: loaded, by the slowest tier that had to supply something."""
    saved_seconds: Seconds = 0.0  # in which the engine would have computed the loaded tokens, as it estimates

    @property
    def credible(self) -> bool:
        """Return whether it can be true: it names no more tokens than its prompts have, and these are not too many."""
        supplied = self.engine_tokens + sum(self.loaded_tokens.values())
        few = self.prompt_tokens <= limits.REPORTED_TOKENS_MAX and self.saved_seconds <= limits.REPORTED_SECONDS_MAX
        return few and supplied <= self.prompt_tokens

    def joined(self, later: TokenReport) -> TokenReport:
        """Return one report of what both say. It has the number of the later one."""
        loaded = Counter(self.loaded_tokens)
        loaded.update(later.loaded_tokens)
        return TokenReport(
            max(self.number, later.number), self.prompt_tokens + later.prompt_tokens,
            self.engine_tokens + later.engine_tokens, loaded, self.saved_seconds + later.saved_seconds,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LocateCall:
    """Asks how far a prompt is stored. The answer is an offer, without a lease."""

    session: SessionToken
    namespace_id: NamespaceId
    keys: Annotated[bytes, Packed(KEY_BYTES, limits.KEYS_PER_CALL_MAX)]  # chunks 0..n-1 of the prompt, in order
    high_tokens: int  # a boundary above this is not usable (the engine computes the last token itself)
    request_id: RequestId = ""
    budget_seconds: Seconds = 0.0  # only what can be in RAM by then counts; 0: whenever it is
    wait_seconds: Seconds = 0.0  # the engine does without an answer after that; 0: it does not say
    local_tokens: int = 0  # that the engine has itself, and would not load; as far as it knows yet
    token_seconds: Seconds = 0.0  # in which it computes one, so that longer loads are rejected; 0: it does not know
    source_id: int = 0  # arena of the daemon that has the objects, as another engine says; 0: nobody says so


@dataclass(frozen=True, slots=True)
class LocateReply:
    """The offer: the boundary at which the request can resume."""

    boundary_tokens: int  # 0: nothing
    tier: Reason = ""  # the slowest that has to give something for it
    attention_tokens: int = 0  # how far attention alone reaches (for `explain`)
    estimate_seconds: Seconds = 0.0  # until all of the boundary's objects are in RAM, if they are acquired now
    miss: Reason = ""  # a `core.misses.MissReason`: why it is 0
    source_tier: Reason = ""  # the tier of kind `peer` that `source_id` selects; empty: none


@dataclass(frozen=True, slots=True)
class FindTiersCall:
    """Asks where the attention of chunks is now. It counts as no lookup, and nothing is read or kept because of it."""

    session: SessionToken
    namespace_id: NamespaceId
    keys: Annotated[bytes, Packed(KEY_BYTES, limits.KEYS_PER_CALL_MAX)]  # of any chunks, in any order


@dataclass(frozen=True, slots=True)
class FindTiersReply:
    """One place a key."""

    tiers: Annotated[bytes, OneOf(bytes(Nearest), limits.KEYS_PER_CALL_MAX)]


@dataclass(frozen=True, slots=True)
class AcquireCall:
    """Pin the named objects for every rank of the session, all or nothing.

    `lease_id` is drawn by the client and unique within its session: repeating the
    call repeats the answer, and a `Release` of it ends it whether or not the answer
    ever arrived.
    """

    session: SessionToken
    lease_id: LeaseId
    namespace_id: NamespaceId
    keys: ObjectKeys  # one an object, in plan order
    kinds: Kinds
    request_id: RequestId = ""
    no_use: bool = False  # it is no request that loads: nothing is kept, or written to a tier, for its sake
    checksums: bool = False  # the reply is to have them

    def check_fields(self) -> None:
        _check_length("kinds", self.kinds, len(self.keys) // KEY_BYTES)


@dataclass(frozen=True, slots=True)
class AcquireReply:
    """Extents of the leased objects, or the reason of a refusal."""

    outcome: AcquireOutcome
    extents: Extents = b""
    arena_id: int = 0
    reason: Explanation = ""
    checksums: Checksums = b""  # XXH3-128 of each object's bytes, zero: it has none yet; empty if not asked for


@dataclass(frozen=True, slots=True)
class ReleaseCall:
    """Every rank is done with these reader leases (or never saw them)."""

    session: SessionToken
    lease_ids: LeaseIds
    unused: LeaseIds = ()  # those of them that no engine has got anything from: they were no hits
    doubted: LeaseIds = ()  # those of them whose bytes did not match their checksums


@dataclass(frozen=True, slots=True)
class ReserveCall:
    """Ask for room for objects; parents before children. Idempotent by `lease_id`."""

    session: SessionToken
    lease_id: LeaseId
    namespace_id: NamespaceId
    keys: ObjectKeys
    parents: bytes
    kinds: Kinds
    boundaries: bytes  # u32 each: the boundary, in tokens, that ends the object's chunk
    request_id: RequestId = ""

    def check_fields(self) -> None:
        count = len(self.keys) // KEY_BYTES
        _check_length("parents", self.parents, count * KEY_BYTES)
        _check_length("boundaries", self.boundaries, count * _BOUNDARY_BYTES)
        _check_length("kinds", self.kinds, count)


@dataclass(frozen=True, slots=True)
class ReserveReply:
    """One outcome per object, and the extents of the granted objects."""

    outcomes: ReserveOutcomes  # one an object
    extents: Extents = b""  # of the granted ones
    arena_id: int = 0
    reason: Explanation = ""


@dataclass(frozen=True, slots=True)
class CommitItem:
    """Objects of one reservation, by index."""

    lease_id: LeaseId
    indices: Annotated[bytes, Packed(_INDEX_BYTES, limits.OBJECTS_PER_LEASE_MAX)]
    """u32 each: which objects of the reservation are completely written by all ranks."""

    def check_fields(self) -> None:
        if self.indices and int(np.frombuffer(self.indices, "<u4").max()) >= limits.OBJECTS_PER_LEASE_MAX:
            raise bad("indices", f"an index is not below {limits.OBJECTS_PER_LEASE_MAX}, the most objects of a call")


CommitItems = Annotated[tuple[CommitItem, ...], Count(limits.LEASES_PER_CALL_MAX)]


@dataclass(frozen=True, slots=True)
class CommitCall:
    """Says that all ranks have written these objects completely."""

    session: SessionToken
    items: CommitItems


@dataclass(frozen=True, slots=True)
class CommitReply:
    """The outcomes of a Commit."""

    outcomes: Annotated[tuple[CommitOutcomes, ...], Count(limits.LEASES_PER_CALL_MAX)]  # per item, one an index


@dataclass(frozen=True, slots=True)
class AbandonCall:
    """Release objects of reservations. No rank touches them any more.

    Empty `indices` means the whole lease, known to the daemon or not (a lost reply).
    """

    session: SessionToken
    items: CommitItems


@dataclass(frozen=True, slots=True)
class EndRequestCall:
    """Ends a request: its prefetch stops, and its provisional nodes may be dropped."""

    session: SessionToken
    request_id: RequestId
    end: RequestEnd = RequestEnd()
    tokens: TokenReport = field(default_factory=TokenReport)


@dataclass(frozen=True, slots=True)
class DeclareCall:
    """After a re-attach: the only leases this engine still holds. All others are freed."""

    session: SessionToken
    lease_ids: AllLeaseIds


@dataclass(frozen=True, slots=True)
class DeclareReply:
    """The leases that the daemon does not know."""

    lost: AllLeaseIds  # declared, but the daemon does not know them
    ranks_attached: int = 0


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The answer of a call whose answer says nothing more."""


@dataclass(frozen=True, slots=True)
class GetCapabilitiesCall:
    """The range of protocol versions that the caller speaks."""

    protocol_min: int
    protocol_max: int
    client_version: Version = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The daemon's versions, arena and limits."""

    protocol_min: int
    protocol_max: int
    daemon_version: Version
    arena_id: int
    ready_bytes: int
    limits: Annotated[Mapping[str, int], Count(_LIMIT_NAMES_MAX)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttachCall:
    """The one datagram a process sends on the attachment socket."""

    protocol_min: int
    protocol_max: int
    engine_id: EngineId
    scheduler: bool  # this process runs the engine's scheduler
    rank: int  # its worker's rank, -1: no worker in this process
    world_size: int  # workers of the engine
    client_version: Version = ""
    stream: bool = False  # it cannot map the arena: a proxy is to move its payload
    calls: bool = False  # it makes the scheduler's calls over a call socket, if it gets one
    parts: bool = False  # it tells another part of the same arena's data from the one that it maps; 0.3.0 does not

    def check_fields(self) -> None:
        if not self.engine_id:
            raise bad("engine_id", "it is empty")
        if not 1 <= self.world_size <= limits.RANKS_MAX:
            raise bad("world_size", f"{self.world_size} is not between 1 and {limits.RANKS_MAX}")
        if not -1 <= self.rank < self.world_size:
            raise bad("rank", f"{self.rank} is not between -1 and world_size - 1 = {self.world_size - 1}")
        if not self.scheduler and self.rank < 0:
            raise bad("rank", "a process that is neither scheduler nor worker has nothing to attach")
        if self.stream and self.scheduler:
            raise bad("stream", "a scheduler attaches without one: the proxy stands for the rank alone")
        if self.calls and not self.scheduler:
            raise bad("calls", "only a scheduler makes calls")


@dataclass(frozen=True, slots=True)
class AttachReply:
    """The answer to an attachment.

    An accepted one carries descriptors (SCM_RIGHTS): that of the arena or of the proxy's lifeline, and then that of the
    call socket.
    """

    protocol: int  # 0: refused
    error: Explanation = ""
    session: Annotated[bytes, Exactly(limits.SESSION_TOKEN_BYTES, or_empty=True)] = b""
    arena_id: int = 0
    arena_bytes: int = 0
    daemon_version: Version = ""
    stream: str = ""  # what the name of the proxy's socket has after the daemon's; empty: there is no proxy
    calls: bool = False  # a call socket comes with it

    def check_fields(self) -> None:
        if self.protocol and not self.session:
            raise bad("session", f"0 bytes, not {limits.SESSION_TOKEN_BYTES}")
        if self.stream and not _STREAM.fullmatch(self.stream):
            raise bad("stream", f"{self.stream[:32]!r} is no name of a proxy's socket")


@dataclass(frozen=True, slots=True)
class DataCall:
    """Begins a `Load` or a `Store` with the proxy. `extents` are parts of granted ones: each within its row."""

    session: SessionToken
    extents: Extents

    def check_fields(self) -> None:
        if not self.extents:
            raise bad("extents", "there are none")
