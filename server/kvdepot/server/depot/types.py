"""Values that go into and come out of the depot (the core of the daemon)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvdepot.core.elements import ElementRun
from kvdepot.core.eviction import DEFAULT_POLICY
from kvdepot.core.report import NamespaceStatus, QuotaStatus, SessionStatus, TenantStatus, TierStatus
from kvdepot.server.platform.identity import Liveness as Liveness
from kvdepot.server.platform.identity import Owner as Owner
from kvdepot.server.platform.identity import ProcessIdentity as ProcessIdentity
from kvdepot.server.platform.identity import Watch as Watch

OWN: Final = Owner(os.geteuid())
"""Of engines within the daemon's process."""
EVERY: Final = "*"
"""In a quota: each tenant, each namespace or each tier apart."""

ID_DIGITS: Final = re.compile(r"[0-9a-f]{8,32}")
"""A namespace in a quota: a text like this begins its id, any other is its label."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of a process in its engine: what the process says of itself, and its owner, as the kernel says."""

    engine_id: str
    scheduler: bool
    rank: int  # -1: no worker in this process
    world_size: int
    owner: Owner = OWN


@dataclass(frozen=True, slots=True)
class Attached:
    """Answer of `Depot.attach`."""

    session: bytes  # the attachment's token, 16 bytes
    attachment: int  # slot of the attachment table; the same for a joined attachment


@dataclass(frozen=True, slots=True)
class AttachmentInfo:
    """One attachment whose death still matters."""

    attachment: int
    process: ProcessIdentity
    rank: int  # -1: no worker in this process
    connections: int


@dataclass(frozen=True, slots=True)
class Quota:
    """One `[[quota]]`: what a tenant's namespaces together, or a namespace, may take of one tier (ADR 0016)."""

    tenant: str = EVERY
    namespace: str | None = None  # None: their total. EVERY, a label, or the first digits of an id
    tier: str = EVERY
    capacity_bytes: int | None = None  # None: no limit, also where another entry has one


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """What a tenant may have at a time. None: an equal part of what the other tenants leave."""

    credit_bytes: int | None = None  # reserved by its engines, or lent to them
    sessions: int | None = None


@dataclass(frozen=True, slots=True)
class DepotConfig:
    """Limits and policies of one depot. Bytes and seconds as the names say."""

    credit_bytes: int = 2 << 30  # reserved and not yet committed, per session
    kept_back_share: float = 0.25  # of credit and arena: for state and window objects only
    lease_deadline_seconds: float = 120.0
    grace_seconds: float = 60.0
    provisional_seconds: float = 60.0  # life of a request's unfinished paths without renewal
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    loads_in_flight: int = 64  # reader leases per session
    prefetch_share: float = 0.25  # of RAM: for what requests that have not acquired yet will need; 0: none
    pin_share: float = 0.25  # of RAM: what operators may pin
    lend_disks: bool = True  # whether peers may have what only a disk has
    audit_sample: float = 0.0  # share of what engines compute although it is here that is compared with it
    evictions_at_once: int = 16  # in advance: 1 to 2 ms in which nobody is answered
    eviction: str = DEFAULT_POLICY  # a name of core.eviction.policy_names()
    quotas: tuple[Quota, ...] = ()
    tenants: Mapping[str, TenantBudget] = field(default_factory=dict)  # by name; empty: none are configured


class WritePolicy(StrEnum):
    """The moment when an object is written to a lower tier."""

    COMMIT = "commit"
    EVICT = "evict"  # when RAM is about to drop it
    SECOND_USE = "second_use"  # when its path is used again
    AUTO = "auto"  # when RAM is about to drop it, if it is likely to be read again, within the drive's endurance


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The settings with which the depot uses one lower tier."""

    write: WritePolicy = WritePolicy.SECOND_USE
    write_bytes_per_day: float = 0.0  # that `AUTO` aims at; 0: no limit
    queue_bytes: int = 256 << 20  # of objects that wait to be written; further ones are dropped and counted
    load_weight: float = 1.0  # the heaviest that has an object is read; its seconds count divided by it
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    tenant: str | None = None  # only objects of this one are looked for there; None: of all


@dataclass(frozen=True, slots=True)
class ToSum:
    """One object for the checksum worker. `summed` answers it."""

    row: int
    generation: int
    extents: tuple[tuple[int, int], ...]  # (offset in the arena, length) in bytes, in object order
    verify: bool  # False: first sum. True: adopted, compared with the stored sum


@dataclass(frozen=True, slots=True)
class ToCompare:
    """Two objects for the checksum worker. `runs` is their element layout. `compared` answers it."""

    row: int  # of the recomputed one
    generation: int
    stored: tuple[tuple[int, int], ...]  # (offset in the arena, length) in bytes, in object order
    recomputed: tuple[tuple[int, int], ...]  # likewise
    runs: tuple[ElementRun, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """An object that differed from what an engine computed again, and was dropped."""

    namespace_id: bytes
    key: bytes
    kind: int
    chunks: int  # that went with it, its own included
    shared_tiers: tuple[str, ...]  # names of those that have a file of it, which stays


@dataclass(frozen=True, slots=True)
class AdoptionReport:
    """The result of `Depot.adopt`: what was in the tables, as numbers of objects unless named otherwise."""

    kept: int = 0  # committed with a sum: served once verified
    detached: int = 0  # likewise, but what lies above them may be on a disk tier that is not open yet
    reserved: int = 0  # still lent to writers that may live
    pinned: int = 0  # unindexed, but still lent to readers that may live
    sessions: int = 0
    leases: int = 0
    lent_beyond: int = 0  # dropped, but lent, and not whole within what may be used of the arena
    dropped: dict[str, int] = field(default_factory=dict)  # by reason

    def __str__(self) -> str:
        return (
            f"{self.kept} committed, {self.detached} waiting for disk tiers, {self.reserved} reserved, "
            f"{self.pinned} lent; {self.sessions} sessions, {self.leases} leases; dropped {self.dropped}"
        )


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of RAM, the lower tiers, sessions, namespaces and quotas, with all counters."""

    tier: TierStatus
    lower_tiers: tuple[TierStatus, ...]
    sessions: tuple[SessionStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]
    quotas: tuple[QuotaStatus, ...]
    tenants: tuple[TenantStatus, ...]
    counters: dict[str, float]
