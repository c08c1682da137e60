"""What ranks may touch in the engines' world, and the bytes that a writer puts there."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from tests.rigs.engine_rig import unpack

Name = tuple[bytes, bytes, int]
"""(namespace, key, kind) of an object."""


@dataclass
class Held:
    """What a rank may touch of one object: its fragments (row, offset, length, generation)."""

    name: Name
    fragments: list[tuple[int, int, int, int]]
    scratch: bool = False  # of an audit: nobody is ever served it


def held_by(names: list[Name], extents: bytes, part: range) -> dict[int, Held]:
    """Return what an engine is lent, by index. Offsets count over all data then; `part` is what the engine maps."""
    held: dict[int, Held] = {}
    for index, row, offset, length, generation in unpack(extents):
        assert offset + length <= len(part), "an extent is outside what the engine maps"
        fragment = (row, part.start + offset, length, generation)
        held.setdefault(index, Held(names[index], [])).fragments.append(fragment)
    return held


def parts_of(held: Held, lease: int) -> list[bytes]:
    """The writer's bytes, cut as the fragments are."""
    token = blake2b(repr((held.name, lease)).encode()).digest()
    total = sum(length for _, _, length, _ in held.fragments)
    payload = (token * (total // len(token) + 1))[:total]
    at, parts = 0, []
    for _, _, length, _ in held.fragments:
        parts.append(payload[at : at + length])
        at += length
    return parts
