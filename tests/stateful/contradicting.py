"""The memory's part in the engine's world: a bit flips between the first two readings of an object."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import xxhash
from kvdepot.core.objectfile import HEADER_BYTES

from tests.rigs.engine_rig import Rig
from tests.stateful.engine_world import World


def contradict(world: World, pick: int) -> None:
    """A bit of an object in RAM flips between its first checksum and its first write, or before the later of both.

    Whichever is answered first: nothing that lies on a medium afterwards has the bytes that changed.
    """
    jobs = [(tier, job) for tier, job in world.jobs if not job.reads and job.raw_sum is None]
    if not jobs or not jobs[pick % len(jobs)][0].begin(jobs[pick % len(jobs)][1]):
        return
    tier, job = jobs[pick % len(jobs)]
    answer = _observe(world.rig, list(job.extents))
    if answer is None:
        return
    at, corrupt = job.extents[0][0], world.rig.counter("corrupt_objects")
    if pick & 1:
        answer()
    world.rig.buffer[at] ^= 0x40
    altered = xxhash.xxh3_128_intdigest(b"".join(bytes(world.rig.buffer[o : o + n]) for o, n in job.extents))
    tier.finish(job)
    if not pick & 1:
        answer()
    if world.rig.counter("corrupt_objects") == corrupt:  # nothing was written: a foreign file is in the way
        world.rig.buffer[at] ^= 0x40
        return
    world.contradicted += 1
    for other, late in world.jobs:
        if late.doubtful or (not late.reads and late.begun and list(late.extents) == list(job.extents)):
            other.finish(late)
    for other, late in world.jobs:
        if late.doubtful:
            other.finish(late)
    for blob in (*world.rig.medium.stored.values(), *world.rig.shared_medium.files.values()):
        assert altered.to_bytes(16, "little") not in blob[:HEADER_BYTES], "bytes that changed are served later"


def _observe(rig: Rig, extents: list[tuple[int, int]]) -> Callable[[], None] | None:
    """The checksum worker reads these bytes now. Return its answer, or None where it is not their turn."""
    while (job := rig.depot.next_to_sum()) is not None:
        digest = xxhash.xxh3_128_intdigest(b"".join(bytes(rig.buffer[o : o + n]) for o, n in job.extents))
        answer = partial(rig.depot.summed, job.row, job.generation, digest & (1 << 64) - 1, digest >> 64)
        if list(job.extents) == extents:
            return answer
        answer()
    return None
