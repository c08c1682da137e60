"""Who a process is. By itself: I/O workers need nothing else of the engine's, and start often."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Liveness(IntEnum):
    """What is known about a process that an earlier daemon run wrote down."""

    ALIVE = 1
    DEAD = 2  # proven: pidfd readable, pid gone, other start time, other boot
    UNKNOWN = 3  # no pid visible from here: its extents stay lent


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    pid: int  # in the daemon's PID namespace, 0 when unknown
    start_ticks: int  # start time, clock ticks since boot
    boot_id: bytes  # 16 bytes
