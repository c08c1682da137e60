"""What a shared tier and its keeper tell each other (ADR 0017, 0018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Report:
    """How the directory is, and what this daemon may write. The first one says that it is open: about every heartbeat.

    `limit_bytes` counts since this daemon run began, like what `KeeperLink.publish` is told: a write may begin when
    that, the most that every write not over yet may take, and the most that this one may take are together not above
    it. It never falls below what was published when the keeper last heard of it.
    """

    node: str  # of this daemon; a new one where the keeper had to register anew
    janitor: str  # node; empty: there is none now
    is_janitor: bool
    used_bytes: int  # of the whole directory, at the last scan
    quarantined_bytes: int
    objects: int
    limit_bytes: int
    marker_ok: bool  # False: nothing may be read or written, because of `reason`
    device: int  # st_dev of the directory
    reason: str = ""  # empty, or what an operator should know
    directory_id: str = ""  # by its marker
    counting_seconds: float | None = None  # for how long the janitor has counted files; None: no count runs
    counted_files: int = 0  # so far


@dataclass(frozen=True, slots=True)
class Failed:
    """The keeper cannot do its work, or does not answer. It goes on trying: a Report ends this."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The keeper's process is gone. Another is made after a while."""


Word = Report | Failed | Ended


class KeeperLink(Protocol):
    """The keeper of one directory, as the daemon has it. Nothing here blocks."""

    def start(self, hear: Callable[[Word], None]) -> None:
        """Make the process; what it says is heard on the loop's thread, until `end`. Where none can be made: Failed."""

    def publish(self, total_bytes: int, wanted_bytes: int = 0, settled: str = "") -> None:
        """What the writes of this daemon run that are over have taken, in all; never less than before.

        Over: answered, or their worker is proven dead. A janitor's scan takes it that it has met what is counted here,
        so a write that hangs is not counted yet, and one that failed never is. `wanted_bytes`: beyond them, what writes
        not over yet and one that was refused take at most; 0: none was refused. `settled`: a node of this daemon run,
        when what was begun under any other of its nodes is over, and nothing more will be; empty: it is not.
        """

    def end(self) -> None:
        """End the process without waiting for it. Nothing is heard any more."""
