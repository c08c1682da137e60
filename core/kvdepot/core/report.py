"""What an operator is told about a running daemon, as plain values.

The engine fills these, `kvdepot.proto.codec_report` carries them, `kvdepotctl` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TierStatus:
    name: str
    kind: str
    capacity_bytes: int
    ready_bytes: int = 0
    used_bytes: int = 0
    lent_bytes: int = 0
    objects: int = 0
    unverified_objects: int = 0
    state: str = ""
    reason: str = ""
    # Of tiers below RAM:
    breaker: str = ""  # closed, open or probing
    queued_objects: int = 0  # waiting to be written
    queued_bytes: int = 0
    written_today_bytes: int = 0  # since midnight UTC, against the write budget
    quarantined_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionStatus:
    engine_id: str
    world_size: int = 0
    ranks_attached: int = 0
    scheduler_attached: bool = False
    credit_bytes: int = 0
    credit_used_bytes: int = 0
    leases: int = 0
    lent_objects: int = 0
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    namespace_id: bytes
    label: str = ""
    tenant: str = ""
    epoch: str = ""
    chunk_tokens: int = 0
    objects: Mapping[int, int] = field(default_factory=dict)  # number of objects by kind
    bytes: int = 0
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    version: str
    pid: int
    uptime_seconds: float
    ready: bool
    reason: str
    arena_id: int
    run: int
    tiers: tuple[TierStatus, ...] = ()
    sessions: tuple[SessionStatus, ...] = ()
    namespaces: tuple[NamespaceStatus, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
