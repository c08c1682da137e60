"""Coordinators over a real directory and a test's clock of a file server: they come, sleep, die and follow each other.

Whatever they do and in whatever order, the directory stays within its capacity (I4), and no janitor deletes anything
once a later one does (T3).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.storage.shared_layout import object_path, temporary_file
from kvdepot.server.tiers.shared.coordinator.coordinator import Coordinator
from kvdepot.server.tiers.shared.coordinator.deletion import delete_object
from kvdepot.server.tiers.shared.coordinator.files import NANOSECONDS, replace_small, taken_bytes
from kvdepot.server.tiers.shared.coordinator.settings import Before, CoordinatorSettings
from kvdepot.server.tiers.shared.links import Report

from tests.fakes.shared_directory import MIB, NAMESPACE, key_of
from tests.rigs.seeds import drawn, steps_until

CAPACITY = 4 * MIB
OVERHEAD = 4 * PAGE_BYTES
NODES = 4
ACTIONS = {
    "heartbeat": 30,
    "work": 20,
    "begin": 20,
    "put": 20,
    "end": 20,
    "sleep": 0.3,
    "die": 0.4,
    "lose_coordinator": 0.4,
}
_COORDINATOR = "kvdepot.server.tiers.shared.coordinator"


@dataclass(eq=False)
class Write:
    node: str
    temporary: Path
    cost: int
    final: Path
    begun: bool = False


@dataclass(eq=False)
class Node:
    """A tier with its coordinator. `offset`: of its clock; a node that sleeps does not hear how time goes by."""

    coordinator: Coordinator
    owner: str
    offset: float
    report: Report | None = None
    over: int = 0
    writes: list[Write] = field(default_factory=list)


REFUSED_SHARE = 0.02
"""Of heartbeats: the file system had no room for what the node wrote."""


class World:
    def __init__(self, root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.random, self.now = root, Random(seed), 10_000.0
        root.mkdir()
        self.numbers = 0
        self.most = 0
        self.terms: list[int] = []
        self.acting: Node | None = None
        monkeypatch.setattr(f"{_COORDINATOR}.spare.replace_small", self.replace)
        monkeypatch.setattr(f"{_COORDINATOR}.janitor.delete_object", self.delete)
        self.nodes = [self.node(f"owner{at}") for at in range(NODES)]

    def stamp(self, path: Path) -> None:
        """As the file server does."""
        mtime_ns = int(self.now * NANOSECONDS)
        os.utime(path, ns=(mtime_ns, mtime_ns))

    def replace(self, root: Path, file: str, data: bytes, temporary: str) -> None:
        replace_small(root, file, data, temporary)
        self.stamp(root / file)

    def delete(self, root: Path, file: str, mtime_ns: int, may: Callable[[], bool]) -> int:
        assert self.acting is not None
        self.terms.append(self.acting.coordinator.janitor.lease.term)
        return delete_object(root, file, mtime_ns, may)

    def node(self, owner: str) -> Node:
        offset = self.random.uniform(-5_000, 5_000)
        return Node(self.coordinator(owner, offset, Before()), owner, offset)

    def coordinator(self, owner: str, offset: float, before: Before) -> Coordinator:
        clock: Callable[[], float] = lambda: self.now + offset  # noqa: E731
        settings = CoordinatorSettings(self.root, CAPACITY, on_root_filesystem=True, owner=owner)
        return Coordinator(settings, before, clock)

    def step(self) -> None:
        random = self.random
        self.now += random.choice((0.01, 0.1, 0.5))
        node = random.choice(self.nodes)
        action = random.choices([*ACTIONS], [*ACTIONS.values()])[0]
        match action:
            case "heartbeat":  # as the process does, a step of work comes after it
                self.heartbeat(node)
                self.acting = node
                node.coordinator.work()
            case "work":
                self.acting = node
                for _ in range(random.randrange(6)):
                    node.coordinator.work()
            case "begin":
                self.begin(node)
            case "put" if node.writes:
                self.put(random.choice(node.writes))
            case "end" if node.writes:
                self.end(node, random.choice(node.writes))
            case "sleep":  # all others go on meanwhile
                self.without(node, random.choice((6, 20, 400, 1_500)))
            case "die":  # with all that write for it
                self.nodes[self.nodes.index(node)] = self.node(node.owner)
            case "lose_coordinator":  # what its tier has begun goes on, and some begins yet
                directory_id = node.report.directory_id if node.report else ""
                node.coordinator = self.coordinator(node.owner, node.offset, Before(node.over, directory_id))
        if action in ("put", "end"):
            used = sum(taken_bytes(path.lstat()) for path in (self.root, *self.root.rglob("*")))
            self.most = max(self.most, used)
            assert used <= CAPACITY

    def heartbeat(self, node: Node) -> None:
        now = node.report.node if node.report else ""
        settled = now if all(write.node == now for write in node.writes) else ""
        node.coordinator.publish(node.over, 0, settled, refused=self.random.random() < REFUSED_SHARE)
        message = node.coordinator.heartbeat()
        assert isinstance(message, Report), message
        assert message.marker_ok
        node.report = message

    def begin(self, node: Node) -> None:
        cost = self.random.randint(2, 40) * PAGE_BYTES + OVERHEAD
        report = node.report
        if report and node.over + sum(write.cost for write in node.writes) + cost <= report.limit_bytes:
            self.numbers += 1
            path = self.root / object_path(NAMESPACE, key_of(self.numbers), Kind.ATTENTION)
            temporary = self.root / temporary_file(report.node, self.numbers)
            node.writes.append(Write(report.node, temporary, cost, path))

    def put(self, write: Write) -> None:
        write.temporary.write_bytes(bytes(write.cost - OVERHEAD))
        self.stamp(write.temporary)
        write.begun = True

    def end(self, node: Node, write: Write) -> None:
        node.writes.remove(write)
        if write.begun and write.temporary.exists():
            write.final.parent.mkdir(parents=True, exist_ok=True)
            write.temporary.rename(write.final)
            node.over += write.cost

    def without(self, sleeping: Node, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 1.5
            for node in self.nodes:
                if node is not sleeping:
                    self.heartbeat(node)
                    self.acting = node
                    node.coordinator.work()
        self.heartbeat(sleeping)  # before it writes: its daemon's clock has told it so


@pytest.mark.requirement("I4", "T3")
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn([1], [pytest.mark.long(seconds=15)])])
def test_coordinators_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    world = World(tmp_path / "shared", seed, monkeypatch)
    for node in world.nodes:
        world.heartbeat(node)

    def enough() -> bool:
        return world.most > CAPACITY // 2 and len(world.terms) > 20 and len(set(world.terms)) > 1

    for _ in steps_until(enough, 1_500):
        world.step()
    assert world.terms == sorted(world.terms)
