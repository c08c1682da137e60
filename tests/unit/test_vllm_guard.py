"""I3: nothing the connector does may reach the engine as an exception; and its messages merge."""

from __future__ import annotations

import inspect
import logging
import pickle

import pytest
from kvdepot.client.vllm.connector import KVDepotConnector
from kvdepot.client.vllm.guard import Failures, guarded
from kvdepot.client.vllm.metadata import RankArena, RankMeta


class Thing:
    def __init__(self) -> None:
        self.failures = Failures(logging.getLogger("test"))

    @guarded(lambda self, value: -value)
    def half(self, value: int) -> int:
        if value % 2:
            raise ValueError(value)
        return value // 2


def test_i3_an_exception_becomes_the_safe_answer_and_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thing = Thing()
    assert thing.half(4) == 2
    assert [thing.half(3), thing.half(5)] == [-3, -5]
    assert thing.failures.counts == {"half:ValueError": 2}
    assert len(caplog.records) == 1


RUNTIME = [
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "reset_cache",
    "shutdown",
    "register_kv_caches",
    "get_handshake_metadata",
]


class Broken:
    """Whatever is asked of it, it raises."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


@pytest.mark.parametrize("name", RUNTIME)
def test_i3_every_method_the_running_engine_calls_is_guarded(name: str) -> None:
    connector = object.__new__(KVDepotConnector)
    connector.failures = Failures(logging.getLogger("test"))
    connector.scheduler_side = connector.worker_side = Broken()  # type: ignore[assignment]
    connector._connector_metadata = None
    method = getattr(connector, name)
    count = len([p for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD])
    method(*[Broken()] * count)
    assert connector.failures.counts or name in ("start_load_kv", "wait_for_save", "get_handshake_metadata", "shutdown")


def test_i3_building_a_steps_message_never_raises_and_is_never_none() -> None:
    connector = object.__new__(KVDepotConnector)
    connector.failures = Failures(logging.getLogger("test"))
    connector.scheduler_side = Broken()  # type: ignore[assignment]
    meta = connector.build_connector_meta(Broken())
    assert meta.loads == []
    assert connector.failures.counts.total() == 2


def test_acknowledgements_of_ranks_add_up() -> None:
    arena = RankArena(7, 1)
    one = RankMeta({0: arena}, {1: (1, 0), 2: (1, 1)}, {5: (1, frozenset({3}))})
    two = RankMeta({1: arena}, {1: (1, 1)}, {5: (1, frozenset({4})), 6: (1, frozenset())})
    merged = pickle.loads(pickle.dumps(one)).aggregate(two)
    stores = {5: (2, frozenset({3, 4})), 6: (1, frozenset[int]())}
    assert merged == RankMeta({0: arena, 1: arena}, {1: (2, 1), 2: (1, 1)}, stores)
    assert one.loads == {1: (1, 0), 2: (1, 1)}, "an aggregate changes neither part"
