"""Bounded tables of marks, which are 64 bits of a key: what was asked for lately."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.uint64]
_END_SETS_BITS: Final = 12
_END_WAYS: Final = 16
"""Marks of a set: 512 KiB in all."""


class KnownMarks:
    """Marks that were seen lately. A slot has the latest mark of those that share it.

    What it has forgotten costs little: chunks then count as fresh, and a branch as a part of its path.
    """

    def __init__(self, bits: int) -> None:
        self._slots = np.zeros(1 << bits, np.uint64)
        self._mask = np.uint64((1 << bits) - 1)

    def known(self, marks: Marks) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._slots[marks & self._mask] == marks
        return found

    def add(self, marks: Marks) -> None:
        self._slots[marks & self._mask] = marks


class LatestMarks:
    """Marks that were seen lately, in sets of 16. The earliest of a set goes first: 99 % of the last 32,000 are there.

    A table of single slots would lose 40 % of them. For ends that matters: a prompt whose end is lost is no hit.
    """

    def __init__(self) -> None:
        self._sets = np.zeros((1 << _END_SETS_BITS, _END_WAYS), np.uint64)
        self._mask = np.uint64((1 << _END_SETS_BITS) - 1)

    def known(self, marks: Marks) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (self._sets[marks & self._mask] == marks[:, np.newaxis]).any(axis=1)
        return found

    def add(self, mark: np.uint64) -> None:
        marks = self._sets[mark & self._mask]
        places = np.flatnonzero(marks == mark)
        place = int(places[0]) if len(places) else _END_WAYS - 1
        marks[1 : place + 1] = marks[:place].copy()
        marks[0] = mark
