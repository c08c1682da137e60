"""When the daemon is asked where the announced chunks are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.vllm.scheduling import tier_checks
from kvdepot.client.vllm.scheduling.tier_checks import REFUSED_SECONDS, ROUND_SECONDS, TierChecks
from kvdepot.core.calls import FindTiersCall, FindTiersReply, Nearest


class Engine:
    """What the checks see of one: its session, its namespace and its events."""

    def __init__(self, chunks: int) -> None:
        self.now = 100.0
        self.registered_id: bytes | None = b"namespace"
        self.announced: Any = OrderedDict((bytes([number]) * 16, object()) for number in range(chunks))
        self.asked: list[tuple[list[int], Callable[[Any], None]]] = []
        self.told: dict[bytes, int] = {}
        self.checks = TierChecks(self, self, self, lambda: self.now)  # type: ignore[arg-type]

    def submit(self, call: Any, timeout_seconds: float, done: Callable[[Any], None]) -> None:
        assert isinstance(call, FindTiersCall) and timeout_seconds > 0
        assert call.namespace_id == self.registered_id
        self.asked.append(([call.keys[at] for at in range(0, len(call.keys), 16)], done))

    def found(self, chunks: list[tuple[bytes, Any]], tiers: bytes) -> None:
        assert all(self.announced[key] is chunk for key, chunk in chunks)
        self.told.update(zip([key for key, _ in chunks], tiers, strict=True))

    def step(self, seconds: float = 0.0) -> list[list[int]]:
        """Return what is asked for after so many seconds, a list for each call."""
        self.now += seconds
        before = len(self.asked)
        self.checks.step()
        return [sorted(numbers) for numbers, _ in self.asked[before:]]

    def answer(self, reply: Any = None) -> None:
        """Answer every call: all is in RAM, or what is given."""
        for numbers, done in self.asked:
            done(reply or FindTiersReply(bytes([Nearest.RAM] * len(numbers))))
        self.asked.clear()


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_checks, "CHUNKS_PER_CALL", 4)


def test_every_chunk_is_asked_for_once_a_round_in_parts() -> None:
    engine = Engine(10)
    assert engine.step() == [[6, 7, 8, 9]]
    assert engine.step() == [], "the next part is not due yet"
    third = ROUND_SECONDS / 3
    assert engine.step(third) == [[2, 3, 4, 5]]
    assert engine.step(third) == [[0, 1]]
    engine.answer()
    assert engine.told == dict.fromkeys(engine.announced, Nearest.RAM)
    assert engine.step() == []
    assert engine.step(third) == [[6, 7, 8, 9]], "the next round"


def test_a_step_asks_for_one_part() -> None:
    engine = Engine(10)
    assert engine.step() == [[6, 7, 8, 9]]
    assert engine.step(10.0) == [[2, 3, 4, 5]]
    assert engine.step() == [[0, 1]]


@pytest.mark.parametrize("answer", [CallFailure(FailureReason.DEADLINE), FindTiersReply(b"")], ids=["none", "short"])
def test_no_round_begins_before_the_last_one_is_answered(answer: Any) -> None:
    engine = Engine(3)
    assert engine.step() == [[0, 1, 2]]
    assert engine.step(10.0) == []
    engine.answer(answer)
    assert not engine.told
    assert engine.step() == [[0, 1, 2]]


@pytest.mark.parametrize("lacks", ["chunks", "namespace"])
def test_without_chunks_or_a_namespace_nothing_is_asked(lacks: str) -> None:
    engine = Engine(0 if lacks == "chunks" else 3)
    engine.registered_id = None if lacks == "namespace" else engine.registered_id
    assert engine.step(10.0) == []


def test_after_a_refusal_there_is_a_pause() -> None:
    """The daemon may be older than the call, or it may be another one soon."""
    engine = Engine(10)
    engine.step()
    engine.answer(CallFailure(FailureReason.REFUSED, "invalid_argument"))
    assert engine.step(REFUSED_SECONDS - 1.0) == []
    assert engine.step(2.0) == [[6, 7, 8, 9]], "a new round"


def test_nothing_is_kept_of_a_round_when_nothing_is_announced_any_more() -> None:
    engine = Engine(10)
    engine.step()
    engine.announced.clear()
    engine.step()
    assert not engine.checks._round
