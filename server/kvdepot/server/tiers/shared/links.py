"""Messages between a shared tier and its coordinator (ADR 0017, 0018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvdepot.core.bounds import Seconds
from kvdepot.server.io.framing import Framing

REFUSED_SECONDS: Final = 60.0
"""So long a node says that the file system has no room, after it has refused a write and unless one works."""


@dataclass(frozen=True, slots=True)
class Report:
    """How the directory is, and what this daemon may write. The first one says that it is open: about every heartbeat.

    `limit_bytes` counts from the start of this daemon run, as `CoordinatorLink.publish` does. It bounds a sum: what was
    published, the most that each unfinished write may take, and the most that a new write may take. That write may
    begin if the sum is not above the limit. The limit never falls below what the coordinator knew to be published.
    """

    node: str  # of this daemon; a new one where the coordinator had to register again
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
    counting_seconds: Seconds | None = None  # for how long the janitor has counted files; None: no count runs
    counted_files: int = 0  # so far
    until: Seconds | None = None  # by `boot_seconds`: nothing begins under the limit after it; None: it has no end


@dataclass(frozen=True, slots=True)
class Failed:
    """The coordinator cannot do its work, or does not answer. It keeps trying: a Report ends this state."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The coordinator's process is gone. Another one is made after a while."""


@dataclass(frozen=True, slots=True)
class Published:
    """Arguments of `CoordinatorLink.publish`."""

    total_bytes: int
    wanted_bytes: int
    settled: str
    refused: bool


class Limits(Protocol):
    """What a tier may cost, where its requests cost something."""

    @property
    def stops_reading(self) -> bool: ...

    @property
    def stops_writing(self) -> bool: ...

    @property
    def reason(self) -> str:
        """Return why nothing more is read or written; empty if no limit is reached."""


Message = Report | Failed | Ended
TO_COORDINATOR: Final[Framing[Published]] = Framing(Published, bytes_max=64 << 10)
FROM_COORDINATOR: Final[Framing[Report | Failed]] = Framing(Report, Failed, bytes_max=64 << 10)


class CoordinatorLink(Protocol):
    """The coordinator of one directory, as the daemon has it. Nothing here blocks."""

    def start(self, on_message: Callable[[Message], None]) -> None:
        """Make the process. `on_message` gets what it sends, on the loop's thread, until `end`; Failed if it fails."""

    def publish(self, total_bytes: int, wanted_bytes: int = 0, settled: str = "", *, refused: bool = False) -> None:
        """Report what the completed writes of this daemon run have taken, in all; never less than before.

        A write is complete when it was answered, or when its worker is proven dead. A janitor's scan assumes that it
        has met all that is counted here. So a write that hangs is not counted yet. A failed write counts with what it
        may have left in the directory.

        Args:
            total_bytes: The bytes that the completed writes have taken.
            wanted_bytes: What unfinished writes and a refused one take at most, beyond `total_bytes`. 0: none was
                refused.
            settled: A node of this daemon run, if all that began under its other nodes is complete. Nothing more begins
                under these then. Empty: this is not so.
            refused: Whether the file system had no room for a write lately, and no write has worked since.
        """

    def end(self) -> None:
        """End the process without waiting for it. `on_message` gets nothing more."""
