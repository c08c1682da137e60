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

from dataclasses import dataclass, field
from enum import IntEnum

from kvdepot.core.kinds import Kind as Kind  # part of these calls

KEY_BYTES = 16
EXTENT_WORDS = 5
ROOT_KEY = b"\0" * KEY_BYTES
"""The parent of a prompt's first chunk."""
STREAM_READY = b"\1"
"""The one thing a proxy says on its lifeline: it serves."""


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
    GRANTED = 1
    MISSING = 2  # an object went away since the lookup
    LATER = 3  # too many loads in flight
    REFUSED = 4  # ranks missing, loads off, tombstoned lease


class CommitOutcome(IntEnum):
    COMMITTED = 1
    LOST = 2  # the lease is unknown: the daemon restarted, or it was given back
    EXPIRED = 3  # the deadline has passed; the extents were taken back at this call
    NO_PARENT = 4  # its parent is not resident


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """What the engine says of a request when it is over."""

    local_tokens: int = 0  # that it had itself when it was last asked
    loaded_tokens: int = 0
    miss: str = ""  # a `core.misses.MissReason`: why it loaded nothing, or not what it was offered


@dataclass(frozen=True, slots=True)
class LocateCall:
    session: bytes
    namespace: bytes
    keys: bytes  # chunks 0..n-1 of the prompt, in order
    high_tokens: int  # a boundary above this is of no use (the engine computes the last token itself)
    request_id: str = ""
    budget_seconds: float = 0.0  # only what can be in RAM by then is of use; 0: whenever it is
    wait_seconds: float = 0.0  # the engine does without an answer after that; 0: it does not say
    local_tokens: int = 0  # that the engine has itself, and would not load; as far as it knows yet
    token_seconds: float = 0.0  # in which it computes one, so that longer loads are of no use; 0: it does not know


@dataclass(frozen=True, slots=True)
class LocateReply:
    boundary_tokens: int  # 0: nothing
    tier: str = ""  # the slowest that has to give something for it
    attention_tokens: int = 0  # how far attention alone reaches (for `explain`)
    estimate_seconds: float = 0.0  # until all of the boundary's objects are in RAM, if they are acquired now
    miss: str = ""  # a `core.misses.MissReason`: why it is 0


@dataclass(frozen=True, slots=True)
class AcquireCall:
    """Pin the named objects for every rank of the session, all or nothing.

    `lease_id` is drawn by the client and unique within its session: repeating the
    call repeats the answer, and a `Release` of it ends it whether or not the answer
    ever arrived.
    """

    session: bytes
    lease_id: int
    namespace: bytes
    keys: bytes  # one an object, in plan order
    kinds: bytes
    request_id: str = ""
    no_use: bool = False  # it is no request that loads: nothing is kept, or written to a tier, for its sake


@dataclass(frozen=True, slots=True)
class AcquireReply:
    outcome: AcquireOutcome
    extents: bytes = b""
    arena_id: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseCall:
    """Every rank is done with these reader leases (or never saw them)."""

    session: bytes
    lease_ids: tuple[int, ...]
    unused: tuple[int, ...] = ()  # those of them that no engine has got anything from: they were no hits


@dataclass(frozen=True, slots=True)
class ReserveCall:
    """Ask for room for objects; parents before children. Idempotent by `lease_id`."""

    session: bytes
    lease_id: int
    namespace: bytes
    keys: bytes
    parents: bytes
    kinds: bytes
    boundaries: bytes  # u32 each: the boundary, in tokens, that ends the object's chunk
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class ReserveReply:
    outcomes: bytes  # one `ReserveOutcome` an object
    extents: bytes = b""  # of the granted ones
    arena_id: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CommitItem:
    lease_id: int
    indices: bytes  # u32 each: which objects of the reservation are completely written by all ranks


@dataclass(frozen=True, slots=True)
class CommitCall:
    session: bytes
    items: tuple[CommitItem, ...]


@dataclass(frozen=True, slots=True)
class CommitReply:
    outcomes: tuple[bytes, ...]  # per item, one `CommitOutcome` an index


@dataclass(frozen=True, slots=True)
class AbandonCall:
    """Give back objects of reservations. No rank touches them any more.

    Empty `indices` means the whole lease, known to the daemon or not (a lost reply).
    """

    session: bytes
    items: tuple[CommitItem, ...]


@dataclass(frozen=True, slots=True)
class EndRequestCall:
    session: bytes
    request_id: str
    end: RequestEnd = RequestEnd()


@dataclass(frozen=True, slots=True)
class DeclareCall:
    """After a re-attach: the only leases this engine still holds. All others are freed."""

    session: bytes
    lease_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeclareReply:
    lost: tuple[int, ...]  # declared, but the daemon does not know them
    ranks_attached: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    protocol_min: int
    protocol_max: int
    version: str
    arena_id: int
    ready_bytes: int
    limits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttachCall:
    """The one datagram a process sends on the attachment socket."""

    protocol_min: int
    protocol_max: int
    engine_id: str
    scheduler: bool  # this process runs the engine's scheduler
    rank: int  # its worker's rank, -1: no worker in this process
    world_size: int  # workers of the engine
    client_version: str = ""
    stream: bool = False  # it cannot map the arena: a proxy is to move its payload
    calls: bool = False  # it makes the scheduler's calls over a call socket, if it gets one


@dataclass(frozen=True, slots=True)
class AttachReply:
    """The answer; an accepted one carries descriptors (SCM_RIGHTS): the arena's, or that of the proxy's lifeline, and
    the call socket's.
    """

    protocol: int  # 0: refused
    error: str = ""
    session: bytes = b""
    arena_id: int = 0
    arena_bytes: int = 0
    daemon_version: str = ""
    stream: str = ""  # what the proxy's socket has behind the daemon's; empty: there is no proxy
    calls: bool = False  # a call socket comes with it


@dataclass(frozen=True, slots=True)
class DataCall:
    """Begins a `Load` or a `Store` with the proxy. `extents` are parts of granted ones: each within its row."""

    session: bytes
    extents: bytes
