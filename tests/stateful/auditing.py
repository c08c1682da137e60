"""The audit's part in the engine's world: every object has a type, and the worker compares byte by byte."""

from __future__ import annotations

from typing import Any

from kvdepot.core.elements import ElementRun, Elements
from kvdepot.core.keys import NamespaceSpec

from tests.rigs.engine_rig import Rig


def elements_of(spec: NamespaceSpec) -> Elements:
    return {kind: (ElementRun("bfloat16", size),) for kind, size in spec.object_bytes.items()}


def compare(rig: Rig) -> None:
    """What is not the same has drifted, as it has whenever two writers made it."""
    while (pair := rig.depot.next_to_compare()) is not None:
        ours, theirs = (
            b"".join(bytes(rig.buffer[offset : offset + length]) for offset, length in extents)
            for extents in (pair.stored, pair.recomputed)
        )
        rig.depot.compared(pair.row, drifted=ours != theirs)


def flip(stored: dict[Any, bytes], pick: int) -> None:
    """One bit of what a medium has, by handle or file, is another."""
    if stored:
        at = sorted(stored)[pick % len(stored)]
        data = bytearray(stored[at])
        data[pick % len(data)] ^= 1 << pick % 8
        stored[at] = bytes(data)
