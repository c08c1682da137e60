"""The attachment listener and the engine's tables together: slots, pidfds, hidden pids, proxies, deaths in any order.

Rows I4 to I6: a slot's pidfd is that of the process that owns the slot, and nobody ends by another's death. Rows S2 and
S4: processes of several users, PID namespaces and tenants share no session, and no party has more than its share.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.fakes.process_kernel import FakeKernel, FakeProcess, Identity, Sight
from tests.stateful.attach_owners import IDENTITIES, Parties
from tests.stateful.attach_world import GRACE_SECONDS, AttachWorld

picks = st.integers(0, 1 << 16)
identities = st.sampled_from(IDENTITIES)
ENGINES = ("a", "b", "c")
ROLES = {"both": (True, 0), "scheduler": (True, -1), "rank": (False, 0)}


class AttachModel(RuleBasedStateMachine):
    """Several processes that may attach, leave, come back, and end; the daemon restarts under them."""

    names_peers = True
    numbers = True

    @initialize(tenants=st.booleans(), tight=st.booleans(), chosen=st.tuples(identities, identities, identities))
    def begin(self, tenants: bool, tight: bool, chosen: tuple[Identity, Identity, Identity]) -> None:
        kernel = FakeKernel(names_peers=self.names_peers, numbers=self.numbers)
        self.world = AttachWorld(kernel, Parties(tenants, tight))
        self.processes = [kernel.start(sight, identity) for sight, identity in zip(Sight, chosen, strict=True)]

    def _process(self, pick: int) -> FakeProcess:
        return self.processes[pick % len(self.processes)]

    @rule(sight=st.sampled_from(Sight), identity=identities)
    def start(self, sight: Sight, identity: Identity) -> None:
        if len(self.processes) < 6:
            self.processes.append(self.world.kernel.start(sight, identity))

    @rule(pick=picks, engine=st.sampled_from(ENGINES), role=st.sampled_from(sorted(ROLES)), stream=st.integers(0, 3))
    def attach(self, pick: int, engine: str, role: str, stream: int) -> None:
        scheduler, rank = ROLES[role]
        self.world.attach(
            self._process(pick), engine, scheduler=scheduler, rank=rank,
            stream=stream > 1 and not scheduler, calls=stream == 1,
        )  # fmt: skip

    @precondition(lambda self: any(link.scheduler for link in self.world.links))
    @rule(pick=picks, stores=st.booleans())
    def lend(self, pick: int, stores: bool) -> None:
        """Only schedulers ask for extents, and say at an attachment which they still hold."""
        links = [link for link in self.world.links if link.scheduler]
        link = links[pick % len(links)]
        if stores:
            self.world.store(link)
        else:
            self.world.reserve(link)

    @precondition(lambda self: self.world.links and self.world.held)
    @rule(pick=picks, which=picks)
    def acknowledge(self, pick: int, which: int) -> None:
        held = self.world.held[which % len(self.world.held)]
        self.world.acknowledge(held, self.world.links[pick % len(self.world.links)])

    @precondition(lambda self: self.world.links)
    @rule(pick=picks)
    def disconnect(self, pick: int) -> None:
        self.world.disconnect(self.world.links[pick % len(self.world.links)])

    @rule(pick=picks, first_the_sockets=st.booleans(), forked=st.booleans(), identity=identities)
    def die(self, pick: int, first_the_sockets: bool, forked: bool, identity: Identity) -> None:
        """Whoever starts next has its pid, if that is the lowest, and may be another user."""
        if self.processes:
            process = self.processes.pop(pick % len(self.processes))
            self.world.die(process, first_the_sockets=first_the_sockets, forked=forked)
            self.processes.append(self.world.kernel.start(process.sight, identity))

    @rule(hang=st.booleans())
    def proxies_hang(self, hang: bool) -> None:
        self.world.proxies_hang = hang

    @precondition(lambda self: self.world.proxies)
    @rule(pick=picks)
    def kill_proxy(self, pick: int) -> None:
        proxies = list(self.world.proxies.values())
        self.world.kill_proxy(proxies[pick % len(proxies)])

    @rule()
    def start_worker(self) -> None:
        if len(self.world.workers) < 3:
            self.world.start_worker()

    @precondition(lambda self: self.world.workers)
    @rule(pick=picks, ends=st.booleans())
    def work(self, pick: int, ends: bool) -> None:
        worker = self.world.workers[pick % len(self.world.workers)]
        if ends:
            self.world.end_worker(worker)
        else:
            self.world.work(worker)

    @rule(seconds=st.sampled_from([1.0, GRACE_SECONDS / 2, GRACE_SECONDS + 1, 3 * GRACE_SECONDS]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(workers_live=st.booleans(), few=st.integers(0, 2), dying=st.sets(picks, max_size=2))
    def restart(self, workers_live: bool, few: int, dying: set[int]) -> None:
        if few:  # else few sessions come to their end
            return
        chosen = list(dict.fromkeys(self._process(pick) for pick in sorted(dying)))
        self.world.restart(workers_live=workers_live, dying=chosen)
        for process in chosen:
            self.processes.remove(process)
            self.processes.append(self.world.kernel.start(process.sight, process.identity))

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        try:
            self.world.finish(self.processes)
        finally:
            self.world.close()


class OldKernelModel(AttachModel):
    """Linux before 6.5: a peer is named by its pid, if that is visible."""

    names_peers = False
    numbers = False


class UnnumberedModel(AttachModel):
    """Linux before 6.9: a process without a visible pid is not recognised."""

    numbers = False


QUICK = settings(max_examples=20, stateful_step_count=30, suppress_health_check=list(HealthCheck))
for model in (AttachModel, OldKernelModel, UnnumberedModel):
    model.TestCase.settings = QUICK
TestAttachModel = AttachModel.TestCase
TestOldKernelModel = OldKernelModel.TestCase
TestUnnumberedModel = UnnumberedModel.TestCase


@pytest.mark.requirement("I6")
@pytest.mark.long(seconds=400)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", [AttachModel, OldKernelModel, UnnumberedModel])
def test_long_histories_of_processes(model: type[AttachModel]) -> None:
    run_state_machine_as_test(model, settings=settings(QUICK, max_examples=400, stateful_step_count=60))
