"""What the daemon holds, namespace by namespace and chunk by chunk, for operators. Pure reads.

A page of chunks goes by the index's node numbers, which a chunk keeps for its life. So a
listing may be taken while everything changes: a chunk that is there from the first page
to the last is shown exactly once, and each page costs some milliseconds however many
nodes there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import numpy as np
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.errors import InvalidArgument, NotFound
from kvdepot.core.listing import (
    CHILDREN_COUNTED_MAX,
    LOANS_MAX,
    PATH_KEYS_MAX,
    Chunk,
    ChunkDescription,
    ChunkPage,
    LoanDescription,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    ObjectDescription,
    TierContents,
    prefix_range,
)
from kvdepot.server.engine.index import NONE, Nodes
from kvdepot.server.engine.lent import NO_SESSION
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.rows import COMMITTED
from kvdepot.server.engine.sessions import WORKER_PREFIX, Sessions
from kvdepot.server.engine.space import PINNED, Space
from kvdepot.server.tiers.base import NO_HANDLE

_RAM: Final = "ram"
_NUMBERS_MAX: Final = 262_144
"""Node numbers that a page looks at: 0.2 ms."""
_CANDIDATES_MAX: Final = 4096
"""Of them, how many are looked up: 1 ms."""
_DEPTH_MAX: Final = 65_536
"""Ancestors that are counted: 10 ms."""
_CHECKSUM_WORKER: Final = "kvdepotd/checksums"


class Listing:
    """Answers `kvdepotctl ls` and `describe`. Raises NotFound and InvalidArgument."""

    def __init__(self, space: Space, sessions: Sessions) -> None:
        self._space = space
        self._sessions = sessions

    # Namespaces

    def namespaces(self, prefix: str, limit: int, token: str) -> NamespacePage:
        """Those whose id begins with these hexadecimal digits, in order; `token` is of the page before, or empty."""
        least, greatest = prefix_range("prefix", prefix)
        after = _after(token)
        ids = sorted(one for one in self._space.namespaces.by_id if least <= one <= greatest and one > after)
        page = tuple(self._contents(self._space.namespaces.by_id[one]) for one in ids[:limit])
        return NamespacePage(page, ids[limit - 1].hex() if len(ids) > limit else "")

    def describe_namespace(self, namespace_id: bytes) -> NamespaceDescription:
        namespace = self._namespace(namespace_id)
        engines = sorted(
            session.engine_id for session in self._sessions.by_slot.values() if namespace_id in session.namespaces
        )
        return NamespaceDescription(self._contents(namespace), namespace.spec, tuple(engines))

    def _namespace(self, namespace_id: bytes) -> Namespace:
        namespace = self._space.namespaces.by_id.get(namespace_id)
        if namespace is None:
            raise NotFound(f"there is no namespace {namespace_id.hex()}")
        return namespace

    def _contents(self, namespace: Namespace) -> NamespaceContents:
        spec = namespace.spec
        ram = {kind: count for kind, count in namespace.objects.items() if count}
        return NamespaceContents(
            namespace_id=namespace.id,
            label=namespace.label,
            tenant=namespace.tenant or "",
            epoch=spec.epoch if spec else "",
            bumps=namespace.bumps,
            chunk_tokens=spec.chunk_tokens if spec else 0,
            chunks=namespace.nodes,
            sessions=namespace.sessions,
            idle_seconds=max(self._space.clock() - namespace.used_at, 0.0),
            tiers=(
                TierContents(_RAM, ram, namespace.bytes),
                *(_tier_contents(tier, namespace) for tier in self._space.tiers),
            ),
        )

    # Chunks

    def chunks(self, namespace_id: bytes, prefix: str, limit: int, token: str) -> ChunkPage:
        """Those whose key begins with these hexadecimal digits, in no order that means anything."""
        namespace = self._namespace(namespace_id)
        start = self._start(token)
        index = self._space.index
        candidates = index.candidates(namespace.slot, start, start + _NUMBERS_MAX) if namespace.nodes else np.arange(0)
        following = start + _NUMBERS_MAX if namespace.nodes else index.high
        if prefix:
            candidates = self._matching(candidates, *prefix_range("prefix", prefix))
        if len(candidates) > _CANDIDATES_MAX:
            candidates = candidates[:_CANDIDATES_MAX]
            following = int(candidates[-1]) + 1
        live = index.live(namespace.slot, candidates)
        if len(live) > limit:
            live = live[:limit]
            following = int(live[-1]) + 1
        return ChunkPage(
            self._tiers(),
            tuple(self._chunks(namespace, live)),
            f"{self._space.rows.run:x}.{following:x}" if following < index.high else "",
        )

    def describe_chunk(self, namespace_id: bytes, key: bytes) -> ChunkDescription:
        namespace = self._namespace(namespace_id)
        index = self._space.index
        node = index.find(namespace.slot, key)
        if node == NONE:
            raise NotFound(f"namespace {namespace_id.hex()} has no chunk {key.hex()}")
        (chunk,) = self._chunks(namespace, np.array([node], np.int64))
        path, depth = self._path(node)
        children = sum(1 for _ in islice(index.children(node), CHILDREN_COUNTED_MAX + 1))
        return ChunkDescription(
            chunk=chunk,
            tiers=self._tiers(),
            objects=tuple(self._objects(namespace, node)),
            path=path,
            depth=depth,
            children=min(children, CHILDREN_COUNTED_MAX),
            more_children=children > CHILDREN_COUNTED_MAX,
        )

    def _start(self, token: str) -> int:
        """The node number that a page begins with."""
        if not token:
            return 0
        run, _, number = token.partition(".")
        try:
            found = int(run, 16), int(number, 16)
        except ValueError:
            raise _no_token(token) from None
        if found[0] != self._space.rows.run:
            raise InvalidArgument("page_token: the daemon was restarted since", advice="list again from the beginning")
        if found[1] < 0:
            raise _no_token(token)
        return min(found[1], self._space.index.high)

    def _matching(self, candidates: Nodes, least: bytes, greatest: bytes) -> Nodes:
        """Those whose keys lie between these, which agree in their first digits."""
        first = self._space.index.keys[candidates, 0].byteswap()
        low, high = (np.uint64(int.from_bytes(bound[:8], "big")) for bound in (least, greatest))
        chosen: Nodes = candidates[(first >= low) & (first <= high)]
        if least[:8] == greatest[:8]:  # hardly more than one is left
            chosen = chosen[[least <= self._space.index.key(node) <= greatest for node in chosen.tolist()]]
        return chosen

    def _tiers(self) -> tuple[str, ...]:
        return (_RAM, *(tier.tier.name for tier in self._space.tiers))

    def _chunks(self, namespace: Namespace, nodes: Nodes) -> Iterator[Chunk]:
        space, index = self._space, self._space.index
        parents = index.parents_of(nodes)
        parent_keys = index.keys[np.where(parents == NONE, 0, parents)].tobytes()
        keys = index.keys[nodes].tobytes()
        boundaries = index.boundaries_of(nodes).tolist()
        rows = [column[nodes].tolist() for column in index.rows]
        handles = [[column[nodes].tolist() for column in columns] for columns in index.handles]
        for at, (node, parent) in enumerate(zip(nodes.tolist(), parents.tolist(), strict=True)):
            held = {kind: row for kind in Kind if (row := rows[kind - 1][at]) != NO_ROW}
            complete = {kind: row for kind, row in held.items() if space.rows.state[row] == COMMITTED}
            below = [[kind for kind in Kind if columns[kind - 1][at] != NO_HANDLE] for columns in handles]
            yield Chunk(
                key=keys[16 * at : 16 * at + 16],
                parent=ROOT_KEY if parent == NONE else parent_keys[16 * at : 16 * at + 16],
                boundary_tokens=boundaries[at],
                usable=space.usable.usable(node),
                kinds=(bytes(complete), *map(bytes, below)),
                size_bytes=(
                    sum(map(space.size_bytes, complete.values())),
                    *(sum(namespace.object_bytes.get(kind, 0) for kind in kinds) for kinds in below),
                ),
                incomplete=bytes(kind for kind in held if kind not in complete),
            )

    def _path(self, node: int) -> tuple[tuple[bytes, ...], int]:
        """Keys of the nearest ancestors, and how many there are."""
        index = self._space.index
        path, depth = [], 0
        while (node := index.parent(node)) != NONE and depth < _DEPTH_MAX:
            if depth < PATH_KEYS_MAX:
                path.append(index.key(node))
            depth += 1
        return tuple(path), depth

    # Objects

    def _objects(self, namespace: Namespace, node: int) -> Iterator[ObjectDescription]:
        for kind in Kind:
            row = self._space.index.row(node, kind)
            if row != NO_ROW:
                yield self._in_ram(kind, row)
        for tier in self._space.tiers:
            for kind in Kind:
                if tier.has(node, kind):
                    yield _on_medium(tier, kind, tier.handle(node, kind), namespace.object_bytes.get(kind, 0))

    def _in_ram(self, kind: int, row: int) -> ObjectDescription:
        rows = self._space.rows
        state = "incomplete"
        if rows.state[row] == COMMITTED:
            state = "complete" if rows.visible(row) else "unverified"
        checksum = (rows.sum_hi[row] << 64 | rows.sum_lo[row]).to_bytes(16, "big") if rows.summed(row) else b""
        return ObjectDescription(
            tier=_RAM,
            kind=kind,
            size_bytes=self._space.size_bytes(row),
            state=state,
            checksum=checksum,
            generation=rows.generation[row],
            extents=len(rows.chain(row)),
            loans=tuple(self._loans(row)),
            pinned=bool(self._space.kept_rows[row] & PINNED),
        )

    def _loans(self, row: int) -> Iterator[LoanDescription]:
        """Who is lent the object. O(lent table) where anybody is."""
        lent = self._space.lent
        if not lent.pinned(row):
            return
        for entry in np.flatnonzero((lent.rows == row) & (lent.modes != LentMode.FREE))[:LOANS_MAX].tolist():
            mode = LentMode(int(lent.modes[entry])).name.lower()
            lease_id, slot = int(lent.leases[entry]), int(lent.sessions[entry])
            session = self._sessions.by_slot.get(slot)
            if slot == NO_SESSION or session is None:
                yield LoanDescription(_CHECKSUM_WORKER, (), mode)
                continue
            pids = tuple(sorted({attachment.process.pid for attachment in session.attachments.values()}))
            engine_id = WORKER_PREFIX.rstrip("/") if session.worker else session.engine_id
            yield LoanDescription(engine_id, pids, mode, 0 if session.worker else lease_id)


def _tier_contents(tier: LowerTier, namespace: Namespace) -> TierContents:
    objects = tier.contents(namespace.slot)
    size_bytes = sum(count * namespace.object_bytes.get(kind, 0) for kind, count in objects.items())
    return TierContents(tier.tier.name, objects, size_bytes)


def _on_medium(tier: LowerTier, kind: int, handle: int, size_bytes: int) -> ObjectDescription:
    stored = tier.tier.stored(handle)
    return ObjectDescription(
        tier=tier.tier.name,
        kind=kind,
        size_bytes=size_bytes,
        state="complete" if tier.tier.readable else "out of use",
        checksum=b"" if stored.stored_sum is None else stored.stored_sum.to_bytes(16, "big"),
        stored_bytes=stored.stored_bytes,
        sequence=stored.sequence,
    )


def _after(token: str) -> bytes:
    """The id of the last namespace of the page before."""
    try:
        return bytes.fromhex(token)
    except ValueError:
        raise _no_token(token) from None


def _no_token(token: str) -> InvalidArgument:
    return InvalidArgument(f"page_token: {token[:64]!r} is none that was answered")
