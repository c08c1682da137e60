"""Every limit of the protocol and the depot, with its unit and its reason (I4).

Beyond a limit a call gets an answer (`LimitExceeded`, "later", "no room"); nothing grows. The sizes of the arena's
fixed tables (sessions, attachments, namespaces) are part of its format, and are in `kvdepot.core.arena`.
"""

from __future__ import annotations

from typing import Final

from kvdepot.core.errors import LimitExceeded

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1

# One call.
KEYS_PER_CALL_MAX: Final = 16_384
"""Chunk keys of one Locate: 4 million tokens at the default chunk of 256, 256 KiB on the wire."""
OBJECTS_PER_LEASE_MAX: Final = 16_384
"""Objects of one Acquire or Reserve: what one Locate can find."""
RESERVED_PER_CALL_MAX: Final = 40
"""Objects of one Reserve that are answered by what is there; those after them are LATER. Each may evict others, which
takes 130 to 430 us: the daemon answers nobody meanwhile."""
FRAGMENTS_PER_REPLY_MAX: Final = 65_536
"""Extents of one reply, 40 bytes each: 2.5 MiB, within the message limit even when every object is in four pieces."""
LEASES_PER_CALL_MAX: Final = 4_096
"""Lease ids or commit items of one Release, Commit, Abandon or Declare."""
MESSAGE_BYTES_MAX: Final = 4 << 20
"""One gRPC message either way. gRPC's own default, so that an untuned client is not surprised."""
PIECE_BYTES_MAX: Final = 1 << 20
"""Payload of one message of a Load or Store with a proxy: a deadline is looked at that often."""
ATTACH_DATAGRAM_BYTES_MAX: Final = 4_096
"""One datagram of the attachment socket: a handful of short fields."""

# Names.
REQUEST_ID_BYTES_MAX: Final = 512
"""UTF-8. Engines use UUIDs, gateways prefix them."""
ENGINE_ID_BYTES_MAX: Final = 256
"""UTF-8. Host names are at most 253 bytes."""
LABEL_BYTES_MAX: Final = 96
"""UTF-8. The width of the label column of the arena's namespace table."""
TENANT_BYTES_MAX: Final = 128
"""UTF-8."""
EPOCH_BYTES_MAX: Final = 128
"""UTF-8. A random hex value, or the user's name of a weights version."""
BUMPS_MAX: Final = (1 << 32) - 1
"""The operator's bump counter of a namespace."""
INVALIDATED_NAMESPACES_MAX: Final = 1024
"""Namespaces that may be bumped individually between two bumps of all."""
BLOCK_HASH_BYTES_MAX: Final = 64
"""An engine's block hash: SHA-512 is the longest digest in use."""

VERSION_BYTES_MAX: Final = 64
"""UTF-8. A client's or daemon's version string."""
REASON_BYTES_MAX: Final = 4_096
"""UTF-8. A reason, an error text or a tier's name in a reply."""
SESSION_TOKEN_BYTES: Final = 16
NAMESPACE_ID_BYTES: Final = 16

# A namespace spec.
IDENTITY_ENTRIES_MAX: Final = 4_096
"""A resolved vLLM config has some 600 leaves."""
SPEC_BYTES_MAX: Final = 1 << 20
"""Canonical encoding of one spec; kept per namespace in the daemon's private memory."""
ELEMENT_RUNS_MAX: Final = 512
"""Of all kinds of a namespace: equal layers of all ranks are one run."""
ELEMENT_PARTS_MAX: Final = 16_384
"""Of all kinds of a namespace: parts in these runs, layers times ranks."""
DTYPE_BYTES_MAX: Final = 32
GROUPS_MAX: Final = 64
"""KV-cache groups of an engine; the largest hybrid seen has 9."""
LAYERS_PER_GROUP_MAX: Final = 1_024
RANKS_MAX: Final = 64
"""Workers (TP x PP) of one engine on one node: four times the accelerators of the largest node."""
CHUNK_TOKENS_MAX: Final = 1 << 20
BOUNDARY_TOKENS_MAX: Final = (1 << 32) - 1
"""Boundaries are u32 in calls and in the arena."""
OBJECT_BYTES_MAX: Final = 64 << 30
"""One object; beyond it no arena of a node could hold two."""

TOKEN_SOURCES_MAX: Final = 32
"""Sources of loaded tokens in one report. An engine names at most 17."""

REPORTED_TOKENS_MAX: Final = 1 << 32
"""Of prompts in one report: more than any engine's prompts have that end between two calls."""

REPORTED_SECONDS_MAX: Final = 1e7
"""Saved, of one report, which may have those of tokens that earlier ones counted: more than these tokens take."""

# A session.
LEASES_PER_SESSION_MAX: Final = 8_192
"""Open leases: 256 running requests with a load and some stores each, times ten."""
TOMBSTONES_PER_SESSION_MAX: Final = 4_096
"""Lease ids ended before their call arrived; older ones are forgotten, oldest first."""
NAMESPACES_PER_SESSION_MAX: Final = 64
"""An engine has one at a time; each epoch makes another, and beyond the limit the session leaves its first one."""
REQUESTS_PER_SESSION_MAX: Final = 65_536
"""Requests with provisional nodes that await their EndRequest; of all sessions together."""


def check_limit(limit: str, value: int, maximum: int) -> None:
    """Raise LimitExceeded, which names `limit`, if `value` is above `maximum`."""
    if value > maximum:
        raise LimitExceeded(limit, value, maximum)


def advertised() -> dict[str, int]:
    """Return the limits that a client may need, by name (Capabilities.limits)."""
    return {
        "keys_per_call": KEYS_PER_CALL_MAX,
        "objects_per_lease": OBJECTS_PER_LEASE_MAX,
        "reserved_per_call": RESERVED_PER_CALL_MAX,
        "fragments_per_reply": FRAGMENTS_PER_REPLY_MAX,
        "leases_per_call": LEASES_PER_CALL_MAX,
        "message_bytes": MESSAGE_BYTES_MAX,
        "request_id_bytes": REQUEST_ID_BYTES_MAX,
        "leases_per_session": LEASES_PER_SESSION_MAX,
        "namespaces_per_session": NAMESPACES_PER_SESSION_MAX,
        "spec_bytes": SPEC_BYTES_MAX,
        "ranks": RANKS_MAX,
    }
