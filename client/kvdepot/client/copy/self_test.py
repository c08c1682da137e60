"""Proof that copies work on this machine: done once, before a rank serves anything from the depot.

A pattern travels into two blocks of each layer, from there into two others, and back to the host, by every way that
the device has. torch's own copies say what the blocks hold, so an address that is wrong in both directions shows. The
blocks hold nothing yet, and are zero afterwards. The load is read back as the first loads of requests are. So every
kernel is loaded here that a request may need.
"""

from __future__ import annotations

import mmap
import secrets
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
from kvdepot.client.copy.base import BATCH_BYTES, CopyBatch, CopyError, Direction, WrongBytesError, concatenate
from kvdepot.client.copy.runs import WORDS_BYTES, Runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdepot.client.copy.backend import Device, Way
    from kvdepot.client.copy.base import Column, CopyMemory
    from kvdepot.client.copy.pinning import Pinnable

    Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_LOADED: Final = np.array([1, 2], dtype=np.int64)
_MOVED: Final = np.array([4, 3], dtype=np.int64)
_TOUCHED: Final = np.concatenate([_LOADED, _MOVED])
_UNTOUCHED: Final = (0, 5)
BLOCKS_MIN: Final = 6
_WORDS: Final = 3
_SPACE_BYTES: Final = 64  # for so many words of any size


class _Host:
    """Host memory that a device may pin, as the arena is."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.buffer = self.pinnable = memoryview(mmap.mmap(-1, self.size_bytes))


class ProvableCopier(Protocol):
    """What the test needs of the copier: `DeviceCopier`."""

    way: Way | None

    def block_bytes(self, layer: int) -> int: ...
    def overlap(self, layers: Sequence[int], blocks: Column) -> bool: ...
    def prepare(self, arena: Pinnable | None) -> float | None: ...
    def copy(self, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None: ...
    def verify(self, arena: CopyMemory, batch: CopyBatch) -> bool: ...
    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None: ...
    def wait(self) -> None: ...
    def zero(self, layers: Sequence[int], blocks: Column) -> None: ...
    def release(self) -> None: ...


def self_test(copier: ProvableCopier, layers: Sequence[torch.Tensor], way: Way) -> None:
    """Copy a pattern by one way. Raise WrongBytesError that names the way and the place.

    Called on the thread that copies. `layers` are those of the copier, and hold nothing yet. An error of the device
    is raised as it is.
    """
    if min(map(len, layers)) < BLOCKS_MIN:
        raise CopyError(f"a KV cache of {min(map(len, layers))} blocks is too small for the self-test: {BLOCKS_MIN}")
    groups = list(_groups(copier, len(layers)))
    host = _Host(2 * max(_size_bytes(copier, group) for group in groups))
    wanted, copier.way = copier.way, way
    try:
        for group in groups:
            _test(copier, layers, group, host)
    finally:
        copier.way = wanted
        copier.release()


def prove_words(device: Device, memory: torch.Tensor) -> None:
    """Move words of each size within `memory`, of the device. Raise WrongBytesError that names the size.

    The size is part of the kernel. Which one a batch takes, its layers and its cuts say, so the blocks of the self-test
    do not show all.
    """
    begin = memory.data_ptr()
    for word_bytes in WORDS_BYTES:
        pattern = np.frombuffer(secrets.token_bytes(2 * _SPACE_BYTES), dtype=np.uint8).copy()
        there = memory[: len(pattern)]
        there.copy_(torch.from_numpy(pattern))
        size = _WORDS * word_bytes
        places = (begin, begin + _SPACE_BYTES, size)
        device.shuffle(Direction.LOAD, Runs(*(np.array([place], dtype=np.int64) for place in places)))
        device.wait(device.mark(Direction.LOAD))
        pattern[_SPACE_BYTES : _SPACE_BYTES + size] = pattern[:size]
        _compare(there.cpu().numpy(), pattern, f"gather: words of {word_bytes} bytes")


def _groups(copier: ProvableCopier, count: int) -> Iterator[list[int]]:
    """Yield the layers in turn: at most a batch of two blocks of each, and none that overlap."""
    group: list[int] = []
    size_bytes = 0
    for layer in range(count):
        full = size_bytes + _size_bytes(copier, [layer]) > BATCH_BYTES
        if group and (full or copier.overlap([*group, layer], _TOUCHED)):
            yield group
            group, size_bytes = [], 0
        group.append(layer)
        size_bytes += _size_bytes(copier, [layer])
    yield group


def _size_bytes(copier: ProvableCopier, group: list[int]) -> int:
    """Return the bytes of two blocks of each layer."""
    return sum(2 * copier.block_bytes(layer) for layer in group)


def _test(copier: ProvableCopier, layers: Sequence[torch.Tensor], group: list[int], host: _Host) -> None:
    total, way = _size_bytes(copier, group), copier.way
    pattern = np.frombuffer(secrets.token_bytes(total), dtype=np.uint8)
    memory = np.frombuffer(host.buffer, dtype=np.uint8)
    memory[:total] = pattern
    before = {(layer, block): _block(layers[layer], block) for layer in group for block in _UNTOUCHED}
    copier.prepare(host)
    try:
        loaded_pieces = _pieces(copier, group, _LOADED, 0)
        copier.copy(host, loaded_pieces, Direction.LOAD)
        copier.move(group, _LOADED, _MOVED)
        copier.wait()
        copier.copy(host, _pieces(copier, group, _MOVED, total), Direction.STORE)
        copier.wait()
        at = 0
        for layer in group:
            size = copier.block_bytes(layer)
            for loaded, moved in zip(_LOADED.tolist(), _MOVED.tolist(), strict=True):
                expected = pattern[at : at + size]
                _compare(_block(layers[layer], loaded), expected, f"{way}: load, layer {layer}")
                _compare(_block(layers[layer], moved), expected, f"{way}: move, layer {layer}")
                _compare(memory[total + at : total + at + size], expected, f"{way}: store, layer {layer}")
                at += size
        for (layer, block), bytes_before in before.items():
            _compare(_block(layers[layer], block), bytes_before, f"{way}: block {block} of layer {layer}, not copied")
        if not copier.verify(host, loaded_pieces):
            raise WrongBytesError(f"the self-test of copies failed: {way}: a right load is read back as a wrong one")
    finally:
        copier.wait()  # a store of which only a part could be queued still reads what is zeroed, in the other queue
        copier.zero(group, _TOUCHED)


def _pieces(copier: ProvableCopier, group: list[int], blocks: Column, at: int) -> CopyBatch:
    """Return both blocks of each layer, end to end from `at` on, the first one in two pieces."""
    batches: list[CopyBatch] = []
    for layer in group:
        size = copier.block_bytes(layer)
        cut = size // 2 // 8 * 8 or size
        rows = [(0, 0, cut), (0, cut, size - cut), (1, 0, size)]
        rows = [row for row in rows if row[2]]
        skips, lengths = (np.array(column, dtype=np.int64) for column in list(zip(*rows, strict=True))[1:])
        ids = blocks[[row[0] for row in rows]]
        offsets = at + np.cumsum(lengths) - lengths
        batches.append(CopyBatch(np.full_like(ids, layer), ids, skips, offsets, lengths))
        at += 2 * size
    return concatenate(batches)


def _block(layer: torch.Tensor, block: int) -> Bytes:
    """Return a block's bytes in the layer's order, by torch's own copy."""
    there: Bytes = layer[block].contiguous().cpu().flatten().view(torch.uint8).numpy()
    return there.copy()


def _compare(found: Bytes, expected: Bytes, what: str) -> None:
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        raise WrongBytesError(
            f"the self-test of copies failed: {what}: {len(wrong)} bytes are wrong, the first at {wrong[0]}"
        )
