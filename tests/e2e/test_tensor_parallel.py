"""Engines of two ranks: equal tokens; and a rank that is late, fails, is stopped or killed harms nobody."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.scheduling.negative import NEGATIVE_SECONDS
from kvdepot.core.report import DaemonStatus

from demo.engine import ROOT, Engine, EngineProcessError
from demo.toys import DENSE, HYBRID
from tests.e2e import arena_bytes
from tests.e2e.arena_bytes import StoredObject
from tests.e2e.asking import LOOKUP_TIMEOUT_SECONDS, ask_until, ask_until_loaded, warm_up
from tests.e2e.faulty_connector import MODULE, VARIABLE, Faults, FaultyConnector
from tests.e2e.fleet import TRIES, Fleet, Loaded
from tests.e2e.hybrid import digests_by_place, wrong
from tests.rigs.stopping import stop

CHUNKS = {"dense": 256, "hybrid": 384}
LOAD_TIMEOUT_SECONDS = 6.0
POLICY = '[policy]\nlease_deadline = "10s"\n'
DEATH_SECONDS = 60.0
HELD_SECONDS = 20.0
BOTH = pytest.mark.parametrize("model", ["dense", "hybrid"])

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def make_fleet(directory: Path) -> Fleet:
    """Two ranks each, and one engine of one rank to compare."""
    fleet = Fleet(directory, ROOT / "build" / "toys", POLICY)
    environment = {VARIABLE: str(Faults(directory / "faults").folder)}
    settings: dict[str, Any] = {
        "load_timeout_seconds": LOAD_TIMEOUT_SECONDS,
        "lookup_timeout_seconds": LOOKUP_TIMEOUT_SECONDS,
        "lookup_min_seconds": LOOKUP_TIMEOUT_SECONDS,
    }
    for name, toy, arguments in (("dense", DENSE, {"block_size": 32}), ("hybrid", HYBRID, {})):
        fleet.define(
            name,
            toy,
            arguments | {"tensor_parallel_size": 2},
            environment=environment,
            connector_class=(FaultyConnector.__name__, MODULE),
            **settings,
        )
    fleet.define("whole", DENSE, {"block_size": 32}, **settings)
    return fleet


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with make_fleet(tmp_path_factory.mktemp("tensor-parallel")) as fleet:
        fleet.ensure_daemon()
        names = ["dense", "hybrid", "whole"]
        fleet.launch(names)
        for name in names:
            warm_up(fleet, name)
        yield fleet


@pytest.fixture
def fleet(two_ranks: Fleet) -> Fleet:
    return two_ranks


@pytest.fixture
def faults(fleet: Fleet) -> Faults:
    return Faults(fleet.directory / "faults")


def boundary(model: str, ids: list[int]) -> int:
    return (len(ids) - 1) // CHUNKS[model] * CHUNKS[model]


def store(fleet: Fleet, model: str, tokens: int) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """A new prompt that the daemon has and the engine has not; its tokens when computed, and after a local hit."""
    engine, ids = fleet.engine(model), fleet.prompt(tokens)
    cold = engine.ask(ids)
    local = engine.ask(ids)
    assert local.local_tokens >= boundary(model, ids)
    fleet.forget(engine)
    return ids, cold.tokens, local.tokens


def granted(fleet: Fleet) -> float:
    return fleet.daemon.status().counters.get("acquires.granted", 0)


def ask_until_granted(fleet: Fleet, engine: Engine, ids: list[int]) -> Loaded:
    """The answer that came by a load, or by one that failed."""
    before = granted(fleet)
    return ask_until(fleet, engine, ids, lambda _: granted(fleet) > before)


def hold_store(fleet: Fleet, faults: Faults, engine: Engine) -> list[int]:
    """A new prompt in whose store rank 1 is held. Of one whose reservation came too late nothing is stored."""
    for _ in range(TRIES):
        ids = fleet.prompt(1000)
        engine.ask(ids)
        if faults.held(Direction.STORE, 1, HELD_SECONDS):
            return ids
    raise AssertionError(f"nothing was stored of {TRIES} prompts")


def check_loads(fleet: Fleet, model: str, ids: list[int], reference: tuple[int, ...]) -> None:
    loaded = ask_until_loaded(fleet, fleet.engine(model), ids)
    assert loaded.external_tokens == loaded.served.tokens == boundary(model, ids)
    assert loaded.tokens == reference


def rank_process(engine: Engine, rank: int) -> int:
    title = f"Worker_TP{rank}".encode()
    (pid,) = [pid for pid in engine.processes() if title in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def digests(arena: Path, objects: set[StoredObject]) -> dict[StoredObject, bytes]:
    with arena_bytes.mapped(arena) as memory:
        return {one: blake2b(memory[one.offset : one.offset + one.length_bytes]).digest() for one in objects}


def wait_gone(fleet: Fleet, engine_id: str) -> None:
    """The engine's session is over, and nothing is lent to anybody."""
    fleet.daemon.wait(
        lambda status: engine_id not in {one.engine_id for one in status.sessions} and not status.tiers[0].lent_bytes,
        DEATH_SECONDS,
        "rid of the engine",
    )


def engine_id(status: DaemonStatus, rank: int) -> str:
    (found,) = [one.engine_id for one in status.sessions if rank in one.pids]
    return found


@pytest.mark.requirement("P4")
@BOTH
def test_two_ranks_get_equal_tokens_each_from_its_own_bytes(fleet: Fleet, model: str) -> None:
    fleet.engine(model)
    known = fleet.audited(model)
    prompts = [store(fleet, model, CHUNKS[model] * chunks + 40) for chunks in (2, 5)]
    for ids, _, reference in prompts:
        check_loads(fleet, model, ids, reference)
    found = digests_by_place(fleet.audit(model, known))
    loaded = {place for place, digest in found.items() if digest["loaded"]}
    assert {place[2] for place in loaded} == {0, 1}
    assert {place[3] for place in loaded} == ({0} if model == "dense" else {0, 1, 2, 3})
    assert wrong(found) == {}


@pytest.mark.requirement("P2")
def test_one_rank_reads_nothing_of_two(fleet: Fleet) -> None:
    ids, _, reference = store(fleet, "dense", 1100)
    whole = fleet.engine("whole")
    alone = fleet.ask(whole, ids)
    assert (alone.external_tokens, alone.served.bytes) == (0, 0)
    fleet.forget(whole)
    again = ask_until_loaded(fleet, whole, ids)
    assert (again.external_tokens, again.tokens) == (1024, alone.tokens)
    check_loads(fleet, "dense", ids, reference)


@pytest.mark.requirement("P5", "P8", "I1")
@BOTH
def test_one_rank_is_late_the_load_ends_by_its_deadline_and_that_rank_writes_nothing_later(
    fleet: Fleet, faults: Faults, model: str
) -> None:
    """Rank 1's copying thread hangs in a store. Meanwhile that is not published either (P11)."""
    known_prompts = [store(fleet, model, 1500) for _ in range(TRIES)]
    engine = fleet.engine(model)
    known, before, count = fleet.audited(model), fleet.daemon.status(), granted(fleet)
    with faults.set(Direction.STORE, 1, "hold"):
        hold_store(fleet, faults, engine)
        for stored in known_prompts:  # a lookup may be late
            ids, cold, reference = stored
            late = fleet.ask(engine, ids)
            if granted(fleet) > count:
                break
        during = fleet.daemon.status()
    assert (late.external_tokens, late.tokens) == (0, cold)
    assert granted(fleet) == count + 1
    assert (late.served.tokens, late.served.bytes > 0) == (0, True), "granted, and of no use"
    assert during.tiers[0].objects == before.tiers[0].objects
    engine.ask(fleet.prompt(40), 1)  # what the rank was late with is told in a step, and an idle engine makes no more
    fleet.forget(engine)
    loads = [line for line in fleet.audit(model, known) if line["event"] == "loaded"]
    assert {line["rank"] for line in loads} == {0}
    engine.pause(NEGATIVE_SECONDS)  # a load that failed is offered to nobody for so long
    check_loads(fleet, model, ids, reference)


@pytest.mark.requirement("D5", "P8")
@BOTH
@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_copy_fails_and_the_load_fails_once(fleet: Fleet, faults: Faults, model: str, rank: int) -> None:
    ids, cold, reference = store(fleet, model, 1500)
    engine = fleet.engine(model)
    before = granted(fleet)
    with faults.set(Direction.LOAD, rank, "fail"):
        failed = ask_until_granted(fleet, engine, ids)
    assert (failed.external_tokens, failed.tokens) == (0, cold)
    assert granted(fleet) == before + 1
    fleet.forget(engine)
    engine.pause(NEGATIVE_SECONDS)
    check_loads(fleet, model, ids, reference)


@pytest.mark.requirement("I1a", "T7")
def test_a_rank_stopped_in_a_load_keeps_its_extents_until_it_is_dead(fleet: Fleet, faults: Faults) -> None:
    before = arena_bytes.committed(fleet.daemon.arena)
    ids, _, _ = store(fleet, "dense", 1500)
    engine = fleet.engine("dense")
    rank = rank_process(engine, 1)
    dying = engine_id(fleet.daemon.status(), rank)
    with faults.set(Direction.LOAD, 1, "hold"):
        begun = engine.begin([ids], 16)
        faults.wait_held(Direction.LOAD, 1)
        stop(rank)
        read = digests(fleet.daemon.arena, arena_bytes.committed(fleet.daemon.arena) - before)
        assert len(read) == boundary("dense", ids) // CHUNKS["dense"]
        expired = "expired_leases.read"
        fleet.daemon.wait(lambda status: bool(status.counters.get(expired)), DEATH_SECONDS, "past the lease's deadline")
        assert digests(fleet.daemon.arena, set(read)) == read
        assert fleet.daemon.status().tiers[0].lent_bytes >= sum(one.length_bytes for one in read)
        os.kill(rank, signal.SIGKILL)
        wait_gone(fleet, dying)
    with pytest.raises(EngineProcessError):  # what becomes of an engine without a rank is vLLM's to say
        engine.finish(begun)
        engine.ask(ids)
    fleet.end("dense", kill=True)


@pytest.mark.requirement("P11", "T7", "P3")
def test_a_rank_killed_in_a_store_publishes_nothing_and_the_next_engine_is_served(fleet: Fleet, faults: Faults) -> None:
    ids, _, reference = store(fleet, "hybrid", 1500)
    engine = fleet.engine("hybrid")
    rank = rank_process(engine, 1)
    before = fleet.daemon.status()
    dying = engine_id(before, rank)
    with faults.set(Direction.STORE, 1, "hold"):
        other = hold_store(fleet, faults, engine)
        assert fleet.daemon.status().tiers[0].lent_bytes
        os.kill(rank, signal.SIGKILL)
        wait_gone(fleet, dying)
    assert fleet.daemon.status().tiers[0].objects == before.tiers[0].objects
    fleet.end("hybrid", kill=True)
    check_loads(fleet, "hybrid", ids, reference)
    missed = fleet.ask(fleet.engine("hybrid"), other)
    assert (missed.external_tokens, missed.served.bytes) == (0, 0)
