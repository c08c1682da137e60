"""One process's attachment to the daemon: the connection that is its liveness, and the arena that came with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdepot.client.arena_map import ArenaMap
    from kvdepot.client.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """Which process of which engine attaches."""

    engine_id: str  # the same for all processes of an engine
    scheduler: bool
    rank: int = -1  # -1: no worker in this process
    world_size: int = 1  # workers of the engine


class Attachment:
    """Keeps a process attached, by a thread of its own. Never raises into the engine.

    A worker makes one per rank; a DepotSession makes its own. Both may live in one process.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        process: EngineProcess,
        *,
        map_arena: bool = True,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`on_change` is called on the attachment's thread after each attach and each loss."""

    def start(self) -> None:
        """Start the thread. Returns at once."""

    @property
    def arena(self) -> ArenaMap | None:
        """The arena of the last attach; kept while disconnected. Compare `arena_id` with the grant's before use."""

    @property
    def session(self) -> bytes | None:
        """The session's token, None while not attached."""

    @property
    def refusal(self) -> str:
        """Why the daemon refused the last attach, in its words; empty if it did not."""
        return ""

    def close(self) -> None:
        """End the thread and the connection (the daemon sees the end of file). Safe to call twice."""
