"""The scheduler side's session with the daemon. No call here waits for the daemon, or raises because of it."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvdepot.client.attachment import Attachment, EngineProcess, Miss
from kvdepot.client.calls import Call, ChainedAcquire, LeaseCall
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.leases import LEASE_BITS, LeaseIds
from kvdepot.client.session_loop import CONFIRM_SECONDS_MAX, Completion, LoopState, SessionLoop
from kvdepot.core.calls import (
    AcquireReply,
    FindTiersReply,
    LocateReply,
    RequestEnd,
    ReserveReply,
    TokenReport,
)
from kvdepot.core.limits import LEASES_PER_SESSION_MAX

if TYPE_CHECKING:
    import logging
    import socket

    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.elements import Elements
    from kvdepot.core.keys import NamespaceSpec

Reply = LocateReply | FindTiersReply | AcquireReply | ReserveReply
Done = Callable[[Reply | CallFailure], None]
CommitDone = Callable[[bytes], None]


class DepotSession:
    """All of an engine's control calls. Made and used by the scheduler's thread.

    Callbacks run inside `poll`, on the thread that calls it. `release`, `commit`, `abandon`,
    `end_request` and `call_soon` may be called on any thread. Calls are made with
    `session=b""`: the session fills in its current token. Lease ids come from
    `new_lease_id`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        engine_id: str,
        world_size: int = 1,
        *,
        client_version: str = "",
        open_leases_max: int = LEASES_PER_SESSION_MAX,
        confirm_timeout_seconds: float = CONFIRM_SECONDS_MAX,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        log: logging.Logger | None = None,
        log_absence: bool = False,
    ) -> None:
        """Prepare a session; `start` begins it.

        Args:
            endpoint: where the daemon listens.
            engine_id: the same for all processes of an engine.
            world_size: workers of the engine.
            client_version: for the daemon's records.
            open_leases_max: with more open leases, a call that asks for another one fails at once.
            confirm_timeout_seconds: after this time a release, commit, abandon or end of a request is sent again.
            clock: monotonic, in seconds.
            rng: draws lease ids and jitter (default: seeded by the system).
            log: for warnings.
            log_absence: whether to log that no daemon is there, and that it is back.
        """
        rng = rng or random.SystemRandom()
        self._clock = clock
        self._open_leases_max = open_leases_max
        self._lease_ids = LeaseIds(rng.getrandbits(LEASE_BITS))
        self._completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._attachment = Attachment(
            endpoint,
            EngineProcess(engine_id, scheduler=True, world_size=world_size),
            map_arena=False,
            on_change=self._attachment_changed,
            client_version=client_version,
            log=log,
            on_missed=self._attachment_missed if log_absence else None,
        )
        self._loop = SessionLoop(
            endpoint, self._attachment, self._completions, world_size, clock, rng, confirm_timeout_seconds, log
        )
        self._leases_asked = 0
        self._closed = False

    def _attachment_changed(self, token: bytes | None, connection: socket.socket | None) -> None:
        self._loop.post(self._loop.attachment_changed, token, connection)

    def _attachment_missed(self, reason: str, miss: Miss) -> None:
        self._loop.post(self._loop.attachment_missed, reason, miss)

    def count_computed(self) -> None:
        """Count a request that the engine computes because of an outage, for the log."""
        self._loop.daemon_log.computed += 1

    def start(self) -> None:
        """Start the threads. Return at once; `attached` turns True when the daemon was reached."""
        self._loop.start()
        self._attachment.start()

    @property
    def threads(self) -> tuple[int, int]:
        """Return the kernel's ids of the threads that an answer comes from: the session's, and the daemon's loop.

        0 for one that is not there, or not seen here.
        """
        return self._loop.threads

    @property
    def attached(self) -> bool:
        """Attached, leases declared, and the daemon answers. Calls fail at once while it is False."""
        return self._state.attached

    @property
    def attachments(self) -> int:
        """How often the daemon has been attached to: another number, another attachment."""
        return self._state.counters["attached"]

    @property
    def ranks_attached(self) -> int:
        """Ranks the daemon has seen attach; none is served before all. Kept up while a namespace is registered."""
        return self._state.ranks_attached

    @property
    def refusal(self) -> str:
        """Why the daemon refused to attach this engine, or to register a namespace, in its words; empty if not."""
        return self._attachment.refusal or self._state.refusal

    @property
    def _state(self) -> LoopState:
        return self._loop.state

    def register(self, spec: NamespaceSpec, elements: Elements = MappingProxyType({})) -> None:
        """Register a namespace, now and after every attach, until `forget`. Return at once."""
        self._loop.post(self._loop.register, spec, elements)

    def forget(self, namespace: bytes) -> None:
        """Stop registering a namespace (an epoch has ended)."""
        self._loop.post(self._loop.forget, namespace)

    def registered(self, namespace: bytes) -> bool:
        """Whether the daemon of this attach has accepted it."""
        return namespace in self._state.registered

    def bumps_wanted(self, namespace: bytes) -> int | None:
        """Return the bump counter to register it with instead, if an operator has invalidated it, or None."""
        return self._state.bumps_wanted.get(namespace)

    def new_lease_id(self) -> int:
        """Return a lease id that no other session of this engine draws (63 bits, random start)."""
        return self._lease_ids.draw()

    def submit(self, call: Call, timeout_seconds: float, done: Done, then: ChainedAcquire | None = None) -> None:
        """Start a call; `done` gets the reply or a CallFailure within the timeout, in `poll`.

        `then`: the Acquire that a Locate's answer may lead to at once; see `cancel`.

        An Acquire or Reserve is repeated with the same lease id while time is left.
        After a failure its lease is ended here: the caller owes nothing for it. The same
        holds for a reply that grants nothing.
        """
        if isinstance(call, LeaseCall):
            self._leases_asked += 1
            if self.open_leases > self._open_leases_max:
                self._leases_asked -= 1
                self._fail(done, "too_many_leases", f"{self._open_leases_max} leases are open")
                return
        if self._closed:
            self._fail(done, "closed", "the session is closed")
            return
        self._loop.post(self._loop.calls.submit, call, self._clock() + timeout_seconds, done, then)

    def _fail(self, done: Done, code: str, message: str) -> None:
        self._completions.put((done, CallFailure(FailureReason.UNAVAILABLE, code, message)))

    def release(self, lease_ids: Sequence[int], *, used: bool = True, doubted: bool = False) -> None:
        """End reader leases that every rank is done with. Repeated until the daemon confirms.

        Args:
            lease_ids: the leases.
            used: whether they brought the engine something; else the daemon does not count them as hits.
            doubted: whether their bytes did not match their checksums; the daemon compares them itself.
        """
        self._loop.post(partial(self._loop.outbox.release, tuple(lease_ids), used=used, doubted=doubted))

    def cancel(self, lease_id: int) -> None:
        """Cancel a chained Acquire: it is not made, or its lease is released."""
        self._loop.post(self._loop.calls.cancel, lease_id)

    def commit(self, lease_id: int, indices: Sequence[int], done: CommitDone | None = None) -> None:
        """Commit objects that all ranks have written. `done` gets one CommitOutcome per index, in `poll`.

        Repeated until the daemon answers, in the order of the calls; LOST if the daemon lost the lease.
        """
        self._loop.post(self._loop.outbox.commit, lease_id, tuple(indices), done)

    def abandon(self, lease_id: int, indices: Sequence[int] = ()) -> None:
        """End granted objects that no rank touches any more, or the whole lease. Repeated until confirmed."""
        self._loop.post(self._loop.outbox.abandon, lease_id, tuple(indices))

    def end_request(
        self,
        request_id: str,
        end: RequestEnd = RequestEnd(),  # noqa: B008 - frozen
        tokens: TokenReport = TokenReport(),  # noqa: B008 - frozen
    ) -> None:
        """End a request. The call is sent after the commits before it."""
        self._loop.post(self._loop.outbox.end_request, request_id, end, tokens)

    def call_soon(self, done: Callable[[None], None]) -> None:
        """Have `poll` (or `wait`) call `done(None)`: how another thread hands over to the session's."""
        self._completions.put((done, None))

    def poll(self) -> int:
        """Run the callbacks that are due, on this thread. Return how many."""
        count = 0
        for _ in range(self._completions.qsize()):
            done, value = self._completions.get_nowait()
            done(value)
            count += 1
        return count

    def wait(self, timeout_seconds: float) -> int:
        """Wait until a callback is due, then `poll`. For tools and tests: an engine never calls this."""
        try:
            done, value = self._completions.get(timeout=timeout_seconds)
        except queue.Empty:
            return 0
        done(value)
        return 1 + self.poll()

    @property
    def open_leases(self) -> int:
        """Leases asked for whose end the daemon has not confirmed."""
        return self._leases_asked + self._state.leases_asked - self._state.leases_ended

    @property
    def unconfirmed(self) -> int:
        """Releases, commits, abandons and request ends not confirmed yet, as of the loop's last turn."""
        return self._state.unconfirmed

    def counters(self) -> dict[str, int]:
        """Events since the start, by name; none ever decreases."""
        return dict(self._state.counters)

    def end(self, timeout_seconds: float = 1.0) -> None:
        """Have the threads send what is queued for at most `timeout_seconds`, then detach. Return at once.

        The daemon ends what is left.
        """
        if not self._closed:
            self._closed = True
            self._loop.end(timeout_seconds)

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Do as `end`, and wait for the threads for a bounded time. A running engine never calls this."""
        self.end(timeout_seconds)
        self._loop.join(timeout_seconds + 1.0)
        self._attachment.close()
