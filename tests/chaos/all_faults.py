"""Everything that a chaos run may do to its nodes, by group; and the faults of the directory that they share."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from typing import Final

from tests.chaos.depot import Depot
from tests.chaos.faults import (
    Ending,
    Fault,
    World,
    arena_bits_flipped,
    bits_flipped,
    clock_step,
    daemon_hang,
    daemon_kill,
    daemon_killed_while_it_starts,
    daemon_stop,
    directory_away,
    directory_deleted,
    engine_kill,
    engine_stop,
    file_deleted,
    garbage_on_the_sockets,
    io_worker_kill,
    io_worker_stop,
    journal_damage,
    medium_full,
    mount_eacces,
    mount_eio,
    mount_enospc,
    mount_erofs,
    mount_hang,
    mount_slow,
    nothing,
    opener_kill,
    other_settings,
    other_sizes,
    rank_kill,
    rank_stop,
    reboot,
    scheduler_kill,
    segment_cut_off,
    strike,
    sum_worker_kill,
    sum_worker_stop,
)
from tests.chaos.plan import ALONE

COORDINATOR: Final = "kvdepot.server.tiers.shared.coordinator.main"
SHARED: Final = "shared"
"""The group of faults of the directory that nodes share."""
LEFT_OUT: Final = "steps of the clock that stamps files: it is the machine's"


def coordinator_kill(world: World, rng: random.Random) -> Ending:
    return strike(world, rng, COORDINATOR, signal.SIGKILL)


def coordinator_stop(world: World, rng: random.Random) -> Ending:
    return strike(world, rng, COORDINATOR, signal.SIGSTOP)


def shared_bits_flipped(world: World, rng: random.Random) -> Ending:
    world.depot.shared.flip(rng, rng.choice([1, 10, 50]))
    return nothing


def shared_files_cut_off(world: World, rng: random.Random) -> Ending:
    world.depot.shared.cut_off(rng, rng.choice([1, 10]))
    return nothing


def shared_files_deleted(world: World, rng: random.Random) -> Ending:
    world.depot.shared.delete(rng, rng.choice([1, 10, 50]))
    return nothing


def shared_directory_away(world: World, rng: random.Random) -> Ending:
    world.depot.shared.move_away()
    return lambda: world.found(world.depot.shared.move_back())


GROUPS: Final[dict[str, Sequence[Fault]]] = {
    "daemon": (
        daemon_kill, daemon_stop, daemon_hang, daemon_killed_while_it_starts, reboot, journal_damage,
        other_settings, directory_deleted, clock_step,
    ),
    ALONE: (other_sizes, arena_bits_flipped),
    "worker": (io_worker_kill, io_worker_stop, sum_worker_kill, sum_worker_stop, opener_kill),
    "engine": (scheduler_kill, rank_kill, engine_kill, engine_stop, rank_stop),
    "mount": (mount_hang, mount_slow, mount_eio, mount_enospc, mount_erofs, mount_eacces),
    "room": (medium_full,),
    "damage": (bits_flipped, segment_cut_off, file_deleted, directory_away),
    "socket": (garbage_on_the_sockets,),
    SHARED: (
        coordinator_kill, coordinator_stop, shared_bits_flipped, shared_files_cut_off, shared_files_deleted,
        shared_directory_away,
    ),
}  # fmt: skip
"""Two faults at once are of two groups, neither of them ALONE."""


def name_of(fault: Fault) -> str:
    return fault.__name__.replace("_", " ")  # type: ignore[attr-defined, no-any-return]


def possible(depot: Depot) -> dict[str, tuple[str, Fault]]:
    """Name -> (group, fault): what this machine allows."""
    missing = {"mount"} if depot.mount.fuse is None else set()
    missing |= set() if depot.mount.small else {"room"}
    missing |= {SHARED} if depot.settings.shared is None else set()
    return {
        name_of(fault): (group, fault) for group, faults in GROUPS.items() if group not in missing for fault in faults
    }
