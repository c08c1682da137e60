"""I3: nothing the connector does may reach the engine as an exception; and its messages merge."""

from __future__ import annotations

import inspect
import logging
import pickle

import pytest
from kvdepot.client.vllm.base.guard import TEXTS_MAX, Failures, guarded
from kvdepot.client.vllm.base.metadata import RankArena, RankMeta
from kvdepot.client.vllm.connector import KVDepotConnector


class Thing:
    def __init__(self) -> None:
        self.failures = Failures(logging.getLogger("test"))

    @guarded(lambda self, value: -value)
    def half(self, value: int) -> int:
        if value % 2:
            raise ValueError(value)
        return value // 2


@pytest.mark.requirement("I3")
def test_an_exception_becomes_the_safe_answer_and_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thing = Thing()
    assert thing.half(4) == 2
    assert [thing.half(3), thing.half(5)] == [-3, -5]
    assert thing.failures.counts == {"half:ValueError": 2}
    assert len(caplog.records) == 1


@pytest.mark.requirement("I3")
def test_errors_of_a_device_have_one_type_and_each_text_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(logging.getLogger("test"))
    for text in ("CUDA error: out of memory\nsee the manual", "CUDA error: unspecified launch failure", "x" * 200):
        for _ in range(2):
            failures.record("copy", RuntimeError(text), by_text=True)
    first, second, third = caplog.messages
    assert "copy failed (RuntimeError: CUDA error: out of memory), and" in first
    assert "(RuntimeError: CUDA error: unspecified launch failure)" in second and f"(RuntimeError: {'x' * 80})" in third
    for number in range(100):
        failures.record("copy", RuntimeError(number), by_text=True)
    assert len(caplog.messages) == TEXTS_MAX and failures.counts == {"copy:RuntimeError": 106}


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


@pytest.mark.requirement("I3")
@pytest.mark.parametrize("name", RUNTIME)
def test_every_method_the_running_engine_calls_is_guarded(name: str) -> None:
    connector = object.__new__(KVDepotConnector)
    connector.failures = Failures(logging.getLogger("test"))
    connector.sides = connector.worker_side = Broken()  # type: ignore[assignment]
    connector._connector_metadata = None
    method = getattr(connector, name)
    count = len([p for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD])
    method(*[Broken()] * count)
    assert connector.failures.counts or name in ("start_load_kv", "wait_for_save", "get_handshake_metadata", "shutdown")


@pytest.mark.requirement("I3")
def test_building_a_steps_message_never_raises_and_is_never_none() -> None:
    connector = object.__new__(KVDepotConnector)
    connector.failures = Failures(logging.getLogger("test"))
    connector.sides = Broken()  # type: ignore[assignment]
    meta = connector.build_connector_meta(Broken())
    assert meta.loads == []
    assert connector.failures.counts.total() == 2


RANK_0, RANK_1 = 1 << 0, 1 << 1


def test_acknowledgements_of_ranks_add_up() -> None:
    arena = RankArena(7, 1)
    one = RankMeta({0: arena}, {1: (RANK_0, 0), 2: (RANK_0, RANK_0)}, {5: (RANK_0, frozenset({3}))})
    two = RankMeta({1: arena}, {1: (RANK_1, RANK_1)}, {5: (RANK_1, frozenset({4})), 6: (RANK_1, frozenset())})
    merged = pickle.loads(pickle.dumps(one)).aggregate(two)
    stores = {5: (RANK_0 | RANK_1, frozenset({3, 4})), 6: (RANK_1, frozenset[int]())}
    loads = {1: (RANK_0 | RANK_1, RANK_1), 2: (RANK_0, RANK_0)}
    assert merged == RankMeta({0: arena, 1: arena}, loads, stores)
    assert one.loads == {1: (RANK_0, 0), 2: (RANK_0, RANK_0)}, "an aggregate changes neither part"


def test_a_rank_that_is_heard_twice_is_no_second_rank() -> None:
    """vLLM 0.33 replays what workers said in a step in which one of them failed."""
    one = RankMeta({}, {1: (RANK_0, 0)}, {5: (RANK_0, frozenset({3}))})
    merged = one.aggregate(pickle.loads(pickle.dumps(one)))
    assert merged == one


def test_of_two_words_of_one_rank_the_later_one_counts_in_whatever_order_they_come() -> None:
    before, now = RankMeta({0: RankArena(7, 1, 10.0)}), RankMeta({0: RankArena(8, 1, 20.0)})
    assert before.aggregate(now).arenas[0].arena_id == now.aggregate(before).arenas[0].arena_id == 8
