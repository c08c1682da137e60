"""The self-test of copies: it passes where every byte is right, names what is wrong, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy import device as device_module
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import CopyBatch, CopyError, Direction, WrongBytesError
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.runs import Runs
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.day_one.copies import filled
from tests.fakes.late_device import EngineWork, LateDevice
from tests.rigs.copy_layouts import layouts

Change = Callable[[Runs], Runs]


class WrongDevice(LateDevice):
    """One that changes what it is given, in one kind of call and one direction."""

    def __init__(self, call: str, direction: Direction, change: Change) -> None:
        super().__init__()
        self._wrong = (call, direction)
        self._change = change

    def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
        changed = self._change(runs) if self._wrong == ("transfer", direction) else runs
        super().transfer(direction, changed, pinned=pinned)

    def shuffle(self, direction: Direction, runs: Runs) -> None:
        super().shuffle(direction, self._change(runs) if self._wrong == ("shuffle", direction) else runs)


def drop_last(runs: Runs) -> Runs:
    return Runs(runs.sources[:-1], runs.targets[:-1], runs.lengths[:-1])


def shorten(runs: Runs, missing: int = 16) -> Runs:
    """By so much that what is missing is hardly ever what was there."""
    return Runs(runs.sources, runs.targets, runs.lengths - missing)


def swap(runs: Runs) -> Runs:
    """The right bytes at each other's places."""
    return Runs(runs.sources[::-1].copy(), runs.targets, runs.lengths)


@pytest.mark.parametrize("name", layouts())
def test_it_passes_on_every_layout_and_leaves_zeros_and_nothing_pinned(name: str) -> None:
    layers, device = layouts()[name], LateDevice()
    before = [layer.clone() for layer in layers]
    copier = DeviceCopier(layers, device)
    copier.enter()
    copier.prove(copier.mark())
    assert not device.pinned and not device.in_flight
    assert {True} == {pinned for pinned, _ in device.transfers}
    assert device.shuffles, "short runs, which are gathered"
    for layer, old in zip(layers, before, strict=True):
        assert not layer[1:5].float().any()
        assert torch.equal(layer[5:].contiguous().view(torch.uint8), old[5:].contiguous().view(torch.uint8))
        assert torch.equal(layer[0].contiguous().view(torch.uint8), old[0].contiguous().view(torch.uint8))


def test_layers_that_lie_in_the_same_pages_are_tested_one_after_the_other() -> None:
    """As in a hybrid model, where a page belongs to a block of one group at a time."""
    pages = filled((20, 4096), torch.uint8)
    layers = [pages[:, :4096], pages.view(torch.bfloat16)[:, :1000], filled((20, 512), torch.uint8)]
    copier = DeviceCopier(layers, LateDevice())
    copier.enter()
    copier.prove(copier.mark())
    assert copier.overlap([0, 1], np.array([1])) and not copier.overlap([0, 2], np.array([1]))


@pytest.mark.requirement("I1", "G1")
@pytest.mark.parametrize("change", [drop_last, shorten, swap])
@pytest.mark.parametrize(
    ("call", "direction", "named"),
    [
        ("transfer", Direction.STORE, "batch: store, layer"),
        ("transfer", Direction.LOAD, "batch: load, layer"),
        ("shuffle", Direction.STORE, "gather: store, layer"),
        ("shuffle", Direction.LOAD, "gather: (load|move), layer"),
    ],
)
def test_a_device_that_copies_wrongly_is_named(call: str, direction: Direction, named: str, change: Change) -> None:
    layers = [filled((8, 3000), torch.uint8), filled((8, 3000), torch.uint8, 1)]
    copier = DeviceCopier(layers, WrongDevice(call, direction, change))
    copier.enter()
    with pytest.raises(WrongBytesError, match=named):
        copier.prove(copier.mark())


@pytest.mark.requirement("I1")
def test_bytes_written_beside_the_blocks_are_seen() -> None:
    layers = [filled((8, 4096), torch.uint8)]

    def beside(runs: Runs) -> Runs:
        there = np.array([layers[0].data_ptr() + 5 * 4096 + 7])
        return Runs(
            np.concatenate([runs.sources, runs.sources[:1]]),
            np.concatenate([runs.targets, there]),
            np.concatenate([runs.lengths, [1]]),
        )

    copier = DeviceCopier(layers, WrongDevice("transfer", Direction.LOAD, beside))
    copier.enter()
    with pytest.raises(CopyError, match="block 5 of layer 0, not copied: 1 bytes are wrong, the first at 7"):
        for _ in range(3):  # a byte may be what it was
            layers[0][5] += 1
            copier.prove(copier.mark())


def test_it_begins_behind_what_the_engine_has_queued_on_its_caches() -> None:
    """vLLM zeroes new caches on its own stream: that must not come later."""
    layer = filled((8, 512), torch.uint8)
    work = EngineWork(lambda: layer.zero_())
    copier = DeviceCopier([layer], LateDevice(work))
    copier.enter()
    copier.prove(copier.mark())
    assert work.done and not layer.any()


class RefusingDevice(LateDevice):
    """One whose driver or compiler refuses some calls."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self._calls = calls

    def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
        if "batch" in self._calls and pinned:
            raise RuntimeError("cuMemcpyBatchAsync: error 801")
        super().transfer(direction, runs, pinned=pinned)

    def shuffle(self, direction: Direction, runs: Runs) -> None:
        if "kernel" in self._calls:
            raise RuntimeError("no C compiler")
        super().shuffle(direction, runs)


@pytest.mark.parametrize(
    ("calls", "left"),
    [(("kernel",), {Way.BATCH, Way.TORCH}), (("batch", "kernel"), {Way.TORCH})],
)
def test_a_way_that_the_device_refuses_is_not_used(
    caplog: pytest.LogCaptureFixture, calls: tuple[str, ...], left: set[Way]
) -> None:
    layer = filled((64, 2048), torch.uint8)
    copier = DeviceCopier([layer], RefusingDevice(*calls))
    copier.enter()
    copier.prove(copier.mark())
    assert copier.ways == left
    assert all("do not use" in message for message in caplog.messages) and len(caplog.messages) == 3 - len(left)
    assert not layer[1:5].any()


@pytest.mark.parametrize("way", [Way.BATCH, Way.GATHER])
def test_a_way_that_was_asked_for_and_is_refused_refuses_the_rank(way: Way) -> None:
    copier = DeviceCopier([filled((64, 2048), torch.uint8)], RefusingDevice("batch", "kernel"), way=way)
    copier.enter()
    with pytest.raises(RuntimeError, match=r"error 801|no C compiler"):
        copier.prove(copier.mark())


def test_only_ways_that_a_batch_may_take_are_tested() -> None:
    """An operator who asks for torch's copies has a reason: a driver that hangs in the others."""
    copier = DeviceCopier([filled((64, 2048), torch.uint8)], RefusingDevice("batch", "kernel"), way=Way.TORCH)
    copier.enter()
    copier.prove(copier.mark())


class WarmDevice(LateDevice):
    """Tells by which of torch's operations it is used: on a GPU each is a kernel that is loaded at its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def run(self, direction: Direction, work: Callable[[], None]) -> None:
        def watched() -> None:
            with Operations(self.operations):
                work()

        super().run(direction, watched)


class Operations(TorchDispatchMode):
    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [one for one in [*args, *(kwargs or {}).values()] if isinstance(one, torch.Tensor)]
        self._seen.add(f"{func} {tensors[0].dtype}")
        return func(*args, **(kwargs or {}))


def cut_batch(copier: DeviceCopier, layers: list[int], cut: int) -> CopyBatch:
    """Two blocks of these layers and the ends of two others, at places in the arena that have nothing in common."""
    rows, offset = [], 0
    for layer in layers:
        size = copier.block_bytes(layer)
        for block, skip, length in ((2, size - cut, cut), (3, 0, size), (4, 0, size), (5, 0, cut)):
            rows.append((layer, block, skip, offset, length))
            offset += length
        offset += 4096 - offset % 4096
    return CopyBatch(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize("arena_pinned", [True, False], ids=["pinned", "not pinned"])
@pytest.mark.parametrize("way", [None, *Way])
@pytest.mark.parametrize("ways", [set(Way), {Way.BATCH, Way.TORCH}, {Way.TORCH}], ids=["all", "no kernel", "torch"])
def test_no_batch_after_it_takes_memory_or_needs_another_kernel(
    arena: ArenaMap, ways: set[Way], way: Way | None, arena_pinned: bool
) -> None:
    """Layers of every word's size, with long and short blocks; loads that are read back, and batches of a stream."""
    shapes = [(64 << 10, torch.uint8), (1028, torch.uint8), (770, torch.uint8), (31, torch.uint8), (96, torch.bfloat16)]
    layers = [filled((8, size), dtype, seed) for seed, (size, dtype) in enumerate(shapes)]
    device = WarmDevice()
    device.ways = frozenset(ways)
    copier = DeviceCopier(layers, device, way=way, pin_in_background=arena_pinned)
    copier.enter()
    copier.prove(copier.mark())
    taken, words, operations = list(device.taken), set(device.words), set(device.operations)
    assert (words == {1, 2, 4, 8}) == (Way.GATHER in ways and way is not Way.TORCH)
    if arena_pinned:
        arena.populated(arena.size_bytes)
    copier.prepare(arena)
    for chosen in ([0], [1], [2], [3], [4], [0, 1], [0, 4], list(range(len(layers)))):
        for cut in (8, 4, 2, 1):
            batch = cut_batch(copier, chosen, cut)
            copier.copy(arena, batch, Direction.STORE)
            copier.copy(arena, batch, Direction.LOAD)
            copier.wait()
            assert copier.verify(arena, batch)
        copier.move(chosen, np.array([3, 4]), np.array([6, 7]))
        copier.wait()
    assert device.taken == taken
    assert device.words <= words
    assert device.operations <= operations


@pytest.mark.parametrize("way", [Way.GATHER, Way.TORCH])
@pytest.mark.parametrize("direction", Direction)
def test_scratch_memory_is_enough_for_a_batch_that_cuts_blocks(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch, direction: Direction, way: Way
) -> None:
    """`CopyBatch.split` cuts no piece, and torch's operations take all of a block of which a piece is there."""
    size, cut, batch_bytes = 4100, 4001, 8 * 4100
    monkeypatch.setattr(device_module, "BATCH_BYTES", batch_bytes)
    device = LateDevice()
    copier = DeviceCopier([filled((64, size), torch.uint8)], device, way=way)
    copier.enter()
    copier.prove(copier.mark())
    taken = list(device.taken)
    blocks = np.arange(64, dtype=np.int64).repeat(2)
    skips, lengths = np.tile(np.array([[0, cut], [cut, size - cut]]), 64)
    pieces = CopyBatch(np.zeros_like(blocks), blocks, skips, np.arange(128) * 4096, lengths)
    for first in range(2):  # a batch begins with a block, and within one
        later = CopyBatch(*(getattr(pieces, column.name)[first:] for column in fields(pieces)))
        for batch in later.split(batch_bytes):
            copier.copy(arena, batch, direction)
    copier.wait()
    assert device.taken == taken


@pytest.mark.requirement("I1", "G1")
@pytest.mark.parametrize("word_bytes", [8, 4, 2, 1])
def test_a_kernel_that_is_wrong_for_words_of_one_size_is_named(word_bytes: int) -> None:
    """Whatever size the blocks have: cuts make smaller words of a batch, and other layers larger ones."""

    def wrong(runs: Runs) -> Runs:
        return shorten(runs, 1) if runs.word_bytes == word_bytes else runs

    copier = DeviceCopier([filled((8, 2 * 1028), torch.uint8)], WrongDevice("shuffle", Direction.LOAD, wrong))
    copier.enter()
    with pytest.raises(WrongBytesError, match=f"gather: (load|move|words of {word_bytes} bytes)"):
        for _ in range(3):  # a byte may be what it was
            copier.prove(copier.mark())


def test_a_read_back_that_is_wrong_is_found_before_it_ends_the_copies_of_a_right_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "index_select", lambda *_, out, **__: out.fill_(0))
    copier = DeviceCopier([filled((8, 512), torch.uint8)], LateDevice(), way=Way.GATHER)
    copier.enter()
    with pytest.raises(WrongBytesError, match="gather: a right load is read back as a wrong one"):
        copier.prove(copier.mark())


def test_a_cache_of_few_blocks_is_refused() -> None:
    copier = DeviceCopier([filled((5, 512), torch.uint8)], LateDevice())
    copier.enter()
    with pytest.raises(CopyError, match="5 blocks is too small"):
        copier.prove(copier.mark())


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("name", layouts())
def test_a_load_that_is_read_back_is_right_until_a_byte_changes(arena: ArenaMap, name: str, way: Way) -> None:
    layers = layouts()[name]
    copier: Any = DeviceCopier(layers, LateDevice(), way=way)
    copier.enter()
    size, cut = copier.block_bytes(0), copier.block_bytes(0) // 2
    rows = [(0, 3, 0, 0, size), (0, 7, 0, size, cut), (0, 7, cut, 3 * size, size - cut)]
    rows = [row for row in rows if row[4]]
    batch = CopyBatch(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))
    begin = 0
    arena.buffer[begin : begin + 4 * size] = np.random.default_rng(0).bytes(4 * size)
    copier.copy(arena, batch, Direction.LOAD)
    copier.wait()
    assert copier.verify(arena, batch)
    for offset in (begin, int(batch.offsets[-1] + batch.lengths[-1]) - 1):
        arena.buffer[offset] ^= 1
        assert not copier.verify(arena, batch)
        arena.buffer[offset] ^= 1


def test_a_store_of_which_only_a_part_was_queued_has_ended_before_its_blocks_are_zeroed() -> None:
    """Zeroing goes by the other queue, which does not wait for it."""

    class HalfStore(LateDevice):
        on_their_way = -1

        def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
            if direction is Direction.STORE:
                raise RuntimeError("launch failed")
            super().transfer(direction, runs, pinned=pinned)

        def run(self, direction: Direction, work: Callable[[], None]) -> None:
            self.on_their_way = len(self.queues[Direction.STORE].work)
            super().run(direction, work)

    device = HalfStore()
    copier = DeviceCopier([filled((64, 2048), torch.uint8)], device, way=Way.GATHER)
    copier.enter()
    with pytest.raises(RuntimeError, match="launch failed"):
        copier.prove(copier.mark())
    assert device.on_their_way == 0
