"""The namespaces of a session: asked for anew at each attachment, and forgotten when they are removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvdepot.client.backoff import Backoff
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.registrations import Registrations
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.registration import RegisterCall, RegisterReply

from tests.rigs.engine_rig import DENSE

NAMESPACE = DENSE.namespace_id()
TOKEN, LATER_TOKEN = b"t" * 16, b"u" * 16


class Caller:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[RegisterCall, Callable[[Any], None]]] = []
        self.events: list[Callable[[], None]] = []
        self.heard: list[Any] = []
        self.registrations: list[tuple[NamespaceSpec, RegisterReply]] = []

    def call(self, call: RegisterCall, done: Callable[[Any], None]) -> None:
        self.asked.append((call, done))

    def after(self, _: float, event: Callable[[], None]) -> None:
        self.events.append(event)

    def noted(self, answer: Any) -> None:
        self.heard.append(answer)

    def registered(self, spec: NamespaceSpec, reply: RegisterReply) -> None:
        self.registrations.append((spec, reply))


@pytest.fixture
def caller() -> Caller:
    return Caller()


@pytest.fixture
def registrations(caller: Caller) -> Registrations:
    return Registrations(caller, 2, Backoff(0.1, 1.0, lambda: 0.5))


def test_a_namespace_is_asked_for_at_each_attachment(caller: Caller, registrations: Registrations) -> None:
    registrations.add(DENSE, {})
    assert not caller.asked, "there is no daemon yet"
    registrations.attached(TOKEN, 1)
    caller.asked[0][1](RegisterReply(NAMESPACE, 2))
    assert (registrations.accepted, registrations.ranks_attached) == (frozenset({NAMESPACE}), 2)
    registrations.detached()
    assert not registrations.accepted
    registrations.attached(LATER_TOKEN, 2)
    assert [call.session for call, _ in caller.asked] == [TOKEN, LATER_TOKEN]
    assert caller.registrations == [(DENSE, RegisterReply(NAMESPACE, 2))], "told at the answer alone"


def test_an_answer_for_a_namespace_that_was_removed_is_nobody_s(caller: Caller, registrations: Registrations) -> None:
    registrations.attached(TOKEN, 2)
    registrations.add(DENSE, {})
    registrations.remove(NAMESPACE)
    caller.asked[0][1](RegisterReply(NAMESPACE, 2))
    assert not registrations.accepted


def test_an_answer_of_a_former_attachment_is_nobody_s(caller: Caller, registrations: Registrations) -> None:
    registrations.add(DENSE, {})
    registrations.attached(TOKEN, 2)
    registrations.attached(LATER_TOKEN, 2)
    caller.asked[0][1](CallFailure(FailureReason.UNAVAILABLE, "channel_closed"))
    caller.asked[0][1](RegisterReply(NAMESPACE, 2))
    assert not (registrations.accepted or caller.heard or caller.events)


def test_a_namespace_is_asked_for_until_all_ranks_are_there(caller: Caller, registrations: Registrations) -> None:
    registrations.attached(TOKEN, 1)
    registrations.add(DENSE, {})
    caller.asked[0][1](RegisterReply(NAMESPACE, 1))
    assert registrations.ranks_attached == 1
    caller.events.pop()()
    caller.asked[1][1](RegisterReply(NAMESPACE, 2))
    assert (registrations.ranks_attached, caller.events) == (2, [])
