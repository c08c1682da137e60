"""Many small objects, stored until all of them are durable."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from kvdepot.client.endpoint import Endpoint
from kvdepot.core.calls import ROOT_KEY, CommitOutcome, Kind, ReserveCall, ReserveOutcome, ReserveReply
from kvdepot.core.groups import GroupSpec
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.report import TierStatus

from benchmarks.depot import engine

CHUNK_TOKENS, OBJECT_BYTES, BATCH = 256, 4096, 100
CALL_SECONDS = 20.0
_QUEUED_MAX = 5_000
_WAIT_SECONDS_MAX = 300.0


def spec() -> NamespaceSpec:
    group = GroupSpec(Kind.ATTENTION, CHUNK_TOKENS, rank_block_bytes=(OBJECT_BYTES,))
    return NamespaceSpec(
        {"benchmark": "small"}, CHUNK_TOKENS, (group,), {Kind.ATTENTION: OBJECT_BYTES}, label="small_objects"
    )


def store_small(endpoint: Endpoint, objects: int, tier: Callable[[], TierStatus]) -> None:
    """Prompts of `BATCH` chunks. Their bytes are what the arena holds: nobody reads them."""
    namespace = spec().namespace_id()
    boundaries = b"".join((CHUNK_TOKENS * (at + 1)).to_bytes(4, "little") for at in range(BATCH))
    with engine(endpoint, spec()) as (session, _):
        answers: list[object] = []

        def answer() -> object:
            while not answers:
                if not session.wait(CALL_SECONDS):
                    raise SystemExit("no answer")
            return answers.pop()

        for _ in range(objects // BATCH):
            keys = [random.randbytes(16) for _ in range(BATCH)]
            lease = session.new_lease_id()
            parents = b"".join((ROOT_KEY, *keys[:-1]))
            kinds = bytes([Kind.ATTENTION] * BATCH)
            call = ReserveCall(b"", lease, namespace, b"".join(keys), parents, kinds, boundaries)
            session.submit(call, CALL_SECONDS, answers.append)
            reply = answer()
            if not isinstance(reply, ReserveReply) or set(reply.outcomes) != {ReserveOutcome.GRANTED}:
                raise SystemExit(f"reserve: {reply}"[:300])
            session.commit(lease, range(BATCH), answers.append)
            if answer() != bytes([CommitOutcome.COMMITTED] * BATCH):
                raise SystemExit("a commit was refused")
            while tier().queued_objects > _QUEUED_MAX:
                time.sleep(0.02)
        until = time.monotonic() + _WAIT_SECONDS_MAX
        while (found := tier()).objects < objects:
            if time.monotonic() > until:
                raise SystemExit(f"{found.objects} of {objects} objects are durable")
            time.sleep(0.05)
