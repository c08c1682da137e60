"""What one engine tells the next of a turn in `kv_transfer_params`, and what the next one makes of it (A4, B1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.transfer_params import TransferOutcome
from kvdepot.core.calls import LocateCall, LocateReply, ReserveCall
from kvdepot.core.control import Switch
from kvdepot.core.misses import MissReason

from tests.fakes.direct_session import ARENA_ID, DirectDepot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt
from tests.rigs.patience import wait_until

KEY = f"kvdepot:{ARENA_ID:016x}"
EVERY_CHUNK: dict[str, Any] = {"hybrid": True, "retention": BLOCK, "step_tokens": BLOCK}


def ask(engine: ScriptedEngine, tokens: list[int], params: Any, max_tokens: int = 4) -> str:
    return engine.add(tokens, max_tokens, params={"extra_args": {"kv_transfer_params": params}})


def told(engine: ScriptedEngine, tokens: list[int], max_tokens: int = 4) -> dict[str, Any]:
    """What the engine says of the request once it is over."""
    request = ask(engine, tokens, {"do_remote_decode": True}, max_tokens)
    engine.run()
    return engine.handed[request]


def says(engine: ScriptedEngine, boundary: Any) -> dict[str, Any]:
    return {KEY: {"namespace": engine.side.namespaces.registered_id.hex(), "boundary_tokens": boundary}}


def counted(engine: ScriptedEngine) -> dict[TransferOutcome, int]:
    counts = {outcome: engine.side.counters[f"transfer_params.{outcome}"] for outcome in TransferOutcome}
    return {outcome: count for outcome, count in counts.items() if count}


@pytest.mark.requirement("A4", "B1")
@pytest.mark.parametrize(
    ("options", "blocks"),
    [({}, 5), (EVERY_CHUNK, 5), ({"hybrid": True, "retention": 0}, 2), ({"windows": (20,)}, 5), ({"ranks": 2}, 5),
     ({"settings": {"store_decode": False}}, 2), ({"settings": {"load_weight": 0}}, 5),
     ({"windows": (20,), "full": False}, 5)],
    ids=["dense", "hybrid", "hybrid with one checkpoint", "window", "two ranks", "prompts only", "stores only",
         "windows alone"],
)  # fmt: skip
def test_an_engine_answers_with_daemon_namespace_and_the_boundary_it_reached(
    make: Make, options: dict[str, Any], blocks: int
) -> None:
    engine = make(**options)
    tokens = prompt(2.5)
    assert told(engine, tokens, 3 * BLOCK) == says(engine, blocks * BLOCK)
    engine.reset()
    other = make(**options | {"settings": {}})
    request = ask(other, [*tokens, *cold(tokens, 3 * BLOCK), *prompt(1, seed=9)], says(engine, blocks * BLOCK))
    other.run()
    assert other.hits[request] == blocks * BLOCK, "and that is what the next turn finds"
    assert counted(other) == {TransferOutcome.MET: 1}
    for one in (engine, other):
        one.assert_clean()


@pytest.mark.requirement("A4")
def test_what_was_loaded_or_found_in_the_engines_own_cache_is_reached_too(make: Make) -> None:
    tokens = prompt(4.5)
    first, second = make(hybrid=True, retention=0), make(hybrid=True, retention=0)
    assert told(first, tokens) == says(first, 4 * BLOCK)
    assert told(first, tokens) == says(first, 4 * BLOCK)
    assert told(second, tokens) == says(first, 4 * BLOCK)


def test_a_request_that_brings_no_params_gets_none(make: Make) -> None:
    engine = make()
    request = engine.add(prompt(4.5))
    engine.run()
    assert request not in engine.handed


@pytest.mark.requirement("I1d")
def test_of_a_request_alive_across_a_change_of_weights_nothing_is_told(make: Make) -> None:
    engine = make()
    request = ask(engine, prompt(5.5), {"do_remote_decode": True}, 2 * BLOCK)
    engine.step()
    engine.connector.reset_cache()
    engine.run()
    assert request not in engine.handed
    engine.assert_clean()


@pytest.mark.requirement("A4")
def test_a_store_that_was_refused_is_not_told(make: Make, depot: DirectDepot) -> None:
    engine = make()
    tokens = prompt(2.5)
    known = told(engine, tokens)
    engine.reset()
    depot.engine.switch(Switch.STORES, b"", on=False)
    assert known == says(engine, 2 * BLOCK)
    assert told(engine, [*tokens, *prompt(3, seed=9)]) == known


@pytest.mark.requirement("A4")
@pytest.mark.parametrize("options", [{}, EVERY_CHUNK], ids=["dense", "hybrid"])
def test_an_engine_waits_for_what_another_one_is_storing(
    make: Make, depot: DirectDepot, options: dict[str, Any]
) -> None:
    first, second = make(**options), make(**options)
    tokens = prompt(4.5)
    depot.held.add(ReserveCall)
    request = ask(first, tokens, {"do_remote_decode": True})
    while request not in first.handed:
        first.step()
    assert first.handed[request] == says(first, 4 * BLOCK)
    handed = ask(second, tokens, first.handed[request])

    def asked_again() -> bool:
        second.step()
        return depot.count(LocateCall) > 2

    wait_until(asked_again, "it asks again")
    assert handed not in second.hits, "its turn has come, and it waits"
    depot.held.clear()
    first.session.let_go()
    first.run()
    second.run()
    assert second.hits[handed] == 4 * BLOCK
    assert second.outputs[handed] == cold(tokens)
    assert counted(second) == {TransferOutcome.MET: 1}
    assert second.side.counters["stored_objects"] == 0, "what was loaded is not stored again (A3)"
    for engine in (first, second):
        engine.assert_clean()


@pytest.mark.requirement("A4", "P7")
def test_what_does_not_come_is_not_waited_for_long(make: Make) -> None:
    tokens = prompt(6.5)
    make().generate(tokens[: 3 * BLOCK])
    engine = make()
    request = ask(engine, tokens, says(engine, 6 * BLOCK))
    engine.run()
    assert engine.outputs[request] == cold(tokens)
    assert engine.hits[request] == 3 * BLOCK, "what there is, is loaded"
    assert counted(engine) == {TransferOutcome.SHORT: 1}
    engine.assert_clean()


@pytest.mark.requirement("A4")
def test_what_the_engine_has_itself_is_waited_for_by_nobody(make: Make, depot: DirectDepot) -> None:
    tokens = prompt(4.5)
    engine = make()
    depot.present = False
    engine.generate(tokens)
    depot.present = True
    engine.settle()
    asked = depot.count(LocateCall)
    ask(engine, tokens, says(engine, 4 * BLOCK))
    engine.run()
    assert counted(engine) == {TransferOutcome.MET: 1}
    assert depot.count(LocateCall) == asked + 1


@pytest.mark.requirement("A4")
@pytest.mark.parametrize("reason", [MissReason.EVICTED, MissReason.LOADS_OFF, MissReason.NO_GRANT, MissReason.OTHER])
def test_nobody_waits_for_what_no_engine_is_storing(
    make: Make, depot: DirectDepot, monkeypatch: pytest.MonkeyPatch, reason: MissReason
) -> None:
    engine = make()
    serve = engine.session._serve

    def answer(call: Any) -> Any:
        reply = serve(call)
        return replace(reply, miss=reason) if isinstance(reply, LocateReply) else reply

    monkeypatch.setattr(engine.session, "_serve", answer)
    ask(engine, prompt(4.5), says(engine, 4 * BLOCK))
    engine.run()
    assert counted(engine) == {TransferOutcome.SHORT: 1}
    assert depot.count(LocateCall) == 1


@pytest.mark.requirement("I3")
@pytest.mark.parametrize(
    ("params", "outcome"),
    [
        ({}, None),
        ({"do_remote_prefill": True, 7: "seven"}, None),
        ({"kvdepot:0000000000000001": {"namespace": "0" * 32, "boundary_tokens": 64}}, TransferOutcome.OTHER_NAMESPACE),
        ({"kvdepot:0000000000000001": {"namespace": "0" * 32}}, TransferOutcome.MALFORMED),
        ({"kvdepot:1": {"namespace": "0" * 32, "boundary_tokens": 64}}, TransferOutcome.MALFORMED),
        ({KEY: {"namespace": "0" * 32, "boundary_tokens": 64}}, TransferOutcome.OTHER_NAMESPACE),
        ({KEY: None}, TransferOutcome.MALFORMED),
        ({KEY: 64}, TransferOutcome.MALFORMED),
        ({KEY: {"namespace": "0" * 31 + "\n", "boundary_tokens": 64}}, TransferOutcome.MALFORMED),
        ({KEY: {"namespace": 0, "boundary_tokens": 64}}, TransferOutcome.MALFORMED),
        ({KEY: {"namespace": "0" * 32, "boundary_tokens": "64"}}, TransferOutcome.MALFORMED),
        ({KEY: {"namespace": "0" * 32, "boundary_tokens": -64}}, TransferOutcome.MALFORMED),
        ({KEY: {"namespace": "0" * 32, "boundary_tokens": True}}, TransferOutcome.MALFORMED),
        ({KEY: {"namespace": "0" * 32}}, TransferOutcome.MALFORMED),
    ],
)
def test_params_that_are_of_no_use_change_nothing(
    make: Make, depot: DirectDepot, params: dict[Any, Any], outcome: TransferOutcome | None
) -> None:
    engine = make()
    tokens = prompt(4.5)
    request = ask(engine, tokens, params)
    engine.run()
    assert engine.outputs[request] == cold(tokens)
    assert counted(engine) == ({outcome: 1} if outcome else {})
    assert depot.count(LocateCall) == 1
    assert engine.handed[request] == says(engine, 4 * BLOCK)
    engine.assert_clean()


OTHER = 0xF00D
"""The arena of another node's daemon."""


def named(engine: ScriptedEngine, boundary: int, arena: int = OTHER) -> dict[str, Any]:
    return {f"kvdepot:{arena:016x}": says(engine, boundary)[KEY]}


def has_as_peer(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, *arenas: int) -> list[int]:
    """Let the engine's daemon have these daemons as peers. Return which arena each lookup has named."""
    serve, asked = engine.session._serve, list[int]()

    def answer(call: Any) -> Any:
        reply = serve(call)
        if not isinstance(reply, LocateReply):
            return reply
        asked.append(call.source_id)
        return replace(reply, source_tier="node-a" if call.source_id in arenas else "")

    monkeypatch.setattr(engine.session, "_serve", answer)
    return asked


@pytest.mark.requirement("B3")
@pytest.mark.parametrize("options", [{}, EVERY_CHUNK], ids=["dense", "hybrid"])
def test_what_an_engine_of_a_peer_is_storing_is_waited_for_and_its_daemon_is_named(
    make: Make, depot: DirectDepot, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    first, second = make(**options), make(**options)
    asked = has_as_peer(second, monkeypatch, OTHER)
    tokens = prompt(4.5)
    request = ask(second, tokens, named(second, 4 * BLOCK))

    def asked_again() -> bool:
        second.step()
        return len(asked) > 2

    wait_until(asked_again, "it asks again")
    first.generate(tokens)
    second.run()
    assert second.hits[request] == 4 * BLOCK
    assert second.outputs[request] == cold(tokens)
    assert set(asked) == {OTHER}
    assert counted(second) == {TransferOutcome.MET: 1}
    for engine in (first, second):
        engine.assert_clean()


@pytest.mark.requirement("B3", "P7")
def test_what_a_peer_does_not_get_is_not_waited_for_long(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    asked = has_as_peer(engine, monkeypatch, OTHER)
    tokens = prompt(6.5)
    request = ask(engine, tokens, named(engine, 6 * BLOCK))
    engine.run()
    assert engine.outputs[request] == cold(tokens)
    assert request not in engine.hits or engine.hits[request] == 0
    assert counted(engine) == {TransferOutcome.SHORT: 1}
    assert 1 < len(asked) < 20


@pytest.mark.requirement("B3")
def test_a_daemon_that_is_no_peer_is_named_and_not_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    asked = has_as_peer(engine, monkeypatch)
    tokens = prompt(4.5)
    request = ask(engine, tokens, named(engine, 4 * BLOCK))
    engine.run()
    assert engine.outputs[request] == cold(tokens)
    assert (asked, counted(engine)) == ([OTHER], {TransferOutcome.OTHER_DAEMON: 1})


@pytest.mark.requirement("B3")
def test_a_peer_whose_engine_has_another_namespace_is_logged_once_with_what_to_compare(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines that differ in dtype, weights or ranks: the likeliest mistake of a set-up of prefill and decode."""
    engine = make()
    asked = has_as_peer(engine, monkeypatch, OTHER)
    params = {f"kvdepot:{OTHER:016x}": {"namespace": "5" * 32, "boundary_tokens": 4 * BLOCK}}
    for seed in range(2):
        ask(engine, prompt(4.5, seed=seed), params)
    engine.run()
    assert (set(asked), counted(engine)) == ({0}, {TransferOutcome.OTHER_NAMESPACE: 2})
    (line,) = [record.getMessage() for record in caplog.records if "shares nothing" in record.getMessage()]
    assert f"describe {'5' * 32}` on the other node" in line


@pytest.mark.requirement("B3", "I3")
@pytest.mark.parametrize(
    "params",
    [
        {"kvdepot:000000000000F00D": {}},
        {"kvdepot:f00d": {}},
        {"kvdepot:000000000000f00d\n": {}},
        {"kvdepot:tcp://10.0.0.1": {}},
        {"kvdepot:" + 12 * "\N{ARABIC-INDIC DIGIT ZERO}" + "f00d": {}},
        {"kvdepot:000000000000f00d": {"namespace": "0" * 32}},
        {"kvdepot:000000000000f00d": {"boundary_tokens": -1}},
        {"kvdepot:000000000000f00d": {"boundary_tokens": 1e3}},
        {KEY: {}},
        {f"key{number}": {} for number in range(10_000)},
    ],
    ids=lambda params: next(iter(params)).encode("unicode_escape").decode(),
)
def test_params_that_name_no_daemon_in_the_right_form_name_none(
    make: Make, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    engine = make()
    asked = has_as_peer(engine, monkeypatch, OTHER)
    right = says(engine, 4 * BLOCK)[KEY]
    several = {key: right | entry for key, entry in params.items()}
    if KEY in params or len(params) > 1:  # its own daemon's come first, and of many keys few are read
        several |= named(engine, 4 * BLOCK)
    tokens = prompt(4.5)
    request = ask(engine, tokens, several)
    engine.run()
    assert engine.outputs[request] == cold(tokens)
    assert set(asked) == {0}


@pytest.mark.requirement("I3")
def test_a_boundary_beyond_any_is_the_prompts(make: Make) -> None:
    tokens = prompt(4.5)
    make().generate(tokens)
    engine = make()
    request = ask(engine, tokens, says(engine, (1 << 64) - 1))
    engine.run()
    assert engine.hits[request] == 4 * BLOCK
    assert counted(engine) == {TransferOutcome.MET: 1}


@pytest.mark.requirement("P9")
def test_of_what_was_handed_no_more_is_waited_for_than_the_request_may_load(make: Make) -> None:
    tokens = prompt(8.5)
    make().generate(tokens[: 4 * BLOCK])
    engine = make()
    request = ask(engine, tokens, says(engine, 8 * BLOCK) | {"max_load_tokens": 3 * BLOCK})
    engine.run()
    assert engine.hits[request] == 3 * BLOCK
    assert counted(engine) == {TransferOutcome.MET: 1}
