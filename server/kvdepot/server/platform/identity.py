"""The identity of a process.

This is a module of its own, because I/O workers need nothing else of the depot, and start often.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Liveness(IntEnum):
    """What is known about a process that an earlier daemon run wrote down."""

    ALIVE = 1
    DEAD = 2  # proven: pidfd readable, pid gone, other start time, other boot
    UNKNOWN = 3  # no pid visible from here: its extents stay lent


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """What distinguishes a process from every other of this boot."""

    pid: int  # in the daemon's PID namespace, 0 when unknown
    start_ticks: int  # start time, clock ticks since boot; without a pid the kernel's number of the process, 0: unknown
    boot_id: bytes  # 16 bytes

    @property
    def known(self) -> bool:
        """Return whether the process can be distinguished: by pid and start time, or by number."""
        return self.pid != 0 or self.start_ticks != 0

    def is_same(self, other: ProcessIdentity) -> bool:
        """Return whether both are proven to be one process. An unknown process is never the same as another."""
        return self.known and self == other

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid else "a process without a visible pid"


@dataclass(frozen=True, slots=True)
class Owner:
    """The user of an engine, as the kernel says. Engines of two owners share no session, whatever they call themselves.

    A PID namespace that the kernel does not show to the daemon is 0: all of these are one. `tenant` follows from uid
    and groups by the configuration; None: no tenants are configured.
    """

    uid: int
    pid_namespace: int = 0
    tenant: str | None = None

    @property
    def party(self) -> int | str:
        """Return who has one share of what all engines use: the tenant or, without tenants, the user."""
        return self.uid if self.tenant is None else self.tenant

    @property
    def party_name(self) -> str:
        return f"uid {self.uid}" if self.tenant is None else f"tenant {self.tenant!r}"

    def __str__(self) -> str:
        return f"uid {self.uid}"


class Watch(Protocol):
    """What tells of the death of an attachment's process. Its attachment owns it: freed, it is closed."""

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""

    def close(self) -> None:
        """Tell nothing any more, and let go of what it needs for that."""
