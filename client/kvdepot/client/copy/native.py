"""The bytes of a batch, moved by one native call that does not hold the GIL.

A call a piece is as fast while nobody else runs Python in the process. Where an engine's own threads
do, each of these calls waits on its return for the thread that has the GIL: with 0.2 ms of Python a
millisecond in other threads, a fifth of the time (docs/adr/0044). numba is there wherever vLLM is, which requires it.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.client.copy.table import ADDRESS, BLOCK_BYTES, BLOCKS, FIRST_RUN, RUN_BYTES, STRIDE_BYTES
from numba import njit

Words = npt.NDArray[np.int64]

MOVE_BYTES_MAX: Final = 64 << 10
"""Of one memmove: above half a MiB or so glibc takes other instructions on some processors, a tenth slower."""

LAYER, BLOCK, SKIP, OFFSET, LENGTH = range(5)
"""A piece: the columns of CopyBatch."""

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
_memmove.restype = None


@njit("int64(int64[:, ::1], int64[:, ::1], int64)")
def _first_wrong(layers: Words, pieces: Words, arena_bytes: int) -> int:
    """Return the first of `pieces`, [5, n], that lies outside its block or the arena's data, or -1."""
    for i in range(pieces.shape[1]):
        layer, block, skip = pieces[LAYER, i], pieces[BLOCK, i], pieces[SKIP, i]
        offset, length = pieces[OFFSET, i], pieces[LENGTH, i]
        if layer < 0 or layer >= len(layers) or block < 0 or block >= layers[layer, BLOCKS]:
            return i
        if length <= 0 or skip < 0 or length > layers[layer, BLOCK_BYTES] - skip:
            return i
        if offset < 0 or offset > arena_bytes - length:
            return i
    return -1


@njit("int64(int64[:, ::1], int64[::1], int64[:, ::1], int64, int64, boolean)", nogil=True)
def copy(layers: Words, runs: Words, pieces: Words, arena: int, arena_bytes: int, store: bool) -> int:
    """Between `pieces` and the arena at this address. Not -1: the first wrong one, and nothing was moved."""
    wrong: int = _first_wrong(layers, pieces, arena_bytes)
    if wrong >= 0:
        return wrong
    for i in range(pieces.shape[1]):
        layer = layers[pieces[LAYER, i]]
        block = layer[ADDRESS] + layer[STRIDE_BYTES] * pieces[BLOCK, i]
        there = arena + pieces[OFFSET, i]
        run = layer[FIRST_RUN] + pieces[SKIP, i] // layer[RUN_BYTES]
        within = pieces[SKIP, i] % layer[RUN_BYTES]
        left = pieces[LENGTH, i]
        while left:
            size = min(left, layer[RUN_BYTES] - within, MOVE_BYTES_MAX)
            here = block + runs[run] + within
            if store:
                _memmove(there, here, size)
            else:
                _memmove(here, there, size)
            there += size
            left -= size
            within += size
            if within == layer[RUN_BYTES]:
                run += 1
                within = 0
    return -1


@njit("void(int64[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1])", nogil=True)
def move(layers: Words, runs: Words, chosen: Words, sources: Words, targets: Words) -> None:
    """Blocks `sources` to `targets` of each of the `chosen` layers. No block is among both; all are there."""
    for number in chosen:
        layer = layers[number]
        for i in range(len(sources)):
            source = layer[ADDRESS] + layer[STRIDE_BYTES] * sources[i]
            target = layer[ADDRESS] + layer[STRIDE_BYTES] * targets[i]
            for run in range(layer[FIRST_RUN], layer[FIRST_RUN] + layer[BLOCK_BYTES] // layer[RUN_BYTES]):
                _memmove(target + runs[run], source + runs[run], layer[RUN_BYTES])
