"""The calls with which operators change a running daemon, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvdepot.core.bounds import ChunkKeyOrNone, Explanation, Label, NamespaceId, NamespaceIdOrNone, Tenant, bad
from kvdepot.core.epochs import Epochs
from kvdepot.core.limits import NAMESPACE_ID_BYTES
from kvdepot.core.report import PinStatus, SwitchesStatus

PIN_SECONDS_MAX: Final = 366 * 86_400.0


class Switch(StrEnum):
    """What can be switched off and on, for all namespaces or for one."""

    LOADS = "loads"
    STORES = "stores"


@dataclass(frozen=True, slots=True)
class SwitchState:
    """One switch. `off`: for all namespaces. `off_namespaces`: for these by name."""

    off: bool
    off_namespaces: tuple[bytes, ...]
    off_seconds: float = 0.0  # 0: not known

    @property
    def anywhere_off(self) -> bool:
        return self.off or bool(self.off_namespaces)


def switch_states(status: SwitchesStatus) -> dict[Switch, SwitchState]:
    return {
        Switch.LOADS: SwitchState(status.loads_off, status.loads_off_namespaces, status.loads_off_seconds),
        Switch.STORES: SwitchState(status.stores_off, status.stores_off_namespaces, status.stores_off_seconds),
    }


@dataclass(frozen=True, slots=True)
class SwitchCall:
    """Switches loads or stores on or off."""

    switch: Switch
    on: bool
    namespace_id: NamespaceIdOrNone = b""  # empty: all; namespaces that were switched off by name stay off


@dataclass(frozen=True, slots=True)
class SwitchReply:
    """The switches after the call."""

    switches: SwitchesStatus  # after the call
    leases: int = 0  # granted before, still in progress
    not_persisted: Explanation = ""  # why the next run will not know the change; empty: it will


@dataclass(frozen=True, slots=True)
class BumpCall:
    """Bumps the epoch of one namespace, or of all."""

    namespace_id: NamespaceIdOrNone = b""
    all: bool = False
    to: int = 0  # with `all`: the counter to reach; 0: the next one

    def check_fields(self) -> None:
        if self.all and self.namespace_id:
            raise bad("all", "and a namespace: either")
        if not self.all and not self.namespace_id:
            raise bad("namespace_id", f"0 bytes, not {NAMESPACE_ID_BYTES}")
        if not self.all and self.to:
            raise bad("to", "is for all namespaces")


@dataclass(frozen=True, slots=True)
class BumpReply:
    """The epochs after a bump, and what the bump invalidated."""

    epochs: Epochs  # after the call
    changed: bool  # False: it was invalidated already
    namespaces: int = 0  # that were invalidated, of the known ones
    chunks: int = 0  # of these namespaces
    leases: int = 0  # of loads and stores in progress, which are discarded
    shared: tuple[str, ...] = ()  # shared tiers: their other nodes have their own counters
    not_persisted: Explanation = ""  # as with switches


@dataclass(frozen=True, slots=True)
class PinCall:
    """Pins a namespace or a prefix in RAM for a time."""

    namespace_id: NamespaceId
    key: ChunkKeyOrNone  # of the chunk that ends a prefix; empty: the whole namespace, now and later
    seconds: float  # from now on; replaces the time of an earlier pin

    def check_fields(self) -> None:
        if not 0 < self.seconds <= PIN_SECONDS_MAX:
            raise bad("seconds", f"{self.seconds} is not above 0 and at most {PIN_SECONDS_MAX:.0f}")


@dataclass(frozen=True, slots=True)
class PinReply:
    """The pin, with what it covers now."""

    pin: PinStatus
    not_persisted: Explanation = ""  # as with switches


@dataclass(frozen=True, slots=True)
class QuotaSubject:
    """The subject of a quota, as in `[[quota]]`."""

    tenant: Tenant = "*"  # "*": each
    namespace: Label | None = None  # None: the total of the tenant's. "*": each; a label, or the first digits of an id
    tier: Label = "*"

    def check_fields(self) -> None:
        if not self.tier:
            raise bad("tier", "is empty; all of them are '*'")

    def __str__(self) -> str:
        tenant = "each tenant" if self.tenant == "*" else f"tenant {self.tenant!r}"
        namespace = "each namespace" if self.namespace == "*" else f"namespace {self.namespace!r}"
        whose = tenant if self.namespace is None else f"{namespace} of {tenant}"
        return f"{whose} in {'each tier' if self.tier == '*' else f'tier {self.tier!r}'}"


@dataclass(frozen=True, slots=True)
class QuotaEntry:
    """One quota in effect, of the configuration or of an operator."""

    subject: QuotaSubject
    capacity_bytes: int | None  # None: no limit, even if a less specific entry has one
    by_operator: bool = False  # set at run time, overrides the entry of the configuration


@dataclass(frozen=True, slots=True)
class SetQuotaCall:
    """Sets a quota at run time."""

    subject: QuotaSubject
    capacity_bytes: int | None  # None: no limit, even if a less specific entry has one


@dataclass(frozen=True, slots=True)
class DeleteQuotaCall:
    """Deletes a quota that was set at run time."""

    subject: QuotaSubject  # of an entry by an operator


@dataclass(frozen=True, slots=True)
class ListQuotasCall:
    """Asks for the quotas in effect."""

    subject: QuotaSubject | None = None  # None: all


@dataclass(frozen=True, slots=True)
class QuotasReply:
    """The quotas in effect."""

    quotas: tuple[QuotaEntry, ...]  # in effect


@dataclass(frozen=True, slots=True)
class ChangeReply:
    """The answer of a call without a result."""

    not_persisted: Explanation = ""  # why the next run will not know the change; empty: it will


@dataclass(frozen=True, slots=True)
class DrainCall:
    """Starts or ends a drain."""

    draining: bool


@dataclass(frozen=True, slots=True)
class DrainReply:
    """The leases that were open at the start of the drain."""

    leases: int  # granted before, still open


@dataclass(frozen=True, slots=True)
class ReloadCall:
    """Has the daemon read its configuration file again."""

    dry_run: bool = False  # return the differences, also those that a reload refuses, and change nothing


@dataclass(frozen=True, slots=True)
class GetConfigCall:
    """Asks for the configuration in effect."""


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One key whose value in the file differs from the one in effect. Values are text, sizes in bytes."""

    key: str
    before: Explanation
    after: Explanation
    live: bool  # whether a reload applies it; otherwise a restart


@dataclass(frozen=True, slots=True)
class ReloadReply:
    """What a reload changed, or would change."""

    file: Explanation
    changes: tuple[ConfigChange, ...] = ()
    empties_ram: bool = False  # after a restart, because the arena is another one
    ram_lost_bytes: int = 0  # of RAM's data, with the objects there, after a restart


@dataclass(frozen=True, slots=True)
class ConfigReply:
    """The configuration in effect: file, environment, command line and defaults, by key."""

    file: Explanation
    values: Mapping[str, Explanation]


@dataclass(frozen=True, slots=True)
class EvictCall:
    """Deletes a namespace, or a chunk and every chunk after it."""

    namespace_id: NamespaceId
    key: ChunkKeyOrNone = b""  # of a chunk, deleted with every chunk after it; empty: the whole namespace


@dataclass(frozen=True, slots=True)
class UnpinCall:
    """Removes a pin."""

    namespace_id: NamespaceId
    key: ChunkKeyOrNone = b""


@dataclass(frozen=True, slots=True)
class PrefetchCall:
    """Starts an operator prefetch."""

    namespace_id: NamespaceId
    key: ChunkKeyOrNone = b""  # of the chunk that ends a prefix; empty: the whole namespace


@dataclass(frozen=True, slots=True)
class EvictReply:
    """What an Evict deleted."""

    chunks: int
    more: bool = False  # than were counted
    unchanged_tiers: tuple[str, ...] = ()  # tiers that were not changed: shared, disabled and read-only ones


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """Starts a verification: objects are read again and compared with their checksums."""

    bytes_per_second: int  # of each tier, at most
    namespace_id: NamespaceIdOrNone = b""  # empty: all
    key: ChunkKeyOrNone = b""  # of a chunk, read with every chunk after it; empty: the whole namespace
    tier: Label = ""  # empty: each

    def check_fields(self) -> None:
        if not self.bytes_per_second:
            raise bad("bytes_per_second", "is 0: nothing would be read")
        if not self.namespace_id and self.key:
            raise bad("key", "is of a chunk of no namespace")


@dataclass(frozen=True, slots=True)
class VerifiedTier:
    """The progress of a verification in one tier. Counts are objects, except bytes."""

    tier: str
    objects: int = 0  # objects at the start; 0: not counted, for a chunk
    verified: int = 0
    verified_bytes: int = 0  # bytes read of them
    damaged: Mapping[str, int] = field(default_factory=dict)  # by outcome; in quarantine, or dropped
    skipped: Mapping[str, int] = field(default_factory=dict)  # by reason
    finished: bool = False
    reason: Explanation = ""  # why it stopped before its end


@dataclass(frozen=True, slots=True)
class VerifyReply:
    """The progress of a verification, by tier."""

    tiers: tuple[VerifiedTier, ...]


@dataclass(frozen=True, slots=True)
class PrefetchReply:
    """The progress of an operator prefetch. Counts are objects unless named otherwise."""

    chunks: int  # chunks at the start; 0: not counted, for a prefix
    examined: int = 0  # of these
    present: int = 0  # in RAM before
    read: int = 0
    read_bytes: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)  # for lack of room: share, quota, room
    failed: Mapping[str, int] = field(default_factory=dict)  # by reason
    finished: bool = False
    reason: Explanation = ""  # why it stopped before its end
