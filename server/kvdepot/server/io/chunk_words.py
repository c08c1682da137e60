"""A word of 64 bits for the name of a chunk, as summaries of peers have it (ADR 85). Source and reader make the same.

Two names may have one word. So a word says where it is worth asking, and never that an object is there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
WORD_BYTES: Final = 8
_ID_BYTES: Final = 16
_U64 = np.uint64
_ODD: Final = (_U64(0x9E37_79B9_7F4A_7C15), _U64(0xBF58_476D_1CE4_E5B9), _U64(0x94D0_49BB_1331_11EB))


def seeds_of(namespaces: bytes) -> Words:
    """Return what words of each namespace begin with. `namespaces`: ids of 16 bytes, one after the other."""
    return _mixed(np.frombuffer(namespaces, "<u8").reshape(-1, 2), _U64(0))


def words_of(seeds: Words | np.uint64, keys: npt.NDArray[np.uint64]) -> Words:
    """Return the word of each key. `keys`: rows of two words. `seeds`: of the namespace of each, or of all."""
    return _mixed(keys, seeds)


def words_of_names(names: list[tuple[bytes, bytes]]) -> Words:
    """Return the word of each (namespace id, key)."""
    if not names:
        return np.empty(0, np.uint64)
    seeds = seeds_of(b"".join(namespace for namespace, _ in names))
    keys = np.frombuffer(b"".join(key for _, key in names), "<u8").reshape(-1, 2)
    return words_of(seeds, keys)


def _mixed(pairs: npt.NDArray[np.uint64], seeds: Words | np.uint64) -> Words:
    """Return 64 bits of each pair (the end is splitmix64's). Overflow wraps."""
    mixed = (pairs[:, 0] ^ seeds) * _ODD[0] + pairs[:, 1]
    mixed = (mixed ^ (mixed >> _U64(30))) * _ODD[1]
    mixed = (mixed ^ (mixed >> _U64(27))) * _ODD[2]
    words: Words = mixed ^ (mixed >> _U64(31))
    return words
