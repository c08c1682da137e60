"""KV events for routers: what the daemon has for an engine, by the engine's hashes, next to those of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_field
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import events as events_module
from kvdepot.client.vllm.scheduling import tier_checks
from kvdepot.core.calls import FindTiersCall, FindTiersReply, Nearest
from kvdepot.core.control import Switch
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.tree.lost_keys import LostKeys
from msgspec.structs import replace
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, evict, prompt


class Router:
    """Keeps what an engine publishes: which blocks it has, by medium."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.blocks: dict[str, dict[bytes, BlockStored]] = {"CPU": {}, "GPU": {}, "STORAGE": {}}
        engine.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: Any) -> None:
        cleared = False
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert event.medium is not None
                self.blocks[event.medium] |= dict.fromkeys(event.block_hashes, event)
            elif isinstance(event, BlockRemoved):
                assert event.medium is not None
                for block_hash in event.block_hashes:
                    assert cleared or block_hash in self.blocks[event.medium], "it was not there"
                    self.blocks[event.medium].pop(block_hash, None)
            else:  # all that the engine has told, as routers understand it
                cleared = True
                for blocks in self.blocks.values():
                    blocks.clear()

    def depth(self) -> int:
        """Blocks that the daemon has in RAM."""
        return len(self.blocks["CPU"])


@pytest.mark.requirement("P10")
def test_what_is_stored_is_announced_as_the_engines_own_blocks_are(make: Make) -> None:
    engine = make(events=True)
    router, tokens = Router(engine), prompt(6.5)
    engine.generate(tokens)
    assert router.blocks["CPU"].keys() == router.blocks["GPU"].keys()
    assert len(router.blocks["CPU"]) == 6
    for block_hash, stored in router.blocks["CPU"].items():
        own = router.blocks["GPU"][block_hash]
        at = own.block_hashes.index(block_hash)
        assert stored.token_ids == own.token_ids[at * BLOCK : (at + 1) * BLOCK]
        assert (stored.block_size, stored.group_idx) == (own.block_size, own.group_idx)
        assert (stored.kv_cache_spec_kind, stored.locality) == (own.kv_cache_spec_kind, "LOCAL")
        assert stored.parent_block_hash == (own.block_hashes[at - 1] if at else own.parent_block_hash)
    engine.reset()
    assert router.depth() == 6, "the engine's cache is void, not the daemon's"
    engine.generate(prompt(2.5, seed=1))
    assert not router.blocks["GPU"].keys() & set(list(router.blocks["CPU"])[:6])


@pytest.mark.requirement("P10")
def test_hybrid_engines_announce_their_attention(make: Make) -> None:
    engine = make(hybrid=True, retention=BLOCK, step_tokens=BLOCK, events=True)
    router = Router(engine)
    engine.generate(prompt(5.5))
    groups = {event.group_idx for event in router.blocks["CPU"].values()}
    assert groups == {2}, "the group of attention behind two recurrent ones"
    assert router.depth() == 5


@pytest.mark.requirement("P10")
def test_what_another_engine_stored_is_announced_once_it_was_loaded(make: Make) -> None:
    tokens = prompt(6.5)
    make().generate(tokens)
    engine = make(events=True)
    router = Router(engine)
    assert engine.generate(tokens) == cold(tokens)
    assert router.depth() == 6


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("by", ["eviction", "an operator"])
def test_what_a_lookup_finds_gone_is_announced_as_removed(make: Make, by: str) -> None:
    engine = make(events=True)
    router, tokens = Router(engine), prompt(6.5)
    engine.generate(tokens)
    engine.reset()
    depot_engine = engine.depot.engine
    if by == "eviction":
        evict(engine)
    else:
        (namespace_id,) = depot_engine._tree.namespaces.by_id
        assert not depot_engine.deletion(namespace_id, b"").run_once()
    request_id = engine.add(tokens, max_tokens=1)
    seen = [router.depth()]
    while engine.scheduler.has_requests():
        engine.step()
        seen.append(router.depth())
    assert 0 in seen, "gone"
    assert router.depth() == 6, "and stored anew"
    assert engine.outputs[request_id]


@pytest.fixture
def checked_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of checks in every step, as if a second had passed."""
    monkeypatch.setattr(tier_checks, "ROUND_SECONDS", 0.0)


@pytest.mark.requirement("P10")
@pytest.mark.usefixtures("checked_always")
def test_what_the_daemon_evicts_is_announced_while_the_engine_does_something_else(make: Make) -> None:
    engine = make(events=True)
    router, tokens = Router(engine), prompt(6.5)
    engine.generate(tokens)
    first = set(router.blocks["CPU"])
    evict(engine, 2)
    engine.generate(prompt(2.5, seed=1))
    assert len(first & router.blocks["CPU"].keys()) == 4, "two of six"
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert len(first & router.blocks["CPU"].keys()) == 6, "stored anew"


@pytest.mark.requirement("P10")
@pytest.mark.usefixtures("checked_always")
def test_what_moves_between_ram_and_a_tier_below_is_announced_by_where_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(events=True)
    router = Router(engine)
    engine.generate(prompt(6.5))
    in_ram = dict(router.blocks["CPU"])
    answers = [Nearest.BELOW_RAM, Nearest.UNKNOWN, Nearest.RAM, Nearest.BELOW_RAM, Nearest.ABSENT]
    for answer, word in zip(answers, ["STORAGE", "STORAGE", "CPU", "STORAGE", ""], strict=True):
        monkeypatch.setattr(
            Depot, "find_tiers", lambda _, call, answer=answer: FindTiersReply(bytes([answer] * (len(call.keys) // 16)))
        )
        engine.generate(prompt(0.5, seed=1))  # too short to be stored
        for medium in ("CPU", "STORAGE"):
            assert router.blocks[medium].keys() == (in_ram.keys() if medium == word else set()), (answer, medium)
        for block_hash, stored in router.blocks.get(word, {}).items():
            assert stored == replace(in_ram[block_hash], medium=word), "all else is as it was"


@pytest.mark.requirement("P10")
@pytest.mark.usefixtures("checked_always")
def test_a_chunk_in_ram_counts_as_below_it_if_one_before_it_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers follow a prompt through RAM, then through what is below, and never back."""
    engine = make(events=True, settings={"chunk_tokens": BLOCK})
    router, tokens = Router(engine), prompt(4.5)
    engine.generate(tokens)
    path = list(router.blocks["CPU"])
    third = next(key for key in engine.side.events.announced if engine.side.events.announced[key].blocks.number == 2)
    below = {third}

    def find_tiers(_: Depot, call: FindTiersCall) -> FindTiersReply:
        keys = [call.keys[at : at + 16] for at in range(0, len(call.keys), 16)]
        return FindTiersReply(bytes(Nearest.BELOW_RAM if key in below else Nearest.RAM for key in keys))

    monkeypatch.setattr(Depot, "find_tiers", find_tiers)
    engine.generate(prompt(0.5, seed=1))
    assert (list(router.blocks["CPU"]), list(router.blocks["STORAGE"])) == (path[:2], path[2:])
    below.clear()
    engine.generate(prompt(0.5, seed=2))
    assert (list(router.blocks["CPU"]), list(router.blocks["STORAGE"])) == (path, [])


@pytest.mark.requirement("P10")
def test_everything_is_announced_again_after_the_engine_has_reset_its_cache(make: Make) -> None:
    engine = make(events=True)
    router = Router(engine)
    engine.generate(prompt(6.5))
    engine.generate(prompt(3.5, seed=1))
    before = dict(router.blocks["CPU"])
    engine.reset()
    engine.generate(prompt(0.5, seed=2))
    assert router.blocks["CPU"] == before
    parents = {event.parent_block_hash for event in before.values()} - {None}
    assert parents and parents <= before.keys()
    order = list(router.blocks["CPU"])
    for block_hash, event in before.items():
        assert event.parent_block_hash is None or order.index(event.parent_block_hash) < order.index(block_hash)


@pytest.mark.requirement("I4")
def test_the_daemon_is_asked_where_chunks_are_once_a_round(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_checks, "ROUND_SECONDS", 3600.0)
    engine = make(events=True)
    for seed in range(4):
        engine.generate(prompt(2.5, seed=seed))
    assert engine.depot.count(FindTiersCall) == 1


@pytest.mark.requirement("P10")
@pytest.mark.parametrize(
    ("reason", "settings"),
    [(MissReason.NO_GRANT, {}), (MissReason.OTHER_NAMESPACE, {"weights_version": "7"})],
    ids=["no room for its store", "another namespace has it"],
)
def test_what_was_evicted_and_met_by_another_engine_is_announced_as_removed(
    make: Make, reason: MissReason, settings: dict[str, str]
) -> None:
    """This one is told of what became of that, and has no room to store it anew."""
    engine, other = make(events=True), make(settings=settings)
    router, tokens = Router(engine), prompt(6.5)
    engine.generate(tokens)
    engine.reset()
    depot_engine = engine.depot.engine
    full = replace_field(depot_engine._config, credit_bytes=1)
    evict(engine)
    if reason is MissReason.NO_GRANT:
        depot_engine.configure(full, {})
    else:
        vars(depot_engine._tree.lost_keys).update(vars(LostKeys()))
    other.generate(tokens)
    depot_engine.configure(full, {})
    assert router.depth() == 6
    assert engine.generate(tokens) == cold(tokens)
    assert engine.side.counters[f"misses.{reason}"] == 1
    assert router.depth() == 0


@pytest.mark.requirement("I1e")
def test_what_is_switched_off_is_computed_counted_as_such_and_announced_on(make: Make) -> None:
    engine = make(events=True)
    router, tokens = Router(engine), prompt(6.5)
    engine.generate(tokens)
    engine.reset()
    engine.depot.engine.switch(Switch.LOADS, b"", on=False)
    assert engine.generate(tokens) == cold(tokens)
    assert engine.side.counters[f"misses.{MissReason.LOADS_OFF}"] == 1
    assert router.depth() == 6, "it is there"
    engine.reset()
    engine.depot.engine.switch(Switch.LOADS, b"", on=True)
    assert engine.generate(tokens) == cold(tokens)
    assert engine.side.counters["loaded_tokens"] == 6 * BLOCK


@pytest.mark.requirement("P10")
def test_a_new_epoch_removes_everything(make: Make) -> None:
    engine = make(events=True)
    router = Router(engine)
    engine.generate(prompt(6.5))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.generate(prompt(2.5, seed=1))
    assert router.depth() == 2


@pytest.mark.requirement("I4")
def test_announced_chunks_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "CHUNKS_MAX", 4)
    engine = make(events=True)
    router = Router(engine)
    engine.generate(prompt(9.5))
    assert router.depth() == 4
    assert len(engine.side.events.announced) == 4


def test_an_engine_without_events_keeps_nothing_for_them(make: Make) -> None:
    engine = make()
    engine.generate(prompt(6.5))
    taken: Sequence[Any] = list(engine.connector.take_events())
    assert not taken
    assert not engine.side.events.announced
