"""The daemon, or its I/O workers, are killed at random moments; no byte may differ, and nothing durable may vanish."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise

import pytest
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.disk_daemon import TIER, DiskDaemon, differences, indexed, sampled
from tests.rigs.disk_load import DiskLoad, serve_all
from tests.rigs.known_objects import KnownEngine, dense, hybrid
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.seeds import RUN_SEED

SPECS = [dense(250_000), hybrid(131_072, 300_008)]
PROMPTS = 120
"""Of each namespace: some 170 MB, of which RAM keeps 50 and the disk 57."""
POLICIES = ["commit", "second_use", "evict"]
_SERVED_SECONDS = 60.0
_ATTACHED = 0.8
"""Of the kills: after an engine has stored something."""
_KILLS = {"commit": 8, "second_use": 6, "evict": 6}


@pytest.fixture
def seed() -> int:
    return RUN_SEED


@pytest.mark.requirement("T2", "I1")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("write", ["commit", pytest.param("second_use", marks=pytest.mark.long(seconds=25)), "evict"])
def test_the_daemon_is_killed_at_random_moments(write: str, seed: int) -> None:
    _kill_again_and_again(write, seed, _KILLS[write])


@pytest.mark.requirement("T2", "I1")
@pytest.mark.long(seconds=290)
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("write", POLICIES)
def test_the_daemon_is_killed_at_200_random_moments(write: str, seed: int) -> None:
    _kill_again_and_again(write, seed, 10 * _KILLS[write])


def _kill_again_and_again(write: str, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    with DiskDaemon(write=write) as world, sampled(world.root) as samples:
        for kill in range(kills):
            _run_until_killed(world, rng, seed, durable=not kill)
            _check_medium(world)
            assert kill or world.events.live, "the first kill leaves nothing durable to check"
            if rng.random() < 0.4:
                world.drop_arena()
            if rng.random() < 0.25:
                _kill_while_it_starts(world, rng)
            world.start()
            _check_served(world, seed, f"kill {kill}")
        with DiskLoad(world.daemon.socket, SPECS, seed=seed, prompts=PROMPTS) as load:
            wait_until(lambda: load.counts["served_tokens"], "engines are served")
        _check_end(world)
        assert max(samples) <= world.capacity_bytes


def _run_until_killed(world: DiskDaemon, rng: random.Random, seed: int, *, durable: bool) -> None:
    """Kill it while engines store, however late they attach; now and then perhaps before they do.

    `durable`: not before the tier has an object.
    """
    attached = rng.random() < _ATTACHED
    with DiskLoad(world.daemon.socket, SPECS, seed=seed, prompts=PROMPTS) as load:
        if durable:
            wait_until(lambda: world.events.follow().live, "an object is durable")
        elif attached:
            wait_until(lambda: load.counts["put"], "engines store")
        time.sleep(rng.uniform(0.05, 1.2))
        world.daemon.kill()


def _kill_while_it_starts(world: DiskDaemon, rng: random.Random) -> None:
    world.start(ready=False)
    time.sleep(rng.uniform(0.1, 0.8))
    world.daemon.kill()
    _check_medium(world)


def _check_medium(world: DiskDaemon) -> None:
    """Everything in the index is whole, nothing lies upon another, and nothing durable is missing."""
    verdict = world.fsck()
    assert set(verdict.outcomes) <= {IoOutcome.OK}, verdict.findings
    fragments = sorted(fragment for put in verdict.index.puts for fragment in put.fragments)
    assert all(start + length <= after for (start, length), (after, _) in pairwise(fragments))
    world.events.restart(indexed(verdict))


def _check_served(world: DiskDaemon, seed: int, when: str) -> None:
    """Every object that is durable is served, from whichever tier, or has ended since.

    For a while nothing is, where all workers were killed too often, or the breaker is open: a worker may be dying yet
    when this begins. What is lost is not served after that either.
    """
    wait_until(lambda: not world.status().tiers[0].unverified_objects, "what was adopted is verified")
    until = Deadline(_SERVED_SECONDS)
    lost = set(world.events.follow().live.values())
    while lost := _not_served(world, seed, lost):
        assert not until.is_over(), f"{when}: durable, never ended, not served: {lost}; {world.tier()}"
        wait_until(lambda: not world.tier().reason, "the tier is of use again")


def _not_served(world: DiskDaemon, seed: int, wanted: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Of these (key, kind), without what has ended."""
    missing: set[tuple[str, str]] = set()
    for spec in SPECS:
        with KnownEngine(world.daemon.socket, spec, seed & 0xFFFF) as engine:
            found = serve_all(engine, wanted, PROMPTS)
        missing |= {(known.key.hex(), known.kind.name.lower()) for known in found}
    return missing & set(world.events.follow().live.values())


def _check_end(world: DiskDaemon) -> None:
    """Nothing is stuck, and the accounts are what lies on the medium. Sessions of this process live as long as it."""
    wait_until(lambda: not any(one.leases or one.lent_objects for one in world.status().sessions), "leases end")
    world.wait_written()  # a worker that was stopped while it started is given twenty seconds
    status, tier = world.status(), world.tier()
    assert (status.tiers[0].lent_bytes, tier.lent_bytes) == (0, 0)
    damaged = {name: count for name, count in status.counters.items() if name.startswith("tier_damaged") and count}
    assert not damaged, "a SIGKILL loses no page cache: nothing can be torn"
    assert world.daemon.stop() == 0
    verdict = world.fsck()
    assert verdict.whole, verdict.index.notes
    assert not differences(verdict, tier, status.counters)
    assert indexed(verdict) == world.events.follow().live


@pytest.mark.requirement("I6", "I1a")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_io_workers_are_killed_or_stopped_at_random_moments(number: signal.Signals, seed: int) -> None:
    """A stopped one is abandoned after its deadline and replaced."""
    _strike_workers(number, seed, 12)


@pytest.mark.requirement("I6", "I1a")
@pytest.mark.long(seconds=60)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_io_workers_are_killed_or_stopped_at_100_random_moments(number: signal.Signals, seed: int) -> None:
    _strike_workers(number, seed, 100)


def _strike_workers(number: signal.Signals, seed: int, strikes: int) -> None:
    rng = random.Random(seed)
    deadline_ms = patient(500 if number == signal.SIGSTOP else 10_000)
    with DiskDaemon(deadline=f"{deadline_ms:.0f}ms") as world:
        with DiskLoad(world.daemon.socket, SPECS, seed=seed, prompts=PROMPTS):
            for _ in range(strikes):
                time.sleep(rng.uniform(0.05, 0.4))
                for pid in rng.sample(victims := world.workers, min(rng.choice([1, 1, 2]), len(victims))):
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        continue
        world.wait_state("ready")
        # Workers that died one after the other are replaced after a pause, in which there is nobody to read.
        wait_until(lambda: not world.tier().reason, "the tier is of use again")
        _check_served(world, seed, "after the strikes")
        _check_end(world)


@pytest.mark.requirement("P4", "T2")
def test_after_a_reboot_objects_come_from_the_disk(seed: int) -> None:
    """An orderly stop, the arena dropped: all that the disk had is served again, byte for byte; its index at once.

    But for what lies there without its parent, whose write was given up after its own had arrived (docs/operations.md).
    The scrubber is off: it reads payloads as soon as the index is there.
    """
    with DiskDaemon(tables='[scrub]\nrate = "0MiB/s"\n') as world:
        for spec in SPECS:
            with KnownEngine(world.daemon.socket, spec, seed & 0xFFFF) as engine:
                for number in range(40):
                    engine.put(engine.prompt(number))
        world.wait_written()
        before = set(world.events.follow().live.values())
        assert len(before) > 100
        assert world.daemon.stop() == 0
        world.drop_arena()
        world.start()
        assert not world.status().tiers[0].objects
        parentless = int(world.counter(f"tier_found_objects.{TIER}/no_parent"))
        assert parentless <= len(before) // 20
        assert world.tier().objects == len(before) - parentless
        assert not world.counter(f"io_bytes.{TIER}/read"), "the index comes back without reading a payload"
        read_before = world.counter("promoted_objects")
        for spec in SPECS:
            with KnownEngine(world.daemon.socket, spec, seed & 0xFFFF) as engine:
                parentless -= len(serve_all(engine, before, PROMPTS))
        assert not parentless
        assert world.counter("promoted_objects") - read_before >= world.tier().objects
