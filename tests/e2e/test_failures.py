"""Daemon and engines that die, hang, are absent: no request notices, nothing is left over, hits come back."""

from __future__ import annotations

import re
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kvdepot.client.vllm.scheduling.negative import NEGATIVE_SECONDS
from kvdepot.core.report import DaemonStatus

from demo.engine import Completion, Engine
from demo.toys import DENSE, prompt
from tests.e2e.fleet import Fleet
from tests.rigs.patience import patient, wait_until

ENGINES = ("dense",)
REQUESTS = 20
OUTPUT_TOKENS = 32
NOTICED_SECONDS = 5.0
"""From the start of the scheduler's connector to the line that says that there is no daemon."""
Known = tuple[list[list[int]], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def reference(fleet: Fleet) -> Known:
    """Prompts and their tokens in a serial cold run."""
    engine = fleet.engine("dense")
    prompts = [fleet.prompt(tokens) for tokens in range(400, 400 + 45 * REQUESTS, 45)]
    return prompts, [done.tokens for done in engine.generate(prompts, OUTPUT_TOKENS, serial=True)]


@pytest.fixture
def engine(fleet: Fleet) -> Engine:
    return fleet.engine("dense")


@pytest.fixture
def known(fleet: Fleet, engine: Engine, reference: Known) -> Known:
    """The reference's prompts, held and summed by the daemon, forgotten by the engine."""
    check(engine.generate(reference[0], OUTPUT_TOKENS), reference[1])
    fleet.daemon.settle(summed=True)
    engine.reset_prefix_cache()
    return reference


def check(completions: list[Completion], cold: list[tuple[int, ...]]) -> None:
    assert [done.error for done in completions] == [""] * len(cold)
    assert [done.tokens for done in completions] == cold


def hits_everywhere(fleet: Fleet, engine: Engine, known: Known) -> None:
    """After whatever happened: the daemon's bytes serve every prompt, and nothing is lent or reserved."""
    prompts, cold = known
    fleet.forget(engine)
    engine.pause(NEGATIVE_SECONDS)  # a load that failed is offered to nobody for so long
    vllm, daemon = engine.totals(), fleet.daemon.served()
    names = [f"known-{number}" for number in range(len(prompts))]
    check(engine.finish(engine.begin(prompts, OUTPUT_TOKENS, names=names)), cold)
    external = engine.totals().since(vllm).external_tokens
    everything = sum((len(ids) - 1) // 256 * 256 for ids in prompts)
    served = fleet.daemon.served().since(daemon).tokens
    assert external == served == everything, "\n".join(fleet.told(1, f"{name}-") for name in names)
    fleet.daemon.settle()


@pytest.mark.requirement("T6", "O3")
@pytest.mark.parametrize(
    "delay_seconds", [0.1, *(pytest.param(seconds, marks=pytest.mark.long) for seconds in (0.4, 0.8, 1.4))]
)
def test_a_killed_daemon_disturbs_nobody_and_its_ram_is_served_again(
    fleet: Fleet, engine: Engine, known: Known, delay_seconds: float
) -> None:
    prompts, cold = known
    begun = engine.begin(prompts, OUTPUT_TOKENS)
    engine.pause(delay_seconds)
    fleet.daemon.kill()
    check(engine.finish(begun), cold)
    engine.reset_prefix_cache()
    check(engine.generate(prompts[:3], OUTPUT_TOKENS), cold[:3])  # absent
    endpoint = fleet.daemon.endpoint
    # The outage is logged once. A busy host may first show a daemon that does not answer, because it takes its time to
    # end. An outage that is over before the engine's next attempt is not logged.
    missed = f"kvdepot: no daemon at {endpoint}: ", f"kvdepot: no answer from the daemon at {endpoint}; "
    wait_until(lambda: any(line in engine.log.read_text() for line in missed), "the engine has noticed")
    fleet.daemon.start()
    fleet.wait_attached()
    hits_everywhere(fleet, engine, known)
    log = engine.log.read_text()
    for line in (f"attached to {endpoint} (kvdepotd ", f"the daemon at {endpoint} is back after "):
        assert f"kvdepot: {line}" in log, line


@pytest.mark.requirement("O3", "I3")
@pytest.mark.long(seconds=20)
def test_an_engine_with_a_wrong_endpoint_says_so_at_its_start_and_serves(
    fleet: Fleet, reference: Known, tmp_path: Path
) -> None:
    endpoint = f"unix://{tmp_path}/mistyped.sock"
    fleet.define("mistyped", DENSE, {"block_size": 32, "max_num_seqs": 20}, endpoint=endpoint)
    prompts, cold = reference
    try:
        engine = fleet.start("mistyped")
        wait_until(lambda: logged_at(fleet.log("mistyped"), f"kvdepot: no daemon at {endpoint}: "), "it is logged")
        log = fleet.log("mistyped")
        (created,) = logged_at(log, "EngineCore.*Creating v1 connector with name: KVDepotConnector")
        (missed,) = logged_at(log, f"kvdepot: no daemon at {endpoint}: ")
        assert (missed - created).total_seconds() <= patient(NOTICED_SECONDS)
        assert "kvdepot: attached to" not in log.read_text(), "nothing says that all is well"
        check(engine.generate(prompts[:3], OUTPUT_TOKENS), cold[:3])
    finally:
        fleet.end("mistyped")


def logged_at(log: Path, pattern: str) -> list[datetime]:
    """Return when vLLM logged the lines that match, in whole seconds of a year that is the same for all."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if re.search(pattern, line)]
    times = [_LOG_TIME.findall(line)[0] for line in lines]
    return [datetime.strptime(f"2024-{one}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) for one in times]


_LOG_TIME = re.compile(r" (\d\d-\d\d \d\d:\d\d:\d\d) \[")


@pytest.mark.requirement("T6")
def test_an_orderly_restart_under_load_loses_nothing(fleet: Fleet, engine: Engine, known: Known) -> None:
    prompts, cold = known
    begun = engine.begin(prompts, OUTPUT_TOKENS)
    engine.pause(0.2)
    assert fleet.daemon.stop() == 0
    fleet.daemon.start()
    check(engine.finish(begun), cold)
    fleet.wait_attached()
    hits_everywhere(fleet, engine, known)


@pytest.mark.requirement("T6")
def test_a_hung_daemon_disturbs_nobody(fleet: Fleet, engine: Engine, known: Known) -> None:
    prompts, cold = known
    begun = engine.begin(prompts, OUTPUT_TOKENS)
    engine.pause(0.1)
    fleet.daemon.signal(signal.SIGSTOP)
    try:
        check(engine.finish(begun), cold)
        engine.reset_prefix_cache()
        check(engine.generate(prompts, OUTPUT_TOKENS), cold)  # nothing is answered from the start
    finally:
        fleet.daemon.signal(signal.SIGCONT)
    fleet.wait_attached()
    hits_everywhere(fleet, engine, known)


@pytest.mark.requirement("P8")
def test_a_load_that_failed_is_computed_within_its_timeout_and_never_offered_again(
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
    located = count(fleet.daemon.status(), "locate_hits")
    before = engine.totals()
    waiting = engine.begin([ids], 16)
    fleet.daemon.wait(lambda status: count(status, "locate_hits") > located, 60, "asked for the waiting prompt")
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
    fleet.wait_attached()
    again = fleet.ask(engine, ids)
    assert again.tokens == cold.tokens
    fleet.daemon.settle()


def count(status: DaemonStatus, counter: str) -> float:
    """A daemon that was just restarted has no counter for what has not happened yet."""
    return status.counters.get(counter, 0.0)


def kill_engine_in_stores_and_loads(fleet: Fleet, engine: Engine, known: Known, delay_seconds: float) -> None:
    fresh = [fleet.prompt(2000) for _ in range(4)]
    stored = count(fleet.daemon.status(), "granted_write_bytes")
    engine.begin(fresh, OUTPUT_TOKENS)
    engine.begin(known[0], OUTPUT_TOKENS)
    fleet.daemon.wait(lambda status: count(status, "granted_write_bytes") > stored, 60, "storing")
    engine.pause(delay_seconds)
    fleet.end("dense", kill=True)
    fleet.wait_attached()  # the dead engine's session is gone
    fleet.daemon.settle()  # nothing is lent: what it had stored may be with the checksum worker yet


@pytest.mark.requirement("T7", "I8")
@pytest.mark.long
def test_an_engine_killed_in_stores_and_loads_leaves_nothing_and_starts_without_a_daemon(
    fleet: Fleet, engine: Engine, known: Known
) -> None:
    kill_engine_in_stores_and_loads(fleet, engine, known, 0.0)
    assert fleet.daemon.stop() == 0
    engine = fleet.start("dense")
    check(engine.generate(known[0][:3], OUTPUT_TOKENS), known[1][:3])  # a daemon has never been there
    fleet.daemon.start()
    fleet.wait_attached()
    hits_everywhere(fleet, engine, known)


@pytest.mark.requirement("T7")
@pytest.mark.long
@pytest.mark.parametrize("delay_seconds", [0.04, 0.08, 0.12, 0.16])
def test_an_engine_killed_at_any_moment_leaves_nothing_and_the_next_one_is_served(
    fleet: Fleet, engine: Engine, known: Known, delay_seconds: float
) -> None:
    kill_engine_in_stores_and_loads(fleet, engine, known, delay_seconds)
    hits_everywhere(fleet, fleet.engine("dense"), known)
