"""What operators see of single namespaces, chunks and objects, as plain values.

The depot fills them, `kvdepot.proto.codec` carries them, and `kvdepotctl ls` and `describe` print them. Sizes are bytes
of the payload as engines see it unless named otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from kvdepot.core import limits
from kvdepot.core.arena import NAMESPACES_MAX, SESSIONS_MAX
from kvdepot.core.bounds import (
    KEY_BYTES,
    AtMost,
    ChunkKey,
    ChunkKinds,
    Count,
    EngineId,
    Epoch,
    Exactly,
    Explanation,
    Label,
    NamespaceId,
    Tenant,
    Text,
    bad,
)
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.keys import SpecField
from kvdepot.core.kinds import Kind

NAMESPACES_PER_PAGE_MAX: Final = 64
CHUNKS_PER_PAGE_MAX: Final = 250
"""The daemon's loop makes a page in one piece: 4 ms, measured with two kinds in RAM and one lower tier."""
PATH_KEYS_MAX: Final = 256
"""Ancestors that are named; `depth` counts them all."""
CHILDREN_COUNTED_MAX: Final = 10_000
LOANS_MAX: Final = 64
"""Loans of one object that are named."""
PREFIX_DIGITS_MAX: Final = 2 * KEY_BYTES
_TIERS_MAX: Final = 64
_CHECKSUM_BYTES: Final = 16

TierName = Annotated[str, Text(256)]
TierNames = Annotated[tuple[TierName, ...], Count(_TIERS_MAX)]
State = Annotated[str, Text(64)]
PageToken = Annotated[str, Text(64)]
Prefix = Annotated[str, Text(PREFIX_DIGITS_MAX)]
ObjectsByKind = Annotated[Mapping[Kind, int], Count(len(Kind))]


@dataclass(frozen=True, slots=True)
class ListContentsCall:
    """Asks for a page of namespaces."""

    prefix: Prefix = ""  # of the namespace's id, hexadecimal
    page_size: int = 0  # 0: as many as a page has
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True)
class ListChunksCall:
    """Asks for a page of a namespace's chunks."""

    namespace_id: NamespaceId
    prefix: Prefix = ""  # of the chunk's key, hexadecimal
    page_size: int = 0  # 0: as many as a page has
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True)
class DescribeNamespaceCall:
    """Asks for everything about a namespace."""

    namespace_id: NamespaceId


@dataclass(frozen=True, slots=True)
class DescribeChunkCall:
    """Asks for everything about a chunk."""

    namespace_id: NamespaceId
    key: ChunkKey


@dataclass(frozen=True, slots=True)
class TierContents:
    """What one tier holds of a namespace."""

    tier: TierName
    objects: ObjectsByKind = field(default_factory=dict)  # number of objects by kind
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceContents:
    """What the tiers hold of a namespace."""

    namespace_id: NamespaceId
    label: Label = ""
    tenant: Tenant = ""
    epoch: Epoch = ""
    chunk_tokens: Annotated[int, AtMost(limits.CHUNK_TOKENS_MAX)] = 0  # 0: no engine has registered it in this run
    chunks: int = 0
    sessions: int = 0
    idle_seconds: float = 0.0  # since an engine last asked for it
    tiers: Annotated[tuple[TierContents, ...], Count(_TIERS_MAX)] = ()  # ram first
    bumps: int = 0  # the operator's bump counter of it


@dataclass(frozen=True, slots=True)
class NamespacePage:
    """One page of namespaces."""

    namespaces: Annotated[tuple[NamespaceContents, ...], Count(NAMESPACES_MAX)] = ()
    next_page_token: PageToken = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`kinds` (a byte a kind) and `size_bytes` are by tier, in the order of the page's tiers."""

    key: ChunkKey
    parent: ChunkKey  # ROOT_KEY: it is a first chunk
    boundary_tokens: int
    usable: bool  # whether a request could resume at its end
    kinds: tuple[ChunkKinds, ...] = ()
    size_bytes: tuple[int, ...] = ()
    incomplete: ChunkKinds = b""  # kinds in RAM that are being written or read


@dataclass(frozen=True, slots=True)
class ChunkPage:
    """Fewer chunks than asked for do not make it the last: that is a page without `next_token`."""

    tiers: TierNames = ()
    chunks: Annotated[tuple[Chunk, ...], Count(CHUNKS_PER_PAGE_MAX)] = ()
    next_page_token: PageToken = ""

    def check_fields(self) -> None:
        for chunk in self.chunks:
            _check_tiers(chunk, self.tiers)


@dataclass(frozen=True, slots=True)
class NamespaceDescription:
    """Everything about a namespace."""

    contents: NamespaceContents
    spec: SpecField | None = None  # None: no engine has registered it in this run
    engines: Annotated[tuple[EngineId, ...], Count(SESSIONS_MAX)] = ()


@dataclass(frozen=True, slots=True)
class LoanDescription:
    """Who may touch an extent of the object."""

    engine_id: EngineId
    pids: Annotated[tuple[int, ...], Count(2 * limits.RANKS_MAX)] = ()
    mode: State = ""  # read, write or checksum
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class ObjectDescription:
    """One object in one tier."""

    tier: TierName
    kind: Kind
    size_bytes: int
    state: State = ""
    checksum: Annotated[bytes, Exactly(_CHECKSUM_BYTES, or_empty=True)] = b""
    """XXH3-128 of the payload, of the stored bytes on a device. Empty: not known."""
    stored_bytes: int = 0  # on a device
    sequence: int = 0  # on a device
    generation: int = 0  # in the arena
    extents: int = 0  # in how many pieces
    loans: Annotated[tuple[LoanDescription, ...], Count(LOANS_MAX)] = ()
    pinned: bool = False  # in the arena
    place: Explanation = ""  # which of several peers have it


@dataclass(frozen=True, slots=True)
class ChunkDescription:
    """Everything about a chunk, with its neighbours in the tree."""

    chunk: Chunk
    tiers: TierNames = ()
    objects: Annotated[tuple[ObjectDescription, ...], Count(_TIERS_MAX * len(Kind))] = ()
    path: Annotated[tuple[ChunkKey, ...], Count(PATH_KEYS_MAX)] = ()  # keys of the nearest ancestors, the parent first
    depth: int = 0  # ancestors
    children: int = 0
    more_children: bool = False  # than were counted

    def check_fields(self) -> None:
        _check_tiers(self.chunk, self.tiers)


def _check_tiers(chunk: Chunk, tiers: tuple[str, ...]) -> None:
    """Raise InvalidArgument if a chunk does not have one entry for each tier of the page."""
    if len(chunk.kinds) != len(tiers) or len(chunk.size_bytes) != len(tiers):
        counts = f"kinds of {len(chunk.kinds)} and size_bytes of {len(chunk.size_bytes)} tiers, not of {len(tiers)}"
        raise bad("chunk", counts)


def prefix_range(field_name: str, digits: str) -> tuple[bytes, bytes]:
    """Return the least and the greatest id of 16 bytes with these first hexadecimal digits. Raise InvalidArgument."""
    if len(digits) > PREFIX_DIGITS_MAX or not set(digits) <= set("0123456789abcdef"):
        shown = digits[: 2 * PREFIX_DIGITS_MAX]
        raise InvalidArgument(
            f"{field_name}: {shown!r} is not the beginning of an id",
            advice=f"give at most {PREFIX_DIGITS_MAX} hexadecimal digits (0-9, a-f)",
        )
    return bytes.fromhex(digits.ljust(PREFIX_DIGITS_MAX, "0")), bytes.fromhex(digits.ljust(PREFIX_DIGITS_MAX, "f"))
