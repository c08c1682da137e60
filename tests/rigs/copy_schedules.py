"""Random histories of one rank: its copying thread, under a model of vLLM's order of calls, checked for order.

What is real: `WorkerSide`, `CopyThread`, `RevocableCopier`, `DeviceCopier`, `Pins`, `ObjectPlaces`, `ArenaMap`. What is
a model: the scheduler, which allocates, frees and pins blocks, and the daemon, which lends extents. Both use memory as
early as they may. So a block is zeroed, copied or written in the very step that loads into it or stores it, although
the real scheduler side sends a store one step later.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy import device as device_module
from kvdepot.client.copy import indexed, pinning, revocable
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import CopyBatch, Direction
from kvdepot.client.copy.runs import address_of
from kvdepot.client.vllm.base.guard import Failures
from kvdepot.client.vllm.base.metadata import Geometry, RankMeta, StepMeta
from kvdepot.client.vllm.base.operations import BlockMove, LayerFacts, LoadOp, ObjectCopy, SpanCopy, StoreOp
from kvdepot.client.vllm.worker import copy_thread
from kvdepot.client.vllm.worker.copy_thread import CopyThread
from kvdepot.client.vllm.worker.layers import RankLayers
from kvdepot.client.vllm.worker.worker import WorkerSide
from kvdepot.core.calls import Kind
from kvdepot.core.groups import GroupSpec

from tests.fakes.call_orders import DRAFT_FORWARD, FORWARD, ORDERS
from tests.fakes.race_rank import RaceCopier, RaceRank, RaceTimeline
from tests.rigs.interleaving import Interleaving
from tests.rigs.memory_arena import granted, make_arena
from tests.rigs.races import Cell, Queues, Races

ACTORS: Final = ("the engine", "the copying thread", "the daemon", "the engine's queue", "stores", "loads")
ENGINE, COPIES, DAEMON, FORWARDS, STORES, LOADS = range(len(ACTORS))
BLOCKS: Final = 14
LAYERS: Final = 2
BLOCK_BYTES: Final = 32  # of one layer
CHUNK_BLOCKS: Final = 2
OBJECT_BYTES: Final = CHUNK_BLOCKS * LAYERS * BLOCK_BYTES
BATCH_BYTES: Final = 96
PIECE_BYTES: Final = 1 << 20
ARENA_BYTES: Final = 8 << 20
SLOTS: Final = 8
PROVED_SHARE: Final = 0.02
"""A self-test takes as long as ten histories."""
NEVER: Final = 1e9
GEOMETRY: Final = Geometry(
    CHUNK_BLOCKS * 16, (GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(LAYERS * BLOCK_BYTES,), layers=("a", "b")),)
)
Fragments = tuple[tuple[int, int], ...]
"""(offset, length) in the arena."""


class World:
    """What all histories of a test share: memory, and the product's modules with small sizes and known threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = [torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]
        facts = [LayerFacts(name, 0, "uint8", (BLOCK_BYTES,), (0,), BLOCK_BYTES, "") for name in ("a", "b")]
        self.rank_layers = RankLayers(tuple(self.layers), tuple(facts))
        made = [make_arena(ARENA_BYTES, arena_id) for arena_id in (7, 8)]
        self.arenas = [arena for arena, _ in made]
        self._descriptors = [descriptor for _, descriptor in made]
        for arena in self.arenas:
            arena.populated(arena.size_bytes)
        self.places = [slot_places(slot) for slot in range(SLOTS)]
        for module in (device_module, indexed, pinning):
            monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)
        monkeypatch.setattr(device_module, "BATCH_RUN_BYTES", 2 * BLOCK_BYTES)
        monkeypatch.setattr(device_module, "BATCH_BYTES", 4 * OBJECT_BYTES)
        monkeypatch.setattr(CopyBatch, "split", functools.partialmethod(CopyBatch.split, BATCH_BYTES))
        self._monkeypatch = monkeypatch

    def close(self) -> None:
        """Give the arenas back."""
        for arena, descriptor in zip(self.arenas, self._descriptors, strict=True):
            arena.close()
            os.close(descriptor)

    def use(self, interleaving: Interleaving, queues: Queues) -> None:
        """The next threads of the product are these, and so are its messages."""
        for module in (copy_thread, revocable):
            self._monkeypatch.setattr(module, "threading", interleaving.threading)
        self._monkeypatch.setattr(copy_thread, "deque", queues)


def slot_places(slot: int) -> Fragments:
    """Where an object lies: across the end of a pinned piece, in fragments that split a block, or neither."""
    border = (1 + slot // 3) * PIECE_BYTES
    if slot % 3 == 0:
        return ((border - OBJECT_BYTES // 2, OBJECT_BYTES),)
    if slot % 3 == 1:
        return ((border + 4096, 48), (border + 8192, OBJECT_BYTES - 48))
    return ((border + 16384, OBJECT_BYTES),)


@dataclass(eq=False)
class Request:
    """`full` blocks of the table are complete."""

    table: list[int]
    full: int = 0
    loading: int = 0  # the operation
    rewrite: bool = False  # its load failed: the next forward computes all
    aborted: bool = False
    stored: set[int] = field(default_factory=set)  # chunks
    writes: list[int] = field(default_factory=list)  # blocks, in the last step


@dataclass
class Step:
    """What a step does on the device, and its message."""

    zero: list[int] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    computing: list[Request] = field(default_factory=list)
    meta: StepMeta = field(default_factory=StepMeta)


class Depot:
    """The daemon's side of extents: lends them, and uses them when it may."""

    def __init__(self, schedule: Schedule) -> None:
        self._races = schedule.races
        self._arenas = schedule.world.arenas
        self._places = schedule.world.places
        self.at = 0  # the present arena
        self.free = list(range(SLOTS))
        self.objects: list[int] = []
        self.leases: Counter[int] = Counter()
        self._generations = [granted(arena) for arena in self._arenas]
        for column in self._generations:
            for slot in range(SLOTS):
                column[slot] = 2
        bases = [address_of(arena.buffer) for arena in self._arenas]
        self._cells = [
            [schedule.device.cells((base + offset, length) for offset, length in places) for places in self._places]
            for base in bases
        ]

    @property
    def arena(self) -> ArenaMap:
        return self._arenas[self.at]

    def lend(self, slot: int, index: int, *, writing: bool) -> bytes:
        """Return the packed extent of a slot for an operation's object `index`."""
        self._races.order(ENGINE, self._races.now(DAEMON))
        if writing:
            self._generations[self.at][slot] += 1
        generation = int(self._generations[self.at][slot])
        words = [word for offset, length in self._places[slot] for word in (index, slot, offset, length, generation)]
        return np.array(words, dtype="<u8").tobytes()

    def hear(self) -> None:
        """The engine has told the daemon all that it knows."""
        self._races.order(DAEMON, self._races.now(ENGINE))

    def committed(self, slot: int) -> None:
        """An object is stored: the daemon reads it, to check it and to demote it."""
        self.hear()
        self._races.act(DAEMON, "the daemon reading", self._cells[self.at][slot])
        self.objects.append(slot)

    def released(self, slot: int) -> None:
        """A load is over."""
        self.hear()
        self.leases[slot] -= 1

    def works(self, random: Random) -> None:
        """Evict what nobody uses, or read something from a tier."""
        idle = [slot for slot in self.objects if not self.leases[slot]]
        if idle and random.random() < 0.5:
            slot = random.choice(idle)
            self.objects.remove(slot)
            self.free.append(slot)
        elif self.free:
            slot = self.free.pop(random.randrange(len(self.free)))
            self._races.act(DAEMON, "the daemon writing", (), self._cells[self.at][slot])
            self.objects.append(slot)

    def takes_all(self) -> None:
        """The rank is over: nobody else writes."""
        self.hear()
        self._races.act(DAEMON, "the daemon", (), [cell for cells in self._cells[self.at] for cell in cells])

    def is_another(self) -> None:
        """It has started again, with another arena."""
        self.at = 1
        self.free, self.leases = list(range(SLOTS)), Counter()
        self.objects = []


class Schedule:
    """One history. `met` counts what happened in it."""

    def __init__(
        self,
        world: World,
        seed: int,
        *,
        early: int = 0,
        order: tuple[str, ...] | None = None,
    ) -> None:
        """`early`: marks lie so many steps before their place. `order`: of calls in a step, instead of a real one."""
        self.world = world
        self.random = random = Random(seed)
        self.met: Counter[str] = Counter()
        self.races = Races(ACTORS)
        self.interleaving = Interleaving(random, random.choice((0.1, 0.3, 0.6)))
        self._actors = {self.interleaving.current: ENGINE}
        self.interleaving.sent = lambda: self.races.now(self.host())
        self.interleaving.received = lambda clock: self.races.order(self.host(), clock)
        world.use(self.interleaving, Queues(self.races, self.host))
        self.timeline = RaceTimeline(seed, early, races=self.races, engine=ENGINE, queue=FORWARDS)
        queues = {Direction.STORE: STORES, Direction.LOAD: LOADS}
        self._faults = random.choice((0.0, 0.0, 0.1))
        self.device = RaceRank(self.timeline, queues, self.host, self.interleaving.point, self._refuse)
        self.depot = Depot(self)
        self.now = 0.0
        self._calls = order or random.choice(list(ORDERS.values()))
        self._ahead = random.randrange(2)
        bases = [layer.data_ptr() for layer in world.layers]
        self._cells = [
            self.device.cells((base + block * BLOCK_BYTES, BLOCK_BYTES) for base in bases) for block in range(BLOCKS)
        ]
        self._make_rank()
        self._free = deque(range(1, BLOCKS))
        self._references: Counter[int] = Counter()
        self._requests: list[Request] = []
        self._unread: deque[tuple[Step, int, RankMeta | None]] = deque()
        self._loads: dict[int, tuple[Request, list[int], list[int], int]] = {}  # request, slots, blocks moved, arena
        self._stores: dict[int, tuple[list[int], list[int], int]] = {}  # slots, blocks, arena
        self._ops = 0

    def host(self) -> int:
        return self._actors.get(self.interleaving.current, COPIES)

    def _refuse(self, what: str) -> None:
        """A driver refuses, or has no memory."""
        if self.random.random() < self._faults:
            self.met[f"{what} refused"] += 1
            raise RuntimeError(what)

    def _make_rank(self) -> None:
        random = self.random
        way = random.choice((None, None, None, Way.BATCH, Way.GATHER, Way.TORCH))
        self.device.pins_refused = random.random() < 0.1
        self.copier = RaceCopier(
            self.world.layers, self.device, way=way, pin_in_background=random.random() < 0.5, clock=lambda: 0.0
        )
        self.attachment: Any = SimpleNamespace(arena=self.depot.arena, session=b"s", close=lambda: None)
        self.failures = Failures(logging.getLogger("test.races"))
        verified = random.choice((0, 0, 0, 1))
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.copies = CopyThread(self.attachment, self.copier, self.failures, clock=clock, read_back=verified)
        if random.random() < PROVED_SHARE:
            self.timeline.works("zeroing of new caches", (), [cell for cells in self._cells for cell in cells])
            self.timeline.launch(lambda: None)
            self.met["refused at start" if self.copies.prove() else "proved"] += 1
        self.side = WorkerSide(0, self.attachment, self.copies, self.world.rank_layers)
        self.side.start_loads(StepMeta(geometry=GEOMETRY))

    # --- the history

    def run(self) -> list[str]:
        """Return the races that were found."""
        for _ in range(self.random.randrange(4, 10)):
            self.step()
            self._happens()
        closed_at_once = self.random.random() < 0.3
        for _ in range(0 if closed_at_once else 100):
            if self.device.lost or not (self._loads or self._stores):
                break
            self.interleaving.switch()
            self.step(admits=False)
        self._close()
        self.met["accesses"] += self.races.accesses
        return self.races.found

    def _close(self) -> None:
        self.side.close()
        self._read_all()
        if self.copies._ended.is_set() and not self.device.lost:
            self.races.act(ENGINE, "freeing KV memory", (), [cell for cells in self._cells for cell in cells])
            self.depot.takes_all()
            self.met["closed"] += 1
        self.interleaving.finish()

    def _happens(self) -> None:
        """What happens now and then."""
        if self.random.random() < 0.6:
            self.depot.works(self.random)
        match self.random.randrange(24):
            case 0:
                self._sleep()
            case 1 if not self.depot.at:
                self.depot.is_another()
                self.attachment.arena = self.depot.arena
                self.met["arena changed"] += 1
            case 2:
                self.now += 1.0
            case 3:
                self.device.pins_refused = not self.device.pins_refused
            case 4 if self._requests:
                self._abort(self.random.choice(self._requests))
            case 5 if self.random.random() < 0.2:
                self.device.lost = True
                self.met["device lost"] += 1

    def _sleep(self) -> None:
        try:
            ended = self.side.suspend()
        except RuntimeError:  # of a device that is lost
            ended = False
        self._read_all()
        if ended:
            self.races.act(ENGINE, "taking KV memory away", (), [cell for cells in self._cells for cell in cells])
            self.met["slept"] += 1
        self.side.resume()

    # --- a step

    def step(self, *, admits: bool = True) -> None:
        """Schedule, launch and read, in the order of one of vLLM's runners."""
        step = self._scheduled(admits)
        place, said = 0, None
        for call in self._calls:
            if call == FORWARD:
                place = self._launch(step)
            elif call == DRAFT_FORWARD:
                place = self._launch_draft(step)
            elif call == "start_load_kv":
                self.side.start_loads(step.meta)
            elif call == "wait_for_save":
                self.side.start_stores(step.meta)
            elif call == "get_transfer_results":
                self.side.results()
            elif call == "build_connector_worker_meta":
                said = self.side.take_meta()
            else:
                continue
            self.interleaving.point()
        self._unread.append((step, place, said))
        while len(self._unread) > (self._ahead if step.computing else 0):
            self._read(*self._unread.popleft())

    def _launch(self, step: Step) -> int:
        works, cells = self.timeline.works, self._of
        if step.copied:
            works("a copy of a block", cells(one for one, _ in step.copied), cells(one for _, one in step.copied))
        if step.zero:
            works("zeroing", (), cells(step.zero))
        works("a forward", cells(step.read), cells(step.written))
        return self.timeline.launch(lambda: None)

    def _launch_draft(self, step: Step) -> int:
        """A drafter has layers of its own in the same blocks. It reads and writes those of the step's requests.

        Not of one that was preempted in this step, as the model of the scheduler may do after it has counted it in.
        """
        written = [block for request in step.computing for block in request.writes]
        read = [block for request in step.computing for block in request.table if block not in written]
        self.timeline.works("a draft's forward", self._of(read), self._of(written))
        return self.timeline.launch(lambda: None)

    def _of(self, blocks: Iterable[int]) -> list[Cell]:
        return [cell for block in blocks for cell in self._cells[block]]

    def _read_all(self) -> None:
        while self._unread:
            self._read(*self._unread.popleft())
        if self.timeline.steps:
            self.timeline.read(len(self.timeline.steps))

    def _read(self, step: Step, place: int, said: RankMeta | None) -> None:
        """The scheduler sees what became of a step."""
        self.timeline.read(place)
        for op_id, (_, failed) in (said.loads if said is not None else {}).items():
            self._loaded(op_id, failed=bool(failed))
        for op_id, (_, indices) in (said.stores if said is not None else {}).items():
            self._stored(op_id, indices)
        for request in step.computing:
            if request in self._requests and not request.loading and self.random.random() < 0.15:
                self._end(request)

    # --- the scheduler

    def _scheduled(self, admits: bool) -> Step:
        step = Step()
        if admits and len(self._requests) < 3 and self.random.random() < 0.8:
            self._admit(step)
        for request in list(self._requests):
            if request in self._requests and not request.loading and not request.aborted:
                self._compute(request, step, self.random.random() < 0.7)
        step.computing = [request for request in step.computing if request in self._requests]
        step.meta.idle = not step.computing
        for request in self._requests:
            if request.aborted and request.loading:
                step.meta.cancelled_loads.append(request.loading)
        if admits:
            self._offer(step)
        return step

    def _allocate(self, step: Step, keep: Request | None = None) -> int | None:
        """Return a free block, zeroed in this step or not. Preempt another request if there is none."""
        if not self._free:
            others = [one for one in self._requests if one is not keep and not one.loading and one.table]
            if others:
                self.met["preempted"] += 1
                self._end(self.random.choice(others))
        if not self._free:
            return None
        block = self._free.popleft()
        self._references[block] = 1
        if self.random.random() < 0.3:
            step.zero.append(block)
        return block

    def _admit(self, step: Step) -> None:
        """A new request: with a load, with blocks of another one, or with nothing."""
        request = Request([])
        # Blocks of a failed load have no hash until they are computed, so that nobody takes them.
        others = [one for one in self._requests if one.full and not one.rewrite]
        self._requests.append(request)
        kind = self.random.randrange(4)
        if kind == 0 and others:
            other = self.random.choice(others)
            request.table = other.table[: self.random.randint(1, other.full)]
            request.full = len(request.table)
            self._references.update(request.table)
        elif kind > 1 and self.depot.objects:
            self._load(request, step, others)

    def _load(self, request: Request, step: Step, others: list[Request]) -> None:
        slots = self.random.sample(self.depot.objects, self.random.randint(1, min(2, len(self.depot.objects))))
        blocks = [self._allocate(step, request) for _ in range(len(slots) * CHUNK_BLOCKS)]
        others = [one for one in others if one in self._requests]
        moves: tuple[BlockMove, ...] = ()
        if others and self.random.random() < 0.3 and (target := self._allocate(step, request)) is not None:
            kept = [one for one in others if one in self._requests]
            if kept:
                source = kept[0].table[0]
                moves = (BlockMove(0, (source,), (target,)),)
                self._references[source] += 1
                self.met["moves"] += 1
            request.table.append(target)
        request.table += [block for block in blocks if block is not None]
        if None in blocks:  # no memory: it is computed
            request.rewrite = True
            if moves:
                self._unreference(moves[0].sources)
            return
        self._ops += 1
        request.loading = self._ops
        held = [int(block) for block in blocks if block is not None]
        objects = tuple(self._object(index, held[2 * index : 2 * index + 2]) for index in range(len(slots)))
        extents = b"".join(self.depot.lend(slot, index, writing=False) for index, slot in enumerate(slots))
        deadline = NEVER if self.random.random() < 0.8 else self.now + 0.5
        step.meta.loads.append(
            LoadOp(self._ops, str(self._ops), deadline, self.depot.arena.arena_id, extents, objects, moves)
        )
        self.depot.leases.update(slots)
        self._loads[self._ops] = (request, slots, list(moves[0].sources) if moves else [], self.depot.at)

    @staticmethod
    def _object(index: int, blocks: list[int]) -> ObjectCopy:
        return ObjectCopy(index, int(Kind.ATTENTION), b"k" * 16, 0, (SpanCopy(0, 0, tuple(blocks)),))

    def _compute(self, request: Request, step: Step, completes: bool) -> None:
        """One step of a request: it reads its blocks, and writes the last one."""
        if request.rewrite:
            request.writes = list(request.table)
            step.written += request.writes
            request.rewrite, request.full = False, len(request.table)
            step.computing.append(request)
            return
        if request.full == len(request.table):
            block = self._allocate(step, request)
            if block is None:
                return
            if request.table and self.random.random() < 0.2:
                step.copied.append((request.table[-1], block))
            request.table.append(block)
        step.read += request.table[:-1]
        request.writes = [request.table[-1]]
        step.written += request.writes
        step.computing.append(request)
        request.full += completes

    def _offer(self, step: Step) -> None:
        """Store what this step completes, and what was complete before."""
        for request in self._requests:
            if request.loading or request.aborted or request.rewrite:
                continue
            for chunk in range(request.full // CHUNK_BLOCKS):
                if chunk in request.stored or not self.depot.free or self.random.random() < 0.3:
                    continue
                request.stored.add(chunk)
                self._store(request.table[2 * chunk : 2 * chunk + 2], step)

    def _store(self, blocks: list[int], step: Step) -> None:
        self._ops += 1
        slot = self.depot.free.pop(self.random.randrange(len(self.depot.free)))
        extents = self.depot.lend(slot, 0, writing=True)
        step.meta.stores.append(StoreOp(self._ops, self.depot.arena.arena_id, extents, (self._object(0, blocks),)))
        self._references.update(blocks)  # the pin
        self._stores[self._ops] = ([slot], blocks, self.depot.at)

    # --- reports

    def _loaded(self, op_id: int, *, failed: bool) -> None:
        if op_id not in self._loads:
            return  # said twice
        request, slots, moved, arena = self._loads.pop(op_id)
        self.met["loads failed" if failed else "loaded"] += 1
        request.loading = 0
        self._unreference(moved)
        if arena == self.depot.at:
            for slot in slots:
                self.depot.released(slot)
        if request.aborted:
            self._end(request)
            return
        request.full, request.rewrite = len(request.table), failed

    def _stored(self, op_id: int, failed: frozenset[int]) -> None:
        if op_id not in self._stores:
            return
        slots, blocks, arena = self._stores.pop(op_id)
        self.met["stores failed" if failed else "stored"] += 1
        self._unreference(blocks)
        for slot in slots if arena == self.depot.at else ():
            if failed:
                self.depot.hear()
                self.depot.free.append(slot)
            else:
                self.depot.committed(slot)

    def _abort(self, request: Request) -> None:
        """Blocks of a load are free when the ranks have reported it."""
        request.aborted = True
        if not request.loading:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._requests.remove(request)
        self._unreference(request.table)
        request.table = []

    def _unreference(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)
