"""The scripted engine with a checker of order: what each step does in a rank's memory is told when it is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.fakes.late_engine import LateEngine
from tests.fakes.race_rank import RaceRank, RaceTimeline, Span
from tests.fakes.rank_memory import RankMemory


class RaceEngine(LateEngine):
    """Its `timelines` are RaceTimelines, and `devices` those of its ranks. `switch` lets other threads continue."""

    def __init__(
        self, *arguments: Any, devices: Sequence[RaceRank], switch: Callable[[], object], **options: Any
    ) -> None:
        self._devices = devices
        self._switch = switch
        super().__init__(*arguments, **options)

    def step(self) -> Any:
        self._switch()
        return super().step()

    def _launch(self, rank: int, scheduled: Any, compute: Callable[[], None]) -> None:
        memories: Any = self.memories
        memory = memories[rank]
        memories[rank] = _Told(memory, self._devices[rank])
        try:
            compute()
        finally:
            memories[rank] = memory
        super()._launch(rank, scheduled, compute)


class _Told:
    """Stands for a rank's memory while a step is launched: nothing is computed, and all is told."""

    def __init__(self, memory: RankMemory, device: RaceRank) -> None:
        self.layout = memory.layout
        self._memory = memory
        self._device = device
        self.caches = {name: _ToldCache(self, name) for name in memory.caches}

    def block(self, layer: str, block_id: int) -> _ToldCache:
        """Return what can only be zeroed."""
        return _ToldCache(self, layer, block_id)

    def holds(self, _: str, layer: str, block_id: int, *__: Any) -> bool:
        self.tell("a forward", reads=[(layer, block_id)])
        return True

    def write(self, _: str, layer: str, block_id: int, *__: Any) -> None:
        self.tell("a forward", writes=[(layer, block_id)])

    def tell(self, what: str, reads: Sequence[tuple[str, int]] = (), writes: Sequence[tuple[str, int]] = ()) -> None:
        """Tell accesses to blocks of layers."""
        timeline = self._device.timeline
        assert isinstance(timeline, RaceTimeline)
        timeline.works(what, self._device.cells(map(self._span, reads)), self._device.cells(map(self._span, writes)))

    def _span(self, place: tuple[str, int]) -> Span:
        block = self._memory.block(*place)
        return block.data_ptr(), block.numel()


class _ToldCache:
    def __init__(self, memory: _Told, layer: str, block_id: int = -1) -> None:
        self._memory = memory
        self._layer = layer
        self._block_id = block_id

    def __getitem__(self, block_id: int) -> _ToldCache:
        return _ToldCache(self._memory, self._layer, block_id)

    def __setitem__(self, block_id: int, source: _ToldCache) -> None:
        here = (self._layer, block_id)
        self._memory.tell("a copy of a block", [(source._layer, source._block_id)], [here])

    def zero_(self) -> None:
        self._memory.tell("zeroing", writes=[(self._layer, self._block_id)])
