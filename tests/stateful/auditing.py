"""The audit's part in the engine's world: every object has a type, and the worker compares byte by byte."""

from __future__ import annotations

from kvdepot.core.elements import ElementRun, Elements
from kvdepot.core.keys import NamespaceSpec

from tests.rigs.engine_rig import Rig


def elements_of(spec: NamespaceSpec) -> Elements:
    return {kind: (ElementRun("bfloat16", size),) for kind, size in spec.object_bytes.items()}


def compare(rig: Rig) -> None:
    """What is not the same has drifted, as it has whenever two writers made it."""
    while (pair := rig.engine.next_to_compare()) is not None:
        ours, theirs = (
            b"".join(bytes(rig.buffer[offset : offset + length]) for offset, length in extents)
            for extents in (pair.stored, pair.recomputed)
        )
        rig.engine.compared(pair.row, drifted=ours != theirs)
