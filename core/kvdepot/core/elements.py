"""The element types of an object's bytes, by which an audit can tell noise from other bytes (ADR 0037).

They are not part of a namespace's identity: the engine's own configuration is. A client that declares no elements
shares bytes with one that does, and is only not audited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Final

from kvdepot.core.bounds import AtMost, Count, Text
from kvdepot.core.errors import NamespaceRefused
from kvdepot.core.kinds import Kind  # not of the calls: a checksum worker needs none of them
from kvdepot.core.limits import DTYPE_BYTES_MAX, ELEMENT_PARTS_MAX, ELEMENT_RUNS_MAX, OBJECT_BYTES_MAX, check_limit

OPAQUE: Final = ""
"""Bytes that are no numbers of one type: packed with their scales, or padding. They are not compared."""
ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
"""Size of an element, by torch's name of its type. Any other type is opaque."""


@dataclass(frozen=True, slots=True)
class ElementRun:
    """`parts` of `part_bytes` each, one after the other. A part is what belongs together: a layer on one rank."""

    dtype: Annotated[str, Text(DTYPE_BYTES_MAX)]
    part_bytes: Annotated[int, AtMost(OBJECT_BYTES_MAX)]
    parts: Annotated[int, AtMost(ELEMENT_PARTS_MAX)] = 1


@dataclass(frozen=True, slots=True)
class KindElements:
    """What the objects of one kind are made of, in the order of their bytes."""

    kind: Kind
    runs: Annotated[tuple[ElementRun, ...], Count(ELEMENT_RUNS_MAX)]


Elements = Mapping[Kind, tuple[ElementRun, ...]]
"""By kind, in the order of the object's bytes and covering them; a kind without an entry is not known."""


def runs_of(parts: Iterable[tuple[str, int]]) -> tuple[ElementRun, ...]:
    """Return the runs of (type, bytes) parts that follow each other."""
    runs: list[ElementRun] = []
    for dtype, size_bytes in parts:
        if runs and (runs[-1].dtype, runs[-1].part_bytes) == (dtype, size_bytes):
            runs[-1] = replace(runs[-1], parts=runs[-1].parts + 1)
        elif size_bytes:
            runs.append(ElementRun(dtype, size_bytes))
    return tuple(runs)


def comparable(run: ElementRun) -> bool:
    """Return whether the bytes are numbers of a known type."""
    size_bytes = ELEMENT_BYTES.get(run.dtype)
    return size_bytes is not None and run.part_bytes % size_bytes == 0


def check_elements(elements: Elements, object_bytes: Mapping[Kind, int]) -> None:
    """Raise NamespaceRefused if elements do not cover the objects, LimitExceeded if there are too many."""
    check_limit("element runs of a namespace", sum(map(len, elements.values())), ELEMENT_RUNS_MAX)
    parts = sum(run.parts for runs in elements.values() for run in runs)
    check_limit("element parts of a namespace", parts, ELEMENT_PARTS_MAX)
    for kind, runs in elements.items():
        covered = sum(run.part_bytes * run.parts for run in runs)
        if covered != object_bytes.get(kind, 0):
            raise NamespaceRefused(
                f"the elements of kind {kind.name.lower()} are {covered} bytes, its objects {object_bytes.get(kind, 0)}"
            )
