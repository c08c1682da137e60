"""The nodes of a shared directory, as its janitor sees them: their files, and which of them have fallen silent."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from kvdepot.server.durable_files import naming
from kvdepot.server.tiers.shared.keeper.files import Found, ServerClock, read_small
from kvdepot.server.tiers.shared.keeper.ledger import NODES_MAX
from kvdepot.server.tiers.shared.keeper.records import NODE_BYTES_MAX, Lease, NodeRecord
from kvdepot.server.tiers.shared.layout import NODES, is_node, node_file

_SUFFIX: Final = ".json"


def registered(root: Path) -> list[str]:
    """The nodes that have a file, in no order. Raises OSError."""
    with naming("readdir", root / NODES):
        names = os.listdir(root / NODES)  # noqa: PTH208
    return [node for name in names if name.endswith(_SUFFIX) and is_node(node := name.removesuffix(_SUFFIX))]


def read_node(root: Path, node: str) -> tuple[Found | None, NodeRecord | None]:
    """A node's file, and what it says; None: it is not there, is not understood. Raises OSError."""
    found = read_small(root / node_file(node), NODE_BYTES_MAX)
    return found, NodeRecord.unpack(found.data) if found else None


class Nodes:
    """What `look` read last."""

    def __init__(self, root: Path, clock: Callable[[], float], server: ServerClock, silent_seconds: float) -> None:
        self._root = root
        self._silent_seconds = silent_seconds
        self._clock = clock
        self._server = server
        self._same_since: dict[str, tuple[int, float]] = {}  # mtime_ns of a node's file, when it was first seen so
        self.records: dict[str, NodeRecord] = {}
        self.strange = 0  # files that are not understood, or too many

    @property
    def published(self) -> dict[str, int]:
        return {node: record.published_bytes for node, record in self.records.items()}

    @property
    def wanted(self) -> dict[str, int]:
        return {node: record.wanted_bytes for node, record in self.records.items()}

    @property
    def term_max(self) -> int:
        """The latest that any of them has seen."""
        return max((record.lease.term for record in self.records.values()), default=0)

    def know_later(self, lease: Lease) -> bool:
        """Whether any of them has seen a later lease, or another of this term: what stands in this one may be old."""
        leases = [record.lease for record in self.records.values()]
        return any(seen.term > lease.term or (seen.term == lease.term and seen != lease) for seen in leases)

    def look(self, known: Collection[str]) -> None:
        """Read them all; of too many, those that are `known` first. Raises OSError."""
        nodes = sorted(registered(self._root), key=lambda node: (node not in known, node))
        self.strange = max(len(nodes) - NODES_MAX, 0)
        self.records = {}
        seen = {node: self._read(node) for node in nodes[:NODES_MAX]}
        seen.update((node, 0) for node in known if node not in seen)  # its file is not there
        now = self._clock()
        for node, mtime_ns in seen.items():
            if self._same_since.get(node, (None,))[0] != mtime_ns:
                self._same_since[node] = mtime_ns, now
        for node in self._same_since.keys() - seen.keys():
            del self._same_since[node]

    @property
    def left(self) -> list[str]:
        """Those of which their owner has proved that they write no more."""
        return [node for node, record in self.records.items() if record.left]

    def gone(self) -> list[str]:
        """Nothing that they may have begun goes on."""
        return list({*self.left, *self._silent()})

    def _silent(self) -> list[str]:
        """Those that have not renewed their file for long, by the server's clock and as this node has seen it."""
        now = self._clock()
        return [
            node
            for node, (mtime_ns, since) in self._same_since.items()
            if min(now - since, self._server.age_seconds(mtime_ns)) > self._silent_seconds
        ]

    def forget(self, node: str) -> None:
        """Its file was removed."""
        self.records.pop(node, None)
        self._same_since.pop(node, None)

    def _read(self, node: str) -> int:
        """mtime_ns; 0: there is none."""
        found, record = read_node(self._root, node)
        if found is None:
            return 0
        if record is None:
            self.strange += 1
        else:
            self.records[node] = record
        return found.mtime_ns
