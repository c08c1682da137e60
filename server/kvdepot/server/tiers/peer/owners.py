"""Which members of a group have which objects, of the latest ones, as lookups and reads have shown (ADR 84).

Members that have left are only numbers here. So nothing keeps them, and one that returns has nothing of before.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, Protocol, TypeVar

OWNERS_MAX: Final = 65_536
"""Objects of which it is known who has them. For others each member is asked in turn."""


class Numbered(Protocol):
    """A member of a group."""

    number: int
    """No other member has it, or will have it."""


M = TypeVar("M", bound=Numbered)


class Owners(Generic[M]):
    """Owners by file. Only members that have joined are owners."""

    def __init__(self) -> None:
        self._members: dict[int, M] = {}
        self._numbers: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def join(self, member: M) -> None:
        self._members[member.number] = member

    def leave(self, member: M) -> None:
        """Let it own nothing any more."""
        del self._members[member.number]

    def add(self, file: str, member: M) -> None:
        """Note that a member has the object of a file. Nothing is noted of one that has left."""
        if member.number not in self._members:
            return
        numbers = tuple(number for number in self._numbers.pop(file, ()) if number in self._members)
        self._numbers[file] = numbers if member.number in numbers else (*numbers, member.number)
        if len(self._numbers) > OWNERS_MAX:
            self._numbers.popitem(last=False)

    def remove(self, file: str, member: M) -> None:
        """Note that a member has it no more."""
        if file in self._numbers:
            self._numbers[file] = tuple(number for number in self._numbers[file] if number != member.number)

    def of(self, file: str) -> tuple[M, ...] | None:
        """Return who has the object of a file. None: nobody knows any more. Empty: who had it has left, or lost it."""
        numbers = self._numbers.get(file)
        return None if numbers is None else tuple(self._members[one] for one in numbers if one in self._members)
