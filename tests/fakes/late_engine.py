"""An engine's own queue on its device, as late as can be: what its steps compute is done when somebody needs it.

A step's zeroing, copies of blocks and writes of KV are done when a copy reaches its mark, or when the host reads the
step's tokens. A mark at the wrong place lets a copy read what the engine has not written yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.fakes.late_device import EngineWork, LateDevice
from tests.fakes.scripted_engine import ScriptedEngine


@dataclass
class Timeline:
    """The engine's queue of one rank. `early`: marks lie so many steps before their place, to show that it matters."""

    seed: int = 0
    early: int = 0
    steps: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0
    failed: list[BaseException] = field(default_factory=list)  # what the engine would have computed wrongly
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _chance: Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)

    def launch(self, step: Callable[[], None]) -> int:
        """Queue a step. Its place, for `read`."""
        self.steps.append(step)
        return len(self.steps)

    def read(self, place: int) -> None:
        """The host sees a step's tokens: it is done, and now and then the device is further. Raises what failed."""
        self.until(place)
        if self._chance.random() < 0.5:
            self.until(len(self.steps))
        self.check()

    def mark(self) -> EngineWork:
        place = len(self.steps) - self.early
        return EngineWork(lambda: self.until(place))

    def until(self, place: int) -> None:
        with self._lock:
            while self.done < place:
                step = self.steps[self.done]
                self.done += 1
                try:
                    step()
                except BaseException as error:  # noqa: BLE001 - raised on the engine's thread
                    self.failed.append(error)

    def check(self) -> None:
        """Raises the first thing that failed."""
        if self.failed:
            raise self.failed[0]


class LateEngine(ScriptedEngine):
    """Its ranks compute their steps on `timelines`, by what is known when a step is launched."""

    def __init__(self, *arguments: Any, timelines: Sequence[Timeline], **options: Any) -> None:
        self.timelines = timelines
        self._places: dict[int, list[int]] = {}  # of steps whose output the scheduler has not seen, by rank
        super().__init__(*arguments, **options)

    def _launch(self, rank: int, scheduled: Any, compute: Callable[[], None]) -> None:
        self._places.setdefault(id(scheduled), []).append(self.timelines[rank].launch(compute))

    def _read(self, scheduled: Any, output: Any) -> None:
        for timeline, place in zip(self.timelines, self._places.pop(id(scheduled)), strict=True):
            timeline.read(place)
        super()._read(scheduled, output)


class LateRank(LateDevice):
    """The device of a rank whose engine is late too."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.timeline = timeline

    def engine_mark(self) -> object:
        return self.timeline.mark()
