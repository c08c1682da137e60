"""Traces: what engines look up, handed to operators who record it. They are bounded, and empty without recorders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from kvdepot.core.errors import LimitExceeded
from kvdepot.core.traces import PART_KEY_BYTES_MAX, PART_REQUESTS_MAX, TracedNamespace, TracedRequest, TracePart
from kvdepot.server.depot.tree.namespaces import Namespace

RECORDERS_MAX: Final = 4
WAITING_KEY_BYTES_MAX: Final = 8 << 20
"""Of requests that a recorder has not taken yet; later ones are lost to it, and counted."""


class Recorder:
    """The recorder of one operator. `take` removes and returns the next part of what came."""

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self._waiting: deque[TracedRequest] = deque()
        self._waiting_bytes = 0
        self._named: set[bytes] = set()
        self._to_name: list[TracedNamespace] = []
        self._lost = 0

    def asked(self, now: float, namespace: Namespace, keys: bytes, boundary_tokens: int) -> None:
        if namespace.spec is None:
            return
        if self._waiting_bytes + len(keys) > WAITING_KEY_BYTES_MAX:
            self._lost += 1
            return
        if namespace.id not in self._named:
            self._named.add(namespace.id)
            self._to_name.append(TracedNamespace(namespace.id, replace(namespace.spec, identity={})))
        self._waiting.append(TracedRequest(now - self._began_at, namespace.id, keys, boundary_tokens))
        self._waiting_bytes += len(keys)

    def take(self) -> TracePart:
        requests: list[TracedRequest] = []
        size_bytes = 0
        while self._waiting and len(requests) < PART_REQUESTS_MAX:
            size_bytes += len(self._waiting[0].keys)
            if requests and size_bytes > PART_KEY_BYTES_MAX:
                break
            requests.append(self._waiting.popleft())
            self._waiting_bytes -= len(requests[-1].keys)
        named, self._to_name = tuple(self._to_name), []
        return TracePart(named, tuple(requests), self._lost)


class Traces:
    """The recorders of one depot."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recorders: list[Recorder] = []

    def asked(self, namespace: Namespace, keys: bytes, boundary_tokens: int) -> None:
        """Hand the first lookup of a request's prompt to all recorders."""
        for recorder in self._recorders:
            recorder.asked(self._clock(), namespace, keys, boundary_tokens)

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Yield a new recorder, which records until the end of the block. Raise LimitExceeded where too many record."""
        if len(self._recorders) >= RECORDERS_MAX:
            raise LimitExceeded("traces recorded at once", len(self._recorders) + 1, RECORDERS_MAX)
        recorder = Recorder(self._clock())
        self._recorders.append(recorder)
        try:
            yield recorder
        finally:
            self._recorders.remove(recorder)
