"""Lookups: shared tiers are asked for what the index does not know of a prompt, slice by slice (design.md#offers).

Another daemon may have put it there: only the backing store knows. A *walk* is the way of
one Locate along its chunks. It asks all shared tiers at the same time for a slice of chunks.
It continues after the slice as far as the path objects are there. Tiers report what they
find by `Tiering.found`. A walk continues after its Locate was answered. Its results serve
later lookups.

Everything is bounded: walks, names of a walk, names of a slice, and the wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from kvdepot.core import limits
from kvdepot.core.calls import KEY_BYTES, ROOT_KEY
from kvdepot.server.depot.loads.presence import Flags, Presence, held_by
from kvdepot.server.depot.tree.index import NONE, Nodes
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.rows import Rows
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.platform.guard import Once, engine_guard
from kvdepot.server.storage.base import ObjectName, SharedTier

FIRST_SLICE_CHUNKS: Final = 16
"""Most prompts end in what nobody has: a walk that finds nothing should cost little."""
SLICE_CHUNKS: Final = 128
"""A file system that takes a millisecond for a call looks these up in a few of them, side by side."""
_SLICES_AT_ONCE: Final = 8
"""Slices of one walk between two ticks that are known or answered at once: some 4 ms."""
NAMES_PER_WALK_MAX: Final = limits.KEYS_PER_CALL_MAX
WALKS_MAX: Final = 256
WAIT_SECONDS: Final = 0.4
"""Of a Locate that does not say for how long it waits: then it is answered with what is known by then."""
_WAIT_SECONDS_MAX: Final = 5.0
_WAIT_SHARE: Final = 0.5
"""Of what the engine waits: the other half is for the way, and for both sides' turns."""

Name = tuple[int, bytes, int, bytes]
"""Of an object that is being asked for: tier, namespace id, kind, key."""


def wait_seconds(call_seconds: float, *, something: bool) -> float:
    """Return how long, in seconds, shared tiers may be asked for a Locate.

    `call_seconds`: how long the engine waits (0: not said). `something`: whether something is known. What is known must
    get there in time. With nothing known, a late answer costs nothing: it serves requests that still queue.
    """
    in_time = min(call_seconds * _WAIT_SHARE, _WAIT_SECONDS_MAX)
    return in_time if something and in_time else max(in_time, WAIT_SECONDS)


class LookedUp(StrEnum):
    """The way in which the wait of a Locate ended. The values are labels of counters."""

    DONE = "done"
    LATE = "late"  # its time was over; the walk continues
    REFUSED = "refused"  # too many are on their way


Ended = Callable[[LookedUp], None]


@dataclass(eq=False, slots=True)
class _Walk:
    namespace: Namespace
    keys: bytes
    begin: int  # chunk that the slice at hand begins with
    end: int  # chunk after the last one that could be used
    ended: Ended | None  # None: the Locate was answered
    deadline: float
    names_left: int
    first: int  # chunk that the first slice begins with
    source: LowerTier | None  # asked alone, and again, as far as it has the path; then all tiers are asked for the rest
    stop: int = 0  # chunk after the current slice, once it is asked for; 0: it is not
    waits_for: dict[_LookUp, None] = field(default_factory=dict)
    heard: set[Name] = field(default_factory=set)  # what others asked for, and as this one would, was answered
    going: bool = False


@dataclass(eq=False, slots=True)
class _LookUp:
    tier: LowerTier
    owner: _Walk
    names: dict[Name, ObjectName]
    asked_at: float
    walks: dict[_Walk, None]
    again: bool = False


class LookUps:
    """The lookups of all sessions."""

    def __init__(self, tree: Tree, rows: Rows, presence: Presence) -> None:
        self._tree = tree
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._counters = tree.counters
        self._clock = tree.clock
        self._guard = engine_guard(self._counters.add)
        self._rows = rows
        self._presence = presence
        self._tiers = [(tier, shared) for tier in tree.tiers if (shared := tier.shared) is not None]
        self._walks: dict[_Walk, None] = {}  # the oldest first
        self._asked: dict[Name, _LookUp] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._walks)

    @property
    def possible(self) -> bool:
        """Whether any shared tier can be asked now."""
        return not self._closed and any(tier.readable for _, tier in self._tiers)

    def source(self, namespace: Namespace, source_id: int) -> LowerTier | None:
        """Return the tier that reads from the daemon with this arena, if it can be asked for this namespace.

        Only what is configured can be selected. A tenant's namespace selects no tier of another tenant.
        """
        for tier, shared in self._tiers:
            if source_id and _may_ask(tier, shared, namespace) and shared.reads_from(source_id):
                return tier
        return None

    def begin(
        self, namespace: Namespace, keys: bytes, begin: int, end: int, ended: Ended, wait_seconds: float,
        source: LowerTier | None = None,
    ) -> float:  # fmt: skip
        """Find out about the chunks from `begin` and below `end`; `keys` are those of all chunks of the prompt.

        `source`: a tier that is asked before all others.

        `ended` is called once: before this returns, or by the tick after the seconds that it returns, at the latest.
        """
        deadline = self._clock() + wait_seconds
        walk = _Walk(namespace, keys, begin, end, ended, deadline, NAMES_PER_WALK_MAX, begin, source)
        if len(self._walks) >= WALKS_MAX:
            self._answer(walk, LookedUp.REFUSED)
            return 0.0
        self._walks[walk] = None
        self._go_on(walk)
        return wait_seconds if walk.ended is not None else 0.0

    def tick(self) -> None:
        """Let those go that have waited for long enough."""
        now = self._clock()
        for walk in list(self._walks):
            if not walk.waits_for:
                self._go_on(walk)
            if walk.deadline <= now and walk in self._walks:
                self._answer(walk, LookedUp.LATE)
                if all(look_up.owner is not walk for look_up in walk.waits_for):
                    self._leave(walk)

    def close(self) -> None:
        """Answer all walks, and ask for nothing further."""
        self._closed = True
        for walk in self._walks:
            self._answer(walk, LookedUp.LATE)

    # A walk

    def _go_on(self, walk: _Walk) -> None:
        """Ask for what comes next; the walk ends where there is nothing more to ask for, or where something raises."""
        if walk.going:
            return
        walk.going = True
        whole = self._guard.call("lookup", self._ask_slices, walk)
        walk.going = False
        if not whole and walk in self._walks and all(look_up.owner is not walk for look_up in walk.waits_for):
            self._leave(walk)
            self._answer(walk, LookedUp.DONE)

    def _ask_slices(self, walk: _Walk) -> None:
        slices = 0
        while not walk.waits_for and walk in self._walks and slices < _SLICES_AT_ONCE:
            slices += 1
            if self._has_more(walk):
                self._ask_slice(walk)
            else:
                self._leave(walk)
                self._answer(walk, LookedUp.DONE)

    def _has_more(self, walk: _Walk) -> bool:
        """Return whether there is a next slice to ask for.

        If a slice was asked for, the path must reach its end.
        """
        if not self.possible or not self._namespaces.defined(walk.namespace):
            return False
        reached = not walk.stop or bool(self._known(self._nodes(walk, walk.stop), walk.namespace.path_kind).all())
        if walk.source is None and not reached:
            return False
        if walk.stop and reached:
            walk.begin = walk.stop
        walk.stop = 0
        if walk.source is not None and (not reached or walk.begin >= walk.end):
            path_alone = len(walk.namespace.object_bytes) == 1
            if len(self._tiers) == 1 or (reached and path_alone):
                return False
            walk.source = None  # the rest may be elsewhere
            if not path_alone:
                walk.begin = walk.first
        return walk.begin < walk.end and walk.names_left > 0

    def _ask_slice(self, walk: _Walk) -> None:
        """Ask for the next slice of a walk.

        If other walks ask for some of its names, wait with these before asking for the rest.
        """
        slice_chunks = min(FIRST_SLICE_CHUNKS, SLICE_CHUNKS) if walk.names_left == NAMES_PER_WALK_MAX else SLICE_CHUNKS
        stop = min(walk.begin + slice_chunks, walk.end)
        wanted = self._wanted(walk, stop)
        joined = {look_up: None for _, names in wanted for name in names if (look_up := self._asked.get(name))}
        if joined:
            walk.waits_for = joined
            for look_up in joined:
                look_up.walks[walk] = None
            return
        walk.stop = stop
        again = walk.source is not None
        look_ups = [_LookUp(tier, walk, names, self._clock(), {walk: None}, again) for tier, names in wanted if names]
        walk.waits_for = dict.fromkeys(look_ups)
        for look_up in look_ups:
            self._ask(look_up)

    def _nodes(self, walk: _Walk, stop: int) -> Nodes:
        """Return the nodes of the current slice."""
        keys = walk.keys[walk.begin * KEY_BYTES : stop * KEY_BYTES]
        return self._index.find_many(walk.namespace.slot, keys)

    def _last(self, walk: _Walk) -> int:
        """Return the last node of the walk that is there, also after the current slice.

        A path is there from its beginning on.
        """
        index, slot, keys = self._index, walk.namespace.slot, walk.keys

        def node(chunk: int) -> int:
            return index.find(slot, keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES])

        chunks = bisect_left(range(walk.end), True, lo=walk.begin, key=lambda chunk: node(chunk) == NONE)
        return node(chunks - 1) if chunks else NONE

    def _known(self, nodes: Nodes, kind: int) -> Flags:
        """Return which of these nodes have an object of this kind that some tier would give now."""
        rows = self._presence.rows_at(nodes, kind)
        return self._rows.visible_many(rows) | self._presence.promotable(nodes, kind)

    def _wanted(self, walk: _Walk, stop: int) -> list[tuple[LowerTier, dict[Name, ObjectName]]]:
        """Return, for each shared tier, the objects that no tier would give now and that this tier may have.

        Parents come first. Of one chunk, the path object comes first.
        """
        nodes = self._nodes(walk, stop)
        kinds = sorted(walk.namespace.object_bytes, key=lambda kind: kind != walk.namespace.path_kind)
        unknown = [~self._known(nodes, kind) for kind in kinds]
        wanted = []
        for tier, shared in self._tiers:
            if not _may_ask(tier, shared, walk.namespace) or (walk.source is not None and tier is not walk.source):
                continue
            held = [held_by(self._index, [tier], nodes, kind) for kind in kinds]
            asked = np.argwhere(np.column_stack(unknown) & ~np.column_stack(held))
            names: dict[Name, ObjectName] = {}
            for at, column in asked[: walk.names_left].tolist():
                name = self._name(walk, walk.begin + at, kinds[column])
                label = (tier.number, name.namespace, name.kind, name.key)
                if label not in walk.heard:
                    names[label] = name
            wanted.append((tier, names))
        return wanted

    def _name(self, walk: _Walk, chunk: int, kind: int) -> ObjectName:
        namespace = walk.namespace
        assert namespace.planner is not None, "checked when the walk continues"
        at = chunk * KEY_BYTES
        parent = walk.keys[at - KEY_BYTES : at] if chunk else ROOT_KEY
        boundary = (chunk + 1) * namespace.planner.chunk_tokens
        key = walk.keys[at : at + KEY_BYTES]
        return ObjectName(namespace.id, key, parent, kind, boundary, namespace.object_bytes[kind])

    def _answer(self, walk: _Walk, looked_up: LookedUp) -> None:
        ended, walk.ended = walk.ended, None
        if ended is not None:
            self._counters.add(f"locate_waits.{looked_up}")
            self._guard.call("answer", ended, looked_up)

    def _leave(self, walk: _Walk) -> None:
        del self._walks[walk]
        for look_up in walk.waits_for:
            del look_up.walks[walk]
        walk.waits_for = {}

    # A lookup

    def _ask(self, look_up: _LookUp) -> None:
        look_up.owner.names_left -= len(look_up.names)
        self._asked.update(dict.fromkeys(look_up.names, look_up))
        done = Once[None](lambda _: self._done(look_up))
        if not self._guard.call("lookup", self._ask_tier, look_up, done):
            done(None)

    def _ask_tier(self, look_up: _LookUp, done: Once[None]) -> None:
        tier, walk = look_up.tier, look_up.owner
        names = list(look_up.names.values())
        tier.make_handles_room(len(names), self._last(walk))
        for name in names:
            self._tree.free_name(walk.namespace.slot, name.key)
        self._count(tier, "asked", len(names))
        shared = tier.shared
        assert shared is not None
        shared.look_up(names, lambda: done(None), again=look_up.again)

    def _done(self, look_up: _LookUp) -> None:
        for label in look_up.names:
            del self._asked[label]
        self._guard.call("lookup", self._count_done, look_up)
        for walk in list(look_up.walks):
            del walk.waits_for[look_up]
            if look_up.owner is not walk and (look_up.again or walk.source is None):
                walk.heard.update(look_up.names)
            if not walk.waits_for:
                self._go_on(walk)

    def _count_done(self, look_up: _LookUp) -> None:
        tier, names = look_up.tier, list(look_up.names.values())
        seconds = max(self._clock() - look_up.asked_at, 0.0)
        self._counters.add(f"tier_probe_seconds.{tier.tier.name}/", seconds)
        namespace = self._namespaces.by_id.get(names[0].namespace)
        if not tier.tier.readable or namespace is None:
            self._count(tier, "unanswered", len(names))
            return
        found = 0
        nodes = self._index.find_many(namespace.slot, b"".join(name.key for name in names))
        kinds = np.array([name.kind for name in names])
        for kind in namespace.object_bytes:
            found += int(held_by(self._index, [tier], nodes[kinds == kind], kind).sum())
        self._count(tier, "found", found)
        self._count(tier, "absent", len(names) - found)

    def _count(self, tier: LowerTier, what: str, objects: int) -> None:
        self._counters.add(f"tier_probed_objects.{tier.tier.name}/{what}", objects)


def _may_ask(tier: LowerTier, shared: SharedTier, namespace: Namespace) -> bool:
    """Return whether a tier can be asked now for objects of this namespace."""
    return shared.readable and tier.config.tenant in (None, namespace.tenant)
