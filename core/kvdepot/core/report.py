"""What an operator is told about a running daemon, as plain values.

The engine fills these, `kvdepot.proto.codec_report` carries them, `kvdepotctl` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvdepot.core.epochs import Epochs


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
    # Of RAM:
    unsummed_objects: int = 0  # committed, and without a checksum yet: a kill now would lose them
    prefetched_objects: int = 0  # held for requests that have not come for them yet, or on their way there
    prefetched_bytes: int = 0
    prefetching_requests: int = 0  # for which that is done or waits
    pinned_objects: int = 0  # not evicted, by an operator's word
    pinned_bytes: int = 0  # what they take of the arena
    # Of shared tiers:
    node: str = ""  # this daemon's id in the directory
    janitor: str = ""  # the node that counts and evicts there; empty: none is known

    @property
    def is_janitor(self) -> bool:
        return self.node == self.janitor != ""


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
    bumps: int = 0  # the operator's bump counter of it


@dataclass(frozen=True, slots=True)
class QuotaOwnerStatus:
    """A tenant or a namespace that a quota holds to its capacity."""

    tenant: str | None  # None: not known, because no engine has registered its namespace since the daemon started
    namespace: str = ""  # empty: the total of the tenant's; an id, where the quota is each namespace's
    used_bytes: int = 0
    refused_objects: int = 0  # that were not taken for its sake
    evicted_objects: int = 0


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """One quota of the configuration in one tier. Its counts never fall, also where owners vanish."""

    tenant: str
    namespace: str
    tier: str
    capacity_bytes: int
    owners_count: int = 0
    owners: tuple[QuotaOwnerStatus, ...] = ()  # the fullest first, not all where there are many
    refused_objects: int = 0
    evicted_objects: int = 0


@dataclass(frozen=True, slots=True)
class SwitchesStatus:
    """What operators have switched off: for all, and by id for single namespaces."""

    loads_off: bool = False
    loads_off_namespaces: tuple[bytes, ...] = ()
    stores_off: bool = False
    stores_off_namespaces: tuple[bytes, ...] = ()
    draining: bool = False  # until resumed, or the end of the run


@dataclass(frozen=True, slots=True)
class PinStatus:
    """What an operator has pinned in RAM. What it holds is as of some seconds ago; several pins may hold the same."""

    namespace_id: bytes
    key: bytes = b""  # of the chunk that ends the path; empty: all of the namespace
    seconds_left: float = 0.0
    chunks: int = 0  # of the path, or of the namespace, in all tiers
    objects: int = 0  # of them, those in RAM and within the share of pins
    bytes: int = 0  # what these take of the arena


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
    quotas: tuple[QuotaStatus, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    switches: SwitchesStatus = SwitchesStatus()
    pins: tuple[PinStatus, ...] = ()
    epochs: Epochs = field(default_factory=Epochs)
