"""The operator's bump counters: what of the past is never served again (docs/adr/0036).

A namespace's counter is part of its id. Its engines have to use the counter that the daemon says, so that what was
stored under another one is neither found nor added to, wherever it lies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvdepot.core.errors import InvalidArgument, LimitExceeded
from kvdepot.core.keys import bumped_id
from kvdepot.core.limits import BUMPS_MAX, VOID_NAMESPACES_MAX, check_limit


@dataclass(frozen=True, slots=True)
class Epochs:
    """What a daemon has been told. No id that was void becomes valid again."""

    bump: int = 0  # the counter of every namespace, but for ...
    void: tuple[bytes, ...] = ()  # ... those of which these ids are: bumped by themselves since all were

    def counter(self, base_id: bytes) -> int:
        """The counter that a namespace's engines have to use; `base_id` is its id with a counter of 0."""
        bumps = self.bump
        while bumped_id(base_id, bumps) in self.void:
            bumps += 1
        return bumps

    def with_void(self, namespace_id: bytes) -> Epochs:
        """Its next counter is one more. Raises LimitExceeded."""
        if namespace_id in self.void:
            return self
        if len(self.void) >= VOID_NAMESPACES_MAX:
            raise LimitExceeded(
                "namespaces bumped by themselves", len(self.void) + 1, VOID_NAMESPACES_MAX,
                advice="bump all: `kvdepotctl epoch bump`",
            )  # fmt: skip
        return replace(self, void=(*self.void, namespace_id))

    def with_all_void(self, to: int = 0) -> Epochs:
        """Above every counter in use, and at `to` where it is given. Raises InvalidArgument, or LimitExceeded.

        A counter is at most one more than that of all for each id that is void by itself.
        """
        lowest = self.bump + len(self.void) + 1
        if to and to <= self.bump:
            return self
        if to and to < lowest:
            raise InvalidArgument(
                f"a counter of {to} may be in use: namespaces were bumped by themselves",
                advice=f"bump to {lowest} or more",
            )
        check_limit("bump counter", to or lowest, BUMPS_MAX)
        return Epochs(to or lowest)
