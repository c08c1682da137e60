"""Token hit rates of the eviction policies on a request trace, beside LRU and an offline optimum.

    python -m benchmarks.policy TRACE [--fractions 0.05 0.1] [--policy adaptive] [--json PATH]

A trace is JSON lines with `timestamp` (milliseconds), `input_length` (tokens) and `hash_ids` (one a
512-token block of the prompt; the last may be partial), as published with Mooncake. Every request is
located, acquired, released, stored and ended in the daemon's own engine over arena tables of its own,
with the trace's clock; no payload byte is touched.

Geometries:

* `attention`: one object a block, the last partial one included, so that figures compare with block caches.
* `hybrid`: as Qwen3-Next (12 attention layers of 2 x 256 keys and values, 36 GDN layers of 32 x 128 x 128,
  bfloat16): a state takes as much as the attention of three blocks. As an engine stores it that keeps no states
  between prompts (`prefix_cache_retention_interval` 0): whole blocks only, and one state a prompt, at its last one.
* `hybrid_dense`: the same model in an engine that offers a state at every block (a retention interval of one block,
  which storing generated tokens needs). Most of them nobody resumes at.

A capacity is a fraction of what all distinct objects of the trace take. The hit rate is tokens resumed at over
tokens asked for, both in blocks. `belady` evicts the unit whose end node occurs again the latest in the trace
(never: first), among the units that may go: the optimum for units of one size (attention), an estimate for others.
In `hybrid_dense` what counts is the next request that resumes at the node if all is there, not one that passes it.
`lru_objects` is a cache of single objects without a tree: each has a recency of its own, and is used when it is
loaded or stored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

import numpy as np
from kvdepot.core.calls import (
    ROOT_KEY,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitCall,
    CommitItem,
    EndRequestCall,
    Kind,
    LocateCall,
    LocateReply,
    ReleaseCall,
    ReserveCall,
    ReserveOutcome,
)
from kvdepot.core.candidate_heap import CandidateHeap
from kvdepot.core.eviction import DEFAULT_POLICY, policy_by_name, policy_names
from kvdepot.core.eviction_policy import NO_NODE, USELESS, EvictionPolicy
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.offline.virtual_engine import VirtualEngine

from benchmarks.report import machine

BLOCK_TOKENS = 512
OBJECT_BYTES = 4096  # of one block's attention: the arena's granule
STATE_BLOCKS = 3  # what a state of the hybrid geometry takes, in blocks of attention
CHUNKS_PER_CALL = 64
NEVER = 1 << 40
BELADY = "belady"


@dataclass(frozen=True, slots=True)
class Request:
    at_seconds: float
    blocks: tuple[int, ...]
    whole_blocks: int  # without a partial one at the end


def read_trace(path: Path) -> list[Request]:
    requests = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        blocks = tuple(record["hash_ids"])
        whole = min(record["input_length"] // BLOCK_TOKENS, len(blocks))
        requests.append(Request(record["timestamp"] / 1000, blocks, whole))
    return requests


@dataclass(frozen=True, slots=True)
class Geometry:
    name: str
    states: bool
    dense: bool = False  # a state at every block, not only at the last one of a prompt

    def path(self, request: Request) -> tuple[int, ...]:
        """The blocks of a request that are looked up and stored."""
        return request.blocks[: request.whole_blocks] if self.states else request.blocks

    def unique_bytes(self, requests: Iterable[Request]) -> int:
        paths = [self.path(request) for request in requests]
        blocks = {block for path in paths for block in path}
        with_state = {block for path in paths for block in path[self.first_state(len(path)) :]}
        return (len(blocks) + STATE_BLOCKS * len(with_state)) * OBJECT_BYTES

    def first_state(self, blocks: int) -> int:
        """The first block that is stored with a state, of a prompt of so many blocks."""
        if not self.states:
            return blocks
        return 0 if self.dense else max(blocks - 1, 0)

    def spec(self) -> NamespaceSpec:
        groups = [GroupSpec(Kind.ATTENTION, BLOCK_TOKENS, rank_block_bytes=(OBJECT_BYTES,), layers=("a",))]
        sizes = {Kind.ATTENTION: OBJECT_BYTES}
        if self.states:
            state_bytes = STATE_BLOCKS * OBJECT_BYTES
            groups.append(GroupSpec(Kind.STATE, BLOCK_TOKENS, rank_block_bytes=(state_bytes,), layers=("s",)))
            sizes[Kind.STATE] = state_bytes
        return NamespaceSpec({"benchmark": "policy"}, BLOCK_TOKENS, tuple(groups), sizes)


GEOMETRIES = (
    Geometry("attention", states=False),
    Geometry("hybrid", states=True),
    Geometry("hybrid_dense", states=True, dense=True),
)


class Belady:
    """Evicts the unit whose end node is used again the latest. The replay tells it the future with `expect`."""

    def __init__(self) -> None:
        self._candidates = CandidateHeap()
        self._next: dict[int, int] = {}
        self.at = 0  # number of the request in progress: what it stores is used at once

    def expect(self, node: int, request: int) -> None:
        self._next[node] = request
        if node in self._candidates:
            self._candidates.put(node, -request)

    def on_commit(self, node: int, now: float, parent: int = NO_NODE, mark: int = 0) -> None:  # noqa: ARG002
        self.expect(node, self.at)

    def on_hit(self, node: int, now: float) -> None:  # noqa: ARG002
        self.expect(node, self.at)

    def on_end(self, node: int) -> None:
        pass

    def on_candidate(self, node: int, worth: float, group: int = 0) -> None:
        self._candidates.put(node, -self._next.get(node, NEVER) if worth > USELESS else -2.0 * NEVER, group)

    def on_not_candidate(self, node: int) -> None:
        self._candidates.discard(node)

    def on_evicted(self, node: int, heir: int) -> None:
        pass

    def on_removed(self, node: int) -> None:
        self._candidates.discard(node)
        self._next.pop(node, None)

    def victim(self, groups: Iterable[int] | None = None) -> int | None:
        return self._candidates.first(groups)

    def use_class(self, node: int) -> int:  # noqa: ARG002
        return 0


def next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per request and block, the number of the next request that has the block."""
    last: dict[int, int] = {}
    uses: list[list[int]] = [[] for _ in paths]
    for number in range(len(paths) - 1, -1, -1):
        uses[number] = [last.get(block, NEVER) for block in paths[number]]
        last.update(dict.fromkeys(paths[number], number))
    return uses


def next_resumes(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Likewise, the next request that has the block and none behind it that was asked for before."""
    seen: set[int] = set()
    resumes = []
    for path in paths:
        known = next((at for at, block in enumerate(path) if block not in seen), len(path))
        resumes.append(path[known - 1] if known else None)
        seen.update(path)
    last: dict[int, int] = {}
    uses: list[list[int]] = [[] for _ in paths]
    for number in range(len(paths) - 1, -1, -1):
        uses[number] = [last.get(block, NEVER) for block in paths[number]]
        resumed = resumes[number]
        if resumed is not None:
            last[resumed] = number
    return uses


class Replay:
    """One engine of so many bytes with one client, and the requests it is given one after the other."""

    def __init__(self, geometry: Geometry, policy: EvictionPolicy, capacity_bytes: int) -> None:
        self.now = 0.0
        self._geometry = geometry
        rows = capacity_bytes // OBJECT_BYTES + 1
        self._virtual = VirtualEngine(capacity_bytes, rows, clock=lambda: self.now)
        self.depot, self._session = self._virtual.depot, self._virtual.session
        # The engine knows policies by name; here it is given one that knows the future, too.
        self.tree = self.depot._tree  # noqa: SLF001
        self.tree.ram.evictor.policy = policy
        self._namespace = self._virtual.register(geometry.spec())

    def request(self, keys: Sequence[bytes]) -> int:
        """Blocks that the request resumes behind, after which it stores the others."""
        if not keys:
            return 0
        call = LocateCall(self._session, self._namespace, b"".join(keys), len(keys) * BLOCK_TOKENS)
        located: list[LocateReply] = []
        self.depot.locate(call, located.append)
        hit = located[0].boundary_tokens // BLOCK_TOKENS
        if hit:
            self._load(keys[:hit])
        for start in range(hit, len(keys), CHUNKS_PER_CALL):
            self._store(keys, start, min(start + CHUNKS_PER_CALL, len(keys)))
        if self._geometry.states and hit == len(keys):
            self.tree.hit(self.tree.index.find(0, keys[-1]))
        self.depot.end_request(EndRequestCall(self._session, "r"))
        return hit

    def _load(self, keys: Sequence[bytes]) -> None:
        kinds = bytes([Kind.ATTENTION]) * len(keys) + (bytes([Kind.STATE]) if self._geometry.states else b"")
        named = b"".join(keys) + (keys[-1] if self._geometry.states else b"")
        lease = self._virtual.new_lease_id()
        replies: list[AcquireReply] = []
        self.depot.acquire(AcquireCall(self._session, lease, self._namespace, named, kinds), replies.append)
        assert [reply.outcome for reply in replies] == [AcquireOutcome.GRANTED]
        self.depot.release(ReleaseCall(self._session, (lease,)))

    def _store(self, keys: Sequence[bytes], start: int, end: int) -> None:
        chunks = list(range(start, end))
        with_state = range(max(start, self._geometry.first_state(len(keys))), end)
        kinds = [Kind.ATTENTION] * len(chunks) + [Kind.STATE] * len(with_state)
        chunks += with_state
        for first in range(0, len(chunks), RESERVED_PER_CALL_MAX):
            part = slice(first, first + RESERVED_PER_CALL_MAX)
            self._reserve(keys, chunks[part], kinds[part])

    def _reserve(self, keys: Sequence[bytes], chunks: Sequence[int], kinds: Sequence[Kind]) -> None:
        lease = self._virtual.new_lease_id()
        call = ReserveCall(
            self._session, lease, self._namespace, b"".join(keys[at] for at in chunks),
            b"".join(keys[at - 1] if at else ROOT_KEY for at in chunks), bytes(kinds),
            (np.array(chunks, "<u4") * BLOCK_TOKENS + BLOCK_TOKENS).astype("<u4").tobytes(), "r",
        )  # fmt: skip
        outcomes = np.frombuffer(self.depot.reserve(call).outcomes, np.uint8)
        granted = np.flatnonzero(outcomes == ReserveOutcome.GRANTED).astype("<u4")
        self.depot.commit(CommitCall(self._session, (CommitItem(lease, granted.tobytes()),)))


def hit_rate(requests: Sequence[Request], geometry: Geometry, name: str, fraction: float) -> float:
    """Share of all blocks asked for that requests resumed behind, under the policy of this name (or `belady`)."""
    capacity_bytes = max(int(fraction * geometry.unique_bytes(requests)), OBJECT_BYTES)
    return sum(hits_of(requests, geometry, name, capacity_bytes)) / sum(len(request.blocks) for request in requests)


def hits_of(requests: Sequence[Request], geometry: Geometry, name: str, capacity_bytes: int) -> list[int]:
    """Return the blocks that each request resumed after, under the policy of this name (or `belady`)."""
    belady = Belady() if name == BELADY else None
    policy = belady or policy_by_name(name, capacity_bytes // OBJECT_BYTES)
    replay = Replay(geometry, policy, capacity_bytes)
    paths = [geometry.path(request) for request in requests]
    future = (next_resumes if geometry.dense else next_uses)(paths) if belady else []
    hits = []
    for number, request in enumerate(requests):
        replay.now = request.at_seconds
        keys = [blake2b(block.to_bytes(8, "little"), digest_size=16).digest() for block in paths[number]]
        if belady:
            belady.at = number
        hits.append(replay.request(keys))
        if belady and keys:
            nodes = replay.tree.index.find_many(0, b"".join(keys)).tolist()
            for node, use in zip(nodes, future[number], strict=True):
                if node != NONE:
                    belady.expect(node, use)
    return hits


def objects_hit_rate(requests: Sequence[Request], geometry: Geometry, fraction: float) -> float:
    """Likewise, of a cache of single objects that evicts the one whose last use is the longest ago."""
    capacity = max(int(fraction * geometry.unique_bytes(requests)) // OBJECT_BYTES, 1)  # in blocks of attention
    cache: OrderedDict[tuple[int, bool], int] = OrderedDict()  # what each takes, by block and whether it is a state
    held = hits = 0
    for request in requests:
        path = geometry.path(request)
        known = next((at for at, block in enumerate(path) if (block, False) not in cache), len(path))
        hit = known
        while geometry.states and hit and (path[hit - 1], True) not in cache:
            hit -= 1
        hits += hit
        first_state = max(hit, geometry.first_state(len(path)))
        for at in range(len(path) - 1, -1, -1):  # what comes first in a path goes last
            if geometry.states and (at >= first_state or at == hit - 1):
                held += STATE_BLOCKS - cache.pop((path[at], True), 0)
                cache[path[at], True] = STATE_BLOCKS
            held += 1 - cache.pop((path[at], False), 0)
            cache[path[at], False] = 1
        while held > capacity:
            held -= cache.popitem(last=False)[1]
    return hits / sum(len(request.blocks) for request in requests)


def rows_of(requests: Sequence[Request], name: str, fractions: Sequence[float]) -> list[dict[str, object]]:
    """All figures; as many replays at once as there are processors."""
    rows: list[dict[str, object]] = []
    settings = [(geometry, fraction) for geometry in GEOMETRIES for fraction in fractions]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = [
            [
                *(pool.submit(hit_rate, requests, geometry, policy, fraction) for policy in (name, "lru", BELADY)),
                pool.submit(objects_hit_rate, requests, geometry, fraction),
            ]
            for geometry, fraction in settings
        ]
        for (geometry, fraction), replays in zip(settings, running, strict=True):
            rate, least, most, objects = (round(replay.result(), 4) for replay in replays)
            rows.append(
                {"geometry": geometry.name, "policy": name, "fraction": fraction,
                 "hit_rate": rate, "lru": least, "lru_objects": objects, "belady": most}
            )  # fmt: skip
            print(
                f"{geometry.name:<12} {fraction:>6.1%}  {name} {rate:.4f}  lru {least:.4f}  lru_objects {objects:.4f}"
                f"  belady {most:.4f}"
                f"  {name}/belady {rate / most if most else 0:.2f}  {name}/lru {rate / least if least else 0:.2f}",
                flush=True,
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--policy", choices=policy_names(), default=DEFAULT_POLICY)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    options = parser.parse_args(arguments)
    rows = rows_of(read_trace(options.trace), options.policy, options.fractions)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"benchmark": "policy", "trace": options.trace.name, "rows": rows, "machine": machine(),
                  "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
