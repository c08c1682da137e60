"""Traces of what engines asked for, for `kvdepotctl trace`. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvdepot.core.keys import NamespaceSpec

PART_KEY_BYTES_MAX: Final = 2 << 20
"""Of the requests of one answer, unless a single one has more."""
PART_REQUESTS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request's first lookup. `boundary_tokens`: how far it was offered to resume, then."""

    seconds: float  # since the trace began
    namespace_id: bytes
    keys: bytes  # of the whole chunks of its prompt, in order
    boundary_tokens: int


@dataclass(frozen=True, slots=True)
class TracePart:
    """What came since the part before. Namespaces without their identities, each once; `lost`: requests, in all."""

    namespaces: tuple[tuple[bytes, NamespaceSpec], ...] = ()
    requests: tuple[TracedRequest, ...] = ()
    lost: int = 0
