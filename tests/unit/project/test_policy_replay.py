"""Replays of small traces: the figures are right, and no policy does much worse than LRU on another workload."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from kvdepot.core.eviction import DEFAULT_POLICY, policy_names

from benchmarks import policy
from benchmarks.policy import GEOMETRIES, Geometry, Request, hit_rate
from benchmarks.workload_policies import requests_of
from tests.rigs.seeds import one_in

ATTENTION, HYBRID, DENSE = GEOMETRIES


class Blocks:
    """Fresh block numbers."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, count: int) -> tuple[int, ...]:
        self.count += count
        return tuple(range(self.count - count, self.count))


def conversations(random: Random, requests: int) -> list[Request]:
    """Several at a time; each goes on with probability 0.6, after others."""
    blocks = Blocks()
    system = blocks.take(1)
    open_: list[tuple[int, ...]] = []
    made: list[Request] = []
    for number in range(requests):
        history = open_.pop(random.randrange(len(open_))) if random.random() < 0.6 and open_ else system
        path = history + blocks.take(random.randint(1, 8))
        made.append(Request(float(number), path, len(path)))
        open_ = [*open_[-60:], path]
    return made


def shared_prompts(random: Random, requests: int) -> list[Request]:
    """Zipf over 40 system prompts, each with a question of its own."""
    blocks = Blocks()
    prompts = [blocks.take(random.randint(2, 12)) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    chosen = random.choices(prompts, weights, k=requests)
    paths = [prompt + blocks.take(random.randint(1, 3)) for prompt in chosen]
    return [Request(float(number), path, len(path)) for number, path in enumerate(paths)]


def scans(random: Random, requests: int) -> list[Request]:
    """Conversations amid long prompts that come once."""
    made = conversations(random, requests)
    blocks = Blocks()
    blocks.count = 1 << 40
    for at in range(0, requests, 3):
        path = blocks.take(30)
        made[at] = Request(float(at), path, len(path))
    return made


def written(trace: Path, requests: list[Request]) -> Path:
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 1000 * r.at_seconds, "input_length": 512 * r.whole_blocks, "hash_ids": r.blocks})
            + "\n"
            for r in requests
        )
    )
    return trace


def least_recently_used(requests: list[Request], fraction: float) -> float:
    """A block cache in a dict: blocks of a path are used together, the last one the earliest to go."""
    capacity = int(fraction * len({block for request in requests for block in request.blocks}))
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        missing = next((at for at, block in enumerate(request.blocks) if block not in cache), len(request.blocks))
        hits += missing
        for block in reversed(request.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / sum(len(request.blocks) for request in requests)


def test_the_engine_under_lru_is_a_least_recently_used_block_cache() -> None:
    requests = conversations(Random(1), 400)
    assert hit_rate(requests, ATTENTION, "lru", 0.3) == pytest.approx(least_recently_used(requests, 0.3), abs=0.01)


@pytest.mark.parametrize("workload", one_in(3, [conversations, shared_prompts, scans], 2))
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_no_policy_is_much_worse_than_lru_and_nothing_beats_the_future(
    workload: Callable[[Random, int], list[Request]], geometry: Geometry
) -> None:
    requests = workload(Random(2), 150)
    rates = {name: hit_rate(requests, geometry, name, 0.2) for name in policy_names()}
    assert min(rates.values()) >= 0.9 * rates["lru"]
    if geometry is ATTENTION:
        assert max(rates.values()) <= hit_rate(requests, geometry, "belady", 0.2) + 0.01


def test_with_one_state_a_prompt_the_default_keeps_what_tenants_share_and_gdsf_does_not() -> None:
    requests = requests_of("tenants", 1, 600)
    rates = {name: hit_rate(requests, HYBRID, name, 0.1) for name in policy_names()}
    assert rates["gdsf"] < 0.9 * rates["lru"]
    assert rates[DEFAULT_POLICY] > rates["lru"]


def test_the_benchmark_writes_its_rows(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.jsonl", conversations(Random(3), 60))
    policy.main([str(trace), "--fractions", "0.2", "0.5", "--json", str(tmp_path / "out" / "policy.json")])
    rows = json.loads((tmp_path / "out" / "policy.json").read_text())["rows"]
    assert [(row["geometry"], row["policy"], row["fraction"]) for row in rows] == [
        (geometry.name, DEFAULT_POLICY, fraction) for geometry in GEOMETRIES for fraction in (0.2, 0.5)
    ]
    assert all(0 <= row[name] <= 1 for row in rows for name in ("hit_rate", "lru", "lru_objects", "belady"))
