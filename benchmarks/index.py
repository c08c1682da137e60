"""The daemon's index at 1,000,000 objects: time of an acquire of 1,000, memory per object, collector pauses.

`find_tiers` is what an engine with KV events asks about a part of its announced chunks, here random ones.

The daemon's own engine over arena tables of its own, without sockets. Keys are random.
Prompts are paths of a forest, written depth first: a trunk of 500 chunks shared by six
branches of 500. An acquire names the 1,000 chunks of one path; encoding and decoding on
both sides is included. Memory is the growth of this process's resident set, arena tables
included. The data region is sparse: nobody touches a payload byte here.
"""

from __future__ import annotations

import gc
import os
import random
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from kvdepot.core.arena import ArenaLayout, tables_in_memory
from kvdepot.core.calls import (
    ROOT_KEY,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitCall,
    CommitItem,
    CommitOutcome,
    EndRequestCall,
    FindTiersCall,
    Kind,
    Nearest,
    ReleaseCall,
    ReserveCall,
    ReserveOutcome,
)
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.core.planner import GroupSpec
from kvdepot.proto.methods import BY_CALL
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.types import DepotConfig, Membership, ProcessIdentity

from benchmarks.report import Report, arguments, median

TRUNK, BRANCH, BRANCHES = 500, 500, 6
TREE = TRUNK + BRANCHES * BRANCH
OBJECT_BYTES = 4096
CHUNK_TOKENS = 16
FOUND_AT_ONCE = 2048


class Index:
    """An engine with one attached client."""

    def __init__(self, objects: int) -> None:
        size_bytes = objects * OBJECT_BYTES * 5 // 4 + (1 << 30)  # below the watermark: nothing is evicted
        layout = ArenaLayout.plan(size_bytes, rows=objects + objects // 16)
        config = DepotConfig(credit_bytes=layout.size_bytes)
        self.engine = Depot(
            tables_in_memory(layout),
            arena_id=1,
            run=1,
            clock=time.monotonic,
            random_bytes=random.randbytes,
            config=config,
        )
        self.engine.ready(layout.data_bytes)
        process = ProcessIdentity(os.getpid(), 1, b"\1" * 16)
        self.session = self.engine.attach(
            process, Membership("benchmark", scheduler=True, rank=0, world_size=1)
        ).session
        group = GroupSpec(Kind.ATTENTION, CHUNK_TOKENS, rank_block_bytes=(OBJECT_BYTES,), layers=("a",))
        spec = NamespaceSpec({"benchmark": "index"}, CHUNK_TOKENS, (group,), {Kind.ATTENTION: OBJECT_BYTES})
        self.namespace, _ = self.engine.register_namespace(self.session, spec)
        self._leases = 0

    def lease(self) -> int:
        self._leases += 1
        return self._leases

    def store(self, keys: bytes, parent: bytes, depth: int) -> None:
        """Reserve and commit a run of chunks below `parent`, which ends at chunk `depth`."""
        for at in range(0, len(keys), RESERVED_PER_CALL_MAX * 16):
            above = keys[at - 16 : at] if at else parent
            self._store(keys[at : at + RESERVED_PER_CALL_MAX * 16], above, depth + at // 16)

    def _store(self, keys: bytes, parent: bytes, depth: int) -> None:
        count = len(keys) // 16
        lease = self.lease()
        boundaries = struct.pack(
            f"<{count}I", *range((depth + 1) * CHUNK_TOKENS, (depth + 1 + count) * CHUNK_TOKENS, CHUNK_TOKENS)
        )
        kinds = bytes([Kind.ATTENTION]) * count
        call = ReserveCall(self.session, lease, self.namespace, keys, parent + keys[:-16], kinds, boundaries, "r")
        method = BY_CALL[ReserveCall]
        reply = self.engine.reserve(method.call.parse(method.call.encode(call).SerializeToString()))
        assert set(reply.outcomes) == {ReserveOutcome.GRANTED}, reply.reason
        item = CommitItem(lease, struct.pack(f"<{count}I", *range(count)))
        answer = self.engine.commit(CommitCall(self.session, (item,)))
        assert set(answer.outcomes[0]) == {CommitOutcome.COMMITTED}

    def acquire(self, keys: bytes) -> tuple[int, AcquireReply]:
        """The whole way of a call and its answer, but for the socket."""
        lease = self.lease()
        call = AcquireCall(self.session, lease, self.namespace, keys, bytes([Kind.ATTENTION]) * (len(keys) // 16))
        method = BY_CALL[AcquireCall]
        replies: list[AcquireReply] = []
        self.engine.acquire(method.call.parse(method.call.encode(call).SerializeToString()), replies.append)
        (reply,) = replies
        return lease, method.reply.parse(method.reply.encode(reply).SerializeToString())


class Pauses:
    """How long each run of the garbage collector took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._began)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def build(index: Index, trees: list[bytes]) -> None:
    for tree in trees:
        trunk = tree[: TRUNK * 16]
        index.store(trunk, ROOT_KEY, 0)
        for branch in range(BRANCHES):
            at = (TRUNK + branch * BRANCH) * 16
            index.store(tree[at : at + BRANCH * 16], trunk[-16:], TRUNK)
        index.engine.end_request(EndRequestCall(index.session, "r"))
        index.engine.tick()


def acquires(index: Index, trees: list[bytes], calls: int, rng: random.Random) -> list[float]:
    seconds = []
    for _ in range(calls):
        tree = rng.choice(trees)
        at = (TRUNK + rng.randrange(BRANCHES) * BRANCH) * 16
        keys = tree[: TRUNK * 16] + tree[at : at + BRANCH * 16]
        start = time.perf_counter()
        lease, reply = index.acquire(keys)
        seconds.append(time.perf_counter() - start)
        assert reply.outcome is AcquireOutcome.GRANTED
        index.engine.release(ReleaseCall(index.session, (lease,)))
    return seconds


def finds(index: Index, trees: list[bytes], calls: int, rng: random.Random) -> list[float]:
    method = BY_CALL[FindTiersCall]
    seconds = []
    for _ in range(calls):
        places = (rng.randrange(TREE) * 16 for _ in range(FOUND_AT_ONCE))
        keys = b"".join(rng.choice(trees)[at : at + 16] for at in places)
        start = time.perf_counter()
        call = method.call.encode(FindTiersCall(index.session, index.namespace, keys)).SerializeToString()
        reply = method.reply.encode(index.engine.find_tiers(method.call.parse(call))).SerializeToString()
        assert set(method.reply.parse(reply).tiers) == {Nearest.RAM}
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = arguments("The index at 1,000,000 objects.")
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    rng = random.Random(seed)
    trees = [rng.randbytes(TREE * 16) for _ in range(-(-options.objects // TREE))]
    index = Index(len(trees) * TREE)
    gc.collect()
    gc.freeze()  # as kvdepotd does when it has started
    pauses = Pauses()
    before = resident_bytes()
    start = time.perf_counter()
    build(index, trees)
    built_seconds = time.perf_counter() - start
    grown = resident_bytes() - before
    objects = index.engine.status().tier.objects
    seconds = acquires(index, trees, options.calls, rng)
    found_seconds = finds(index, trees, options.calls, rng)
    report = Report("index: 1,000,000 objects")
    report.note("seed", seed)
    report.figure("objects", objects, "")
    report.figure("acquire_1000_p50_ms", median(seconds) * 1e3, "ms", at_most=3.0)
    report.figure("acquire_1000_p99_ms", sorted(seconds)[int(len(seconds) * 0.99)] * 1e3, "ms")
    report.figure(f"find_tiers_{FOUND_AT_ONCE}_p50_ms", median(found_seconds) * 1e3, "ms")
    report.figure("bytes_per_object", grown / objects, "bytes", at_most=300.0)
    report.figure("gc_pause_ms_max", max(pauses.seconds, default=0.0) * 1e3, "ms", at_most=5.0)
    report.note("gc_runs", len(pauses.seconds))
    report.figure("store_us_per_object", built_seconds / objects * 1e6, "us")
    report.finish(options.json)


if __name__ == "__main__":
    main()
