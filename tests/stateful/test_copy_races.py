"""The order of copies on a device, over random histories: whatever the threads do, no two accesses race.

`tests/rigs/copy_schedules.py` says what is real and what is a model. The second half shows what the checker finds: a
change of the product that takes away one wait, or puts it elsewhere, is found within so many histories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

import pytest
from kvdepot.client.copy import cuda
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.driver import ANY_ORDER
from kvdepot.client.copy.revocable import RevocableCopier
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome
from kvdepot.client.vllm.worker.copy_thread import CopyThread

from tests.fakes.call_orders import FORWARD, V1
from tests.rigs.copy_schedules import Schedule, World
from tests.rigs.seeds import drawn, steps_until

HISTORIES: Final = 200
LONG_RUNS, LONG_HISTORIES = 20, 5000
FAULTS: Final = {
    "transfer refused",
    "shuffle refused",
    "memory refused",
    "device lost",
    "stores failed",
    "loads failed",
}
MET: Final = FAULTS | {"stored", "loaded", "moves", "preempted", "slept", "arena changed", "closed", "proved"}
"""What a run of histories has to meet."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    made.close()


def run(world: World, seed: int, histories: int) -> None:
    random, met = Random(seed), Counter[str]()
    for number in steps_until(lambda: met.keys() >= MET, histories):
        schedule = Schedule(world, random.randrange(2**32))
        found = schedule.run()
        assert not found, f"history {number}: {found}"
        met.update(schedule.met)


@pytest.mark.requirement("I1", "I6", "P5")
@pytest.mark.parametrize("seed", drawn([0]))
def test_no_two_accesses_race_whatever_the_threads_do(world: World, seed: int) -> None:
    run(world, seed, HISTORIES)


@pytest.mark.requirement("I1", "I6", "P5")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", drawn(range(1, 1 + LONG_RUNS), [pytest.mark.long(seconds=25)]))
def test_no_two_accesses_race_in_a_hundred_thousand_histories(world: World, seed: int) -> None:
    run(world, seed, LONG_HISTORIES)


# --- what the checker finds

Patch = pytest.MonkeyPatch


def no_mark(patch: Patch) -> None:
    """Copies wait for no work of the engine."""
    patch.setattr(DeviceCopier, "after", lambda *_: None)


def one_scratch(patch: Patch) -> None:
    """Loads take the scratch memory of stores, and do not wait for them."""
    made = DeviceCopier.__init__

    def shared(copier: Any, *arguments: Any, **options: Any) -> None:
        made(copier, *arguments, **options)
        copier._queues[Direction.LOAD]._scratch = copier._queues[Direction.STORE]._scratch

    patch.setattr(DeviceCopier, "__init__", shared)


def no_wait(patch: Patch) -> None:
    """A copy is reported when it is queued."""
    patch.setattr(RevocableCopier, "wait", lambda *_: None)


def wait_for_loads_only(patch: Patch) -> None:
    """Whatever is copied."""
    wait = RevocableCopier.wait
    patch.setattr(RevocableCopier, "wait", lambda copier, *_: wait(copier, Direction.LOAD))


def early_report(patch: Patch) -> None:
    """A copy is reported first, and waited for then."""
    do = CopyThread._do

    def early(thread: CopyThread, op: Any, mark: object) -> None:
        thread._done.append(CopyOutcome(op, frozenset()))
        do(thread, op, mark)

    patch.setattr(CopyThread, "_do", early)


def unpinning_between_batches(patch: Patch) -> None:
    """A former arena's pieces are unpinned while a store has batches on their way to it."""
    yield_to_loads = CopyThread._yield_to_loads

    def unpinning(thread: CopyThread) -> None:
        thread._prepare()
        yield_to_loads(thread)

    patch.setattr(CopyThread, "_yield_to_loads", unpinning)


def no_wait_before_sleep(patch: Patch) -> None:
    """KV memory is taken away when no copy begins any more, and before the last one has ended."""

    def revoke(copier: RevocableCopier, _: float) -> bool:
        copier.revoked = True
        return True

    patch.setattr(RevocableCopier, "revoke", revoke)


def stores_in_any_order(patch: Patch) -> None:
    """A driver may read a store's blocks before what its stream waits for."""
    patch.setitem(cuda._ORDERS, Direction.STORE, ANY_ORDER)


def no_wait_before_comparing(patch: Patch) -> None:
    """A load that is read back is compared at once."""
    verify = DeviceCopier.verify

    def at_once(copier: Any, *arguments: Any) -> bool:
        queue = copier._queues[Direction.LOAD]
        wait, queue.wait = queue.wait, lambda: None
        try:
            return verify(copier, *arguments)
        finally:
            queue.wait = wait

    patch.setattr(DeviceCopier, "verify", at_once)


def nothing(_: Patch) -> None:
    """The product is as it is."""


_AT: Final = V1.index(FORWARD)
LOADS_FIRST: Final = (*V1[:_AT], "start_load_kv", *(call for call in V1[_AT:] if call != "start_load_kv"))
"""Loads are queued before the forward, as vLLM's interface was once meant."""


@pytest.mark.parametrize(
    ("change", "options", "histories"),
    [
        pytest.param(no_mark, {}, 50, id="no mark is waited for"),
        pytest.param(nothing, {"early": 1}, 200, id="marks one step early"),
        pytest.param(nothing, {"early": 2}, 200, id="marks two steps early"),
        pytest.param(nothing, {"order": LOADS_FIRST}, 400, id="loads are queued before the forward"),
        pytest.param(one_scratch, {}, 1000, id="loads and stores share scratch memory"),
        pytest.param(no_wait, {}, 50, id="no wait before a report"),
        pytest.param(wait_for_loads_only, {}, 200, id="a wait in the other direction"),
        pytest.param(early_report, {}, 200, id="a report before the wait"),
        pytest.param(unpinning_between_batches, {}, 4000, id="unpinning during a copy"),
        pytest.param(no_wait_before_sleep, {}, 1500, id="no wait before a sleep"),
        pytest.param(stores_in_any_order, {}, 400, id="stores read in any order"),
        pytest.param(no_wait_before_comparing, {}, 1000, id="no wait before comparing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", drawn([50]))
def test_control_a_change_of_the_order_is_found(
    world: World,
    monkeypatch: Patch,
    change: Callable[[Patch], None],
    options: dict[str, Any],
    histories: int,
    seed: int,
) -> None:
    """A mark one step early is found because the model has no step of slack: the real scheduler side has one."""
    change(monkeypatch)
    random = Random(seed)
    assert any(Schedule(world, random.randrange(2**32), **options).run() for _ in range(histories))
