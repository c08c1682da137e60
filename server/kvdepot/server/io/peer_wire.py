"""What a reader and a source of the peer tier say to each other, and the source's server to its daemon (ADR 78).

Reader and source talk over TLS, by frames as child processes use them (`framing`). The version is the protocol of ALPN.
The reader asks, the source answers, one after the other. After `Leased` come the bytes of the object, and nothing
else: who cannot send all of them closes the connection.

With `ALPN_NIXL` a reader may also borrow an object: it reads the object over NIXL, and then returns it (ADR 82).

A reader may also ask for a summary of all that it could have (ADR 85). A source that does not know this question
closes the connection.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from kvdepot.core.bounds import AtMost, Between, ChunkKey, Count, DrawnId, Duration, NamespaceId, bad
from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.server.io.framing import Digest, Framing, Signed
from kvdepot.server.io.jobs import FILES_PER_STAT, UNKNOWN, Extents
from kvdepot.server.storage.base import ObjectName

ALPN: Final = "kvdepot-peer/1"
ALPN_NIXL: Final = "kvdepot-peer-nixl/1"
"""Both sides want NIXL. It has all questions of the other protocol too."""
NAMES_MAX: Final = 64
"""Of a certificate. What it has beyond them does not count."""
NAME_CHARACTERS_MAX: Final = 512
METADATA_BYTES_MAX: Final = 256 << 10
"""Of a NIXL agent. It takes 318 bytes with UCX over TCP."""
SUMMARY_BYTES_MAX: Final = 1 << 20
"""Of the bits of a summary."""
_SUMMARY_BYTES_MIN: Final = 8
_HASHES_MAX: Final = 16
"""Of a summary. Sources use 7 at most."""
_QUESTION_BYTES_MAX: Final = 64 << 10
_ANSWER_BYTES_MAX: Final = 2 << 20
_Length = Annotated[Signed, Between(UNKNOWN, OBJECT_BYTES_MAX)]


class Refusal(StrEnum):
    """Why a source sends nothing. The values are labels of counters."""

    GONE = "gone"  # it has no such object, or not yet a checksum of it
    FOREIGN = "foreign"  # it has one of this name, with another parent, boundary or length
    BUSY = "busy"  # it has lent as much as it may
    NOT_ALLOWED = "not_allowed"  # no name of the certificate is that of a peer
    NOT_LENT = "not_lent"  # it lends nothing over NIXL now


class Lane(StrEnum):
    """What the bytes of an object come over. The values are labels of counters, and those of the key `lane`."""

    STREAM = "stream"
    NIXL = "nixl"


UNCONNECTED: Final = ("handshake", "limit", "no_answer")
"""Why. The values are labels of counters. `no_answer`: the daemon did not answer a question in time."""


class Sent(StrEnum):
    """How a lease ended. The values are labels of counters."""

    WHOLE = "whole"
    CUT = "cut"  # the connection ended before all bytes were sent
    LATE = "late"  # the lease was over


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object that a reader asks for."""

    namespace: NamespaceId
    key: ChunkKey
    kind: Annotated[int, AtMost(0xFF)]


ManyWanted = Annotated[tuple[Wanted, ...], Count(FILES_PER_STAT)]
Names = Annotated[tuple[str, ...], Count(NAMES_MAX)]


@dataclass(frozen=True, slots=True)
class Locate:
    """Which of these can be had now?"""

    wanted: ManyWanted


@dataclass(frozen=True, slots=True)
class Located:
    """The length of each object in bytes, or `jobs.ABSENT`, or `jobs.UNKNOWN`: it is there, and nobody may have it yet.

    `arena_id` is the source's, by which engines name it.
    """

    lengths: Annotated[tuple[_Length, ...], Count(FILES_PER_STAT)]
    arena_id: int = 0


@dataclass(frozen=True, slots=True)
class Pull:
    """Lease this object, and send it."""

    name: ObjectName


@dataclass(frozen=True, slots=True)
class Leased:
    """So many bytes follow. `raw_sum` is their XXH3-128; `generation` is the object's in the source's arena."""

    raw_bytes: Annotated[int, Between(1, OBJECT_BYTES_MAX)]
    raw_sum: Digest
    generation: int


@dataclass(frozen=True, slots=True)
class Borrow:
    """Lease this object. It is read over NIXL."""

    name: ObjectName


@dataclass(frozen=True, slots=True)
class Lender:
    """A NIXL agent that serves the arena. `metadata` is a secret: with it all of the arena can be read.

    `digest`: XXH3-128 of `metadata`. NIXL sees no other metadata: of what is too short it would take a part, and dial.
    `base`: the address of the arena's first byte there.
    """

    metadata: Annotated[bytes, Count(METADATA_BYTES_MAX)]
    digest: Digest
    base: int


@dataclass(frozen=True, slots=True)
class Lent:
    """The right to read these extents until `Return`. `raw_sum` and `generation` are as in `Leased`."""

    raw_sum: Digest
    generation: int
    lender: Lender
    extents: Extents


@dataclass(frozen=True, slots=True)
class Return:
    """All bytes have come. Who cannot say this ends the connection."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The lease lasted until now."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a question that the source does not answer otherwise."""

    reason: Refusal


@dataclass(frozen=True, slots=True)
class Summarize:
    """Which chunks can be had? The reader has the summary of this version; 0: it has none."""

    version: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A Bloom filter (rbloom's) of the words of all chunks that can be had (`chunk_words`).

    Equal summaries have one version, and it is never 0.
    """

    arena_id: int
    version: Annotated[int, DrawnId()]
    chunks: int
    hashes: Annotated[int, Between(1, _HASHES_MAX)]
    bits: Annotated[bytes, Count(SUMMARY_BYTES_MAX)]

    def check_fields(self) -> None:
        if len(self.bits) < _SUMMARY_BYTES_MIN:
            raise bad("bits", f"{len(self.bits)} bytes; expected at least {_SUMMARY_BYTES_MIN}")


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The reader has the latest summary."""

    arena_id: int


Question = Locate | Pull | Borrow | Return | Summarize
Reply = Located | Leased | Refused | Lent | Returned | Summary | Unchanged
FROM_READER: Final[Framing[Question]] = Framing(Locate, Pull, Borrow, Return, Summarize, bytes_max=_QUESTION_BYTES_MAX)
TO_READER: Final[Framing[Reply]] = Framing(
    Located, Leased, Refused, Lent, Returned, Summary, Unchanged, bytes_max=_ANSWER_BYTES_MAX
)


# Between the source's server and its daemon. The number of a frame is that of the question.


@dataclass(frozen=True, slots=True)
class AskLocate:
    """A `Locate` of a reader whose certificate has these names."""

    names: Names
    wanted: ManyWanted


@dataclass(frozen=True, slots=True)
class AskPull:
    """A `Pull` of a reader whose certificate has these names, or a `Borrow`."""

    names: Names
    name: ObjectName
    borrows: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """The right to read these extents until its end, or until the server says that it has ended."""

    lease: int
    raw_sum: Digest
    generation: int
    seconds: Annotated[float, Duration()]
    extents: Extents
    lender: Lender | None = None  # of what is borrowed


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing in the server touches the extents of this lease any more."""

    lease: int
    sent: Sent
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Unconnected:
    """Connections that were refused or ended since the last message, for one reason of `UNCONNECTED`."""

    reason: Annotated[str, Count(32)]
    times: int


@dataclass(frozen=True, slots=True)
class AskSummary:
    """A `Summarize` of a reader whose certificate has these names."""

    names: Names


@dataclass(frozen=True, slots=True)
class SummaryWords:
    """Words of chunks that peers of a tenant can have. With the first ones those of before do not count any more."""

    tenant: int
    words: bytes  # u64
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Gathered:
    """All words of this tenant have been sent."""

    tenant: int
    arena_id: int


TO_DAEMON: Final[Framing[AskLocate | AskPull | Ended | Unconnected | AskSummary]] = Framing(
    AskLocate, AskPull, Ended, Unconnected, AskSummary, bytes_max=256 << 10
)
FROM_DAEMON: Final[Framing[Located | Granted | Refused | SummaryWords | Gathered]] = Framing(
    Located, Granted, Refused, SummaryWords, Gathered, bytes_max=_ANSWER_BYTES_MAX
)


# Between the process that lends over NIXL and its daemon.


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve reads from now on, or no more: something is lent, or nothing."""

    on: bool


TO_LENDER: Final[Framing[Serve]] = Framing(Serve, bytes_max=64)
FROM_LENDER: Final[Framing[Lender]] = Framing(Lender, bytes_max=2 * METADATA_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Where a peer is, and who it has to be. Nothing here is secret: it is an argument of the worker."""

    host: str
    port: int
    cert: str  # files of PEM
    key: str
    ca: str
    names: tuple[str, ...]  # of the certificates that count as this peer's
    timeout_seconds: float  # of one step
    lane: Lane = Lane.STREAM
    no_nixl: str = ""  # why objects come over the stream for now, if the lane is NIXL

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "names": tuple(values["names"]), "lane": Lane(values["lane"])})


Receive = Callable[[memoryview], int]
"""Takes what has come, and returns how many bytes. 0: the end."""


class Exact:
    """A socket as the stream of `Framing.read`: it takes no byte more than it is asked for.

    `receive`: the socket's `recv_into`, or what calls it.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    def read(self, size: int) -> bytes:
        """Return so many bytes, or fewer at the end. Raise OSError."""
        data = bytearray(size)
        return bytes(data[: receive_into(self._receive, memoryview(data))])


def receive_into(receive: Receive, buffer: memoryview) -> int:
    """Fill the buffer. Return how many bytes came; fewer than it has at the end. Raise OSError."""
    filled = 0
    while filled < len(buffer):
        count = receive(buffer[filled:])
        if not count:
            break
        filled += count
    return filled
