"""Copies, on the CPU and by way of a device, against a plain loop.

Every layout a KV tensor has, every way an object is cut into fragments.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy import native
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import CopyBatch, CopyError, Direction, concatenate, object_pieces
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.extents import Extents, parse_extents

from benchmarks.day_one.copies import backward_cut, block_bytes_of, check_layers, filled
from tests.fakes.late_device import LateDevice
from tests.rigs.copy_layouts import layouts
from tests.rigs.memory_arena import ARENA_BYTES, granted
from tests.rigs.seeds import RUN_SEED, drawn

Copier = CpuCopier | DeviceCopier
MakeCopier = Callable[[Sequence[torch.Tensor]], Copier]


def pinned_copier(layers: Sequence[torch.Tensor], arena: ArenaMap, way: Way | None) -> DeviceCopier:
    """One that may pin all of the arena."""
    copier = DeviceCopier(layers, LateDevice(), way=way)
    arena.populated(arena.size_bytes)
    copier.enter()
    copier.prepare(arena)
    return copier


@pytest.fixture(params=["cpu", *Way])
def make_copier(request: pytest.FixtureRequest, arena: ArenaMap) -> MakeCopier:
    if request.param == "cpu":
        return CpuCopier
    return lambda layers: pinned_copier(layers, arena, Way(request.param))


def extents(*fragments: tuple[int, int]) -> Extents:
    words = [word for row, (offset, length) in enumerate(fragments) for word in (0, row, offset, length, 2)]
    return parse_extents(np.array(words, dtype="<u8").tobytes(), ARENA_BYTES)


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("cut_bytes", [0, 4096, 1000])
def test_stored_bytes_are_the_blocks_bytes_and_come_back_into_other_blocks(
    arena: ArenaMap, make_copier: MakeCopier, name: str, cut_bytes: int
) -> None:
    layers = layouts()[name]
    copier = make_copier(layers)
    total = 4 * sum(copier.block_bytes(number) for number in range(len(layers)))
    cut = backward_cut(total, cut_bytes)
    if cut[0][0] + cut_bytes > ARENA_BYTES:
        pytest.skip("more fragments than this arena holds")
    check_layers(copier, arena, layers, cut, random.Random(RUN_SEED))


@pytest.mark.requirement("A1")
@pytest.mark.parametrize("name", layouts())
def test_blocks_move_within_every_layer(make_copier: MakeCopier, name: str) -> None:
    layers = layouts()[name]
    before = [layer.clone() for layer in layers]
    sources, targets = np.array([3, 11, 0, 19]), np.array([5, 6, 14, 2])
    copier = make_copier(layers)
    copier.move(range(len(layers)), sources, targets)
    copier.wait()
    for layer, old in zip(layers, before, strict=True):
        came_from = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        for block in range(20):
            assert block_bytes_of(layer, block) == block_bytes_of(old, came_from.get(block, block))


@pytest.mark.requirement("A1")
def test_as_many_blocks_come_as_go(make_copier: MakeCopier) -> None:
    with pytest.raises(CopyError, match="2 blocks to 1"):
        make_copier([filled((8, 512), torch.uint8)]).move([0], np.array([1, 2]), np.array([3]))


@pytest.mark.requirement("A1")
@pytest.mark.parametrize(("source", "target"), [(20, 1), (1, 20), (-1, 1), (1, -1)])
def test_a_block_out_of_range_moves_nothing(make_copier: MakeCopier, source: int, target: int) -> None:
    layers = [filled((40, 512), torch.uint8), filled((20, 512), torch.uint8, 1)]
    before = [layer.clone() for layer in layers]
    copier = make_copier(layers)
    with pytest.raises(CopyError, match="blocks"):
        copier.move([0, 1], np.array([4, source]), np.array([7, target]))
    copier.wait()
    assert all(torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))


def test_padding_between_blocks_is_neither_stored_nor_written(arena: ArenaMap, make_copier: MakeCopier) -> None:
    storage = torch.full((8, 6144), 7, dtype=torch.uint8)
    layer = storage[:, :4096]
    copier = make_copier([layer])
    arena.buffer[:8192] = b"\x55" * 8192
    pieces = object_pieces(extents((0, 8192)), [0], 0, [0], [4096], 2, [[1, 6]])
    copier.copy(arena, pieces, Direction.LOAD)
    copier.wait()
    assert (storage[:, 4096:] == 7).all()
    assert (storage[[1, 6], :4096] == 0x55).all()
    assert (storage[[0, 2, 3, 4, 5, 7]] == 7).all()


def test_a_part_within_an_object_takes_only_its_missing_blocks(arena: ArenaMap, make_copier: MakeCopier) -> None:
    """Part at byte 4096 of the object, blocks 1 and 2 of 3: layer-major positions (docs/formats/namespace.md)."""
    layers = [filled((10, 1024), torch.uint8, seed) for seed in (1, 2)]
    copier = make_copier(layers)
    base = 0
    held = extents((base, 4096 + 2 * 3 * 1024))
    pieces = object_pieces(held, [0], 4096, [0, 1], [1024, 1024], 3, [[8, 4]], first_block=1)
    assert (pieces.offsets - base).tolist() == [
        4096 + 1024,
        4096 + 2048,
        4096 + 3 * 1024 + 1024,
        4096 + 3 * 1024 + 2048,
    ]
    copier.copy(arena, pieces, Direction.STORE)
    copier.wait()
    for offset, (layer, block) in zip(pieces.offsets.tolist(), [(0, 8), (0, 4), (1, 8), (1, 4)], strict=True):
        assert bytes(arena.buffer[offset : offset + 1024]) == block_bytes_of(layers[layer], block)


@pytest.mark.parametrize("most_fragments", [1, 12])
@pytest.mark.parametrize("seed", drawn(range(20)))
def test_any_objects_in_any_cut_have_every_byte_covered_once(seed: int, most_fragments: int) -> None:
    rng = random.Random(seed)
    block_bytes, blocks = rng.randrange(1, 3000), rng.randrange(1, 6)
    size_bytes = block_bytes * blocks + rng.choice([0, 7])
    names = rng.sample(range(9), rng.randrange(1, 5))
    cut: dict[int, list[tuple[int, int]]] = {}
    at, words = 4096, []
    for name in names:
        ends = sorted(
            {*rng.sample(range(1, size_bytes + 1), min(rng.randrange(most_fragments), size_bytes)), size_bytes}
        )
        lengths = np.diff([0, *ends]).tolist()
        at += sum(lengths) + rng.randrange(5000)
        cut[name] = [(at - sum(lengths[: i + 1]), length) for i, length in enumerate(lengths)]  # backwards
        words += [word for row, (offset, length) in enumerate(cut[name]) for word in (name, row, offset, length, 2)]
    held = parse_extents(np.array(words, dtype="<u8").tobytes(), ARENA_BYTES)
    asked = rng.sample(names, rng.randrange(1, len(names) + 1))
    first = rng.randrange(blocks)
    ids = [[100 * name + block for block in range(first, blocks)] for name in asked]
    pieces = object_pieces(held, asked, 0, [0], [block_bytes], blocks, ids, first)
    walked = [o + i for o, n in zip(pieces.offsets, pieces.lengths, strict=True) for i in range(n)]
    part = slice(first * block_bytes, blocks * block_bytes)
    assert walked == [b for name in asked for b in [o + i for o, n in cut[name] for i in range(n)][part]]
    where = [(b, s + i) for b, s, n in zip(pieces.blocks, pieces.skips, pieces.lengths, strict=True) for i in range(n)]
    assert where == [(block, i) for of_one in ids for block in of_one for i in range(block_bytes)]


def test_parts_beyond_an_object_are_refused() -> None:
    held = extents((4096, 100))
    for part_offset, blocks, first in ((1, 10, 0), (-1, 9, 0), (0, 10, 1), (0, 10, -1)):
        with pytest.raises(CopyError):
            object_pieces(held, [0], part_offset, [0], [10], 10, [range(blocks)], first)
    assert len(object_pieces(held, [0], 0, [0], [10], 10, [[]])) == 0


def test_batches_are_bounded_and_in_order() -> None:
    lengths = np.array([100, 900, 10, 2000, 5, 5], dtype=np.int64)
    numbers = np.arange(6, dtype=np.int64)
    whole = CopyBatch(numbers, numbers, numbers, numbers, lengths)
    parts = list(whole.split(1000))
    assert [p.layers.tolist() for p in parts] == [[0, 1], [2], [3, 4, 5]]
    assert all(part.size_bytes <= 1000 + 2000 for part in parts)
    assert concatenate(parts).lengths.tolist() == lengths.tolist()
    assert list(concatenate([]).split(1000)) == []


@pytest.mark.requirement("I1")
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"layers": 1}, "layer"), ({"layers": -1}, "layer"), ({"blocks": 8}, "block"), ({"blocks": -1}, "block"),
        ({"skips": -1}, "before"), ({"lengths": 0}, "empty"), ({"skips": 1}, "after"), ({"lengths": 2049}, "after"),
        ({"offsets": -4096}, "outside"), ({"offsets": ARENA_BYTES - 2047}, "outside"),
    ],
)  # fmt: skip
def test_refuses_pieces_out_of_range_before_any_byte_moves(
    arena: ArenaMap, make_copier: MakeCopier, change: dict[str, int], names: str
) -> None:
    layer = filled((8, 2048), torch.uint8)
    good = {"layers": 0, "blocks": 2, "skips": 0, "offsets": 0, "lengths": 2048}
    rows = [good, good | {"offsets": good["offsets"] + 2048} | change]
    batch = CopyBatch(*(np.array([row[name] for row in rows], dtype=np.int64) for name in good))
    with pytest.raises(CopyError, match=names):
        make_copier([layer]).copy(arena, batch, Direction.STORE)
    assert not any(arena.buffer[:4096])


def test_refuses_a_layer_that_has_no_blocks(make_copier: MakeCopier) -> None:
    with pytest.raises(CopyError, match="0 dimensions"):
        make_copier([torch.tensor(1.0)])


@pytest.mark.requirement("D6")
@pytest.mark.parametrize("direction", Direction)
def test_other_threads_run_python_while_a_batch_moves(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """Nobody is made to give the GIL away here: what is seen between the two marks is seen during the native call."""
    blocks = np.arange(64, dtype=np.int64)
    zeros = np.zeros_like(blocks)
    copier = CpuCopier([filled((64, 1 << 17), torch.uint8)])
    batch = CopyBatch(zeros, blocks, zeros, (1 << 17) * blocks, zeros + (1 << 17))
    moving = seen = False
    real = native.copy

    def marked(*args: object) -> int:
        nonlocal moving
        moving = True
        wrong: int = real(*args)
        moving = False
        return wrong

    def look() -> None:
        nonlocal seen
        while not seen:
            seen = moving
            time.sleep(1e-5)

    copier.copy(arena, batch, direction)  # a first call does more than that
    monkeypatch.setattr(native, "copy", marked)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    watcher = threading.Thread(target=look, daemon=True)
    try:
        watcher.start()
        for _ in range(2000):
            copier.copy(arena, batch, direction)
            if seen:
                break
        assert seen
    finally:
        sys.setswitchinterval(interval)
        seen = True
        watcher.join()


def test_refuses_a_layer_elsewhere_than_on_the_cpu() -> None:
    with pytest.raises(CopyError, match="meta"):
        CpuCopier([torch.empty(4, 4, device="meta")])


@pytest.mark.requirement("I1b")
def test_a_generation_that_changed_fails_the_check(arena: ArenaMap) -> None:
    column = granted(arena)
    column[5], column[9] = 4, 7
    assert arena.check([5, 9], [4, 7])
    column[9] = 8
    assert not arena.check([5, 9], [4, 7])
    assert not arena.check([5, 4096], [4, 0])
    arena.close()
    assert not arena.check([5], [4])


def test_views_outlive_the_mapping(arena: ArenaMap) -> None:
    view = np.frombuffer(arena.buffer, dtype=np.uint8)
    arena.close()
    view[-1] = 9
    assert view[-1] == 9
    with pytest.raises(ValueError, match="closed"):
        _ = arena.buffer
