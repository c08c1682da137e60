"""Coordinators on a file server whose requests take time, and that pauses: half a dozen processes, interleaved anyhow.

The directory stays within its capacity (I4), nobody deletes while a later janitor does (T3), and while the server
answers a count ends, and nodes are granted what they want.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.storage.shared_layout import object_path, temporary_file
from kvdepot.server.tiers.shared.coordinator.coordinator import Coordinator
from kvdepot.server.tiers.shared.coordinator.deletion import delete_object
from kvdepot.server.tiers.shared.coordinator.files import taken_bytes
from kvdepot.server.tiers.shared.coordinator.janitor import Janitor
from kvdepot.server.tiers.shared.coordinator.main import Turns
from kvdepot.server.tiers.shared.coordinator.pace import LEASE_SECONDS_MAX
from kvdepot.server.tiers.shared.coordinator.settings import Before, CoordinatorSettings
from kvdepot.server.tiers.shared.links import Failed, Report

from tests.fakes.shared_directory import MIB, NAMESPACE, key_of
from tests.fakes.slow_server import SlowServer
from tests.rigs.seeds import drawn

OVERHEAD = 4 * PAGE_BYTES
_JANITOR = "kvdepot.server.tiers.shared.coordinator.janitor"


class Node:
    """A coordinator process, and a tier that writes within what it may. `offset`: of its clock."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.offset = world.random.uniform(-5_000, 5_000)
        settings = CoordinatorSettings(world.root, world.capacity, on_root_filesystem=True, owner=f"owner{number}")
        self.settings = settings
        self.coordinator = Coordinator(settings, Before(), self.clock)
        self.report: Report | None = None
        self.heard_at = 0.0
        self.failed = ""
        self.over = self.wanted = self.written = 0
        self.writes: list[str] = []  # the nodes under which they began
        self.process = world.server.client(self.keep)
        self.tier = world.server.client(self.write)

    def clock(self) -> float:
        return self.world.server.now - self.world.server.began + 10_000 + self.offset

    def keep(self) -> None:
        turns = Turns(self.coordinator, self.settings.heartbeat_seconds, self.clock)
        while True:
            now = self.report.node if self.report else ""
            self.coordinator.publish(self.over, self.wanted, now if all(node == now for node in self.writes) else "")
            self.world.server.sleep(turns.turn(self.hear))

    def hear(self, message: Report | Failed) -> None:
        if isinstance(message, Failed):
            self.failed = message.reason
            return
        self.report, self.heard_at = message, self.world.server.now

    def write(self) -> None:
        random, server = Random(self.number), self.world.server
        while True:
            server.sleep(random.uniform(0.2, 2.0) + 4 * self.world.latency)
            cost = random.randint(2, 20) * PAGE_BYTES + OVERHEAD
            heard = server.now - self.heard_at <= self.settings.unheard_seconds
            if self.report is None or not heard or self.over + cost > self.report.limit_bytes:
                self.wanted = cost
                continue
            self.wanted = 0
            self.publish_object(self.report.node, cost)

    def publish_object(self, node: str, cost: int) -> None:
        self.written += 1
        self.writes.append(node)
        temporary = self.world.root / temporary_file(node, self.written)
        final = self.world.root / object_path(NAMESPACE, key_of(self.written, str(self.number)), Kind.ATTENTION)
        final.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT)
        os.write(fd, bytes(cost - OVERHEAD))
        os.close(fd)
        temporary.rename(final)
        self.writes.remove(node)
        self.over += cost
        if self.written % (1 + self.world.files // 100) == 0:
            self.world.check_capacity()


class World:
    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, latency: float, files: int, nodes: int = 1,
        pause_every: float = 1e9, pause_seconds: float = 0.0, capacity: int = 1 << 30,
    ) -> None:  # fmt: skip
        self.root, self.random, self.latency, self.capacity = root, Random(seed), latency, capacity
        self.terms: list[int] = []
        self.most = 0
        self.files = files
        root.mkdir()
        Coordinator(CoordinatorSettings(root, capacity, on_root_filesystem=True), Before(), lambda: 0.0).heartbeat()
        self._unregister()
        for number in range(files):
            path = root / object_path(NAMESPACE, key_of(number), Kind.ATTENTION)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(PAGE_BYTES))
        monkeypatch.setattr(f"{_JANITOR}.delete_object", self.delete)
        self.server = SlowServer(
            monkeypatch, seed, latency=latency, pause_every=pause_every, pause_seconds=pause_seconds
        )
        self.nodes = [Node(self, number) for number in range(nodes)]

    def _unregister(self) -> None:
        """Of the node that has made the directory, nothing is left but that."""
        for path in (self.root / ".janitor.json", *(self.root / ".nodes").iterdir()):
            path.unlink()

    def delete(self, root: Path, file: str, mtime_ns: int, may: object) -> int:
        def still() -> bool:
            assert callable(may)
            if may():
                self.deletes()
            return bool(may())

        return delete_object(root, file, mtime_ns, still)

    def deletes(self) -> None:
        janitors = [node.coordinator.janitor for node in self.nodes]
        acting = [one for one in janitors if one.holding and one._vouched and not one._late()]
        assert len(acting) == 1, f"{len(acting)} janitors at once"
        self.terms.append(acting[0].lease.term)

    def check_capacity(self) -> None:
        with self.server.unseen():
            used = sum(self._taken(path) for path in (self.root, *self.root.rglob("*")))
        self.most = max(self.most, used)
        assert used <= self.capacity, f"{used} bytes of {self.capacity}"

    @staticmethod
    def _taken(path: Path) -> int:
        try:
            return taken_bytes(path.lstat())
        except FileNotFoundError:
            return 0

    @property
    def counted(self) -> bool:
        return any(node.report is not None and node.report.objects for node in self.nodes)

    def all_write(self) -> bool:
        return all(node.written for node in self.nodes)


@contextmanager
def world_of(*arguments: object, **options: object) -> Iterator[World]:
    world = World(*arguments, **options)  # type: ignore[arg-type]
    try:
        yield world
    finally:
        world.server.close()


@pytest.mark.timeout(30)
def test_a_client_that_sleeps_for_less_than_the_clock_shows_wakes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of nodes are finer than that of the server: what is left until a heartbeat may be less than it can add."""
    server, woke = SlowServer(monkeypatch, 1, latency=1.0), list[float]()
    began = server.now

    def wait() -> None:
        while server.now == began:
            server.sleep(1e-9)
        woke.append(server.now - began)

    server.client(wait)
    server.run(1.0)
    server.close()
    assert 0 < woke[0] < 1e-6


def count_needs(files: int, latency: float) -> float:
    """What a count takes without anything else: a request for each file, and three for each folder."""
    return (files + 3 * min(files, 256)) * latency


ROWS = [
    *((0.001, 500), (0.02, 200), (0.05, 300), (1.0, 100)),
    *(
        pytest.param(*row, marks=pytest.mark.long(seconds=3))
        for row in ((0.001, 2_000), (0.002, 20_000), (0.02, 2_000), (0.01, 5_000), (0.05, 2_000), (0.05, 20_000))
    ),
]


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(("latency", "files"), ROWS)
def test_the_first_count_takes_about_twice_what_it_needs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency: float, files: int
) -> None:
    """And as long as a node takes to become janitor: some heartbeats of 14 requests."""
    needs = count_needs(files, latency)
    with world_of(tmp_path / "shared", monkeypatch, 1, latency=latency, files=files) as world:
        took = world.server.run_until(lambda: world.counted, 2.2 * needs + 15 + 400 * latency, "a count ends")
        print(f"{latency * 1000:.0f} ms, {files} files: {took:.0f} s, alone {needs:.0f} s")
        world.server.run_until(world.all_write, 30 + 100 * latency, "room is granted")


@pytest.mark.parametrize(("latency", "files", "nodes"), [(2.0, 100, 1), (2.0, 100, 4), (0.5, 300, 8), (0.02, 300, 3)])
def test_the_first_count_has_half_of_the_time_however_many_nodes_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency: float, files: int, nodes: int
) -> None:
    """Without the way to the lease, which grows with neither."""
    began, ended, count = list[float](), list[float](), Janitor._count
    with world_of(tmp_path / "shared", monkeypatch, 1, latency=latency, files=files, nodes=nodes) as world:

        def counted(janitor: Janitor) -> Iterator[bool]:
            began.append(world.server.now)
            yield from count(janitor)
            ended.append(world.server.now)

        monkeypatch.setattr(Janitor, "_count", counted)
        needs = count_needs(files, latency)
        world.server.run_until(lambda: ended, 4 * needs + 15 + 400 * latency, "a count ends")
        assert ended[0] - began[0] <= 2 * needs
        world.server.run_until(world.all_write, 30 + 100 * nodes * latency, "room is granted")


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(("latency", "every", "pause"), [(0.02, 20, 30), (0.2, 100, 60), (0.005, 10, 7)])
def test_a_count_goes_on_after_every_pause_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency: float, every: float, pause: float
) -> None:
    """One count, whichever janitor's lease grew old meanwhile: a janitor alone is late, not another's loser."""
    begun, count = [], Janitor._count

    def counted(janitor: Janitor) -> Iterator[bool]:
        begun.append(janitor)
        yield from count(janitor)

    monkeypatch.setattr(Janitor, "_count", counted)
    needs = count_needs(400, latency) * (1 + pause / every)
    with world_of(
        tmp_path / "shared", monkeypatch, 2, latency=latency, files=400, pause_every=every, pause_seconds=pause
    ) as world:  # fmt: skip
        world.server.run_until(lambda: world.counted, 2.5 * needs + 30 + 400 * latency + 2 * pause, "a count ends")
        assert len(begun) == 1


def play(root: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, files: int, rounds: int) -> World:
    """Coordinators that are stopped and go on, beside tiers that write, on a server drawn by `seed`."""
    random = Random(seed)
    latency = random.choice((0.001, 0.01, 0.05, 0.2, 1.0))
    every, pause = random.choice(((1e9, 0.0), (30, 5), (100, 60), (400, 150)))
    with world_of(
        root, monkeypatch, seed, latency=latency, files=files, nodes=random.randint(2, 4), pause_every=every,
        pause_seconds=pause, capacity=4 * MIB + files * 3 * PAGE_BYTES // 2,
    ) as world:  # fmt: skip
        for _ in range(rounds):
            world.server.run(30 + 600 * latency)
            if random.random() < 0.3:
                victim = random.choice(world.nodes)
                world.server.stop(victim.process, random.choice((1, 8, 30, 100, 400)))
        world.server.pause_no_more()
        for node in world.nodes:
            node.written = 0
        patience = 400 + 2 * LEASE_SECONDS_MAX + 6 * count_needs(files, latency) + 2_000 * latency
        world.server.run_until(world.all_write, patience, "every node is granted room and writes")
        world.check_capacity()
    assert world.terms == sorted(world.terms)
    return world


@pytest.mark.requirement("I4", "T3")
@pytest.mark.parametrize("seed", [0, 2])
def test_coordinators_on_a_slow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of these seeds, files are deleted on each. The long test draws its own."""
    world = play(tmp_path / "shared", monkeypatch, seed, files=100, rounds=8)
    assert world.most > world.capacity // 2
    assert len(world.terms) > 20


@pytest.mark.requirement("I4", "T3")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(300, marks=pytest.mark.long(seconds=10)),
        pytest.param(20_000, marks=pytest.mark.long(seconds=25)),
    ],
)
@pytest.mark.parametrize("seed", drawn(range(10, 16)))
def test_coordinators_on_a_slow_server_with_any_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, files: int
) -> None:
    play(tmp_path / "shared", monkeypatch, seed, files=files, rounds=30)
