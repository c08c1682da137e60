"""Daemon and engines that die, hang, are absent: no request notices, nothing is left over, hits come back."""

from __future__ import annotations

import signal
import time

import pytest

from demo.engine import Completion, Engine
from demo.toys import prompt
from tests.e2e.fleet import Fleet

REQUESTS = 20


@pytest.fixture
def engine(fleet: Fleet) -> Engine:
    return fleet.engine("dense")


def check(completions: list[Completion], cold: list[tuple[int, ...]]) -> None:
    assert [done.error for done in completions] == [""] * len(cold)
    assert [done.tokens for done in completions] == cold


def known_prompts(fleet: Fleet, engine: Engine) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Prompts that the daemon holds and the engine has forgotten, and their tokens in a serial cold run."""
    prompts = [fleet.prompt(tokens) for tokens in range(600, 600 + 60 * REQUESTS, 60)]
    cold = [done.tokens for done in engine.generate(prompts, 48, serial=True)]
    fleet.daemon.settle(summed=True)
    engine.reset_prefix_cache()
    return prompts, cold


def hits_everywhere(fleet: Fleet, engine: Engine, prompts: list[list[int]], cold: list[tuple[int, ...]]) -> None:
    """After whatever happened: the daemon's bytes serve every prompt, and nothing is lent or reserved."""
    fleet.forget(engine)
    vllm, daemon = engine.totals(), fleet.daemon.served()
    check(engine.generate(prompts, 48), cold)
    external = engine.totals().since(vllm).external_tokens
    assert external == fleet.daemon.served().since(daemon).tokens == sum((len(ids) - 1) // 256 * 256 for ids in prompts)
    fleet.daemon.settle()


@pytest.mark.parametrize("delay_seconds", [0.05, 0.6])
def test_t6_a_killed_daemon_disturbs_nobody_and_its_ram_is_served_again(
    fleet: Fleet, engine: Engine, delay_seconds: float
) -> None:
    prompts, cold = known_prompts(fleet, engine)
    begun = engine.begin(prompts, 48)
    engine.pause(delay_seconds)
    fleet.daemon.kill()
    check(engine.finish(begun), cold)
    engine.reset_prefix_cache()
    check(engine.generate(prompts[:3], 48), cold[:3])  # absent
    fleet.daemon.start()
    fleet.daemon.wait_attached(1)
    hits_everywhere(fleet, engine, prompts, cold)


def test_t6_an_orderly_restart_under_load_loses_nothing(fleet: Fleet, engine: Engine) -> None:
    prompts, cold = known_prompts(fleet, engine)
    begun = engine.begin(prompts, 48)
    engine.pause(0.2)
    assert fleet.daemon.stop() == 0
    fleet.daemon.start()
    check(engine.finish(begun), cold)
    fleet.daemon.wait_attached(1)
    hits_everywhere(fleet, engine, prompts, cold)


def test_t6_a_hung_daemon_disturbs_nobody(fleet: Fleet, engine: Engine) -> None:
    prompts, cold = known_prompts(fleet, engine)
    begun = engine.begin(prompts, 48)
    engine.pause(0.1)
    fleet.daemon.signal(signal.SIGSTOP)
    try:
        check(engine.finish(begun), cold)
        engine.reset_prefix_cache()
        check(engine.generate(prompts, 48), cold)  # nothing is answered from the start
    finally:
        fleet.daemon.signal(signal.SIGCONT)
    fleet.daemon.wait_attached(1)
    hits_everywhere(fleet, engine, prompts, cold)


def test_p8_a_load_that_failed_is_computed_within_its_timeout_and_never_offered_again(
    fleet: Fleet, engine: Engine
) -> None:
    timeout_seconds = engine.options.connector_settings["load_timeout_seconds"]
    ids = fleet.prompt(2000)
    cold = engine.ask(ids)
    fleet.forget(engine)
    # All places are taken, so the request waits with its lookup answered. Then the daemon
    # hangs, and a place becomes free: what it was promised cannot be acquired any more.
    places = [f"place-{number}" for number in range(REQUESTS)]
    taken = engine.begin([prompt(8, name) for name in places], 2000, names=places)
    engine.pause(1.0)
    located = fleet.daemon.status().counters["locate_hits"]
    before = engine.totals()
    waiting = engine.begin([ids], 16)
    fleet.daemon.wait(lambda status: status.counters["locate_hits"] > located, 10, "asked for the waiting prompt")
    fleet.daemon.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        engine.abort(places)
        engine.finish(taken)
        (done,) = engine.finish(waiting)
        seconds = time.monotonic() - started
    finally:
        fleet.daemon.signal(signal.SIGCONT)
    assert (done.error, done.tokens) == ("", cold.tokens)
    assert timeout_seconds <= seconds < timeout_seconds + 1 + cold.completion.seconds + 1
    assert engine.totals().since(before).computed_tokens >= len(ids)
    fleet.daemon.wait_attached(1)
    hits_everywhere(fleet, engine, [ids], [engine.ask(ids, 48).tokens])


def test_t7_an_engine_killed_in_stores_and_loads_leaves_nothing_and_i8_starts_without_a_daemon(
    fleet: Fleet, engine: Engine
) -> None:
    known, cold = known_prompts(fleet, engine)
    fresh = [fleet.prompt(2000) for _ in range(4)]
    stored = fleet.daemon.status().counters["granted_write_bytes"]
    engine.begin(fresh, 48)
    engine.begin(known, 48)
    fleet.daemon.wait(lambda status: status.counters["granted_write_bytes"] > stored, 30, "storing")
    fleet.end("dense", kill=True)
    status = fleet.daemon.wait(lambda status: not status.sessions, 10, "rid of the dead engine's session")
    assert status.tiers[0].lent_bytes == 0
    assert fleet.daemon.stop() == 0

    engine = fleet.start("dense")
    check(engine.generate(known[:3], 48), cold[:3])  # a daemon has never been there
    fleet.daemon.start()
    fleet.daemon.wait_attached(1)
    hits_everywhere(fleet, engine, known, cold)
