"""Calls that end leases and requests, queued until the daemon confirms them. Pure: no clock, no I/O.

Each kind has one call in flight at a time. What is queued meanwhile goes with the next
call, so that a busy engine sends few large ones. A call that failed is sent again as it
was, in front of what came later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from kvdepot.core import limits
from kvdepot.core.calls import (
    AbandonCall,
    CommitCall,
    CommitItem,
    CommitOutcome,
    EndRequestCall,
    ReleaseCall,
    RequestEnd,
    TokenReport,
)

if TYPE_CHECKING:
    from kvdepot.core.calls import CommitReply

OutboxCall = ReleaseCall | CommitCall | AbandonCall | EndRequestCall
CommitDone = Callable[[bytes], None]

LEASES_PER_CALL = 512
INDICES_PER_CALL = 16_384
REQUESTS_QUEUED_MAX = 65_536
"""EndRequests beyond it are dropped, oldest first. The daemon ends such requests after 60 s.

The tokens that they report go with the next one. One that was sent is kept: the daemon may have counted it.
"""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What a confirmed call has ended, for the lease book, and the callbacks that are due."""

    leases: tuple[int, ...] = ()
    objects: tuple[tuple[int, tuple[int, ...]], ...] = ()  # lease, indices
    committed: tuple[tuple[CommitDone, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class _Item:
    lease_id: int
    indices: tuple[int, ...]
    done: CommitDone | None = None

    def packed(self) -> CommitItem:
        return CommitItem(self.lease_id, np.array(self.indices, dtype="<u4").tobytes())


class _Release(NamedTuple):
    id: int
    used: bool
    doubted: bool


class Outbox:
    """Queues of Release, Commit, Abandon and EndRequest."""

    def __init__(self) -> None:
        self._releases: deque[_Release] = deque()
        self._commits: deque[_Item] = deque()
        self._abandons: deque[_Item] = deque()
        self._requests: deque[tuple[str, int, RequestEnd, TokenReport]] = deque()
        self._request_sent = False  # the first one of these, at least once
        self._commits_asked = 0
        self._commits_ended = 0
        self._in_flight: dict[type[OutboxCall], int] = {}  # kind -> how many items of the queue's head
        self._single: set[type[OutboxCall]] = set()  # kinds whose last call was refused: one item a call, to find it

    def release(self, lease_ids: Iterable[int], *, used: bool, doubted: bool = False) -> None:
        self._releases.extend(_Release(lease_id, used, doubted) for lease_id in lease_ids)

    def commit(self, lease_id: int, indices: tuple[int, ...], done: CommitDone | None) -> None:
        self._commits.append(_Item(lease_id, indices, done))
        self._commits_asked += 1

    def abandon(self, lease_id: int, indices: tuple[int, ...]) -> None:
        self._abandons.append(_Item(lease_id, indices))

    def end_request(self, request_id: str, end: RequestEnd, tokens: TokenReport) -> None:
        """Queue the end of a request. It is sent when all commits so far have been answered."""
        if len(self._requests) >= REQUESTS_QUEUED_MAX:
            self._drop_request()
        self._requests.append((request_id, self._commits_asked, end, tokens))

    def _drop_request(self) -> None:
        """Drop the oldest end that was not sent. The next one reports its tokens too, if that can be one report."""
        at = int(self._request_sent)
        dropped = self._requests[at][3]
        del self._requests[at]
        request_id, commits, end, tokens = self._requests[at]
        both = dropped.joined(tokens)
        if both.credible and len(both.loaded_tokens) <= limits.TOKEN_SOURCES_MAX:
            self._requests[at] = (request_id, commits, end, both)

    def __len__(self) -> int:
        return len(self._releases) + len(self._commits) + len(self._abandons) + len(self._requests)

    def next_calls(self, session: bytes) -> list[OutboxCall]:
        """Return the calls to send now: at most one of each kind, and none of a kind that has one in flight."""
        calls: list[OutboxCall] = []
        if self._releases and ReleaseCall not in self._in_flight:
            leases = list(islice(self._releases, 1 if ReleaseCall in self._single else LEASES_PER_CALL))
            self._in_flight[ReleaseCall] = len(leases)
            unused = tuple(lease.id for lease in leases if not lease.used)
            doubted = tuple(lease.id for lease in leases if lease.doubted)
            calls.append(ReleaseCall(session, tuple(lease.id for lease in leases), unused, doubted))
        if self._commits and CommitCall not in self._in_flight:
            calls.append(CommitCall(session, self._take(CommitCall, self._commits)))
        if self._abandons and AbandonCall not in self._in_flight:
            calls.append(AbandonCall(session, self._take(AbandonCall, self._abandons)))
        if self._requests and EndRequestCall not in self._in_flight and self._requests[0][1] <= self._commits_ended:
            self._in_flight[EndRequestCall] = 1
            self._request_sent = True
            request_id, _, end, tokens = self._requests[0]
            calls.append(EndRequestCall(session, request_id, end, tokens))
        return calls

    def _take(self, kind: type[OutboxCall], queue: deque[_Item]) -> tuple[CommitItem, ...]:
        items: list[CommitItem] = []
        indices = 0
        for item in islice(queue, 1 if kind in self._single else LEASES_PER_CALL):
            indices += len(item.indices)
            if items and indices > INDICES_PER_CALL:
                break
            items.append(item.packed())
        self._in_flight[kind] = len(items)
        return tuple(items)

    def unconfirmed(self, kind: type[OutboxCall]) -> None:
        """Keep the items of a failed call queued."""
        self._in_flight.pop(kind)

    def refused(self, kind: type[OutboxCall]) -> Confirmed:
        """Note a refusal. Several items are sent one by one from now on; a single refused item is dropped."""
        if self._in_flight[kind] > 1:
            self._in_flight.pop(kind)
            self._single.add(kind)
            return Confirmed()
        return self._ended(kind, None)

    def confirmed(self, kind: type[OutboxCall], reply: CommitReply | None = None) -> Confirmed:
        """Note that the daemon has done a call. `reply`: of a Commit."""
        self._single.discard(kind)
        return self._ended(kind, reply)

    def _ended(self, kind: type[OutboxCall], reply: CommitReply | None) -> Confirmed:
        count = self._in_flight.pop(kind)
        if kind is ReleaseCall:
            return Confirmed(leases=tuple(self._releases.popleft().id for _ in range(count)))
        if kind is EndRequestCall:
            self._requests.popleft()
            self._request_sent = False
            return Confirmed()
        queue = self._commits if kind is CommitCall else self._abandons
        items = [queue.popleft() for _ in range(count)]
        if kind is AbandonCall:
            return Confirmed(
                leases=tuple(item.lease_id for item in items if not item.indices),
                objects=tuple((item.lease_id, item.indices) for item in items if item.indices),
            )
        self._commits_ended += count
        outcomes = _outcomes(items, reply)
        return Confirmed(
            objects=tuple((item.lease_id, item.indices) for item in items),
            committed=tuple((i.done, o) for i, o in zip(items, outcomes, strict=True) if i.done is not None),
        )


def _outcomes(items: list[_Item], reply: CommitReply | None) -> list[bytes]:
    """Return one CommitOutcome per index; LOST for what the answer does not cover."""
    answered = reply.outcomes if reply is not None else ()
    found: list[bytes] = []
    for number, item in enumerate(items):
        outcomes = answered[number] if number < len(answered) else b""
        missing = len(item.indices) - len(outcomes)
        found.append(outcomes[: len(item.indices)] + bytes([CommitOutcome.LOST]) * missing)
    return found
