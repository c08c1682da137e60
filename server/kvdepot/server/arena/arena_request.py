"""What the configuration asks of an arena, and what a start does with an arena that is different.

An arena is kept, although the configuration asks for another size, where only the tiers below RAM have changed since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvdepot.core.arena import NO_DIGEST, ArenaLayout
from kvdepot.core.arena_purpose import NO_PURPOSE
from kvdepot.core.ram_size import kept_parts
from kvdepot.server.config.memory_room import MIB
from kvdepot.server.config.schema import DATA_SUFFIX, GENERATIONS_SUFFIX


def arena_paths(path: Path) -> tuple[Path, Path, Path]:
    """Return all names that files of the arena may have: of tables, generations and data."""
    return path, path.with_name(f"{path.name}{GENERATIONS_SUFFIX}"), path.with_name(f"{path.name}{DATA_SUFFIX}")


@dataclass(frozen=True, slots=True)
class ArenaRequest:
    """What the configuration asks for. `capacity_bytes` is only for messages; the files have `size_bytes` together.

    `sealed`: no engine can cut the data short, because it is a memfd. Somebody else has to hold it over a restart, with
    the generations.
    """

    path: Path
    size_bytes: int
    capacity_bytes: int
    config_file: str
    sealed: bool = True
    purpose: bytes = NO_PURPOSE
    """An arena with this purpose is adopted even if it has another size. NO_PURPOSE: none is."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of data of each tenant, in the order of their names; empty: all data is one file."""

    @property
    def layout(self) -> ArenaLayout:
        return ArenaLayout.plan(self.size_bytes, divided=tuple(self.parts.values()))

    @property
    def tenants(self) -> bytes:
        """Return what the superblock says of the tenants."""
        names = "\0".join(self.parts).encode()  # no name has a control character
        return hashlib.blake2b(names, digest_size=len(NO_DIGEST)).digest() if self.parts else NO_DIGEST

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        return arena_paths(self.path)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a start does with an arena of another size than is asked for.

    `loss`: why it replaces the arena, so that RAM begins empty. `note`: what is different where it keeps the arena.
    Both are empty if there is no such arena.
    """

    loss: str = ""
    note: str = ""


NOTHING_KNOWN: Final = Outlook()


def kept_note(found: ArenaLayout, asked: ArenaLayout, freed_from: Sequence[int] = ()) -> str:
    """Return what is different in an arena that is kept; empty if it has the size that is asked for."""
    used, before = sum(kept_parts(found, asked, freed_from)), sum(freed_from) or found.data_bytes
    notes = []
    if used < before:
        notes.append(
            f"RAM shrinks from {before // MIB} to {used // MIB} MiB, and loses only the objects in the last"
            f" {(before - used) // MIB} MiB, with what follows them"
        )
    if used < min(sum(kept_parts(found, asked)), asked.data_bytes):
        notes.append(
            f"it has {used // MIB} of {asked.data_bytes // MIB} MiB, because memory of it was freed that engines may"
            " have pinned; a start while no engine runs uses the rest"
        )
    elif used < asked.data_bytes:
        notes.append(
            f"it has {used // MIB} of {asked.data_bytes // MIB} MiB until the arena is made again, for example after a"
            " reboot"
        )
    return "; ".join(notes)
