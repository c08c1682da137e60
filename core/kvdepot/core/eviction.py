"""The policies by name, and the simplest of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Final

from kvdepot.core.adaptive_greedy_dual import AdaptiveGreedyDual
from kvdepot.core.candidate_heap import CandidateHeap, missing_entries
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.eviction_policy import GHOSTS_DEFAULT, NEVER_USED, NO_NODE, USELESS, EvictionPolicy
from kvdepot.core.greedy_dual import GreedyDualSizeFrequency


class LeastRecentlyUsed:
    """The candidate whose last commit or hit is the longest ago. 22 bytes a node."""

    def __init__(self) -> None:
        self._candidates = CandidateHeap()
        self._used_at = array("d")  # by node: time of its last use

    def on_commit(self, node: int, now: float, parent: int = NO_NODE, mark: int = 0) -> None:  # noqa: ARG002
        self.on_hit(node, now)

    def on_hit(self, node: int, now: float) -> None:
        missing = missing_entries(node, self._used_at)
        if missing:
            self._used_at.extend(array("d", (NEVER_USED,)) * missing)
        # A time before the last one is no reason to evict a node earlier.
        self._used_at[node] = max(self._used_at[node], now)
        if node in self._candidates and self._candidates.score(node) != NEVER_USED:
            self._candidates.change(node, self._used_at[node])

    def on_end(self, node: int) -> None:
        pass

    def on_candidate(self, node: int, worth: float, group: int = 0) -> None:
        used_at = self._used_at[node] if node < len(self._used_at) else NEVER_USED
        self._candidates.put(node, used_at if worth > USELESS else NEVER_USED, group)

    def on_not_candidate(self, node: int) -> None:
        self._candidates.discard(node)

    def on_evicted(self, node: int, heir: int) -> None:
        pass  # an ancestor that was used later than its last descendant has a later time of its own

    def on_removed(self, node: int) -> None:
        self._candidates.discard(node)
        if node < len(self._used_at):
            self._used_at[node] = NEVER_USED

    def victim(self, groups: Iterable[int] | None = None) -> int | None:
        return self._candidates.first(groups)

    def use_class(self, node: int) -> int:  # noqa: ARG002
        """Return 0: times say nothing of the number of uses."""
        return 0


_POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "adaptive": AdaptiveGreedyDual,
    "gdsf": GreedyDualSizeFrequency,
    "lru": lambda _: LeastRecentlyUsed(),
}
DEFAULT_POLICY: Final = "adaptive"


def policy_names() -> tuple[str, ...]:
    """Return the names that `policy_by_name` knows (`[policy].eviction`)."""
    return tuple(sorted(_POLICIES))


def policy_by_name(name: str, ghosts: int = GHOSTS_DEFAULT) -> EvictionPolicy:
    """Return a new policy that remembers at most so many evicted nodes. Raise InvalidArgument for an unknown name."""
    if name not in _POLICIES:
        raise InvalidArgument(
            f"there is no eviction policy {name!r}", advice=f"choose one of: {', '.join(policy_names())}"
        )
    return _POLICIES[name](ghosts)
