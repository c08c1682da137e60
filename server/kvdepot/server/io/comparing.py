"""Whether an object that was computed again is what is stored of it, but for noise. The rule and why: ADR 0037.

Numbers are compared by slices of 2 KiB, of each the distance of the two over the larger of their lengths (L2).
A part, a layer of one rank, has drifted when

* one slice is at least `BROKEN` away: other bytes, zeros, a number that outgrew all others, no number at all; or
* more than `SHARE_MAX` of its slices are further away than its type's `TOLERANCE`.

Slices that are almost zero, compared with the rest of their part, are measured by that: of what cancels out only noise
is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.elements import ELEMENT_BYTES, ElementRun, comparable

SLICE_BYTES: Final = 2048
"""So that a page of 4 KiB that is lost has a slice of its own wherever it lies."""
PIECE_BYTES: Final = 256 << 10
"""Looked at in one go: with its numbers in float32 twice it stays in a core's cache."""
BROKEN: Final = 0.75
"""Zeros are 1 away from anything, another chunk's values 1.2 to 1.4; noise was never more than 0.27."""
SHARE_MAX: Final = 0.05
TOLERANCE: Final[Mapping[str, float]] = {
    "bfloat16": 0.25, "float16": 0.25, "float32": 0.25, "float64": 0.25,
    "int8": 0.35, "float8_e4m3fn": 0.35, "float8_e5m2": 0.4,
}  # fmt: skip
"""What computing makes of it is the same for all types, as a float32 state comes from a bfloat16 model; rounding to
8 bits adds up to half a step of each number."""
FLOOR: Final = 0.01
"""Of a part's root mean square: slices below it are measured by it."""

Bytes = npt.NDArray[np.uint8]
Extents = Sequence[tuple[int, int]]
Energies = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison. `beyond`: slices over tolerance.

    `worst`: the furthest slice, inf if something in it is no number.
    """

    drifted: bool
    slices: int = 0
    beyond: int = 0
    worst: float = 0.0


def compare(arena: memoryview, stored: Extents, recomputed: Extents, runs: Sequence[ElementRun]) -> Comparison:
    """Compare two objects of one size. `runs` cover it. Opaque bytes are not compared."""
    drifted, slices, beyond, worst = False, 0, 0, 0.0
    ours, theirs = _Object(arena, stored), _Object(arena, recomputed)
    at = 0
    for run in runs:
        for start in range(at, at + run.part_bytes * run.parts, run.part_bytes):
            if not comparable(run) or _equal(ours, theirs, start, start + run.part_bytes):
                continue
            distances = _distances(ours, theirs, start, start + run.part_bytes, run.dtype)
            far = int((distances > TOLERANCE[run.dtype]).sum())
            furthest = float(distances.max())
            drifted |= furthest >= BROKEN or far > SHARE_MAX * len(distances)
            slices, beyond, worst = slices + len(distances), beyond + far, max(worst, furthest)
        at += run.part_bytes * run.parts
    return Comparison(drifted, slices, beyond, worst)


class _Object:
    """The bytes of an object, wherever in the arena its extents lie."""

    def __init__(self, arena: memoryview, extents: Extents) -> None:
        self._arena = arena
        self._extents = extents

    def read(self, start: int, stop: int) -> Bytes:
        """Return a range of bytes, without a copy if one extent has all of them."""
        found, at = [], 0
        for offset, length in self._extents:
            low, high = max(start, at), min(stop, at + length)
            if low < high:
                found.append(np.frombuffer(self._arena[offset + low - at : offset + high - at], np.uint8))
            at += length
        return found[0] if len(found) == 1 else np.concatenate(found)


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, PIECE_BYTES):
        yield low, min(low + PIECE_BYTES, stop)


def _equal(ours: _Object, theirs: _Object, start: int, stop: int) -> bool:
    return all(np.array_equal(ours.read(*piece), theirs.read(*piece)) for piece in _pieces(start, stop))


def _distances(ours: _Object, theirs: _Object, start: int, stop: int, dtype: str) -> Energies:
    """Return the distance of every slice of a part. It is inf if something in a slice is no number and not the same."""
    numbers = SLICE_BYTES // ELEMENT_BYTES[dtype]
    lengths: list[tuple[Energies, Energies, Energies]] = []
    with np.errstate(all="ignore"):  # overflow and NaN are what is looked for
        for piece in _pieces(start, stop):
            one, other = decoded(ours.read(*piece), dtype), decoded(theirs.read(*piece), dtype)
            lengths.append((_energies(one, numbers), _energies(other, numbers), _energies(one - other, numbers)))
        stored, recomputed, apart = (np.concatenate(column) for column in zip(*lengths, strict=True))
        floor = FLOOR**2 * np.minimum(stored.mean(), recomputed.mean())
        longest = np.fmax(np.maximum(stored, recomputed), floor)
        found: Energies = np.sqrt(np.divide(apart, longest, out=np.zeros_like(apart), where=apart != 0))
        found[~np.isfinite(found)] = inf
    return found


def _energies(values: npt.NDArray[Any], numbers: int) -> Energies:
    """Return the sums of squares of `numbers` values each. The last sum is of the remaining values."""
    rows = np.pad(values, (0, -len(values) % numbers)).reshape(-1, numbers)
    found: Energies = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    return found


def decoded(raw: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the numbers in float32; float64 stays float64."""
    if dtype == "bfloat16":  # the upper half of a float32; numpy has no such type
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    if dtype in _FLOAT8:
        return _FLOAT8[dtype][raw]
    return raw.view(_NUMPY[dtype]).astype(np.float64 if dtype == "float64" else np.float32)


_NUMPY: Final = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "int8": "i1"}


def _float8_values(exponent_bits: int, *, finite: bool) -> npt.NDArray[np.float32]:
    """Return the values of all 256 codes of OCP's 8-bit floats (https://arxiv.org/abs/2209.05433).

    E4M3 has no infinities, and one NaN.
    """
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponents, mantissas = codes >> mantissa_bits & (1 << exponent_bits) - 1, codes & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    fractions = mantissas / (1 << mantissa_bits)
    values = np.where(exponents, (1 + fractions) * 2.0 ** (exponents - bias), fractions * 2.0 ** (1 - bias))
    if finite:
        values[codes & 0x7F == 0x7F] = np.nan
    else:
        special = exponents == (1 << exponent_bits) - 1
        values[special] = np.where(mantissas[special] == 0, inf, np.nan)
    signed: npt.NDArray[np.float32] = np.where(codes & 0x80, -values, values).astype(np.float32)
    return signed


_FLOAT8: Final = {"float8_e4m3fn": _float8_values(4, finite=True), "float8_e5m2": _float8_values(5, finite=False)}
