"""What the daemon and the scout of a peer tier say to each other (ADR 85)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Self

from kvdepot.core.bounds import AtMost, Count, Prose
from kvdepot.server.io.framing import Framing

PLACES_MAX: Final = 128
"""That are asked for summaries."""
SEATS_MAX: Final = 32
"""The largest `peers_max`."""
WHY_BYTES_MAX: Final = 512
NAMES_MAX: Final = 64
"""Of one lookup, that the scout is told: enough to know who has them."""
_WANT_BYTES_MAX: Final = 64 << 10
HOST_CHARACTERS_MAX: Final = 255
"""A longer name is no name of DNS."""
_PORT_MAX: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class At:
    """Where a peer listens."""

    host: Annotated[str, Count(HOST_CHARACTERS_MAX)]
    port: Annotated[int, AtMost(_PORT_MAX)]


@dataclass(frozen=True, slots=True)
class Watch:
    """Ask these places for summaries from now on, and no others. Of equally useful ones the first counts more.

    `members`: which of them the tier asks now.
    """

    places: Annotated[tuple[At, ...], Count(PLACES_MAX)]
    members: Annotated[tuple[At, ...], Count(SEATS_MAX)]


@dataclass(frozen=True, slots=True)
class Want:
    """A lookup asks for these names, one a line. As one text they are packed in a tenth of the time."""

    files: Annotated[bytes, Count(_WANT_BYTES_MAX)]

    @classmethod
    def of(cls, files: Sequence[str]) -> Self:
        """Return a message with some of these names, from all over the prompt."""
        return cls("\n".join(files[:: -(-len(files) // NAMES_MAX) or 1]).encode())

    def names(self) -> list[str]:
        return self.files.decode(errors="replace").splitlines()


@dataclass(frozen=True, slots=True)
class Useful:
    """A place, and about how many names that were asked for lately it adds to what those before it have."""

    place: At
    names: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """The places that are worth asking, the most useful one first, and those that are this daemon itself."""

    useful: Annotated[tuple[Useful, ...], Count(SEATS_MAX)]
    itself: Annotated[tuple[At, ...], Count(PLACES_MAX)]


class Asked(StrEnum):
    """What came of a question for a summary. The values are labels of counters."""

    NEW = "new"
    UNCHANGED = "unchanged"
    REFUSED = "refused"  # what came is no summary, or says nothing
    FAILED = "failed"  # nothing came


@dataclass(frozen=True, slots=True)
class Told:
    """A place has been asked."""

    place: At
    asked: Asked
    why: Annotated[str, Prose(WHY_BYTES_MAX)] = ""


TO_SCOUT: Final[Framing[Watch | Want]] = Framing(Watch, Want, bytes_max=1 << 20)
FROM_SCOUT: Final[Framing[Ranked | Told]] = Framing(Ranked, Told, bytes_max=1 << 20)
