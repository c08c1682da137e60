"""What happens to one node. Each fault begins, and answers how it ends; it leaves behind what the depot has to bear."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from tests.chaos.depot import CAPACITIES, CODECS, QUOTAS, RAMS, RAMS_SHARED, WORKERS, Depot
from tests.chaos.fleet import Engine, Fleet
from tests.chaos.messages import Command
from tests.chaos.watch import Watch
from tests.rigs.patience import patience

IO_WORKER: Final = "kvdepot.server.io.worker"
SUM_WORKER: Final = "kvdepot.server.io.checksum_worker"
OPENER: Final = "kvdepot.server.tiers.disk.opener"
_PAUSE_SECONDS: Final = 10.0
_ERRORS: Final = {
    "EIO": {"read": errno.EIO, "write": errno.EIO},
    "ENOSPC": {"write": errno.ENOSPC, "create": errno.ENOSPC},
    "EROFS": {"write": errno.EROFS, "create": errno.EROFS},
    "EACCES": {"open": errno.EACCES, "create": errno.EACCES, "write": errno.EACCES},
}


@dataclass(slots=True)
class World:
    """One node."""

    depot: Depot
    fleet: Fleet
    watch: Watch
    findings: list[str] = field(default_factory=list)

    def found(self, *findings: str) -> None:
        self.findings += [finding for finding in findings if finding]

    def pause(self) -> bool:
        """Whether the engines have come to rest: not when the other fault keeps them from it."""
        self.fleet.command(Command.PAUSE)
        until = time.monotonic() + _PAUSE_SECONDS * patience()
        while not self.fleet.idle and time.monotonic() < until:
            self.found(*self.fleet.read())
            time.sleep(0.05)
        return self.fleet.idle

    def restart(self) -> None:
        """Orderly."""
        if self.depot.running:
            self.found(self.depot.stop())
        self.depot.start()


Ending = Callable[[], object]


class Fault(Protocol):
    """Begins, and answers how it ends. May raise nothing."""

    def __call__(self, world: World, rng: random.Random) -> Ending: ...


def nothing() -> None:
    pass


# --- the daemon


def daemon_kill(world: World, rng: random.Random) -> Ending:
    world.depot.kill()
    return world.depot.start


def daemon_stop(world: World, rng: random.Random) -> Ending:
    world.found(world.depot.stop())
    return world.depot.start


def daemon_hang(world: World, rng: random.Random) -> Ending:
    world.depot.suspend()
    return world.depot.resume


def daemon_killed_while_it_starts(world: World, rng: random.Random) -> Ending:
    world.depot.kill()
    world.depot.start()

    def end() -> None:
        world.depot.kill()
        world.depot.start()

    return end


def reboot(world: World, rng: random.Random) -> Ending:
    """What was in RAM is gone; engines keep the old arena mapped."""
    world.depot.kill()
    world.depot.drop_arena()
    return world.depot.start


def journal_damage(world: World, rng: random.Random) -> Ending:
    """While no daemon runs: cut off, or a few bytes changed."""
    depot = world.depot
    depot.kill()
    files = depot.files("journal", ".log") + depot.files("snapshots", ".snap")
    for path in rng.sample(files, min(len(files), 2)):
        depot.damaged(path)
        with contextlib.suppress(FileNotFoundError):  # a process of the daemon's may end a moment after it
            size = path.stat().st_size
            at = rng.randrange(size) if size else 0
            if rng.random() < 0.5:
                os.truncate(path, at)
            else:
                with path.open("r+b") as file:
                    os.pwrite(file.fileno(), rng.randbytes(8), at)
    return depot.start


def other_settings(world: World, rng: random.Random) -> Ending:
    """Another write policy, eviction, quota, fsync."""
    depot, settings = world.depot, world.depot.settings
    if rng.random() < 0.5:
        world.found(depot.stop())
    else:
        depot.kill()
    settings.write = rng.choice(["commit", "second_use", "evict"])
    settings.eviction = rng.choice(["adaptive", "gdsf", "lru"])
    settings.quota = rng.choice(QUOTAS)
    settings.fsync = rng.random() < 0.3
    return depot.start


def directory_deleted(world: World, rng: random.Random) -> Ending:
    """It is made anew by the next start, and by nothing else."""
    depot = world.depot
    shutil.rmtree(depot.backing, ignore_errors=True)
    return world.restart


def arena_bits_flipped(world: World, rng: random.Random) -> Ending:
    """While no daemon runs and no engine copies: a copy would be of the flipped bytes, and nobody could tell."""
    depot = world.depot
    idle = world.pause()
    depot.kill()
    if idle:
        depot.flip_arena(rng, rng.choice([10, 1000]))

    def end() -> None:
        depot.start()
        world.fleet.command(Command.GO_ON)

    return end


def other_sizes(world: World, rng: random.Random) -> Ending:
    """RAM or disk smaller or larger, another codec, fewer workers: all change the arena's size.

    That is refused while an engine is lent anything.
    """
    depot, settings = world.depot, world.depot.settings
    idle = world.pause()
    world.found(depot.stop())
    if idle:
        settings.ram = rng.choice(RAMS_SHARED if settings.shared else RAMS)
        settings.capacity = rng.choice(CAPACITIES)
        settings.codec = rng.choice(CODECS)
        settings.io_workers = rng.choice(WORKERS)

    def end() -> None:
        depot.start()
        world.fleet.command(Command.GO_ON)

    return end


def clock_step(world: World, rng: random.Random) -> Ending:
    """Of the daemon's wall clock: by an hour, days, to the beginning of time. It is set right at the end, or never."""
    world.depot.clock.step_to(rng.choice([-3600.0, 3600.0, -3 * 86400.0, 400 * 86400.0, 100.0 - time.time()]))
    right = rng.random() < 0.5
    return (lambda: world.depot.clock.step_to(0.0)) if right else nothing


# --- its workers


def strike(world: World, rng: random.Random, module: str, number: signal.Signals) -> Ending:
    pids = world.depot.children(module)
    struck = rng.sample(pids, min(len(pids), rng.choice([1, 1, 2])))

    def send(wanted: signal.Signals) -> None:
        for pid in struck:
            if pid in world.depot.children(module):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, wanted)

    send(number)
    return lambda: send(signal.SIGCONT)


def io_worker_kill(world: World, rng: random.Random) -> Ending:
    return strike(world, rng, IO_WORKER, signal.SIGKILL)


def io_worker_stop(world: World, rng: random.Random) -> Ending:
    return strike(world, rng, IO_WORKER, signal.SIGSTOP)


def sum_worker_kill(world: World, rng: random.Random) -> Ending:
    return strike(world, rng, SUM_WORKER, signal.SIGKILL)


def sum_worker_stop(world: World, rng: random.Random) -> Ending:
    return strike(world, rng, SUM_WORKER, signal.SIGSTOP)


def opener_kill(world: World, rng: random.Random) -> Ending:
    return strike(world, rng, OPENER, signal.SIGKILL)


# --- engines


def _engine(world: World, rng: random.Random) -> Engine:
    return rng.choice(world.fleet.engines)


def _kill(world: World, engine: Engine, pids: Sequence[int]) -> Ending:
    """One or more of its processes. The others end by themselves, or when it is repaired."""
    for pid in pids:
        engine.signal(pid, signal.SIGKILL)
    return lambda: world.found(*world.fleet.repair())


def scheduler_kill(world: World, rng: random.Random) -> Ending:
    engine = _engine(world, rng)
    return _kill(world, engine, engine.pids[:1])


def rank_kill(world: World, rng: random.Random) -> Ending:
    engine = _engine(world, rng)
    return _kill(world, engine, [rng.choice(engine.pids[1:])])


def engine_kill(world: World, rng: random.Random) -> Ending:
    engine = _engine(world, rng)
    return _kill(world, engine, engine.pids)


def _stop(engine: Engine, pids: Sequence[int]) -> Ending:
    for pid in pids:
        engine.signal(pid, signal.SIGSTOP)
    return engine.go_on


def engine_stop(world: World, rng: random.Random) -> Ending:
    engine = _engine(world, rng)
    return _stop(engine, engine.pids)


def rank_stop(world: World, rng: random.Random) -> Ending:
    engine = _engine(world, rng)
    return _stop(engine, [rng.choice(engine.pids[1:])])


# --- the mount


def mount_hang(world: World, rng: random.Random) -> Ending:
    fuse = world.depot.mount.fuse
    assert fuse is not None
    fuse.hang()
    return fuse.go_on


def _mount_fault(world: World, **faults: float) -> Ending:
    fuse = world.depot.mount.fuse
    assert fuse is not None
    fuse.fault(**faults)
    return fuse.fault


def mount_slow(world: World, rng: random.Random) -> Ending:
    return _mount_fault(world, seconds=rng.choice([0.01, 0.05, 0.3]))


def mount_eio(world: World, rng: random.Random) -> Ending:
    return _mount_fault(world, **_ERRORS["EIO"])


def mount_enospc(world: World, rng: random.Random) -> Ending:
    return _mount_fault(world, **_ERRORS["ENOSPC"])


def mount_erofs(world: World, rng: random.Random) -> Ending:
    return _mount_fault(world, **_ERRORS["EROFS"])


def mount_eacces(world: World, rng: random.Random) -> Ending:
    return _mount_fault(world, **_ERRORS["EACCES"])


def medium_full(world: World, rng: random.Random) -> Ending:
    """Somebody else's file takes all that is left."""
    filler = world.depot.filler
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return lambda: filler.unlink(missing_ok=True)


# --- what lies on the medium


def bits_flipped(world: World, rng: random.Random) -> Ending:
    world.depot.flip(rng, rng.choice([1, 10, 100]))
    return nothing


def segment_cut_off(world: World, rng: random.Random) -> Ending:
    segments = world.depot.files("segments", ".seg")
    for path in rng.sample(segments, min(len(segments), 1)):
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            at = rng.randrange(size) if size else 0
            world.depot.damaged(path, at)
            os.truncate(path, at)
    return nothing


def file_deleted(world: World, rng: random.Random) -> Ending:
    depot = world.depot
    files = depot.files("segments", ".seg") if rng.random() < 0.7 else depot.files("journal", ".log")
    for path in rng.sample(files, min(len(files), 1)):
        depot.damaged(path)
        path.unlink(missing_ok=True)
    return nothing


def directory_away(world: World, rng: random.Random) -> Ending:
    depot = world.depot
    with contextlib.suppress(OSError):
        depot.backing.rename(depot.away)

    def back() -> None:
        if depot.backing.exists():  # a start has made another one
            shutil.rmtree(depot.away, ignore_errors=True)
        elif depot.away.exists():
            depot.away.rename(depot.backing)

    return back


# --- the sockets


def garbage_on_the_sockets(world: World, rng: random.Random) -> Ending:
    open_ones = list(_garbage(world.depot, rng))

    def end() -> None:
        for connection in open_ones:
            connection.close()

    return end


def _garbage(depot: Depot, rng: random.Random) -> Iterator[socket.socket]:
    """Connections that stay open: some have said something, some nothing."""
    for number in range(20):
        kind = rng.choice([socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
        path = depot.daemon.socket if kind == socket.SOCK_STREAM else depot.daemon.attach_socket
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            connection.connect(os.fspath(path))
            if number % 4:
                connection.send(rng.randbytes(rng.choice([1, 24, 4000])))
        yield connection
