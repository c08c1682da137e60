"""What one call may take of the daemon's loop, however many objects and requests there are (row I2 of every engine).

Counted in nodes that are looked at, not in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from kvdepot.core.calls import AcquireOutcome, Kind
from kvdepot.core.groups import GroupSpec
from kvdepot.server.depot.tree.evicting import Evictor
from kvdepot.server.depot.tree.index import Index
from kvdepot.server.depot.tree.usable import Usable

from tests.rigs.engine_rig import CHUNK, HYBRID, Rig, audit, key, path, spec_of
from tests.rigs.tier_rig import ATTENTION, BOTH, COMMIT, reboot, store

WINDOWS = spec_of(
    GroupSpec(Kind.ATTENTION, CHUNK, rank_block_bytes=(2048,)),
    GroupSpec(Kind.WINDOW, CHUNK, window_tokens=4 * CHUNK, rank_block_bytes=(2048,)),
    name="windows",
)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, of: type, name: str) -> Iterator[list[Any]]:
    """Calls of a method, each with its first argument."""
    calls: list[Any] = []
    original = getattr(of, name)

    def method(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        return original(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(of, name, method)
        yield calls


def test_a_demotion_below_a_shared_prefix_looks_at_its_own_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows that reach into several chunks, hundreds of prompts follow one."""
    prompts = 300
    size = prompts * 9 + 100
    rig = Rig(data_pages=size, rows=size, lent_rows=size, tier=COMMIT, tier_bytes=1 << 28, tier_handles=size)
    client = rig.attach(spec=WINDOWS)
    kinds = (Kind.ATTENTION, Kind.WINDOW)
    system = path("system", 4)
    client.store(system, kinds)
    for at in range(prompts):
        client.store([key("prompt", at, deep) for deep in range(3)], kinds, start=4, parent=system[-1])
    rig.tier.run()
    while rig.tier.run():
        pass
    with counted(monkeypatch, Usable, "_judge") as judged:
        for _ in range(20):
            assert rig.depot._ram.evictor.evict_one("room")
    assert len(judged) < 20 * 50
    audit(rig.depot)


def test_a_victim_is_found_although_what_is_learned_has_changed_the_worth_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, deep = 40, 20
    rig = Rig(data_pages=4 * prompts * deep, rows=4 * prompts * deep, lent_rows=2000)
    client = rig.attach(spec=HYBRID)
    for at in range(prompts):
        client.store([key(at, chunk) for chunk in range(deep)], BOTH, request=f"r{at}")
        client.end_request(f"r{at}")
    most = 0
    for at in range(prompts):
        inner = [key(at, chunk) for chunk in range(deep // 2)]
        lease, reply = client.acquire([*inner, inner[-1]], [*[Kind.ATTENTION] * len(inner), Kind.STATE])
        assert reply.outcome is AcquireOutcome.GRANTED
        client.release(lease)
        with counted(monkeypatch, Evictor, "update_candidate") as settled:
            assert rig.depot._ram.evictor.evict_one("room")
        most = max(most, len(settled))
    assert most < 100
    audit(rig.depot)


def test_a_slice_of_what_an_operator_drops_looks_up_first_chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, deep = 20, 50
    rig = Rig(data_pages=2 * prompts * deep, rows=2 * prompts * deep, lent_rows=2000)
    client = rig.attach()
    for at in range(prompts):
        client.store([key(at, chunk) for chunk in range(deep)])
    removal = rig.depot.deletion(client.namespace, b"")
    with counted(monkeypatch, Index, "live") as looked_up:
        while removal.run_once():
            pass
    assert max(len(nodes) for _, nodes in looked_up) == prompts
    assert rig.depot.status().tier.objects == 0
    audit(rig.depot)


@pytest.mark.parametrize("dies", [False, True], ids=["a request ends", "its engine dies"])
def test_what_nobody_can_resume_at_goes_at_once_however_long_it_is(dies: bool) -> None:
    chunks = 1000
    rig = Rig(data_pages=2 * chunks, rows=2 * chunks, lent_rows=2000, drop_nodes_max=128)
    client = rig.attach(spec=HYBRID)
    keys = [key("long", chunk) for chunk in range(chunks)]
    for start in range(0, chunks, 500):
        parent = {"parent": keys[start - 1]} if start else {}
        client.store(keys[start : start + 500], (Kind.ATTENTION,), request="r", start=start, **parent)
    index = rig.depot._tree.index
    if dies:
        rig.depot.process_dead(client.attachment)
    else:
        client.end_request("r")
    assert index.find(0, keys[0]) == index.find(0, keys[-1]) == 0xFFFF_FFFF
    assert index.count >= chunks - 2 * 128, "not all of it in one go"
    assert rig.counter("pruned_objects") == chunks
    while index.count:
        rig.depot.tick()
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_requests_that_are_over_leave_their_lane_while_loads_keep_a_tier_busy() -> None:
    rig = Rig(data_pages=256, tier=COMMIT, lease_deadline_seconds=1000.0)
    client = rig.attach()
    keys, other = path("p", 12), path("o", 30)
    for prompt in (keys, other):
        store(client, prompt)
        rig.tier.run()
    reboot(rig)
    client = rig.attach()
    client.acquire_later(other[:1], ATTENTION, 1)
    for number in range(1000):
        client.locate(keys, request=f"r{number}")
        client.end_request(f"r{number}")
    prefetch = rig.depot._prefetch
    assert not len(prefetch)
    assert sum(len(waiting) for queue in prefetch._queues.values() for waiting in queue._waiting) < 100


@pytest.mark.requirement("I4")
def test_what_two_tiers_read_for_one_request_is_held_by_it_once_it_is_over_by_nobody() -> None:
    """Its reads begin in one tier; another takes over that one's share while it is silent; then it answers again."""
    rig = Rig(data_pages=256, tier=COMMIT, shared=COMMIT, lease_deadline_seconds=1000.0)
    client = rig.attach()
    keys, other = path("p", 12), path("o", 1)
    for prompt in (keys, other):
        store(client, prompt)
        rig.tier.run()
        rig.shared.run()
    tree, ram = rig.depot._tree, rig.depot._ram
    disk = tree.tiers[0]
    handles = [disk.handle(tree.index.find(0, chunk), Kind.ATTENTION) for chunk in (*keys[10:], *other)]
    while ram.evictor.evict_one("room"):
        pass
    rig.tier.lose(*handles)
    answers = client.acquire_later(other, ATTENTION, 1)  # keeps the shared tier busy
    client.locate_later(keys, request="r")
    assert len(rig.tier.jobs) == 4
    rig.now += 30  # the disk is silent
    rig.shared.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED
    client.release(1)
    while rig.shared.run():
        pass
    while rig.tier.run() + rig.shared.run():
        pass
    (wish,) = rig.depot._prefetch._requests.values()
    assert len(wish.tokens) > len(set(wish.tokens)), "some are held twice"
    client.end_request("r")
    for _ in range(20):
        rig.depot.tick()
    assert (rig.depot.status().tier.prefetched_objects, rig.depot.status().tier.prefetched_bytes) == (0, 0)
    while ram.evictor.evict_one("room"):
        pass
    assert rig.depot.status().tier.objects == 0
    assert not np.count_nonzero(rig.depot._ram.pins.prefetch._requests)
    audit(rig.depot)
