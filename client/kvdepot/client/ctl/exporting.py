"""A namespace, or the path to one of its chunks, out of the depot into one file."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO, Final

from kvdepot.client.bulk import Granted
from kvdepot.core.calls import ROOT_KEY, AcquireOutcome
from kvdepot.core.errors import KvDepotError, NotFound
from kvdepot.core.export_file import ExportedObject, ExportHead, ExportWriter
from kvdepot.core.objectfile import ObjectName, payload_sum

if TYPE_CHECKING:
    from kvdepot.client.bulk import BulkEngine
    from kvdepot.client.ctl.calls import Operator
    from kvdepot.core.keys import NamespaceSpec
    from kvdepot.core.listing import Chunk, ChunkPage

GROUP_BYTES: Final = 64 << 20
"""Lent at once, and held in memory: a lease lasts for as long as its copies, not for as long as a slow file."""
GROUP_OBJECTS: Final = 1024
CHUNKS_MAX: Final = 4_000_000
LATER_SECONDS: Final = 10.0
"""How long room, or credit, is waited for while nothing else moves."""
LATE_MAX: Final = 3
"""Chunks in a row that could not be read in time: then it is a tier that hangs."""
TOLD_SECONDS: Final = 0.5
_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """Objects, and bytes of their payloads. `left_out`: by reason."""

    planned: int
    exported: int = 0
    exported_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    finished: bool = False


def planned(page: ChunkPage, spec: NamespaceSpec, key: bytes, tier: str) -> list[list[ObjectName]]:
    """Return the objects to export, chunk by chunk: parents first, path by path, and path objects first.

    Args:
        page: the namespace's chunks.
        spec: of the namespace.
        key: of the chunk that ends the path; empty: all paths.
        tier: export what this tier has; empty: what any tier has.

    Raises:
        NotFound: there is no such tier or chunk.
    """
    namespace_id, path_kind = spec.namespace_id(), spec.planner().path_kind
    if tier and tier not in page.tiers:
        raise NotFound(f"there is no tier {tier}", advice=f"there are {', '.join(page.tiers)}")
    chosen = [at for at, name in enumerate(page.tiers) if tier in ("", name)]
    return [
        [
            ObjectName(namespace_id, chunk.key, chunk.parent, kind, chunk.boundary_tokens, size_bytes)
            for kind, size_bytes in sorted(spec.object_bytes.items(), key=lambda of: of[0] != path_kind)
            if any(kind in chunk.kinds[at] for at in chosen)
        ]
        for chunk in (_path(page.chunks, key) if key else _depth_first(page.chunks))
    ]


def _path(chunks: Sequence[Chunk], key: bytes) -> list[Chunk]:
    by_key = {chunk.key: chunk for chunk in chunks}
    path: list[Chunk] = []
    while key != ROOT_KEY:
        if key not in by_key:
            raise NotFound(f"chunk {key.hex()} of the path is not there any more")
        path.append(by_key[key])
        key = by_key[key].parent
    return path[::-1]


def _depth_first(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks, parents first. Leave out what has no path to a first chunk: it is just being dropped."""
    below: dict[bytes, list[Chunk]] = {}
    for chunk in chunks:
        below.setdefault(chunk.parent, []).append(chunk)
    waiting = below.get(ROOT_KEY, [])
    while waiting:
        chunk = waiting.pop()
        yield chunk
        waiting += below.get(chunk.key, [])


class Exporter:
    """One export. What goes away while it runs, with all that follows it, is left out and counted."""

    def __init__(self, engine: BulkEngine, operator: Operator, file: BinaryIO, head: ExportHead) -> None:
        self._engine = engine
        self._operator = operator
        self._writer = ExportWriter(file, head)
        self._path_kind = engine.spec.planner().path_kind
        self._placed = {ROOT_KEY}  # chunks that the file has the path to
        self._progress = ExportProgress(head.objects)
        self._told_at = time.monotonic()
        self._patient_until = time.monotonic() + LATER_SECONDS
        self._late = 0

    def run(self, chunks: Iterable[list[ObjectName]], pathless: int = 0) -> Generator[ExportProgress, None, None]:
        """Export the chunks, and yield the progress. Raise OSError, KvDepotError or grpc.RpcError.

        `pathless`: chunks that were listed without a path to them.
        """
        if pathless:
            self._leave_out("path", pathless)
        for group in _groups(chunks):
            yield from self._export(group)
        self._writer.end(sum(self._progress.left_out.values()))
        self._progress = replace(self._progress, finished=True)
        yield self._progress

    def _export(self, group: list[list[ObjectName]]) -> Iterator[ExportProgress]:
        """Export a group. If it is not lent as a whole, ask for it chunk by chunk."""
        names = [name for chunk in group for name in chunk]
        granted = self._acquire(names)
        if isinstance(granted, Granted):
            try:
                found = list(self._read(names, granted))
            finally:
                self._engine.release(granted)
            self._write(found)
        elif len(group) > 1:
            for chunk in group:
                yield from self._export([chunk])
        else:
            self._not_lent(granted, len(names))
        if time.monotonic() - self._told_at >= TOLD_SECONDS:
            self._told_at = time.monotonic()
            yield self._progress

    def _acquire(self, names: list[ObjectName]) -> Granted | AcquireOutcome | None:
        granted = self._engine.acquire(names)
        while granted is AcquireOutcome.LATER and time.monotonic() < self._patient_until:
            self._engine.pause(_PAUSE_SECONDS)
            granted = self._engine.acquire(names)
        if isinstance(granted, Granted):
            self._patient_until = time.monotonic() + LATER_SECONDS
            self._late = 0
        return granted

    def _not_lent(self, outcome: AcquireOutcome | None, objects: int) -> None:
        self._late += outcome is None
        if self._late == LATE_MAX:
            raise KvDepotError(f"{LATE_MAX} chunks could not be read in time", advice="--tier ram; `kvdepotctl status`")
        reason = "late" if outcome is None else "gone" if outcome is AcquireOutcome.MISSING else outcome.name.lower()
        self._leave_out(reason, objects)

    def _read(self, names: list[ObjectName], granted: Granted) -> Iterator[tuple[ObjectName, bytearray, int]]:
        """Those that were held from before the copy until after it, and have the sum that the daemon knows of them."""
        known = self._sums(names)
        for index, name in enumerate(names):
            payload = self._engine.read(granted, index)
            if payload is None:
                self._leave_out("gone")
                continue
            raw_sum = payload_sum((payload,))
            generation = granted.extents.granted([index])[1][0]
            if known.get((name.key, name.kind, generation), raw_sum) == raw_sum:
                yield name, payload, raw_sum
            else:
                self._leave_out("damaged")

    def _sums(self, names: list[ObjectName]) -> dict[tuple[bytes, int, int], int]:
        """By key, kind and generation: of what is in RAM, where its sum has been taken."""
        sums: dict[tuple[bytes, int, int], int] = {}
        for key in dict.fromkeys(name.key for name in names):
            with suppress(NotFound):  # dropped while it is lent, which `read` sees by its generation
                for one in self._operator.describe_chunk(self._engine.namespace, key).objects:
                    if one.generation and one.checksum:
                        sums[key, one.kind, one.generation] = int.from_bytes(one.checksum, "big")
        return sums

    def _write(self, found: Iterable[tuple[ObjectName, bytearray, int]]) -> None:
        for name, payload, raw_sum in found:
            if name.kind == self._path_kind and name.parent in self._placed:
                self._placed.add(name.key)
            if name.key in self._placed:
                self._writer.add(ExportedObject(name, payload), raw_sum)
            else:
                self._leave_out("path")
        written = self._writer
        self._progress = replace(self._progress, exported=written.objects, exported_bytes=written.raw_bytes)

    def _leave_out(self, reason: str, count: int = 1) -> None:
        left_out = dict(self._progress.left_out)
        left_out[reason] = left_out.get(reason, 0) + count
        self._progress = replace(self._progress, left_out=left_out)


def _groups(chunks: Iterable[list[ObjectName]]) -> Iterator[list[list[ObjectName]]]:
    group: list[list[ObjectName]] = []
    size_bytes = objects = 0
    for chunk in chunks:
        if not chunk:
            continue
        chunk_bytes = sum(name.raw_bytes for name in chunk)
        if group and (size_bytes + chunk_bytes > GROUP_BYTES or objects + len(chunk) > GROUP_OBJECTS):
            yield group
            group, size_bytes, objects = [], 0, 0
        group.append(chunk)
        size_bytes += chunk_bytes
        objects += len(chunk)
    if group:
        yield group


def export_spec(operator: Operator, namespace_id: bytes) -> NamespaceSpec:
    """Return the namespace's spec. Raise NotFound if the daemon does not know it."""
    spec = operator.describe_namespace(namespace_id).spec
    if spec is None:
        raise NotFound(
            f"no engine has registered namespace {namespace_id.hex()[:12]} since the daemon started",
            advice="start an engine of it: it says what the namespace is",
        )
    return spec
