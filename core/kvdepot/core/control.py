"""The calls with which operators change a running daemon, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvdepot.core.epochs import Epochs
from kvdepot.core.report import PinStatus, SwitchesStatus

PIN_SECONDS_MAX: Final = 366 * 86_400.0


class Switch(StrEnum):
    """What can be switched off and on, for all namespaces or for one."""

    LOADS = "loads"
    STORES = "stores"


@dataclass(frozen=True, slots=True)
class SwitchState:
    """One switch. `off`: for all. `off_namespaces`: for these by themselves."""

    off: bool
    off_namespaces: tuple[bytes, ...]

    @property
    def anywhere_off(self) -> bool:
        return self.off or bool(self.off_namespaces)


def switch_states(status: SwitchesStatus) -> dict[Switch, SwitchState]:
    return {
        Switch.LOADS: SwitchState(status.loads_off, status.loads_off_namespaces),
        Switch.STORES: SwitchState(status.stores_off, status.stores_off_namespaces),
    }


@dataclass(frozen=True, slots=True)
class SwitchCall:
    switch: Switch
    on: bool
    namespace_id: bytes = b""  # empty: all. Those that were switched off by themselves stay so


@dataclass(frozen=True, slots=True)
class SwitchReply:
    switches: SwitchesStatus  # as they are now
    leases: int = 0  # granted before and not ended: loads, or stores, in progress
    not_kept: str = ""  # why the next run of the daemon will not know; empty: it will


@dataclass(frozen=True, slots=True)
class BumpCall:
    namespace_id: bytes = b""  # empty: all
    to: int = 0  # of all: the counter, where it is not there yet; 0: the next one


@dataclass(frozen=True, slots=True)
class BumpReply:
    epochs: Epochs  # as they are now
    changed: bool  # False: it was void already
    namespaces: int = 0  # that became void, of those the daemon knew
    chunks: int = 0  # that they had
    leases: int = 0  # of loads and stores in progress there; nothing comes of them
    shared: tuple[str, ...] = ()  # tiers that other nodes have too, which have counters of their own
    not_kept: str = ""  # as with switches


@dataclass(frozen=True, slots=True)
class PinCall:
    namespace_id: bytes
    key: bytes  # of the chunk that ends a path; empty: all of the namespace, now and later
    seconds: float  # from now on, also where it is pinned already


@dataclass(frozen=True, slots=True)
class PinReply:
    pin: PinStatus
    not_kept: str = ""  # as with switches


@dataclass(frozen=True, slots=True)
class QuotaSubject:
    """What an entry is about, as in `[[quota]]`."""

    tenant: str = "*"  # of all: each
    namespace: str | None = None  # None: the total of the tenant's. "*": each; a label, or the first digits of an id
    tier: str = "*"

    def __str__(self) -> str:
        tenant = "each tenant" if self.tenant == "*" else f"tenant {self.tenant!r}"
        namespace = "each namespace" if self.namespace == "*" else f"namespace {self.namespace!r}"
        whose = tenant if self.namespace is None else f"{namespace} of {tenant}"
        return f"{whose} in {'each tier' if self.tier == '*' else f'tier {self.tier!r}'}"


@dataclass(frozen=True, slots=True)
class QuotaEntry:
    subject: QuotaSubject
    capacity_bytes: int | None  # None: no limit, also where a wider entry has one
    by_operator: bool = False  # set at run time, in place of what the configuration says about the subject


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One key whose value in the file is not the one that the daemon runs with. As text, sizes in bytes."""

    key: str
    before: str
    after: str
    live: bool  # whether a reload applies it; else a restart does


@dataclass(frozen=True, slots=True)
class ReloadReply:
    file: str
    changes: tuple[ConfigChange, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigReply:
    """What the daemon runs with: file, command line and defaults together, by key."""

    file: str
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EvictReply:
    chunks: int
    more: bool = False  # than were counted
    spared: tuple[str, ...] = ()  # tiers that keep what they have: shared ones, and those out of use


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """What is to be read again and compared with its checksum."""

    bytes_per_second: int  # of each tier, at most
    namespace_id: bytes = b""  # empty: all
    key: bytes = b""  # of a chunk, meant with all below it; empty: all of the namespace
    tier: str = ""  # empty: each


@dataclass(frozen=True, slots=True)
class VerifiedTier:
    """How far it is in one tier. All but the bytes are numbers of objects."""

    tier: str
    objects: int = 0  # that there were at the beginning; 0: not counted, of a chunk
    verified: int = 0
    verified_bytes: int = 0  # that were read of them
    damaged: Mapping[str, int] = field(default_factory=dict)  # by what was found; they are in quarantine, or dropped
    skipped: Mapping[str, int] = field(default_factory=dict)  # by reason
    over: bool = False
    reason: str = ""  # why it was over before its end


@dataclass(frozen=True, slots=True)
class VerifyReply:
    tiers: tuple[VerifiedTier, ...]


@dataclass(frozen=True, slots=True)
class PrefetchReply:
    """How far reading ahead for an operator is. Numbers of objects, where nothing else is said."""

    chunks: int  # that there were at the beginning; 0: not counted, of a path
    looked_at: int = 0  # of these
    there: int = 0  # in RAM before
    read: int = 0
    read_bytes: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)  # for want of room: share, quota, room
    failed: Mapping[str, int] = field(default_factory=dict)  # by reason
    over: bool = False
    reason: str = ""  # why it was over before its end
