"""Traces of lookups, for `kvdepotctl trace`, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from kvdepot.core import limits
from kvdepot.core.bounds import KEY_BYTES, Count, NamespaceId, Packed, Seconds
from kvdepot.core.keys import SpecField

PART_KEY_BYTES_MAX: Final = 2 << 20
"""Of the requests of one answer, unless a single one has more."""
PART_REQUESTS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class RecordTraceCall:
    """Asks for a trace of lookups, until the caller ends the call."""


@dataclass(frozen=True, slots=True)
class TracedNamespace:
    """Before the first request of it. The spec is without the identity."""

    namespace_id: NamespaceId
    spec: SpecField


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request's first lookup. `boundary_tokens`: how far it was offered to resume, then."""

    seconds: Seconds  # since the trace began
    namespace_id: NamespaceId
    keys: Annotated[bytes, Packed(KEY_BYTES, limits.KEYS_PER_CALL_MAX)]  # of the whole chunks of its prompt, in order
    boundary_tokens: int


@dataclass(frozen=True, slots=True)
class TracePart:
    """What came since the part before. Namespaces without their identities, each once; `lost`: requests, in all."""

    namespaces: tuple[TracedNamespace, ...] = ()
    requests: Annotated[tuple[TracedRequest, ...], Count(PART_REQUESTS_MAX)] = ()
    lost: int = 0
