"""Reads and damages objects in the arena file of a running daemon, from outside."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvdepot.core.arena import PAGE_BYTES, ArenaTables, RowState, Superblock
from kvdepot.core.calls import Kind

from tests.rigs.arena_data import data_of


@dataclass(frozen=True, slots=True, order=True)
class StoredObject:
    """A committed object: where its first extent lies in the arena."""

    boundary_tokens: int
    kind: Kind
    offset: int
    length_bytes: int


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def committed(arena: Path) -> set[StoredObject]:
    with mapped(arena) as memory:
        # A copy of the tables: views would keep the mapping from closing.
        layout = Superblock.unpack(memory[:PAGE_BYTES]).layout
        table = ArenaTables(memoryview(memory[: layout.tables_bytes]), layout).extents
        rows = np.flatnonzero(table["state"] == RowState.COMMITTED)
        return {
            StoredObject(
                int(table["boundary"][row]),
                Kind(table["kind"][row]),
                int(table["offset"][row]),
                int(table["length"][row]),
            )
            for row in rows
        }


def read(arena: Path, stored: StoredObject) -> bytes:
    """The bytes of an object that lies in one piece."""
    with mapped(data_of(arena)) as memory:
        return memory[stored.offset : stored.offset + stored.length_bytes]


def damage(arena: Path, stored: StoredObject) -> None:
    """Turn an object's bytes around: every value stays a plausible one, none stays in its place."""
    with mapped(data_of(arena)) as memory:
        end = stored.offset + stored.length_bytes
        words = np.frombuffer(memory[stored.offset : end], dtype=np.uint32)
        memory[stored.offset : end] = words[::-1].tobytes()
