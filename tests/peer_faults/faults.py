"""What happens to peers, their processes and the wire between them. Each returns what ends it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tests.peer_faults.world import SOURCES, Source, World, evict

Ending = Callable[[], None]
Fault = Callable[[World, Source, list[bytes], random.Random], Ending]
"""Gets the source that is struck, and the prompt that is on its way."""


def _nothing() -> None:
    """It has ended by itself."""


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it was replaced
            os.kill(pid, number)


def _stop(pids: list[int]) -> Ending:
    _signal(pids, signal.SIGSTOP)
    return lambda: _signal(pids, signal.SIGCONT)


# A source


def source_kill(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    source.daemon.kill()
    return lambda: _started(world, source)


def source_restart(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    source.daemon.stop()
    return lambda: _started(world, source)


def _started(world: World, source: Source) -> None:
    source.daemon.start()
    world.attach_source(source)


def source_stop(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    source.daemon.suspend()
    return source.daemon.resume


def source_evict(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    evict(source, keys, rng)
    return _nothing


def sender_kill(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    _signal(source.servers, signal.SIGKILL)
    return _nothing


def sender_stop(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    return _stop(source.servers)


# Its disk


def disk_worker_kill(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    _signal(source.disk_workers, signal.SIGKILL)
    return _nothing


def disk_stop(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    return _stop(source.disk_workers)


# The reader


def reader_kill(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    world.reader.kill()

    def end() -> None:
        world.reader.start()
        world.attach()

    return end


def reader_stop(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    world.reader.suspend()
    return world.reader.resume


def _some(world: World, rng: random.Random) -> list[int]:
    workers = world.workers
    return rng.sample(workers, rng.randint(1, len(workers)) if workers else 0)


def worker_kill(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    _signal(_some(world, rng), signal.SIGKILL)
    return _nothing


def worker_stop(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    return _stop(_some(world, rng))


# The wire


def partition(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    world.network.cut(source.node)
    return world.network.heal


def partition_of_all(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    world.network.cut(SOURCES)
    return world.network.heal


def loss(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    world.network.fault(source.node, loss=rng.uniform(0.02, 0.4))
    return world.network.heal


def bit_flips(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    world.network.fault(source.node, flips=rng.choice([0.01, 0.1, 1.0]))
    return world.network.heal


def slow(world: World, source: Source, keys: list[bytes], rng: random.Random) -> Ending:
    world.network.fault(source.node, bytes_per_second=rng.uniform(1e5, 4e6), delay_seconds=rng.uniform(0.0, 0.1))
    return world.network.heal


_GROUPS: Final[dict[str, tuple[Fault, ...]]] = {
    "source": (source_kill, source_restart, source_stop, source_evict),
    "sender": (sender_kill, sender_stop),
    "disk": (disk_worker_kill, disk_stop),
    "reader": (reader_kill, reader_stop),
    "worker": (worker_kill, worker_stop),
    "wire": (partition, partition_of_all, loss, bit_flips, slow),
}
"""Several faults at once are of several groups."""


def _name(fault: Fault) -> str:
    return fault.__name__.replace("_", " ")


FAULTS: Final = {_name(fault): fault for faults in _GROUPS.values() for fault in faults}
GROUPS: Final = {_name(fault): group for group, faults in _GROUPS.items() for fault in faults}
OF_READER: Final = frozenset(_name(fault) for fault in _GROUPS["reader"])
"""Its RAM serves nobody meanwhile."""
OF_DISK: Final = frozenset(_name(fault) for fault in _GROUPS["disk"])
"""Of sources that have one."""
NOT_OVER_NIXL: Final = frozenset({_name(bit_flips)})
"""The wire flips what the checksum of TCP does not show. UCX believes its own headers then, and may write elsewhere."""
