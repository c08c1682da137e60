"""The namespaces that a session registers, and the ranks that the daemon has seen, across re-attachments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.core.elements import KindElements
from kvdepot.core.registration import RegisterCall, RegisterReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdepot.client.backoff import Backoff
    from kvdepot.client.transports.control import Answer
    from kvdepot.core.elements import Elements
    from kvdepot.core.keys import NamespaceSpec


class Caller(Protocol):
    """The loop that owns this."""

    def call(self, call: Any, done: Callable[[Answer], None]) -> None: ...
    def after(self, seconds: float, event: Callable[[], None]) -> None: ...
    def noted(self, answer: Answer) -> None: ...
    def registered(self, spec: NamespaceSpec, reply: RegisterReply) -> None: ...


class Registrations:
    """Registers each namespace after every attach, and repeats that until all ranks are there."""

    def __init__(self, caller: Caller, world_size: int, backoff: Backoff) -> None:
        self.accepted: frozenset[bytes] = frozenset()
        self.refusal = ""
        self.ranks_attached = 0
        self._caller = caller
        self._world_size = world_size
        self._backoff = backoff
        self._specs: dict[bytes, tuple[NamespaceSpec, Elements]] = {}
        self.bumps_wanted: dict[bytes, int] = {}  # by namespace: the bump counter that the daemon wants instead
        self._token: bytes | None = None
        self._armed = False

    def add(self, spec: NamespaceSpec, elements: Elements) -> None:
        namespace = spec.namespace_id()
        self._specs[namespace] = spec, elements
        self._ask(namespace)

    def remove(self, namespace: bytes) -> None:
        self._specs.pop(namespace, None)
        self.bumps_wanted.pop(namespace, None)
        self.accepted -= {namespace}

    def attached(self, token: bytes, ranks_attached: int) -> None:
        self._token = token
        self.ranks_attached = ranks_attached
        self._backoff.reset()
        for namespace in self._specs:
            self._ask(namespace)

    def detached(self) -> None:
        self._token = None
        self.accepted = frozenset()
        self.refusal = ""
        self.ranks_attached = 0

    def again(self) -> None:
        """Register all namespaces again soon: an answer shows that the daemon knows fewer."""
        if not self._armed and self._specs:
            self._armed = True
            self._caller.after(self._backoff.next_seconds(), self._ask_all)

    def _ask_all(self) -> None:
        self._armed = False
        for namespace in self._specs:
            self._ask(namespace)

    def _ask(self, namespace: bytes) -> None:
        token = self._token
        if token is not None:
            spec, elements = self._specs[namespace]
            by_kind = tuple(KindElements(kind, runs) for kind, runs in elements.items())
            call = RegisterCall(token, spec, by_kind, follows_bumps=True)
            self._caller.call(call, lambda answer: self._answered(token, namespace, answer))

    def _answered(self, token: bytes, namespace: bytes, answer: Answer) -> None:
        if token != self._token or namespace not in self._specs:
            return
        self.bumps_wanted.pop(namespace, None)
        if isinstance(answer, RegisterReply) and not answer.namespace_id:
            self.accepted -= {namespace}
            if answer.bumps == self._specs[namespace][0].bumps:
                self.again()  # no sense
            else:
                self.bumps_wanted[namespace] = answer.bumps
        elif isinstance(answer, RegisterReply):
            self.accepted |= {namespace}
            self.refusal = ""
            self.ranks_attached = answer.ranks_attached
            self._caller.registered(self._specs[namespace][0], answer)
            if answer.ranks_attached < self._world_size:
                self.again()
        elif isinstance(answer, CallFailure) and answer.reason is FailureReason.REFUSED:
            self.accepted -= {namespace}
            self.refusal = answer.message
        else:
            self.again()
        self._caller.noted(answer)
