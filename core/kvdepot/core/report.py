"""What operators see of a running daemon, as plain values.

The depot fills them, `kvdepot.proto.codec` carries them, and `kvdepotctl` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvdepot.core.bounds import Explanation, Version
from kvdepot.core.epochs import Epochs
from kvdepot.core.kinds import Kind
from kvdepot.core.verdict import Health


@dataclass(frozen=True, slots=True)
class CapacityFactor:
    """The hit ratio that a tier of another capacity would have."""

    factor: float  # of the tier's capacity
    capacity_bytes: int
    hit_ratio: float | None = None  # 0 to 1; None: too few requests are in the sample
    full: bool = False  # it has evicted something; otherwise more requests may show a higher ratio
    sampled_requests: int = 0  # of the window, those with a chunk in the sample
    sample_ratio: float = 1.0  # the part of all chunks that is in the sample


@dataclass(frozen=True, slots=True)
class WhatIfStatus:
    """The expected hit ratio of a tier at other capacities, of the requests of the last hour.

    The tiers above are taken as they are. Ratios are tokens that requests could resume after, of those that they asked
    for.
    """

    window_seconds: float = 0.0  # that the figures cover: at most an hour
    requests: int = 0
    requests_min: int = 0  # below so many sampled ones there is no ratio
    measured_hit_ratio: float | None = None  # what all tiers offered to the same requests
    points: tuple[CapacityFactor, ...] = ()
    upper_bound: bool = False  # the tier's write policy keeps less than the estimate takes for granted


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A daemon that a peer tier loads from. Its figures count since it was last found."""

    address: str  # host:port
    state: str = ""  # new: it has not answered yet; ready, failing, or disabled; itself: it is this daemon
    reason: Explanation = ""
    arena_id: int = 0  # 0: it has not answered yet
    breaker: str = ""  # closed, open or probing
    lane: str = ""  # what objects came over last
    reading_objects: int = 0  # now
    loaded_objects: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0  # of these loads, one after the other
    failed_objects: Mapping[str, int] = field(default_factory=dict)  # loads without a result, by outcome
    lookups: int = 0  # that it has answered
    lookup_seconds: float = 0.0  # of these, one after the other
    chosen: Explanation = ""  # why, where the list has more peers than the tier asks


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """Daemons that load from the RAM of this one, by a name of their certificate. Figures of this run."""

    name: str
    tenant: str = ""
    leases: int = 0  # now
    leased_bytes: int = 0
    sent_objects: int = 0  # whole, or lent until they were read
    sent_bytes: int = 0
    refused_objects: Mapping[str, int] = field(default_factory=dict)  # sent or lent in part, or not at all, by reason


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The state of one tier."""

    name: str
    kind: str
    capacity_bytes: int
    ready_bytes: int = 0
    used_bytes: int = 0
    lent_bytes: int = 0
    objects: int = 0
    unverified_objects: int = 0
    state: str = ""
    reason: Explanation = ""
    # Of tiers below RAM:
    breaker: str = ""  # closed, open or probing
    queued_objects: int = 0  # waiting to be written
    queued_bytes: int = 0
    written_today_bytes: int = 0  # since midnight UTC, against the write budget
    quarantined_bytes: int = 0
    # Of RAM:
    pending_checksums: int = 0  # committed objects without a checksum: a kill now would lose them
    prefetched_objects: int = 0  # pinned for requests that wait, or in flight
    prefetched_bytes: int = 0
    prefetching_requests: int = 0  # with a prefetch in progress or queued
    pinned_objects: int = 0  # protected from eviction by an operator
    pinned_bytes: int = 0  # in the arena
    # Of shared tiers:
    node: str = ""  # this daemon's id in the directory
    janitor: str = ""  # the node that counts and evicts; empty: unknown
    # Of RAM, and of disks:
    what_if: WhatIfStatus | None = None  # None: the daemon does not estimate it
    # Of disks:
    write_target_bytes: int = 0  # a day, that `write = "auto"` aims at; 0: no target
    # Of peer tiers:
    peers: tuple[PeerStatus, ...] = ()

    @property
    def is_janitor(self) -> bool:
        return self.node == self.janitor != ""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """The state of one engine's session."""

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
    """The state of one namespace in RAM."""

    namespace_id: bytes
    label: str = ""
    tenant: str = ""
    epoch: str = ""
    chunk_tokens: int = 0
    objects: Mapping[Kind, int] = field(default_factory=dict)  # number of objects
    size_bytes: int = 0
    identity: Mapping[str, str] = field(default_factory=dict)
    bumps: int = 0  # the operator's bump counter of it


@dataclass(frozen=True, slots=True)
class QuotaOwnerStatus:
    """A tenant or a namespace that a quota limits."""

    tenant: str | None  # None: unknown, because no engine has registered its namespace in this run
    namespace: str = ""  # empty: the total of the tenant; otherwise the id of the namespace
    used_bytes: int = 0
    refused_objects: int = 0  # refused because of the quota
    evicted_objects: int = 0


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """One quota in one tier. Its counters never fall, even if owners vanish."""

    tenant: str
    namespace: str
    tier: str
    capacity_bytes: int
    owners_count: int = 0
    owners: tuple[QuotaOwnerStatus, ...] = ()  # the fullest first, at most a limited number
    refused_objects: int = 0
    evicted_objects: int = 0


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """What a configured tenant has, and was refused since the daemon started."""

    name: str
    used_bytes: int = 0  # of RAM, by all its objects
    credit_bytes: int = 0  # what its engines may have reserved, and be lent
    credit_used_bytes: int = 0  # of that, with what its loads wait for
    sessions: int = 0
    sessions_max: int = 0
    refused_objects: int = 0  # that were not reserved, because the credit was used
    refused_loads: int = 0  # the same


@dataclass(frozen=True, slots=True)
class SwitchesStatus:
    """The switches of operators: for all namespaces, and by id for single ones."""

    loads_off: bool = False
    loads_off_namespaces: tuple[bytes, ...] = ()
    stores_off: bool = False
    stores_off_namespaces: tuple[bytes, ...] = ()
    draining: bool = False  # until resumed, or the end of the run
    loads_off_seconds: float = field(default=0.0, compare=False)  # since the first was switched off; 0: not known
    stores_off_seconds: float = field(default=0.0, compare=False)  # the same


@dataclass(frozen=True, slots=True)
class PinStatus:
    """What an operator has pinned in RAM. What it holds is as of some seconds ago; several pins may hold the same."""

    namespace_id: bytes
    key: bytes = b""  # of the chunk that ends the path; empty: all of the namespace
    seconds_left: float = 0.0
    chunks: int = 0  # of the path, or of the namespace, in all tiers
    objects: int = 0  # of them, those in RAM and within the share of pins
    size_bytes: int = 0  # what these take of the arena


@dataclass(frozen=True, slots=True)
class HistogramStatus:
    """Durations since the daemon started, named like a counter."""

    name: str
    bounds_seconds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()  # how many took at most each bound, then how many there were


@dataclass(frozen=True, slots=True)
class GetStatusCall:
    """Asks for the daemon's status."""


@dataclass(frozen=True, slots=True)
class ListNamespacesCall:
    """Asks for a page of namespaces with their identities."""

    page_size: int = 0  # 0: as many as a page has
    page_token: str = ""


@dataclass(frozen=True, slots=True)
class NamespaceStatusPage:
    """One page of namespaces with their identities."""

    namespaces: tuple[NamespaceStatus, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """The state of the daemon as a whole."""

    daemon_version: Version
    pid: int
    uptime_seconds: float
    ready: bool
    reason: Explanation
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
    tenants: tuple[TenantStatus, ...] = ()
    health: Health = field(default_factory=Health)
    histograms: tuple[HistogramStatus, ...] = ()
    certificate_seconds_left: float | None = None  # negative: it has expired; None: no address needs one
    readers: tuple[ReaderStatus, ...] = ()
