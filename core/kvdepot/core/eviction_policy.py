"""Which part of the chunk tree goes first when room is needed.

The engine owns the tree, knows which of its units may go (design.md#eviction) and what
each is worth, and tells the policy in the calls of `EvictionPolicy` what happened. A
unit is named by one node: an integer, dense from 0 and reused after `on_removed`. A
policy keeps its knowledge in arrays indexed by it, never an object a node.

The candidates of every policy lie in a `CandidateHeap`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

NO_NODE: Final = 0xFFFF_FFFF
USELESS: Final = 0.0
"""Worth of a unit that no request can use: it goes before all others."""
NEVER_USED: Final = float("-inf")
"""Score of such a unit, and time of the last use of a node that had none."""
USE_CLASSES: Final = 16
GHOSTS_DEFAULT: Final = 1 << 16


class EvictionPolicy(Protocol):
    """What the engine tells a policy, and the one question it asks. `now` is monotonic, in seconds.

    The calls are idempotent: to say what the policy knows already has no effect.
    """

    def on_commit(self, node: int, now: float, parent: int = NO_NODE, mark: int = 0) -> None:
        """Note that an object of `node` was committed or adopted.

        `mark` is 64 bits of the chunk's key. They identify the node after an eviction. 0: none.
        """

    def on_hit(self, node: int, now: float) -> None:
        """Note that a request resumed at `node`: the end node of an acquire, not its ancestors."""

    def on_end(self, node: int) -> None:
        """Note that a request ended at `node`. Its continuation will resume there."""

    def on_candidate(self, node: int, worth: float, group: int = 0) -> None:
        """Add the node's unit to the candidates. `worth`: seconds that each use saves, per byte of the unit.

        `group` is below 65,536, and stays the same until `on_removed`.
        """

    def on_not_candidate(self, node: int) -> None:
        """Remove the node's unit from the candidates: descendants need it, or a part is lent or reserved."""

    def on_evicted(self, node: int, heir: int) -> None:
        """Note that the unit was evicted. Requests that would have resumed there resume at `heir`, or NO_NODE."""

    def on_removed(self, node: int) -> None:
        """Forget `node`. Its number may be reused for another node."""

    def victim(self, groups: Iterable[int] | None = None) -> int | None:
        """Return the node whose unit goes next, of these groups or of all; None without a candidate.

        The node stays a candidate until another call removes it.
        """

    def use_class(self, node: int) -> int:
        """Return a number below `USE_CLASSES`, the same for nodes with the same past as far as the policy knows."""
