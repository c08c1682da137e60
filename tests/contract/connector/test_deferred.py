"""Runners that end a step late: what ranks have copied is acknowledged in a later step, and counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput

from tests.fakes.call_orders import ORDERS
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt


class Steps:
    """The step in which each store was sent to the ranks, and the one in which the last rank's word of it came."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.number = 0
        self.sent: dict[int, int] = {}
        self.acknowledged: dict[int, int] = {}
        self._engine = engine
        self._ranks: dict[int, int] = {}  # bits, 1 << rank
        self._all = (1 << engine.ranks) - 1
        output = engine.connector.update_connector_output

        def update(kv: Any) -> None:
            for op_id, (ranks, _) in kv.kv_connector_worker_meta.stores.items() if kv.kv_connector_worker_meta else ():
                self._ranks[op_id] = self._ranks.get(op_id, 0) | ranks
                if self._ranks[op_id] == self._all:
                    self.acknowledged[op_id] = self.number
            output(kv)

        engine.connector.update_connector_output = update

    def run(self) -> None:
        """To the end of all stores."""
        engine = self._engine
        while engine.scheduler.has_unfinished_requests() or engine.connector.has_pending_push_work():
            self.number += 1
            for op in engine.step().kv_connector_metadata.stores:
                self.sent[op.op_id] = self.number
            assert engine.side.holds.pinned_blocks or self.sent.keys() == self.acknowledged.keys()
        assert self.sent.keys() == self.acknowledged.keys()
        assert all(ranks == self._all for ranks in self._ranks.values())


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("order", ORDERS)
def test_stores_of_a_deferred_step_are_acknowledged_a_step_later_at_the_earliest(
    make: Make, order: str, hybrid: bool
) -> None:
    options: dict[str, Any] = {
        "order": ORDERS[order],
        "ranks": 2,
        "hybrid": hybrid,
        "retention": BLOCK * hybrid or None,
    }
    engine, other = make(**options), make(**options)
    steps, tokens = Steps(engine), prompt(6.5)
    name = engine.add(tokens, 4)
    steps.run()
    assert engine.outputs[name] == cold(tokens)
    assert steps.sent, "nothing was stored"
    deferred = ORDERS[order].index("wait_for_save") > ORDERS[order].index("build_connector_worker_meta")
    least = 1 if deferred else 0
    assert min(steps.acknowledged[op_id] - sent for op_id, sent in steps.sent.items()) >= least
    assert other.generate(tokens) == cold(tokens)
    assert any(other.hits.values())
    for one in (engine, other):
        one.settle()
        one.reset()
        one.assert_clean()


@pytest.mark.skipif(not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"), reason="from vLLM 0.33 on")
@pytest.mark.parametrize("order", ORDERS)
def test_what_ranks_say_in_a_step_that_failed_counts_once_when_it_is_replayed(make: Make, order: str) -> None:
    """Every other step is one in which another worker failed: vLLM keeps what these said for its next step."""
    make(ranks=2).generate(prompt(6.5))
    engine = make(order=ORDERS[order], ranks=2)
    aggregator, steps = engine._aggregator, Steps(engine)
    aggregate = aggregator.aggregate

    def failing(outputs: list[Any], *rest: Any) -> Any:
        if not steps.number % 2:
            return aggregate(outputs, *rest)
        said = [output.kv_connector_output for output in outputs]
        nothing = [replace(output, kv_connector_output=KVConnectorOutput()) for output in outputs]
        answer = aggregate(nothing, *rest)
        aggregator.ft_defer_kv_connector_outputs(said)
        return answer

    aggregator.aggregate = failing
    for tokens in (prompt(6.5), prompt(9.5), prompt(6.5, seed=1)):
        name = engine.add(tokens, 4)
        steps.run()
        assert engine.outputs[name] == cold(tokens)
        engine.settle()
        engine.reset()
    assert list(engine.hits.values()) == [6 * BLOCK, 6 * BLOCK, 0]
    assert engine.loaded_reports == [*dict.fromkeys(engine.loaded_reports)]
    engine.assert_clean()
