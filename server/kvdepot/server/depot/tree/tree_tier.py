"""What the tree and its tiers know of each other. RAM and the tiers below it are peers here.

`Tree` makes its tiers and calls them as `TreeTier`; a tier sees the tree as `TierTree`. So no tier imports the tree.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvdepot.server.depot.tree.evicting import Evictor
from kvdepot.server.depot.tree.holding import Holding, UnionTree
from kvdepot.server.depot.tree.index import Nodes
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.quotas import Account


class TreeTier(Holding, Protocol):
    """One tier of the tree."""

    evictor: Evictor
    account: Account

    def among(self, nodes: Nodes) -> Nodes:
        """Return those of the nodes that have objects here."""

    def enter(self, namespace: Namespace) -> None:
        """Note a namespace that is new, or of which more is known now."""

    def give_way(self, slots: Collection[int] | None) -> bool:
        """Offer something that was pinned, of these namespaces or of any. Return False when there is nothing."""


class TierTree(UnionTree, Protocol):
    """The tree, as its tiers need it."""

    def refresh_node(self, node: int) -> None:
        """Refresh the node and the nodes that depend on it: what is usable, and what may go in every tier."""

    def update_candidates(self, node: int) -> None:
        """Tell the evictor of every tier what of the node may go."""

    def within_quota(self, tier: TreeTier, slot: int, size_bytes: int) -> bool:
        """Return whether so much more of the namespace may lie in the tier, dropping others of its owners for it."""

    def reclaim_for_room(self) -> bool:
        """Drop a slice of what was unlinked. Return False when there is nothing, or the limit is reached."""


class GiveWay(Protocol):
    """Prefetch, which unpins what it keeps in RAM where another object finds no room."""

    def __call__(self, slots: Collection[int] | None) -> bool:
        """Unpin something of these namespaces, or of any. Return False when there is nothing."""
