"""A checker of order, by vector clocks: two accesses to the same memory, one of which writes, must not be unordered.

Actors are threads, a device's queues, and other processes. Each has a clock: for every actor, up to which of its
operations it is ordered after. An operation is told once everything that it is ordered after has been told. Nothing
has to happen at the same time for a race to be found: what counts is that nothing says which access comes first.

Only messages order threads: an operation that is queued, a report that is taken, an event that is set. Locks do not.
A lock that happens to be taken between two accesses would hide that nothing else orders them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Clock = list[int]
Cell = int | tuple[str, int]
"""A piece of memory that is accessed as a whole."""


class Races:
    """What actors have done until now, and the races among it, in words."""

    def __init__(self, actors: Sequence[str]) -> None:
        self.actors = tuple(actors)
        self.clocks: list[Clock] = [[0] * len(actors) for _ in actors]
        self.found: list[str] = []
        self.accesses = 0
        self._writes: dict[Cell, tuple[int, int, str]] = {}  # the last: actor, its time, what
        self._reads: dict[Cell, dict[int, tuple[int, str]]] = {}  # since then: by actor, its time and what

    def now(self, actor: int) -> Clock:
        """Return what an actor is ordered after, itself included."""
        return self.clocks[actor].copy()

    def order(self, actor: int, after: Clock) -> None:
        """Let all that an actor does from now on come after that."""
        own = self.clocks[actor]
        for other, time in enumerate(after):
            if time > own[other]:
                own[other] = time

    def begin(self, actor: int) -> Clock:
        """Begin an actor's next operation. Return its clock."""
        clock = self.clocks[actor]
        clock[actor] += 1
        return clock.copy()

    def access(
        self,
        actor: int,
        operation: Clock,
        what: str,
        reads: Iterable[Cell] = (),
        writes: Iterable[Cell] = (),
        *,
        reads_after: Clock | None = None,
    ) -> None:
        """Note what an operation reads and writes.

        Args:
            actor: whose operation.
            operation: its clock, from `begin`.
            what: it is, in words.
            reads: cells that it reads.
            writes: cells that it writes.
            reads_after: what its reads come after, if that is less than what the operation does.
        """
        time, known = operation[actor], reads_after or operation
        for cell in reads:
            self.accesses += 1
            before = self._writes.get(cell)
            if before is not None and known[before[0]] < before[1]:
                self._race(f"{what} reads", cell, f"{before[2]} writes")
            self._reads.setdefault(cell, {})[actor] = (time, what)
        for cell in writes:
            self.accesses += 1
            before = self._writes.get(cell)
            if before is not None and operation[before[0]] < before[1]:
                self._race(f"{what} writes", cell, f"{before[2]} writes")
            for reader, (read_at, reading) in self._reads.pop(cell, {}).items():
                if operation[reader] < read_at:
                    self._race(f"{what} writes", cell, f"{reading} reads")
            self._writes[cell] = (actor, time, what)

    def act(self, actor: int, what: str, reads: Iterable[Cell] = (), writes: Iterable[Cell] = ()) -> None:
        """Note an operation that happens at once."""
        self.access(actor, self.begin(actor), what, reads, writes)

    def forget(self, cells: Iterable[Cell]) -> None:
        """Memory is other memory from now on."""
        for cell in cells:
            self._writes.pop(cell, None)
            self._reads.pop(cell, None)

    def _race(self, one: str, cell: Cell, other: str) -> None:
        if len(self.found) < 20:
            self.found.append(f"{one} {cell}, which {other}, in no order")


class Queues:
    """Makes the deques of a module messages: what is taken out is ordered after what was put in."""

    def __init__(self, races: Races, actor: Callable[[], int]) -> None:
        """`actor`: of the calling thread."""
        self._races = races
        self._actor = actor

    def __call__(self, items: Iterable[Any] = ()) -> deque[Any]:
        """Make a deque, as `collections.deque` does."""
        return _Messages(self._races, self._actor, items)


class _Messages(deque[Any]):
    def __init__(self, races: Races, actor: Callable[[], int], items: Iterable[Any]) -> None:
        super().__init__()
        self._races = races
        self._actor = actor
        self._sent: dict[int, Clock] = {}
        self.extend(items)

    def append(self, item: Any) -> None:
        self._sent[id(item)] = self._races.now(self._actor())
        super().append(item)

    def extend(self, items: Iterable[Any]) -> None:
        for item in items:
            self.append(item)

    def popleft(self) -> Any:
        item = super().popleft()
        self._races.order(self._actor(), self._sent.pop(id(item)))
        return item

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self._races.order(self._actor(), self._sent[id(item)])
            yield item

    def clear(self) -> None:
        self._sent.clear()
        super().clear()
