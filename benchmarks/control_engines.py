"""Engines of `benchmarks.control`, each a process of its own as vLLM's are: a daemon tells sessions by their processes.

All do their share of a call at the same time, and have some of their calls under way at once.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.session import DepotSession
from kvdepot.core.calls import (
    ROOT_KEY,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitOutcome,
    Kind,
    LocateCall,
    LocateReply,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)

from benchmarks.depot import engine
from tests.rigs.raw_client import CHUNK_TOKENS, dense_spec

OBJECT_BYTES: Final = 4096
_CALL_SECONDS: Final = 60.0
IN_FLIGHT: Final = 8
"""Calls of one engine at once."""

Prompt = tuple[bytes, ...]


def _kinds(keys: Prompt) -> bytes:
    return bytes([Kind.ATTENTION] * len(keys))


class _Engine:
    """What one engine does. Its methods raise SystemExit if the daemon refuses anything."""

    def __init__(self, session: DepotSession) -> None:
        self._session = session
        self._namespace = dense_spec("control", OBJECT_BYTES).namespace_id()
        self._open = 0
        self._leases: list[tuple[int, int]] = []  # with the number of objects

    def _drive(self, count: int, start: Callable[[int], None]) -> None:
        """Start work 0 to `count`, some at once, until all has ended."""
        number = 0
        while number < count or self._open:
            while number < count and self._open < IN_FLIGHT:
                self._open += 1
                start(number)
                number += 1
            self._session.wait(_CALL_SECONDS)

    def reserve(self, prompts: Sequence[Prompt]) -> None:
        def start(number: int) -> None:
            keys, lease = prompts[number], self._session.new_lease_id()
            parents = b"".join((ROOT_KEY, *keys[:-1]))
            boundaries = (np.arange(1, len(keys) + 1) * CHUNK_TOKENS).astype("<u4").tobytes()
            call = ReserveCall(b"", lease, self._namespace, b"".join(keys), parents, _kinds(keys), boundaries)

            def done(reply: object) -> None:
                if not isinstance(reply, ReserveReply) or set(reply.outcomes) != {ReserveOutcome.GRANTED}:
                    raise SystemExit(f"reserve: {reply}"[:300])
                self._open -= 1
                self._leases.append((lease, len(keys)))

            self._session.submit(call, _CALL_SECONDS, done)

        self._drive(len(prompts), start)

    def commit(self, _: Sequence[Prompt]) -> None:
        """Commit all that is reserved."""

        def committed(outcomes: bytes) -> None:
            self._open -= 1
            if set(outcomes) != {CommitOutcome.COMMITTED}:
                raise SystemExit(f"commit: {list(outcomes)}")

        leases, self._leases = self._leases, []

        def start(number: int) -> None:
            lease, objects = leases[number]
            self._session.commit(lease, range(objects), committed)

        self._drive(len(leases), start)

    def locate(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return those that are in RAM as a whole."""
        found: list[Prompt] = []

        def start(number: int) -> None:
            keys = prompts[number]

            def done(reply: object) -> None:
                if not isinstance(reply, LocateReply):
                    raise SystemExit(f"locate: {reply}"[:300])
                self._open -= 1
                if reply.boundary_tokens == len(keys) * CHUNK_TOKENS:
                    found.append(keys)

            call = LocateCall(b"", self._namespace, b"".join(keys), len(keys) * CHUNK_TOKENS)
            self._session.submit(call, _CALL_SECONDS, done)

        self._drive(len(prompts), start)
        return found

    def acquire(self, prompts: Sequence[Prompt]) -> None:
        def start(number: int) -> None:
            keys, lease = prompts[number], self._session.new_lease_id()

            def done(reply: object) -> None:
                if not isinstance(reply, AcquireReply) or reply.outcome is not AcquireOutcome.GRANTED:
                    raise SystemExit(f"acquire: {reply}"[:300])
                self._open -= 1
                self._leases.append((lease, len(keys)))

            self._session.submit(
                AcquireCall(b"", lease, self._namespace, b"".join(keys), _kinds(keys)), _CALL_SECONDS, done
            )

        self._drive(len(prompts), start)

    def release(self, _: Sequence[Prompt]) -> None:
        """Release all that is acquired."""
        leases, self._leases = self._leases, []
        for lease, _objects in leases:
            self._session.release((lease,))
        while self._session.open_leases:
            self._session.wait(0.001)


class Engines:
    """The driver's end. A call returns once every engine has done its share of the prompts."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.count = len(connections)
        self._connections = connections

    def _all(self, call: Callable[[_Engine, Sequence[Prompt]], object], prompts: Sequence[Prompt] = ()) -> list[object]:
        for number, connection in enumerate(self._connections):
            connection.send((call.__name__, prompts[number :: self.count]))
        try:
            return [connection.recv() for connection in self._connections]
        except EOFError:
            raise SystemExit("an engine has ended") from None

    def reserve(self, prompts: Sequence[Prompt]) -> None:
        self._all(_Engine.reserve, prompts)

    def commit(self) -> None:
        self._all(_Engine.commit)

    def locate(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        found: list[Prompt] = []
        for share in self._all(_Engine.locate, prompts):
            assert isinstance(share, list)
            found += share
        return found

    def acquire(self, prompts: Sequence[Prompt]) -> None:
        self._all(_Engine.acquire, prompts)

    def release(self) -> None:
        self._all(_Engine.release)


def _serve(connection: Connection, endpoint: Endpoint, name: str) -> None:
    with engine(endpoint, dense_spec("control", OBJECT_BYTES), name) as (session, _):
        one = _Engine(session)
        connection.send(None)
        while True:
            try:
                call, prompts = connection.recv()
            except EOFError:  # the driver has ended
                return
            connection.send(getattr(one, call)(prompts))


@contextmanager
def engines(count: int, endpoint: Endpoint) -> Iterator[Engines]:
    """So many engines of one namespace, each attached and registered."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        ours: list[Connection] = []
        for number in range(count):
            end, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, endpoint, f"control-{number}"))
            process.start()
            stack.callback(process.join)
            stack.enter_context(end)
            other.close()
            ours.append(end)
        for end in ours:
            try:
                end.recv()
            except EOFError:
                raise SystemExit("an engine has not started") from None
        yield Engines(ours)
