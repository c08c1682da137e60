"""What an evictor knows of its tier, of the tree and of the tiers below."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvdepot.server.depot.tree.in_use import InUse
from kvdepot.server.depot.tree.index import Index
from kvdepot.server.depot.tree.namespaces import Namespaces
from kvdepot.server.depot.tree.usable import Usable


class Holding(Protocol):
    """The part of the tree that one tier has."""

    drops_orphans: bool
    """Whether the tier may drop an orphan, with what follows it in other tiers (`Evictor.drop_orphan`)."""

    @property
    def used_bytes(self) -> int: ...

    def kinds(self, node: int) -> list[int]:
        """Return the kinds of the node's objects that lie here, or are being written here."""

    def complete(self, node: int, kind: int) -> bool:
        """Return whether the object is here and whole."""

    def busy(self, node: int) -> bool:
        """Return whether somebody touches an object of the node at the moment: its turn comes later."""

    def kept(self, node: int) -> bool:
        """Return whether no object of the node may go. Whoever pins it reports when that changes."""

    def pinned(self, node: int, kind: int) -> bool:
        """Return whether this object may not go, while others of the node may."""

    def children(self, node: int) -> int:
        """Return how many children of the node have objects here."""

    def cost_bytes(self, node: int, kind: int) -> int:
        """Return the bytes that dropping the object frees here."""

    def drop(self, node: int, kind: int) -> None:
        """Forget the object here. The caller refreshes its node."""

    def count_evicted(self, reason: str, objects: int, size_bytes: int) -> None:
        """Count what an eviction dropped."""

    def evict_detached(self, reason: str, slots: Collection[int] | None) -> int:
        """Drop an object here that has no node, of these namespaces or of any. Return the number of objects."""


class UnionTree(Protocol):
    """The union of tiers."""

    index: Index
    namespaces: Namespaces
    usable: Usable
    in_use: InUse

    def clock(self) -> float:
        """Return the time in seconds."""

    def path_kind(self, node: int) -> int:
        """Return the kind of object that makes a path in the node's namespace."""

    def copied(self, holding: Holding, node: int, kind: int) -> bool:
        """Return whether another tier has a complete copy."""

    def changed(self, node: int) -> None:
        """Drop what has no path now that objects of the node went, and refresh what depends on the node."""

    def dropped_orphan(self, nodes: int) -> None:
        """Count the nodes that went with an orphan."""


class Demotion(Protocol):
    """The lower tiers' claim to what RAM is about to drop, ahead of need."""

    def defers(self, node: int) -> bool:
        """Return whether the node is to stay until a lower tier has taken it."""

    def save(self, node: int) -> None:
        """Offer the path to the node to the tiers that have what follows it."""
