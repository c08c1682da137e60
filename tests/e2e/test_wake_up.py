"""Twenty times sleep, new weights, wake-up, as vLLM 0.33 calls a connector (row I1d): nothing old, nothing left."""

from __future__ import annotations

import pytest

from demo.toys import DENSE
from tests.e2e.fleet import Fleet

pytestmark = [pytest.mark.long(seconds=50), pytest.mark.timeout(900)]
CYCLES = 20
FACTORS = (2.0, 0.5)
"""To other weights, and back to the ones before."""
PROMPT_TOKENS = 1500
HIT_TOKENS = 1280


@pytest.mark.requirement("I1d")
def test_nothing_is_served_of_former_weights_and_nothing_is_left_of_former_sides(fleet: Fleet) -> None:
    fleet.define(
        "waking", DENSE, {"block_size": 32, "worker_extension_cls": "tests.e2e.waking_connector.Sleeper"},
        connector_class=("WakingConnector", "tests.e2e.waking_connector"),
    )  # fmt: skip
    engine = fleet.engine("waking")
    prompt = fleet.prompt(PROMPT_TOKENS)
    tokens = [fleet.ask(engine, prompt).tokens]
    fleet.forget(engine)
    assert fleet.ask(engine, prompt).external_tokens == HIT_TOKENS
    threads = engine.call_workers("kvdepot_threads")
    sessions = len(fleet.daemon.status().sessions)
    for cycle in range(CYCLES):
        fleet.daemon.settle()
        engine.reset_connector()
        engine.call_workers("take_kv_memory")
        engine.call_workers("scale_weights", FACTORS[cycle % 2])
        engine.call_workers("give_kv_memory")
        woken = fleet.ask(engine, prompt)
        assert (woken.external_tokens, woken.local_tokens) == (0, 0)
        tokens.append(woken.tokens)
        fleet.forget(engine)
        again = fleet.ask(engine, prompt)
        assert (again.external_tokens, again.tokens) == (HIT_TOKENS, woken.tokens)
        assert engine.call_workers("kvdepot_threads") == threads
        status = fleet.daemon.settle()
        assert len(status.sessions) == sessions
        assert not any(session.leases or session.lent_objects for session in status.sessions)
    assert tokens[0] != tokens[1], "the weights make a difference"
    assert tokens == [tokens[cycle % 2] for cycle in range(CYCLES + 1)]
