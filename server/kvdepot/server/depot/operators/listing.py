"""Listings of what the daemon holds, by namespace and by chunk, for operators. They only read.

A page of chunks follows the index's node numbers, which a chunk keeps for its life. So a
listing may be taken while everything changes. A chunk that is there from the first page to
the last is listed exactly once. Each page costs some milliseconds, however many nodes there
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from kvdepot.server.depot.sessions.session import WORKER_PREFIX
from kvdepot.server.depot.sessions.sessions import Sessions
from kvdepot.server.depot.tree.index import NONE, Nodes
from kvdepot.server.depot.tree.lent import NO_SESSION
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.storage.base import NO_HANDLE

_RAM: Final = "ram"
_NUMBERS_MAX: Final = 262_144
"""Node numbers that a page looks at: 0.2 ms."""
_CANDIDATES_MAX: Final = 4096
"""Of them, how many are looked up: 1 ms."""
_DEPTH_MAX: Final = 65_536
"""Ancestors that are counted: 10 ms."""
_CHECKSUM_WORKER: Final = "kvdepotd/checksums"


class Listing:
    """The answers of `kvdepotctl ls` and `describe`. Methods raise NotFound and InvalidArgument."""

    def __init__(self, tree: Tree, ram: RamTier, sessions: Sessions) -> None:
        self._ram = ram
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._usable = tree.usable
        self._tiers = tree.tiers
        self._clock = tree.clock
        self._rows = ram.rows
        self._lent = ram.lent
        self._sessions = sessions

    # Namespaces

    def namespaces(self, prefix: str, limit: int, token: str) -> NamespacePage:
        """Return namespaces whose id begins with these hexadecimal digits, in order.

        `token` is of the page before, or empty.
        """
        least, greatest = prefix_range("prefix", prefix)
        after = _after(token)
        ids = sorted(one for one in self._namespaces.by_id if least <= one <= greatest and one > after)
        page = tuple(self._contents(self._namespaces.by_id[one]) for one in ids[:limit])
        return NamespacePage(page, ids[limit - 1].hex() if len(ids) > limit else "")

    def describe_namespace(self, namespace_id: bytes) -> NamespaceDescription:
        namespace = self._namespace(namespace_id)
        engines = sorted(
            session.engine_id for session in self._sessions.by_slot.values() if namespace_id in session.namespaces
        )
        return NamespaceDescription(self._contents(namespace), namespace.spec, tuple(engines))

    def _namespace(self, namespace_id: bytes) -> Namespace:
        namespace = self._namespaces.by_id.get(namespace_id)
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
            idle_seconds=max(self._clock() - namespace.used_at, 0.0),
            tiers=(
                TierContents(_RAM, _by_kind(ram), namespace.bytes),
                *(_tier_contents(tier, namespace) for tier in self._tiers),
            ),
        )

    # Chunks

    def chunks(self, namespace_id: bytes, prefix: str, limit: int, token: str) -> ChunkPage:
        """Return chunks whose key begins with these hexadecimal digits, in no particular order."""
        namespace = self._namespace(namespace_id)
        start = self._start(token)
        index = self._index
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
            self._tier_names(),
            tuple(self._chunks(namespace, live)),
            f"{self._rows.run:x}.{following:x}" if following < index.high else "",
        )

    def describe_chunk(self, namespace_id: bytes, key: bytes) -> ChunkDescription:
        namespace = self._namespace(namespace_id)
        index = self._index
        node = index.find(namespace.slot, key)
        if node == NONE:
            raise NotFound(f"namespace {namespace_id.hex()} has no chunk {key.hex()}")
        (chunk,) = self._chunks(namespace, np.array([node], np.int64))
        path, depth = self._path(node)
        children = sum(1 for _ in islice(index.children(node), CHILDREN_COUNTED_MAX + 1))
        return ChunkDescription(
            chunk=chunk,
            tiers=self._tier_names(),
            objects=tuple(self._objects(namespace, node)),
            path=path,
            depth=depth,
            children=min(children, CHILDREN_COUNTED_MAX),
            more_children=children > CHILDREN_COUNTED_MAX,
        )

    def _start(self, token: str) -> int:
        """Return the node number that a page begins with. Raise InvalidArgument for a token that is not valid."""
        if not token:
            return 0
        run, _, number = token.partition(".")
        try:
            found = int(run, 16), int(number, 16)
        except ValueError:
            raise _no_token(token) from None
        if found[0] != self._rows.run:
            raise InvalidArgument("page_token: the daemon was restarted since", advice="list again from the beginning")
        if found[1] < 0:
            raise _no_token(token)
        return min(found[1], self._index.high)

    def _matching(self, candidates: Nodes, least: bytes, greatest: bytes) -> Nodes:
        """Return the candidates whose keys lie between these bounds. The bounds agree in their first digits."""
        first = self._index.keys[candidates, 0].byteswap()
        low, high = (np.uint64(int.from_bytes(bound[:8], "big")) for bound in (least, greatest))
        chosen: Nodes = candidates[(first >= low) & (first <= high)]
        if least[:8] == greatest[:8]:  # hardly more than one is left
            chosen = chosen[[least <= self._index.key(node) <= greatest for node in chosen.tolist()]]
        return chosen

    def _tier_names(self) -> tuple[str, ...]:
        return (_RAM, *(tier.tier.name for tier in self._tiers))

    def _chunks(self, namespace: Namespace, nodes: Nodes) -> Iterator[Chunk]:
        index = self._index
        parents = index.parents_of(nodes)
        parent_keys = index.keys[np.where(parents == NONE, 0, parents)].tobytes()
        keys = index.keys[nodes].tobytes()
        boundaries = index.boundaries_of(nodes).tolist()
        rows = [column[nodes].tolist() for column in index.rows]
        handles = [[column[nodes].tolist() for column in columns] for columns in index.handles]
        for at, (node, parent) in enumerate(zip(nodes.tolist(), parents.tolist(), strict=True)):
            held = {kind: row for kind in Kind if (row := rows[kind - 1][at]) != NO_ROW}
            complete = {kind: row for kind, row in held.items() if self._rows.state[row] == COMMITTED}
            below = [[kind for kind in Kind if columns[kind - 1][at] != NO_HANDLE] for columns in handles]
            yield Chunk(
                key=keys[16 * at : 16 * at + 16],
                parent=ROOT_KEY if parent == NONE else parent_keys[16 * at : 16 * at + 16],
                boundary_tokens=boundaries[at],
                usable=self._usable.usable(node),
                kinds=(bytes(complete), *map(bytes, below)),
                size_bytes=(
                    sum(map(self._ram.size_bytes, complete.values())),
                    *(sum(namespace.object_bytes.get(kind, 0) for kind in kinds) for kinds in below),
                ),
                incomplete=bytes(kind for kind in held if kind not in complete),
            )

    def _path(self, node: int) -> tuple[tuple[bytes, ...], int]:
        """Return the keys of the nearest ancestors, and how many ancestors there are."""
        index = self._index
        path, depth = [], 0
        while (node := index.parent(node)) != NONE and depth < _DEPTH_MAX:
            if depth < PATH_KEYS_MAX:
                path.append(index.key(node))
            depth += 1
        return tuple(path), depth

    # Objects

    def _objects(self, namespace: Namespace, node: int) -> Iterator[ObjectDescription]:
        for kind in Kind:
            row = self._index.row(node, kind)
            if row != NO_ROW:
                yield self._in_ram(kind, row)
        for tier in self._tiers:
            for kind in Kind:
                if tier.has(node, kind):
                    yield _on_medium(tier, kind, tier.handle(node, kind), namespace.object_bytes.get(kind, 0))

    def _in_ram(self, kind: int, row: int) -> ObjectDescription:
        rows = self._rows
        state = "incomplete"
        if rows.state[row] == COMMITTED:
            state = "complete" if rows.visible(row) else "unverified"
        checksum = (rows.sum_hi[row] << 64 | rows.sum_lo[row]).to_bytes(16, "big") if rows.summed(row) else b""
        return ObjectDescription(
            tier=_RAM,
            kind=Kind(kind),
            size_bytes=self._ram.size_bytes(row),
            state=state,
            checksum=checksum,
            generation=rows.generation[row],
            extents=len(rows.chain(row)),
            loans=tuple(self._loans(row)),
            pinned=bool(self._ram.pins.user.pinned[row]),
        )

    def _loans(self, row: int) -> Iterator[LoanDescription]:
        """Yield the loans of the object. This is O(lent table) where there are any."""
        lent = self._lent
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
    return TierContents(tier.tier.name, _by_kind(objects), size_bytes)


def _by_kind(objects: Mapping[int, int]) -> dict[Kind, int]:
    return {Kind(kind): count for kind, count in objects.items()}


def _on_medium(tier: LowerTier, kind: int, handle: int, size_bytes: int) -> ObjectDescription:
    stored = tier.tier.stored(handle)
    return ObjectDescription(
        tier=tier.tier.name,
        kind=Kind(kind),
        size_bytes=size_bytes,
        state="complete" if tier.tier.readable else "disabled",
        checksum=b"" if stored.stored_sum is None else stored.stored_sum.to_bytes(16, "big"),
        stored_bytes=stored.stored_bytes,
        sequence=stored.sequence,
        place=stored.place,
    )


def _after(token: str) -> bytes:
    """Return the id of the last namespace of the page before. Raise InvalidArgument for a token that is not valid."""
    try:
        return bytes.fromhex(token)
    except ValueError:
        raise _no_token(token) from None


def _no_token(token: str) -> InvalidArgument:
    return InvalidArgument(f"page_token: {token[:64]!r} is none that was answered")
