"""What one request needs before its acquire."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from kvdepot.core.calls import KEY_BYTES, Kind
from kvdepot.server.depot.tree.namespaces import Namespace

Owner = tuple[int, str]
"""(session slot, request id)."""


@dataclass(eq=False, slots=True)
class PrefetchRequest:
    """The needs of an owner.

    `todo`: by tier number, (chunk, kind) to read, the first one last. An absent tier was not computed.
    """

    number: int  # of arrival
    owner: Owner
    namespace: Namespace
    room: int  # where its objects lie
    keys: bytes = b""  # of the chunks up to the boundary
    over: bool = False
    todo: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    queues: set[int] = field(default_factory=set)  # numbers of tiers in whose queue it is
    tokens: list[int] = field(default_factory=list)  # of what is pinned for it
    deadline: float = inf

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


def needed(namespace: Namespace, chunks: int) -> list[tuple[int, int]]:
    """Return what the boundary after so many chunks needs: kinds, and the first chunk of each."""
    planner = namespace.planner
    assert planner is not None, "only registered namespaces are located in"
    first = {Kind.ATTENTION: 0, Kind.WINDOW: max(chunks - planner.window_chunks, 0), Kind.STATE: chunks - 1}
    return [(int(kind), first[kind]) for kind in planner.kinds]
