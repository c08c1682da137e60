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
FOUND_MAX: Final = 4
"""Places that a lookup is told of. Some of them may have failed a moment ago."""
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
    members: Annotated[tuple[At, ...], Count(SEATS_MAX + 1)]  # and a guest


@dataclass(frozen=True, slots=True)
class _Names:
    """Names, one a line. As one text they are packed in a tenth of the time."""

    files: Annotated[bytes, Count(_WANT_BYTES_MAX)]

    def names(self) -> list[str]:
        return self.files.decode(errors="replace").splitlines()


@dataclass(frozen=True, slots=True)
class Want(_Names):
    """A lookup asks for these names."""

    @classmethod
    def of(cls, files: Sequence[str]) -> Self:
        """Return a message with some of these names, from all over the prompt."""
        return cls("\n".join(files[:: -(-len(files) // NAMES_MAX) or 1]).encode())


@dataclass(frozen=True, slots=True)
class Find(_Names):
    """Which places that are no members have these? One for each chunk, parents first. The number is the answer's."""

    @classmethod
    def of(cls, files: Sequence[str]) -> Self:
        """Return a question for the first ones of these: nobody can use a chunk without those before it."""
        return cls("\n".join(files[:NAMES_MAX]).encode())


@dataclass(frozen=True, slots=True)
class Useful:
    """A place, and for how many names it is worth asking."""

    place: At
    names: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """The places that are worth asking, the most useful one first, and those that are this daemon itself.

    The names of each are those that were asked for lately, and that it adds to what those before it have.
    """

    useful: Annotated[tuple[Useful, ...], Count(SEATS_MAX)]
    itself: Annotated[tuple[At, ...], Count(PLACES_MAX)]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to `Find`: places that have the first names, the one that has most first."""

    useful: Annotated[tuple[Useful, ...], Count(FOUND_MAX)]


class Asked(StrEnum):
    """What came of a question for a summary. The values are labels of counters."""

    NEW = "new"
    UNCHANGED = "unchanged"
    REFUSED = "refused"  # what came is no summary, or says nothing
    FAILED = "failed"  # nothing came


@dataclass(frozen=True, slots=True)
class Told:
    """A place has been asked. `arena_id`: of the daemon that answered last there, 0 if none has."""

    place: At
    asked: Asked
    why: Annotated[str, Prose(WHY_BYTES_MAX)] = ""
    arena_id: int = 0


TO_SCOUT: Final[Framing[Watch | Want | Find]] = Framing(Watch, Want, Find, bytes_max=1 << 20)
FROM_SCOUT: Final[Framing[Ranked | Told | Found]] = Framing(Ranked, Told, Found, bytes_max=1 << 20)
