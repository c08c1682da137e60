"""An engine without a model, for step 9: stores, loads, or stores until it is killed.

`python -m benchmarks.day_one.engine store|load|forever ENDPOINT`.
"""

from __future__ import annotations

import argparse
import itertools
import struct
import time
from typing import TYPE_CHECKING, Any

from kvdepot.client.endpoint import Endpoint
from kvdepot.core.calls import ROOT_KEY, AcquireCall, AcquireReply, Kind, ReserveCall, ReserveReply
from kvdepot.core.keys import NamespaceSpec, chunk_key

from benchmarks.day_one.child import say
from benchmarks.day_one.machine import machine_of
from benchmarks.day_one.rank import CHUNK_TOKENS, OBJECT_BYTES, Rank, group
from benchmarks.depot import engine

if TYPE_CHECKING:
    from kvdepot.client.calls import Call
    from kvdepot.client.session import DepotSession

OBJECTS = 16
CALL_SECONDS = 20.0


def spec() -> NamespaceSpec:
    return NamespaceSpec(
        {"benchmark": "day one"}, CHUNK_TOKENS, (group(),), {Kind.ATTENTION: OBJECT_BYTES}, label="day_one"
    )


def keys(prompt: str) -> list[bytes]:
    return [chunk_key(f"{prompt}/{number}".encode().ljust(32, b".")) for number in range(OBJECTS)]


def call(session: DepotSession, request: Call) -> object:
    """Submit a call and wait for its reply."""
    got: list[object] = []
    session.submit(request, CALL_SECONDS, got.append)
    return _first(session, got)


def _first(session: DepotSession, got: list[Any]) -> Any:
    """Wait for what the session puts there. None: it is late."""
    until = time.monotonic() + CALL_SECONDS
    while not got and time.monotonic() < until:
        session.wait(0.05)
    return got[0] if got else None


def reserved(session: DepotSession, prompt: str) -> tuple[int, ReserveReply]:
    """Return the lease and the grant of a prompt's objects."""
    names, lease = keys(prompt), session.new_lease_id()
    boundaries = struct.pack(f"<{OBJECTS}I", *(CHUNK_TOKENS * (number + 1) for number in range(OBJECTS)))
    parents, kinds = b"".join((ROOT_KEY, *names[:-1])), bytes([Kind.ATTENTION] * OBJECTS)
    reply = call(
        session, ReserveCall(b"", lease, spec().namespace_id(), b"".join(names), parents, kinds, boundaries, "r")
    )
    if not isinstance(reply, ReserveReply):
        raise SystemExit(f"reserve: {reply}"[:300])
    return lease, reply


def store(session: DepotSession, rank: Rank) -> None:
    lease, reply = reserved(session, "prompt")
    rank.fill()
    digest = rank.digest(loaded=False)
    rank.thread.submit([], [rank.store_granted(range(OBJECTS), reply.arena_id, reply.extents)])
    outcomes = rank.done(1)
    if not outcomes or outcomes[0].failed:
        raise SystemExit(f"store: {outcomes}"[:300])
    ended: list[bytes] = []
    session.commit(lease, range(OBJECTS), ended.append)
    say(digest=digest, committed=_first(session, ended) is not None)


def load(session: DepotSession, rank: Rank) -> None:
    names = b"".join(keys("prompt"))
    request = AcquireCall(
        b"", session.new_lease_id(), spec().namespace_id(), names, bytes([Kind.ATTENTION] * OBJECTS), "r"
    )
    reply = call(session, request)
    if not isinstance(reply, AcquireReply):
        raise SystemExit(f"acquire: {reply}"[:300])
    rank.thread.submit([rank.load_granted(range(OBJECTS), reply.arena_id, reply.extents)], [])
    outcomes = rank.done(1)
    if not outcomes or outcomes[0].failed:
        raise SystemExit(f"load: {outcomes}"[:300])
    say(digest=rank.digest(loaded=True))


def forever(session: DepotSession, rank: Rank) -> None:
    _, reply = reserved(session, "killed")
    say(extents=reply.extents.hex())
    for number in itertools.count():
        rank.fill(number % 255 + 1)
        rank.thread.submit([], [rank.store_granted(range(OBJECTS), reply.arena_id, reply.extents)])
        rank.done(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["store", "load", "forever"])
    parser.add_argument("endpoint")
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    machine = machine_of(stand_in=options.stand_in)
    with engine(Endpoint.parse(options.endpoint), spec(), f"day-one-{options.what}") as (session, worker):
        rank = Rank(machine, worker, OBJECTS)
        {"store": store, "load": load, "forever": forever}[options.what](session, rank)
        rank.close()


if __name__ == "__main__":
    main()
