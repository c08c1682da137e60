"""A batch as a table of runs: as few as there can be, none over the end of a pinned piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvdepot.client.copy.base import CopyBatch
from kvdepot.client.copy.runs import Runs
from kvdepot.client.copy.table import LayerTable

from benchmarks.day_one.copies import filled


def batch_of(rows: list[tuple[int, int, int, int, int]]) -> CopyBatch:
    """(layer, block, skip, offset, length)."""
    return CopyBatch(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


def test_blocks_that_follow_each_other_on_both_sides_are_one_run() -> None:
    table = LayerTable([filled((16, 512), torch.uint8)])
    runs = table.table(batch_of([(0, 3, 0, 4096, 512), (0, 4, 0, 4608, 512), (0, 6, 0, 5120, 512)]))
    assert runs.lengths.tolist() == [1024, 512]
    assert runs.offsets.tolist() == [4096, 5120]


def test_runs_of_two_layers_are_never_joined() -> None:
    """They may be two allocations that happen to follow each other: a driver refuses a copy over both."""
    both = filled((4, 512), torch.uint8)
    table = LayerTable([both[:2], both[2:]])
    assert len(table.table(batch_of([(0, 1, 0, 4096, 512), (1, 0, 0, 4608, 512)]))) == 2


def test_no_run_crosses_the_end_of_a_piece() -> None:
    table = LayerTable([filled((4, 10_000), torch.uint8)])
    runs = table.table(batch_of([(0, 1, 0, 6000, 10_000), (0, 2, 0, 16_000, 10_000)]), piece_bytes=8192)
    ends = runs.offsets + runs.lengths
    assert runs.offsets.tolist() == [6000, 8192, 16_384, 24_576]
    assert ends[-1] == 26_000 and (runs.offsets // 8192 == (ends - 1) // 8192).all()
    assert (np.diff(runs.addresses) == runs.lengths[:-1]).all()


@pytest.mark.parametrize(
    ("layer", "runs"),
    [
        (filled((8, 16, 4, 64), torch.bfloat16), 1),
        (filled((8, 16, 4, 64), torch.bfloat16).transpose(1, 2), 64),
        (filled((4, 8, 16, 64), torch.bfloat16).transpose(0, 1), 4),  # heads outermost
    ],
)
def test_a_block_is_as_many_runs_as_pieces_of_memory(layer: torch.Tensor, runs: int) -> None:
    table = LayerTable([layer])
    block_bytes = layer[0].numel() * 2
    assert len(table.table(batch_of([(0, 5, 0, 4096, block_bytes)]))) == runs
    assert len(table.moves([0], np.array([1, 2]), np.array([3, 5]))) == 2 * runs


@pytest.mark.parametrize(("columns", "word"), [((64, 4096, 8), 8), ((64, 4100, 8), 4), ((6, 8, 8), 2), ((8, 8, 1), 1)])
def test_runs_move_in_the_largest_words_that_divide_them(columns: tuple[int, int, int], word: int) -> None:
    assert Runs(*(np.array([value, value + 64], dtype=np.int64) for value in columns)).word_bytes == word
