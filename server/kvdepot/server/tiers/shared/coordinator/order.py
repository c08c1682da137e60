"""Which objects of a shared directory go first (design.md#shared-tiers, ADR 0018).

The one used longest ago, in hours, because that is how often its time is refreshed. Within an hour the deepest boundary
first, a chunk's state and window before its attention, so that no chunk goes before what continues it. What only a
header says is read of the hours in question alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.tiers.shared.coordinator.files import NANOSECONDS
from kvdepot.server.tiers.shared.coordinator.scan import UNREAD, Columns, Rows

HOUR_NS: Final = 3_600 * NANOSECONDS
_UNREADABLE: Final = 0xFFFF_FFFF
"""Boundary of an object without a header that can be believed: nothing continues it, so it goes first."""
Numbers = npt.NDArray[np.int64]


def in_order(columns: Columns, read_name: Callable[[str], ObjectName | None]) -> Iterator[int | None]:
    """Yield each row of `columns` once, first those to be deleted first. Yield None after each header that was read.

    A parent's time may be an hour older than its child's, because neither time is refreshed within the hour. So a
    parent goes with the youngest child that continues it.
    """
    rows = columns.rows
    rows["bucket"] = rows["mtime_ns"] // HOUR_NS
    chunks, paths = _chunks(columns)
    known = np.sort(chunks[paths])
    while True:
        left = np.flatnonzero(rows["gone"] == 0)
        if not len(left):
            return
        oldest = int(rows["bucket"][left].min())
        near = left[rows["bucket"][left] <= oldest + 1]
        for row in near[rows["tokens"][near] == UNREAD].tolist():
            _read(columns, row, read_name(columns.file(row)))
            yield None
        _raise_parents(rows, near, chunks, paths)
        going = near[rows["bucket"][near] == oldest]
        for row in _deepest_first(rows, going, paths, known).tolist():
            rows["gone"][row] = 1
            yield row


def _chunks(columns: Columns) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return a number for each row's chunk, and whether the row is what the next chunk of a path needs of this one.

    The numbers are 64 bits of a digest. Two chunks of one number would only be deleted in another order.
    """
    rows = columns.rows
    chunks = rows["key"][:, :8].copy().view("<u8")[:, 0] ^ _salt(rows["namespace"])
    attention = rows["kind"] == Kind.ATTENTION
    with_attention = np.zeros(len(columns.namespaces) + 1, np.bool_)
    with_attention[rows["namespace"][attention]] = True
    return chunks, attention | ~with_attention[rows["namespace"]]


def _salt(namespace: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint64]:
    return (namespace.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def _read(columns: Columns, row: int, name: ObjectName | None) -> None:
    found = columns.rows[row]
    found["tokens"] = name.boundary_tokens if name else _UNREADABLE
    if name and any(name.parent):
        parent = np.frombuffer(name.parent[:8], "<u8")
        found["parent"] = (parent ^ _salt(columns.rows["namespace"][row : row + 1]))[0]


def _raise_parents(rows: Rows, near: Numbers, chunks: npt.NDArray[np.uint64], paths: npt.NDArray[np.bool_]) -> None:
    """Make each object that another one needs as young as that one.

    Start with the deepest, so that this reaches whole paths.
    """
    index = near[paths[near]]
    index = index[np.argsort(chunks[index], kind="stable")]
    numbers = chunks[index]
    needs = np.where(paths[near], rows["parent"][near], chunks[near])
    at = np.searchsorted(numbers, needs)
    at[at == len(numbers)] = 0
    has = (numbers[at] == needs) if len(numbers) else np.zeros(len(near), np.bool_)
    depths = rows["tokens"][near].astype(np.int64) * 2 + ~paths[near]  # what is needed has a lower one
    order = np.argsort(-depths, kind="stable")
    order = order[has[order]]
    buckets = rows["bucket"]
    for level in np.split(order, np.flatnonzero(np.diff(depths[order])) + 1):
        np.maximum.at(buckets, index[at[level]], buckets[near[level]])


def _deepest_first(rows: Rows, going: Numbers, paths: npt.NDArray[np.bool_], known: npt.NDArray[np.uint64]) -> Numbers:
    """Return the rows, the deepest first. Those whose parent is gone come before all others: no lookup finds them."""
    parents = rows["parent"][going]
    at = np.minimum(np.searchsorted(known, parents), len(known) - 1) if len(known) else np.zeros(len(going), np.int64)
    orphan = paths[going] & (parents != 0) & (known[at] != parents if len(known) else True)
    first: Numbers = going[np.lexsort((paths[going], -rows["tokens"][going].astype(np.int64), ~orphan))]
    return first
