"""The heart of the daemon: index, leases and sessions over the arena's tables.

Plain synchronous code with one owner thread; no call blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.core.arena import ArenaTables
from kvdepot.core.calls import (
    AbandonCall,
    AcquireCall,
    AcquireReply,
    CommitCall,
    CommitReply,
    DeclareCall,
    DeclareReply,
    EndRequestCall,
    LocateCall,
    LocateReply,
    ReleaseCall,
    ReserveCall,
    ReserveReply,
)
from kvdepot.core.keys import NamespaceSpec
from kvdepot.server.engine.counters import Counters
from kvdepot.server.engine.types import (
    AdoptionReport,
    Attached,
    AttachmentInfo,
    EngineConfig,
    EngineStatus,
    Liveness,
    ProcessIdentity,
    ToSum,
)


class Engine:
    """Answers every call of `kvdepot.core.calls`. Errors are classes of `kvdepot.core.errors`.

    `run` counts daemon runs on this arena (superblock), `arena_id` names the arena in
    grants. `clock` is CLOCK_MONOTONIC seconds. Nothing is allocated before `ready`.
    """

    def __init__(
        self,
        tables: ArenaTables,
        *,
        arena_id: int,
        run: int,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        config: EngineConfig,
        counters: Counters | None = None,
    ) -> None:
        raise NotImplementedError

    # Life of the arena

    def adopt(self, alive: Callable[[ProcessIdentity], Liveness]) -> AdoptionReport:
        """Take over what an earlier run left in the tables. Call once, before anything else; an empty arena is fine."""
        raise NotImplementedError

    def ready(self, upto_bytes: int) -> None:
        """The arena file is populated up to this offset (bytes from its start; never shrinks)."""
        raise NotImplementedError

    def tick(self) -> None:
        """Deadlines, grace, provisional paths and watermark eviction, in bounded slices. Call about every 100 ms."""
        raise NotImplementedError

    def status(self) -> EngineStatus:
        raise NotImplementedError

    # Sessions

    def attach(
        self, process: ProcessIdentity, engine_id: str, *, scheduler: bool, rank: int, world_size: int
    ) -> Attached:
        """One connection of one process. Joins the attachment the process already has.

        Raises the errors of core.errors: another live process is this engine's scheduler
        or rank, world_size is out of range or differs, tables are full.
        """
        raise NotImplementedError

    def disconnected(self, attachment: int) -> None:
        """One connection of the attachment ended while its process lives, or its death cannot be proven."""
        raise NotImplementedError

    def process_dead(self, attachment: int) -> tuple[int, ...]:
        """Its process is proven dead.

        Returns attachments of the same session whose connections are to be closed, because
        the session ended with its scheduler (clients attach anew).
        """
        raise NotImplementedError

    def attachments(self) -> tuple[AttachmentInfo, ...]:
        """All attachments in the table, also those adopted from an earlier run: watch these processes."""
        raise NotImplementedError

    def register_namespace(self, session: bytes, spec: NamespaceSpec) -> tuple[bytes, int]:
        """(namespace id, ranks attached). Raises when the spec lies about sizes or the table is full."""
        raise NotImplementedError

    # Calls; all raise the "attach first" error on an unknown session token

    def locate(self, call: LocateCall) -> LocateReply:
        raise NotImplementedError

    def acquire(self, call: AcquireCall) -> AcquireReply:
        raise NotImplementedError

    def release(self, call: ReleaseCall) -> None:
        raise NotImplementedError

    def reserve(self, call: ReserveCall) -> ReserveReply:
        raise NotImplementedError

    def commit(self, call: CommitCall) -> CommitReply:
        raise NotImplementedError

    def abandon(self, call: AbandonCall) -> None:
        raise NotImplementedError

    def end_request(self, call: EndRequestCall) -> None:
        raise NotImplementedError

    def declare(self, call: DeclareCall) -> DeclareReply:
        raise NotImplementedError

    # Checksums

    def next_to_sum(self) -> ToSum | None:
        """The next object for the checksum worker, now lent to it; None when there is none."""
        raise NotImplementedError

    def summed(self, row: int, generation: int, sum_lo: int, sum_hi: int) -> None:
        """The worker's answer. A verified object becomes visible, a mismatch drops its subtree."""
        raise NotImplementedError

    def sum_worker_died(self) -> None:
        """Its death is proven: what it was lent returns and is handed out again."""
        raise NotImplementedError
