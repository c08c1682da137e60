"""What the bytes of an object are numbers of: by which the daemon can tell noise from other bytes (ADR 0037).

Not part of a namespace's identity, which has it in the engine's own words: a client that
says nothing here shares bytes with one that does, and is only not audited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvdepot.core.calls import Kind
from kvdepot.core.errors import NamespaceRefused
from kvdepot.core.limits import ELEMENT_PARTS_MAX, ELEMENT_RUNS_MAX, check_limit

OPAQUE: Final = ""
"""Bytes that are no numbers of one type: packed with their scales, or padding. They are not compared."""
ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
"""Size of an element, by torch's name of its type. Any other type is opaque."""


class ElementRun(NamedTuple):
    """`parts` of `part_bytes` each, one behind the other. A part is what belongs together: a layer on one rank."""

    dtype: str
    part_bytes: int
    parts: int = 1


Elements = Mapping[Kind, tuple[ElementRun, ...]]
"""By kind, in the order of the object's bytes and covering them; a kind without an entry is not known."""


def runs_of(parts: Iterable[tuple[str, int]]) -> tuple[ElementRun, ...]:
    """Of (type, bytes) one part after the other."""
    runs: list[ElementRun] = []
    for dtype, size_bytes in parts:
        if runs and runs[-1][:2] == (dtype, size_bytes):
            runs[-1] = runs[-1]._replace(parts=runs[-1].parts + 1)
        elif size_bytes:
            runs.append(ElementRun(dtype, size_bytes))
    return tuple(runs)


def comparable(run: ElementRun) -> bool:
    """Whether its bytes are numbers of a type that is known here."""
    size_bytes = ELEMENT_BYTES.get(run.dtype)
    return size_bytes is not None and run.part_bytes % size_bytes == 0


def check_elements(elements: Elements, object_bytes: Mapping[Kind, int]) -> None:
    """Raises NamespaceRefused where they do not cover the objects, LimitExceeded where there are too many."""
    check_limit("element runs of a namespace", sum(map(len, elements.values())), ELEMENT_RUNS_MAX)
    parts = sum(run.parts for runs in elements.values() for run in runs)
    check_limit("element parts of a namespace", parts, ELEMENT_PARTS_MAX)
    for kind, runs in elements.items():
        covered = sum(run.part_bytes * run.parts for run in runs)
        if covered != object_bytes.get(kind, 0):
            raise NamespaceRefused(
                f"the elements of kind {kind.name.lower()} are {covered} bytes, its objects {object_bytes.get(kind, 0)}"
            )
