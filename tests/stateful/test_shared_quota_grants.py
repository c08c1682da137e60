"""Row I4 for a shared directory: whatever nodes and janitors do, and when, it never holds more than its capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.tiers.shared.coordinator.ledger import Count, Ledger
from kvdepot.server.tiers.shared.coordinator.records import JanitorRecord, Lease, NodeRecord

from tests.rigs.seeds import drawn

CAPACITY = 256 * PAGE_BYTES
FOLDERS = 3
picks = st.integers(0, 1 << 16)
pages = st.integers(1, 60)


@dataclass
class Write:
    cost: int
    place: tuple[int, int] | None = None  # folder, size: its file is there
    over: bool = False


@dataclass(eq=False)
class Node:
    """`file`: what others can read of it. `published` runs ahead of that.

    A daemon with a new coordinator goes on as another node: this one begins no more, what it has begun goes on.
    """

    name: str
    limit: int = 0
    published: int = 0
    writes: list[Write] = field(default_factory=list)
    file: NodeRecord | None = None
    alive: bool = True
    succeeded: bool = False

    @property
    def begins(self) -> bool:
        return self.alive and not self.succeeded

    @property
    def in_progress(self) -> int:
        return sum(write.cost for write in self.writes if not write.over)


class Generous(Ledger):
    """Wishes decide how well room is used, and must not matter to what is safe."""

    def _wish(self, node: str, published: Mapping[str, int], living: int) -> int:
        return self.capacity_bytes


def generous(record: JanitorRecord | None) -> Ledger:
    ledger = Generous(CAPACITY)
    if record is not None:
        taken = record.ledger(CAPACITY)
        ledger.used_bytes, ledger.shares = taken.used_bytes, taken.shares
    return ledger


class QuotaGrants(RuleBasedStateMachine):
    """Files lie in folders; a scan looks at one folder after the other while nodes go on writing."""

    @initialize(used=st.integers(0, 250))
    def begin(self, used: int) -> None:
        self.folders: list[list[int]] = [[] for _ in range(FOLDERS)]
        self.folders[0].append(used * PAGE_BYTES)
        self.nodes: list[Node] = []
        self.buried: set[str] = set()
        self.term = 0
        self.record = JanitorRecord(Lease("", 0), None, 0, 0, 0, {})
        self.change_janitor(keep=True)

    # Nodes.

    @precondition(lambda self: sum(node.begins for node in self.nodes) < 6)
    @rule()
    def come(self) -> None:
        self.nodes.append(Node(f"n{len(self.nodes)}"))

    def living(self, pick: int) -> Node | None:
        nodes = [node for node in self.nodes if node.begins]
        return nodes[pick % len(nodes)] if nodes else None

    @rule(pick=picks)
    def heartbeat(self, pick: int) -> None:
        node = self.living(pick)
        if node is not None:
            limit = max(node.limit, self.record.limit_of(node.name))
            node.file = NodeRecord(node.published, limit, self.record.lease)
            node.limit = limit

    @rule()
    def a_round(self) -> None:
        """What happens most: everybody tells, the janitor hands out, everybody hears."""
        for again in (False, True):
            for pick in range(sum(node.begins for node in self.nodes)):
                self.heartbeat(pick)
            if not again:
                self.look()
                self.hand_out()

    @rule(pick=picks, change=st.booleans())
    def heartbeat_beside_a_new_janitor(self, pick: int, change: bool) -> None:
        """It reads the lease, another janitor comes, its file is written: it does not act under what it read."""
        node = self.living(pick)
        if node is not None:
            limit, lease = max(node.limit, self.record.limit_of(node.name)), self.record.lease
            if change:
                self.change_janitor(keep=False)
            node.file = NodeRecord(node.published, limit, lease)
            if self.record.lease == lease:
                node.limit = limit

    @rule(pick=picks, size=pages)
    def write(self, pick: int, size: int) -> None:
        node, cost = self.living(pick), size * PAGE_BYTES
        if node is not None and node.published + node.in_progress + cost <= node.limit:
            node.writes.append(Write(cost))

    @rule(pick=picks)
    def write_as_much_as_it_may(self, pick: int) -> None:
        node = self.living(pick)
        if node is not None and (room := node.limit - node.published - node.in_progress) > 0:
            write = Write(room)
            node.writes.append(write)
            self.put(write, 0, less=0)
            node.published += room
            write.over = True

    def writing(self, pick: int, *, placed: bool) -> tuple[Node, Write] | None:
        found = [
            (node, write)
            for node in self.nodes
            for write in node.writes
            if node.alive and not write.over and (write.place is not None) == placed
        ]
        return found[pick % len(found)] if found else None

    def put(self, write: Write, folder: int, less: int) -> None:
        size = write.cost - min(less * PAGE_BYTES, write.cost)
        write.place = folder, size
        self.folders[folder].append(size)

    @rule(pick=picks, folder=st.integers(0, FOLDERS - 1), less=st.integers(0, 20))
    def place(self, pick: int, folder: int, less: int) -> None:
        """Its file is there, and maybe smaller than it might have been. Nobody has heard of it."""
        if found := self.writing(pick, placed=False):
            self.put(found[1], folder, less)

    @rule(pick=picks)
    def end(self, pick: int) -> None:
        if found := self.writing(pick, placed=True):
            node, write = found
            assert write.place is not None
            node.published += write.place[1]
            write.over = True

    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        if found := self.writing(pick, placed=False):
            found[1].over = True

    @rule(pick=picks)
    def die(self, pick: int) -> None:
        """What it was writing is there, or is not."""
        node = self.living(pick)
        if node is not None:
            node.alive = False

    @rule(pick=picks)
    def lose_coordinator(self, pick: int) -> None:
        node = self.living(pick)
        if node is not None:
            node.succeeded = True
            self.come()

    # Janitors.

    @rule(keep=st.booleans())
    def change_janitor(self, keep: bool) -> None:
        """Another one reads the lease file, or finds none that it can use; then the nodes' files."""
        self.term += 1
        self.ledger = generous(self.record if keep else None)
        self.scan: tuple[Count, int, int] | None = None  # begun with, folders looked at, bytes met
        self.save()
        self.look()

    @rule()
    def look(self) -> None:
        """Read the nodes' files; what they say later is heard at the next look."""
        self.seen: dict[Node, NodeRecord] = {}
        for node in self.nodes:
            if node.file is not None and node.name not in self.buried:
                self.seen[node] = node.file
                self.ledger.meet(node.name, node.file.limit_bytes)

    def save(self) -> None:
        record = JanitorRecord(Lease(f"j{self.term}", self.term), self.ledger.used_bytes, 0, 0, 0, self.ledger.shares)
        read = JanitorRecord.unpack(record.pack())
        assert read is not None
        self.record = read

    def published(self, *, living: bool) -> dict[str, int]:
        return {
            node.name: record.published_bytes
            for node, record in self.seen.items()
            if node.name not in self.buried and (node.alive or not living)
        }

    @rule()
    def hand_out(self) -> None:
        self.ledger.hand_out(self.published(living=True))
        self.save()

    @precondition(lambda self: self.scan is None)
    @rule()
    def begin_scan(self) -> None:
        self.scan = self.ledger.begin_count(self.published(living=False)), 0, 0

    @precondition(lambda self: self.scan is not None)
    @rule()
    def look_at_a_folder(self) -> None:
        assert self.scan is not None
        count, looked, met = self.scan
        if looked < FOLDERS:
            self.scan = count, looked + 1, met + sum(self.folders[looked])
        else:
            self.ledger.end_count(count, met)
            self.scan = None

    @rule()
    def whole_scan(self) -> None:
        self.scan = None
        self.begin_scan()
        for _ in range(FOLDERS + 1):
            self.look_at_a_folder()

    @precondition(lambda self: self.scan is None)
    @rule(pick=picks)
    def evict(self, pick: int) -> None:
        files = [(folder, at) for folder in self.folders for at in range(len(folder))]
        if files:
            folder, at = files[pick % len(files)]
            self.ledger.deleted(folder.pop(at))

    @rule()
    def bury(self) -> None:
        """Long dead, or its successor knows: its writes are over, its temporaries and its file are gone."""
        for node in self.nodes:
            settled = node.succeeded and all(write.over for write in node.writes)
            if (settled or not node.alive) and node.name not in self.buried:
                for write in node.writes:
                    write.over = True
                self.buried.add(node.name)
                self.ledger.leave(node.name)

    @invariant()
    def never_above_capacity(self) -> None:
        assert sum(map(sum, self.folders)) <= CAPACITY

    @invariant()
    def whatever_is_still_written(self) -> None:
        """Every node may write all it is allowed, at this moment and at once."""
        may = sum(node.limit - node.published for node in self.nodes if node.begins)
        ends = sum(w.cost for node in self.nodes if not node.begins for w in node.writes if not w.over and not w.place)
        begun = sum(w.place[1] for node in self.nodes if node.begins for w in node.writes if w.place and not w.over)
        assert sum(map(sum, self.folders)) + may + ends - begun <= CAPACITY


TestQuotaGrants = QuotaGrants.TestCase
TestQuotaGrants.settings = settings(max_examples=200, stateful_step_count=50)


def test_what_a_node_had_is_free_after_a_count_that_began_when_it_had_left() -> None:
    ledger = Ledger(CAPACITY, 0)
    ledger.meet("gone", 10 * PAGE_BYTES)
    count = ledger.begin_count({"gone": 0})
    ledger.leave("gone")  # having written where the count has been already
    ledger.end_count(count, 0)
    assert ledger.committed_bytes == 10 * PAGE_BYTES
    ledger.end_count(ledger.begin_count({}), 3 * PAGE_BYTES)
    assert ledger.committed_bytes == 3 * PAGE_BYTES


ACTIONS = (
    *("heartbeat", "place", "end", "hand_out", "look_at_a_folder") * 3, *("come", "write") * 4, *("evict", "bury") * 2,
    *("lose_coordinator", "write", "a_round") * 4, *("begin_scan", "look_at_a_folder", "write") * 2,
    "look", "fail", "die", "begin_scan", "change_janitor", "heartbeat_beside_a_new_janitor", "a_round",
)  # fmt: skip


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("seed", [*drawn(range(3)), *drawn(range(3, 8), [pytest.mark.long(seconds=1)])])
def test_long_histories_of_a_full_directory(seed: int) -> None:
    """Where a machine that shrinks examples seldom comes: everything granted, and used."""
    random = Random(seed)
    world = QuotaGrants()
    world.begin(random.randrange(200))
    for _ in range(4_000):
        pick, action = random.randrange(1 << 16), random.choice(ACTIONS)
        match action:
            case "write":
                world.write(pick, random.randint(1, 30))
            case "place":
                world.place(pick, random.randrange(FOLDERS), random.randrange(4))
            case "heartbeat" | "end" | "fail" | "evict" | "lose_coordinator":
                getattr(world, action)(pick)
            case "die" if random.random() < 0.4:
                world.die(pick)
            case "come" if sum(node.begins for node in world.nodes) < 6:
                world.come()
            case "begin_scan" | "evict" if world.scan is None:
                getattr(world, action)()
            case "look_at_a_folder" if world.scan is not None:
                world.look_at_a_folder()
            case "heartbeat_beside_a_new_janitor" if random.random() < 0.2:
                world.heartbeat_beside_a_new_janitor(pick, True)
            case "change_janitor" if random.random() < 0.2:
                world.change_janitor(random.random() < 0.7)
            case "hand_out" | "bury" | "a_round" | "look":
                getattr(world, action)()
        world.never_above_capacity()
        world.whatever_is_still_written()
