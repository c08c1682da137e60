"""The nodes of a shared directory, as its janitor sees them: their files, and which of them have fallen silent."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from kvdepot.server.platform.durable_files import naming
from kvdepot.server.storage.shared_layout import NODES, is_node, node_file
from kvdepot.server.tiers.shared.coordinator.files import Found, ServerClock, read_small
from kvdepot.server.tiers.shared.coordinator.ledger import NODES_MAX
from kvdepot.server.tiers.shared.coordinator.records import NODE_BYTES_MAX, Lease, NodeRecord

_SUFFIX: Final = ".json"


def registered(root: Path) -> list[str]:
    """Return the nodes that have a file, in no order. Raise OSError."""
    with naming("readdir", root / NODES):
        names = os.listdir(root / NODES)  # noqa: PTH208
    return [node for name in names if name.endswith(_SUFFIX) and is_node(node := name.removesuffix(_SUFFIX))]


def read_node(root: Path, node: str) -> tuple[Found | None, NodeRecord | None]:
    """Return a node's file and its record. None: it is not there, or is not understood. Raise OSError."""
    found = read_small(root, node_file(node), NODE_BYTES_MAX)
    return found, NodeRecord.unpack(found.data) if found else None


class Nodes:
    """The nodes' files, as the last complete `look` has read them."""

    def __init__(self, root: Path, clock: Callable[[], float], server: ServerClock, silent_seconds: float) -> None:
        self._root = root
        self._silent_seconds = silent_seconds
        self._clock = clock
        self._server = server
        self._same_since: dict[str, tuple[int, float]] = {}  # mtime_ns of a node's file, when it was first seen so
        self._looked_at = clock()
        self.records: dict[str, NodeRecord] = {}
        self._coming: dict[str, NodeRecord] = {}  # of a look in progress
        self.strange = 0  # files that are not understood, or too many

    @property
    def published(self) -> dict[str, int]:
        return {node: record.published_bytes for node, record in self.records.items()}

    @property
    def wanted(self) -> dict[str, int]:
        return {node: record.wanted_bytes for node, record in self.records.items()}

    @property
    def refused(self) -> bool:
        """Return whether the file system has refused a node's writes lately."""
        return any(record.refused and not record.left for record in self.records.values())

    @property
    def term_max(self) -> int:
        """Return the latest term that any node has seen."""
        return max((record.lease.term for record in self.records.values()), default=0)

    def know_later(self, lease: Lease) -> bool:
        """Return whether any node has seen a later lease, or another of this term.

        What stands in this lease may be old then.
        """
        leases = [record.lease for record in self.records.values()]
        return any(seen.term > lease.term or (seen.term == lease.term and seen != lease) for seen in leases)

    def look(self, known: Collection[str]) -> Iterator[None]:
        """Read the files of all nodes, one a step. Of too many, those that are `known` come first. Raise OSError."""
        nodes = sorted(registered(self._root), key=lambda node: (node not in known, node))
        strange = max(len(nodes) - NODES_MAX, 0)
        self._coming = {}
        seen = {}
        for node in nodes[:NODES_MAX]:
            yield
            found, record = read_node(self._root, node)
            seen[node] = found.mtime_ns if found else 0
            if record is not None:
                self._coming[node] = record
            elif found is not None:
                strange += 1
        seen.update((node, 0) for node in known if node not in seen)  # its file is not there
        self.records, self.strange = self._coming, strange
        now = self._looked_at = self._clock()
        for node, mtime_ns in seen.items():
            if self._same_since.get(node, (None,))[0] != mtime_ns:
                self._same_since[node] = mtime_ns, now
        for node in self._same_since.keys() - seen.keys():
            del self._same_since[node]

    @property
    def left(self) -> list[str]:
        """Return the nodes of which their owner has proved that they write no more."""
        return [node for node, record in self.records.items() if record.left]

    def gone(self) -> list[str]:
        """Return the nodes of which nothing that they may have begun is still in progress."""
        return list({*self.left, *self._silent()})

    def _silent(self) -> list[str]:
        """Return the nodes that have not renewed their file for long, by the server's clock and by this node's looks.

        Only the last look counts: what was renewed since then is not known yet.
        """
        return [
            node
            for node, (mtime_ns, since) in self._same_since.items()
            if min(self._looked_at - since, self._server.age_seconds(mtime_ns, since)) > self._silent_seconds
        ]

    def forget(self, node: str) -> None:
        """Forget a node whose file was removed. A look that has not ended yet may have read that file."""
        self.records.pop(node, None)
        self._coming.pop(node, None)
        self._same_since.pop(node, None)
