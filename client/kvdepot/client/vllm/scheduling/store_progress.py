"""What is in progress of stores: an object, all of a request, and a copy that the ranks do."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.operations import SpanCopy
    from kvdepot.client.vllm.scheduling.pins import WeakHold
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.core.planner import PlannedObject


@dataclass(slots=True)
class StoreObject:
    """One object on its way to the daemon."""

    state: RequestState
    planned: PlannedObject
    key: bytes
    parent: bytes
    spans: tuple[SpanCopy, ...]
    hold: WeakHold
    tries: int = 0
    retry_at: float = 0.0
    lease_id: int = 0
    index: int = 0  # within the lease
    arena_id: int = 0
    extents: bytes = b""


@dataclass(slots=True)
class RequestStores:
    """The stores of one request. They may outlive the request."""

    state: RequestState
    epoch: int
    waiting: deque[StoreObject] = field(default_factory=deque)  # in chain order
    granted: deque[StoreObject] = field(default_factory=deque)
    asking: list[StoreObject] = field(default_factory=list)  # in the Reserve that is in flight
    ops: int = 0  # dispatched and not acknowledged
    asked: bool = False  # the daemon knows the request, so it must be told of its end
    finished: bool = False
    invalid: str = ""  # why nothing more of it may be committed; empty if it may
    progress_at: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether a store of the request is in progress."""
        return bool(self.waiting or self.granted or self.asking or self.ops)


@dataclass(slots=True)
class Dispatched:
    """A copy that the ranks are working on. Its blocks are pinned."""

    stores: RequestStores
    epoch: int
    lease_id: int
    indices: tuple[int, ...]
    chunks: tuple[int | None, ...]  # of each index; None if it is not attention
    block_ids: tuple[int, ...]
    ranks_done: int = 0  # as bits
    failed: set[int] = field(default_factory=set)
