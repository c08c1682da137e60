"""Checks of announced chunks: where the daemon has them, asked every 0.8 s while the engine steps.

A step asks for a part of them, so that it has little to do. After a refusal there is a pause: the daemon may be older
than the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.core.calls import FindTiersCall, FindTiersReply

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.scheduling.events import Chunk, KvEvents
    from kvdepot.client.vllm.scheduling.namespaces import Namespaces

ROUND_SECONDS: Final = 0.8
"""In which every announced chunk is asked for once. So a removal is published within a second, if steps are short."""
CHUNKS_PER_CALL: Final = 2048
"""At most one call a step. The daemon's thread takes 0.6 ms for it (`benchmarks.index`), and a step up to 30 ms."""
TIMEOUT_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 60.0


class TierChecks:
    """The checks of one engine. Used on the scheduler's thread only."""

    def __init__(
        self, session: DepotSession, namespaces: Namespaces, events: KvEvents, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._namespaces = namespaces
        self._events = events
        self._clock = clock
        self._round: list[tuple[bytes, Chunk]] = []  # what is still to be asked for
        self._due = 0.0  # when the next part is
        self._pause_seconds = 0.0  # between two parts of the present round
        self._unanswered = 0

    def step(self) -> None:
        """Ask for the parts that are due. Call this once a step."""
        now = self._clock()
        namespace = self._namespaces.registered_id if self._events.announced else None
        if namespace is None:
            self._round = []
        if namespace is None or now < self._due:
            return
        if not self._round and not self._unanswered:
            self._round = list(self._events.announced.items())
            self._pause_seconds = ROUND_SECONDS / -(-len(self._round) // CHUNKS_PER_CALL)
            self._due = now
        if not self._round:
            return
        part, self._round = self._round[-CHUNKS_PER_CALL:], self._round[:-CHUNKS_PER_CALL]
        self._due += self._pause_seconds
        self._unanswered += 1
        call = FindTiersCall(b"", namespace, b"".join(key for key, _ in part))
        self._session.submit(call, TIMEOUT_SECONDS, partial(self._answered, part))

    def _answered(self, part: list[tuple[bytes, Chunk]], reply: Any) -> None:
        self._unanswered -= 1
        if isinstance(reply, FindTiersReply) and len(reply.tiers) == len(part):
            self._events.found(part, reply.tiers)
        elif isinstance(reply, CallFailure) and reply.reason is FailureReason.REFUSED:
            self._round = []
            self._due = self._clock() + REFUSED_SECONDS
