"""Offers of a Locate: not the longest boundary, but the one that serves the request best (design.md#offers).

Costs are computed for every boundary of a prompt at once: what each tier would have to read
for it, and how long that takes after what the tier reads already. Tiers read in parallel. An
engine that says how fast it computes is offered what saves it the most time. Any other engine
is offered the longest boundary that is in time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import Kind, LocateCall
from kvdepot.core.misses import MissReason
from kvdepot.core.planner import Planner, Presence, per_boundary
from kvdepot.server.depot.tiering.promotions import Promotions
from kvdepot.server.depot.tree.index import NONE, Index, Nodes
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import RESERVED

ESTIMATE_SECONDS_MAX: Final = 3600.0
"""What is said of a boundary whose readiness nobody can tell."""
WORTH_SHARE: Final = 0.8
"""Of the time that computing takes, what a load may: estimates err, and the copies of the ranks come on top."""

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Offer:
    """A boundary that a Locate offers: what it waits for, and why it is not the longest."""

    boundary_tokens: int
    tier: str = ""  # the slowest that has to give something for it
    seconds: float = 0.0  # until all of it is in RAM
    miss: MissReason | None = None  # why it is not the longest


@dataclass(frozen=True, slots=True)
class Costs:
    """Per boundary, the first chunk's first: seconds until it is in RAM; by tier, 0 where that has nothing to give.

    `weighed`: what these seconds count against computing; a tier's by its `load_weight`, 2 halves them.
    """

    seconds: Numbers
    weighed: Numbers
    of_tiers: tuple[tuple[LowerTier, Numbers], ...]

    def source_tiers(self, at: int) -> list[int]:
        """Return the numbers of the tiers that have to give something for a boundary."""
        return [tier.number for tier, seconds in self.of_tiers if seconds[at]]

    def slowest(self, at: int) -> str:
        """Return the name of the tier that a boundary waits for, or "ram" where it waits for none."""
        seconds, name = max(((seconds[at], tier.tier.name) for tier, seconds in self.of_tiers), default=(0.0, "ram"))
        return name if seconds else "ram"


class Offers:
    """The choice of what a Locate answers."""

    def __init__(self, index: Index, ram: RamTier, clock: Callable[[], float], promotions: Promotions) -> None:
        self._ram = ram
        self._index = index
        self._clock = clock
        self._rows = ram.rows
        self._lent = ram.lent
        self._promotions = promotions

    def costs(self, namespace: Namespace, nodes: Nodes, absent: Mapping[Kind, Flags], *, explored: bool) -> Costs:
        """Return the costs of the boundaries of these chunks.

        `absent`: by kind, one flag a chunk: an object has to be read into RAM. `explored`: what is not offered is
        prefetched nevertheless, so that tiers are measured without the offer.
        """
        now = self._clock()
        per_tier: dict[LowerTier, Numbers] = {}
        for kind, flags in absent.items():
            chunks = np.flatnonzero(flags)
            sizes = self._sizes(namespace, kind, nodes[chunks])
            for tier, given in self._promotions.shares(nodes[chunks], kind):
                each = np.zeros(len(nodes))
                each[chunks[given]] = sizes[given]
                together = per_boundary(kind, each, namespace.window_chunks)
                per_tier[tier] = per_tier.get(tier, np.zeros(len(nodes))) + together
        seconds, weighed, in_all = np.zeros(len(nodes)), np.zeros(len(nodes)), np.zeros(len(nodes))
        of_tiers = []
        for tier, size_bytes in per_tier.items():
            own: Numbers = np.where(size_bytes > 0, tier.reads.seconds(size_bytes, now), 0.0)
            seconds = np.maximum(seconds, own)
            weight = tier.config.load_weight
            cost = tier.reads.weighed_seconds(size_bytes, now, explored=explored) / weight if weight else inf
            weighed = np.maximum(weighed, np.where(size_bytes > 0, cost, 0.0))
            in_all += size_bytes
            of_tiers.append((tier, own))
        for kind, flags in absent.items():
            in_all += per_boundary(kind, self._unpinned(namespace, kind, nodes, ~flags), namespace.window_chunks)
        room = self._ram.rooms.of(namespace.slot)
        free_bytes = room.allocator.ready_bytes - self._ram.lent_bytes(room=room) if room is not None else 0
        seconds[(seconds > 0) & (in_all > free_bytes)] = inf
        return Costs(seconds, weighed, tuple(of_tiers))

    def _unpinned(self, namespace: Namespace, kind: Kind, nodes: Nodes, in_ram: Flags) -> Numbers:
        """Return the bytes of objects that RAM has and that are not lent: they cannot make room for the others."""
        sizes = np.zeros(len(nodes))
        known = np.flatnonzero(in_ram & (nodes != NONE))
        rows = self._index.rows[kind - 1][nodes[known]]
        held = rows != NO_ROW
        free = self._lent.pins[rows[held]] == 0
        sizes[known[held][free]] = self._ram.rounded(namespace.object_bytes[kind])
        return sizes

    def _sizes(self, namespace: Namespace, kind: Kind, nodes: Nodes) -> Numbers:
        """Return the bytes to read for each object.

        An object that is on its way counts as 1 byte, because it is among what is read already.
        """
        rows = self._index.rows[kind - 1][nodes].astype(np.int64)
        sizes = np.full(len(nodes), float(self._ram.rounded(namespace.object_bytes[kind])))
        coming = np.flatnonzero(rows != NO_ROW)
        sizes[coming[self._rows.states[rows[coming]] == RESERVED]] = 1.0
        return sizes

    def choose(
        self, planner: Planner, presence: Presence, longest_tokens: int, costs: Costs, call: LocateCall
    ) -> Offer:
        """Choose one of the legal boundaries that can be in RAM within the call's budget.

        `longest_tokens` is the longest legal boundary. If the call does not say how fast the engine computes, choose
        the longest. Else choose the boundary that saves most of the time in which the engine would compute it.
        """
        chunk_tokens, chunks = planner.chunk_tokens, longest_tokens // planner.chunk_tokens
        seconds, weighed = costs.seconds[:chunks], costs.weighed[:chunks]
        in_time = seconds <= (call.budget_seconds or inf)
        gained = np.arange(1, chunks + 1) * chunk_tokens - float(call.local_tokens)
        eligible = planner.legal_boundaries(presence, chunks) & in_time & (gained > 0)
        if call.token_seconds:
            gained *= call.token_seconds
            eligible &= (weighed <= WORTH_SHARE * gained) | (weighed == 0)
            gained -= np.where(eligible, weighed, 0.0)
        miss = MissReason.NOT_WORTH_IT if in_time[-1] else MissReason.NOT_IN_TIME
        if not eligible.any():
            return Offer(0, miss=miss)
        at = chunks - 1 - int(np.argmax(np.where(eligible, gained, -inf)[::-1]))  # the longest of equals
        estimate_seconds = min(float(seconds[at]), ESTIMATE_SECONDS_MAX)
        return Offer((at + 1) * chunk_tokens, costs.slowest(at), estimate_seconds, miss if at < chunks - 1 else None)
