"""The operator's bump counters: which stored objects are never served again (docs/adr/0036).

A namespace's counter is part of its id. Its engines must use the counter that the daemon names. So objects that were
stored under another counter are neither found nor extended, in any tier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvdepot.core.bounds import NamespaceId
from kvdepot.core.errors import InvalidArgument, LimitExceeded
from kvdepot.core.keys import bumped_id
from kvdepot.core.limits import BUMPS_MAX, INVALIDATED_NAMESPACES_MAX, check_limit


@dataclass(frozen=True, slots=True)
class Epochs:
    """The counters of one daemon. An id that was invalidated never becomes valid again."""

    bump: int = 0  # the counter of all namespaces, except ...
    invalidated_namespaces: tuple[NamespaceId, ...] = ()  # ... these ids, which were bumped individually since

    def counter(self, base_id: bytes) -> int:
        """Return the counter that a namespace's engines must use. `base_id` is the id with a counter of 0."""
        bumps = self.bump
        while bumped_id(base_id, bumps) in self.invalidated_namespaces:
            bumps += 1
        return bumps

    def with_invalidated(self, namespace_id: bytes) -> Epochs:
        """Return epochs in which the next counter of the namespace is one more. Raise LimitExceeded."""
        if namespace_id in self.invalidated_namespaces:
            return self
        if len(self.invalidated_namespaces) >= INVALIDATED_NAMESPACES_MAX:
            raise LimitExceeded(
                "namespaces bumped individually", len(self.invalidated_namespaces) + 1, INVALIDATED_NAMESPACES_MAX,
                advice="bump all: `kvdepotctl epoch bump`",
            )  # fmt: skip
        return replace(self, invalidated_namespaces=(*self.invalidated_namespaces, namespace_id))

    def with_all_invalidated(self, to: int = 0) -> Epochs:
        """Return epochs with a counter above each one in use, or with `to`. Raise InvalidArgument or LimitExceeded.

        A counter exceeds that of all namespaces by at most one for each id that is invalidated individually.
        """
        lowest = self.bump + len(self.invalidated_namespaces) + 1
        if to and to <= self.bump:
            return self
        if to and to < lowest:
            raise InvalidArgument(
                f"the counter {to} may be in use: namespaces were bumped individually",
                advice=f"bump to {lowest} or more",
            )
        check_limit("bump counter", to or lowest, BUMPS_MAX)
        return Epochs(to or lowest)
