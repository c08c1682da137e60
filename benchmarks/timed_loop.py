"""Run a module as the main one, and say at its end which callbacks held its event loop longest.

`python -m benchmarks.timed_loop REPORT MODULE ARGUMENT...`: what comes of it is JSON in the file REPORT. A callback's
time is CPU time of the loop's thread: what a busy machine takes away between two instructions is not the callback's.
Counted from the first call of an engine on. A collection of garbage counts in its callback, and has a row of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import runpy
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kvdepot.proto.methods import Method
from kvdepot.server.rpc.depot_calls import DepotCalls

_methods: list[str] = []  # engines' calls that the callback at hand has made
_called: set[str] = set()
REPEATED: Final = 3


@dataclass
class Held:
    """What the calls of one callback took, in seconds.

    `repeated` has the longest CPU times, shortest first: one that does not repeat can be the machine's.
    """

    calls: int = 0
    wall: float = 0.0  # the longest
    repeated: list[float] = field(default_factory=list)

    @property
    def cpu(self) -> float:
        """The longest CPU time."""
        return self.repeated[-1]


_held: dict[str, Held] = {}


def _name(handle: asyncio.Handle) -> str:
    """Of the coroutine that a step belongs to, else of the function."""
    callback: Any = getattr(handle, "_callback")  # noqa: B009 - asyncio names it to nobody
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        return str(getattr(coroutine, "__qualname__", coroutine))
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def _count(name: str, cpu: float, wall: float) -> None:
    held = _held.setdefault(name, Held())
    held.calls += 1
    held.wall = max(held.wall, wall)
    held.repeated = sorted([*held.repeated, cpu])[-REPEATED:]


def _collecting() -> Callable[[str, dict[str, int]], None]:
    """Return what the collector calls before and after each collection."""
    began = began_wall = 0.0
    loop = threading.get_ident()

    def collecting(phase: str, collection: dict[str, int]) -> None:
        nonlocal began, began_wall
        if phase == "start":
            began, began_wall = time.thread_time(), time.perf_counter()
        elif _called and threading.get_ident() == loop:
            name = f"garbage of generation {collection['generation']}"
            _count(name, time.thread_time() - began, time.perf_counter() - began_wall)

    return collecting


def _timed() -> None:
    """Have every callback of every loop counted."""
    gc.callbacks.append(_collecting())
    run, start = vars(asyncio.Handle)["_run"], DepotCalls.start

    def counted(self: asyncio.Handle) -> None:
        if not _called:  # the daemon starts, and nobody waits for it
            run(self)
            return
        _methods.clear()
        name = _name(self)  # before it runs: a handle that is cancelled in its callback has forgotten it
        began, began_wall = time.thread_time(), time.perf_counter()
        run(self)
        cpu, wall = time.thread_time() - began, time.perf_counter() - began_wall
        _count(" ".join([name, *sorted(set(_methods))]), cpu, wall)

    def named(self: DepotCalls, method: Method[Any, Any], request: bytes, done: Any) -> None:
        _called.add(method.name)
        _methods.append(method.name)
        start(self, method, request, done)

    for owner, name, function in ((asyncio.Handle, "_run", counted), (DepotCalls, "start", named)):
        setattr(owner, name, function)


def main() -> None:
    report, sys.argv[:] = Path(sys.argv[1]), sys.argv[2:]
    _timed()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        report.write_text(json.dumps({name: asdict(held) for name, held in _held.items()}))


if __name__ == "__main__":
    main()
