"""What an operator is told about single namespaces, chunks and objects, as plain values.

The engine fills these, `kvdepot.proto.codec_listing` carries them, `kvdepotctl ls` and
`describe` print them. Sizes are bytes of the payload as engines see it unless named otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.calls import KEY_BYTES
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.keys import NamespaceSpec

NAMESPACES_PER_PAGE_MAX: Final = 64
CHUNKS_PER_PAGE_MAX: Final = 250
"""The daemon's loop makes a page in one piece: 4 ms, measured with two kinds in RAM and one lower tier."""
PATH_KEYS_MAX: Final = 256
"""Ancestors that are named; `depth` counts them all."""
CHILDREN_COUNTED_MAX: Final = 10_000
LOANS_MAX: Final = 64
"""Loans of one object that are named."""
PREFIX_DIGITS_MAX: Final = 2 * KEY_BYTES


@dataclass(frozen=True, slots=True)
class TierContents:
    """What one tier holds of a namespace."""

    tier: str
    objects: Mapping[int, int] = field(default_factory=dict)  # number of objects by kind
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceContents:
    namespace_id: bytes
    label: str = ""
    tenant: str = ""
    epoch: str = ""
    chunk_tokens: int = 0  # 0: no engine has registered it in this run
    chunks: int = 0
    sessions: int = 0
    idle_seconds: float = 0.0  # since an engine last asked for it
    tiers: tuple[TierContents, ...] = ()  # ram first
    bumps: int = 0  # the operator's bump counter of it


@dataclass(frozen=True, slots=True)
class NamespacePage:
    namespaces: tuple[NamespaceContents, ...] = ()
    next_token: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`kinds` (a byte a kind) and `size_bytes` are by tier, in the order of the page's tiers."""

    key: bytes
    parent: bytes  # ROOT_KEY: it is a first chunk
    boundary_tokens: int
    usable: bool  # whether a request could resume at its end
    kinds: tuple[bytes, ...] = ()
    size_bytes: tuple[int, ...] = ()
    incomplete: bytes = b""  # kinds in RAM that are being written or read


@dataclass(frozen=True, slots=True)
class ChunkPage:
    """Fewer chunks than asked for do not make it the last: that is a page without `next_token`."""

    tiers: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    next_token: str = ""


@dataclass(frozen=True, slots=True)
class NamespaceDescription:
    contents: NamespaceContents
    spec: NamespaceSpec | None = None  # None: no engine has registered it in this run
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoanDescription:
    """Who may touch an extent of the object."""

    engine_id: str
    pids: tuple[int, ...] = ()
    mode: str = ""  # read, write or checksum
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class ObjectDescription:
    """One object in one tier."""

    tier: str
    kind: int
    size_bytes: int
    state: str = ""
    checksum: bytes = b""  # XXH3-128 of the payload (of the stored bytes on a medium), empty: not known
    stored_bytes: int = 0  # on a medium
    sequence: int = 0  # on a medium
    generation: int = 0  # in the arena
    extents: int = 0  # in how many pieces
    loans: tuple[LoanDescription, ...] = ()
    pinned: bool = False  # in the arena


@dataclass(frozen=True, slots=True)
class ChunkDescription:
    chunk: Chunk
    tiers: tuple[str, ...] = ()
    objects: tuple[ObjectDescription, ...] = ()
    path: tuple[bytes, ...] = ()  # keys of the nearest ancestors, the parent first
    depth: int = 0  # ancestors
    children: int = 0
    more_children: bool = False  # than were counted


def prefix_range(field_name: str, digits: str) -> tuple[bytes, bytes]:
    """The least and the greatest id of 16 bytes that begin with these hexadecimal digits. Raises InvalidArgument."""
    if len(digits) > PREFIX_DIGITS_MAX or not set(digits) <= set("0123456789abcdef"):
        shown = digits[: 2 * PREFIX_DIGITS_MAX]
        raise InvalidArgument(
            f"{field_name}: {shown!r} is not the beginning of an id",
            advice=f"give at most {PREFIX_DIGITS_MAX} hexadecimal digits (0-9, a-f)",
        )
    return bytes.fromhex(digits.ljust(PREFIX_DIGITS_MAX, "0")), bytes.fromhex(digits.ljust(PREFIX_DIGITS_MAX, "f"))
