"""The kernel that moves runs, by Triton's interpreter: the same source that is compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.rigs.patience import patient

PROGRAM = """
import random, sys
import numpy as np, torch
from kvdepot.client.copy import gather
from kvdepot.client.copy.runs import Runs

chance = random.Random(int(sys.argv[2]))
word = int(sys.argv[1])
count = 9
source = torch.randint(0, 256, (400_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
target = torch.full_like(source, 0xDD)
lengths = [word * chance.randrange(1, 5000) for _ in range(count - 1)] + [word]
at = [40_000 * place + 8 * chance.randrange(8) + (word if word < 8 else 0) for place in range(count)]
to = [40_000 * place + 8 * chance.randrange(8) for place in chance.sample(range(count), count)]
columns = [np.array(column, dtype=np.int64) for column in (at, to, lengths)]
runs = Runs(columns[0] + source.data_ptr(), columns[1] + target.data_ptr(), columns[2])
assert runs.word_bytes == word, runs.word_bytes
gather.PROGRAMS_MAX = 4
gather.move(torch.from_numpy(np.stack([runs.sources, runs.targets, runs.lengths])), count, word)
expected = torch.full_like(source, 0xDD)
for begin, into, length in zip(at, to, lengths):
    expected[into : into + length] = source[begin : begin + length]
assert torch.equal(target, expected)
"""


@pytest.mark.parametrize(
    "word_bytes",
    [8, pytest.param(4, marks=pytest.mark.long(seconds=5)), pytest.param(2, marks=pytest.mark.long(seconds=5)), 1],
)
def test_every_run_arrives_and_nothing_beside_it_changes(word_bytes: int) -> None:
    pytest.importorskip("triton", reason="the kernel needs Triton, as vLLM brings it")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PROGRAM, str(word_bytes), "5"]
    subprocess.run(command, check=True, env=environment, timeout=patient(300))
