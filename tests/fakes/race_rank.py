"""A rank's device and its engine's queue, which tell a checker of order what they read and write, and after what.

The device does its work late, as `LateRank` does. The addresses that it is given say what is accessed: blocks of
layers, extents of the arena, scratch memory. Of torch's own operations their tensors say it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from kvdepot.client.copy import cuda
from kvdepot.client.copy.base import CopyBatch, CopyMemory, Direction
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.driver import ANY_ORDER
from kvdepot.client.copy.runs import Runs, address_of
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.late_device import EngineWork, Mark
from tests.fakes.late_engine import LateRank, Timeline
from tests.rigs.races import Cell, Clock, Races

Span = tuple[int, int]
"""An address, and a number of bytes."""

_ATEN: Final = torch.ops.aten


@dataclass
class RaceMark(EngineWork):
    """Work of the engine, and what comes after it comes after this."""

    clock: Clock = field(default_factory=list)


@dataclass
class RaceTimeline(Timeline):
    """The engine's queue of one rank, actor `queue`. `engine` is the engine's thread."""

    races: Races = field(default_factory=lambda: Races(()))
    engine: int = 0
    queue: int = 0
    _clocks: list[Clock] = field(default_factory=list)  # after each step

    def works(self, what: str, reads: Iterable[Cell] = (), writes: Iterable[Cell] = ()) -> None:
        """A part of the step that is launched next."""
        self.races.order(self.queue, self.races.now(self.engine))
        self.races.act(self.queue, what, reads, writes)

    def launch(self, step: Callable[[], None]) -> int:
        self._clocks.append(self.races.now(self.queue))
        return super().launch(step)

    def read(self, place: int) -> None:
        self.races.order(self.engine, self._clocks[place - 1])
        super().read(place)

    def mark(self) -> RaceMark:
        place = len(self.steps) - self.early
        clock = self._clocks[place - 1] if place > 0 else [0] * len(self.races.actors)
        return RaceMark(super().mark().work, clock=clock)


class RaceRank(LateRank):
    """`queues` are the actors of its queues, `host` says whose thread calls. `point` is called before each operation.

    `refuse` is called with the name of an operation, before it is queued. It may raise, as a driver does.
    """

    def __init__(
        self,
        timeline: RaceTimeline,
        queues: dict[Direction, int],
        host: Callable[[], int],
        point: Callable[[], None] = lambda: None,
        refuse: Callable[[str], None] = lambda _: None,
        cell_bytes: int = 16,
    ) -> None:
        super().__init__(timeline)
        self.races = timeline.races
        self.host = host
        self._actors = queues
        self._point = point
        self._refuse = refuse
        self._cell_bytes = cell_bytes
        self._pages = (range(0), 0)
        self._clocks: dict[Mark, Clock] = {}
        self._pinned_at: list[Span] = []  # by address
        self._scratch: list[torch.Tensor] = []  # kept: a change of the product may use it when it is dropped
        self.torch_wrote: list[Cell] = []

    def paged(self, memory: range, page_bytes: int) -> None:
        """Let a page of this memory be one cell: nobody accesses two parts of it at once."""
        self._pages = (memory, page_bytes)

    def cells(self, spans: Iterable[Span]) -> list[Cell]:
        """Return the cells of some memory."""
        size = self._cell_bytes
        paged, page = self._pages
        found: list[Cell] = []
        for at, length in spans:
            if at in paged:
                found.append(("page", at // page))
            else:
                found.extend(range(at // size, -(-(at + length) // size)))
        return found

    # --- order

    def engine_mark(self) -> object:
        self._point()
        return super().engine_mark()

    def run_after(self, mark: object) -> None:
        self._point()
        assert isinstance(mark, RaceMark)
        for actor in self._actors.values():
            self.races.order(actor, mark.clock)
        super().run_after(mark)

    def mark(self, direction: Direction) -> Mark:
        made = super().mark(direction)
        if made not in self._clocks:
            self._clocks[made] = self._begin(direction)
        return made

    def wait(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self._point()
        super().wait(mark)
        self.races.order(self.host(), self._clocks[mark])
        self._point()

    def _begin(self, direction: Direction) -> Clock:
        """Begin an operation of a queue: it comes after what the thread knows that queues it."""
        actor = self._actors[direction]
        self.races.order(actor, self.races.now(self.host()))
        return self.races.begin(actor)

    # --- accesses

    def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
        self._point()
        self._refuse("transfer")
        before = self.races.now(self.host())
        operation = self._begin(direction)
        reads, writes = self._cells_of(runs)
        if pinned:
            host = runs.targets if direction is Direction.STORE else runs.sources
            reads = [*reads, *self._pins_of(host, runs.lengths)]
        any_order = pinned and cuda._ORDERS[direction] == ANY_ORDER
        what = f"a transfer of a {direction.value}"
        self._tell(direction, operation, what, reads, writes, before if any_order else None)
        super().transfer(direction, runs, pinned=pinned)

    def shuffle(self, direction: Direction, runs: Runs) -> None:
        self._point()
        self._refuse("shuffle")
        self._tell(direction, self._begin(direction), f"a launch of a {direction.value}", *self._cells_of(runs))
        super().shuffle(direction, runs)

    def run(self, direction: Direction, work: Callable[[], None]) -> None:
        self._point()
        operation = self._begin(direction)

        def watched() -> None:
            with _TorchWatch(self, direction, operation):
                work()

        super().run(direction, watched)

    def _cells_of(self, runs: Runs) -> tuple[list[Cell], list[Cell]]:
        lengths = runs.lengths.tolist()
        reads = self.cells(zip(runs.sources.tolist(), lengths, strict=True))
        writes = self.cells(zip(runs.targets.tolist(), lengths, strict=True))
        if len(set(writes)) < len(writes) or not set(writes).isdisjoint(reads):
            self.races.found.append("one call writes what it reads or writes elsewhere")
        return reads, writes

    def _tell(
        self,
        direction: Direction,
        operation: Clock,
        what: str,
        reads: Iterable[Cell],
        writes: Iterable[Cell],
        reads_after: Clock | None = None,
    ) -> None:
        """Tell it when the queue has come to it: by then all is told that it comes after."""
        actor = self._actors[direction]
        self._queue(
            direction,
            lambda: self.races.access(actor, operation, what, reads, writes, reads_after=reads_after),
        )

    def torch_accessed(self, direction: Direction, operation: Clock, reads: list[Span], writes: list[Span]) -> None:
        """An operation of torch runs."""
        what = f"a torch operation of a {direction.value}"
        self.torch_wrote = self.cells(writes)
        self.races.access(self._actors[direction], operation, what, self.cells(reads), self.torch_wrote)

    # --- memory

    def memory(self, direction: Direction, size_bytes: int) -> torch.Tensor:
        self._point()
        self._refuse("memory")
        made = super().memory(direction, size_bytes)
        self.races.forget(self.cells([(made.data_ptr(), size_bytes)]))  # an allocator serves each queue for itself
        self._scratch.append(made)
        return made

    def pin(self, host: memoryview) -> bool:
        self._point()
        done = super().pin(host)
        if done:
            span = (address_of(host), len(host))
            self._pinned_at.insert(bisect_right(self._pinned_at, span), span)
            self.races.act(self.host(), "pinning", (), [("pinned", span[0])])
        return done

    def unpin(self, host: memoryview) -> None:
        self._point()
        span = (address_of(host), len(host))
        self._pinned_at.remove(span)
        self.races.act(self.host(), "unpinning", (), [("pinned", span[0])])
        super().unpin(host)

    def _pins_of(self, addresses: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> Iterator[Cell]:
        """Yield what an unpinning writes and these transfers need."""
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
            place = bisect_right(self._pinned_at, (address, 1 << 62)) - 1
            begin, size = self._pinned_at[place] if place >= 0 else (0, 0)
            if address + length > begin + size:
                self.races.found.append("a transfer of pinned memory crosses the end of what was pinned at once")
            yield "pinned", begin


class RaceCopier(DeviceCopier):
    """Tells what its thread itself reads."""

    def verify(self, arena: CopyMemory, batch: CopyBatch) -> bool:
        device: Any = self._device
        device.torch_wrote = []
        right = super().verify(arena, batch)
        spans = zip((batch.offsets + address_of(arena.buffer)).tolist(), batch.lengths.tolist(), strict=True)
        if not device.torch_wrote:
            device.races.found.append("what is read back is compared before it is there")
        device.races.act(device.host(), "reading back", [*device.cells(spans), *device.torch_wrote])
        device.races.forget(device.torch_wrote)  # memory that serves again for anything
        return right


class _TorchWatch(TorchDispatchMode):
    """Says what torch's operations access while it is on."""

    def __init__(self, rank: RaceRank, direction: Direction, operation: Clock) -> None:
        super().__init__()
        self._told = (direction, operation)
        self._rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads: list[Span] = []
        writes: list[Span] = []
        if func is _ATEN.index_select.out:
            reads, writes = _blocks(args[0], args[2]), [_span(kwargs["out"])]
        elif func is _ATEN.index_copy_.default:
            reads, writes = [_span(args[3])], _blocks(args[0], args[2])
        elif func is _ATEN.index_fill_.int_Scalar:
            writes = _blocks(args[0], args[2])
        elif func is _ATEN.copy_.default:
            reads, writes = [_span(args[1])], [_span(args[0])]
        else:
            assert func.is_view or func is _ATEN.detach.default, f"{func} is not known here"
        if writes:
            self._rank.torch_accessed(*self._told, reads, writes)
        return func(*args, **kwargs)


def _span(tensor: torch.Tensor) -> Span:
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _blocks(layer: torch.Tensor, numbers: torch.Tensor) -> list[Span]:
    return [_span(layer[number]) for number in numbers.tolist()]
