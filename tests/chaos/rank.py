"""One rank of an engine: KV blocks, an attachment, and copies between the two.

It knows what every block has to hold. Loads are compared byte by byte, freed blocks must stay as they were
left, and a copy in progress is slow on purpose, so that kills and stops come into the middle of it.
"""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.attachment import Attachment, EngineProcess
from kvdepot.client.copy.base import CopyBatch, Direction, concatenate, object_pieces
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.extents import Extents, parse_extents

from tests.chaos.messages import Copied, Fill, Free, Load, Placed, RankOp, Report, Store
from tests.chaos.models import BLOCKS, FREED, LAYERS, MODELS, Model, describe_difference

PIECE_BYTES = 256 << 10
PAUSE_SECONDS_MAX = 0.004
SLOW_SHARE = 0.1
SLOW_SECONDS = 0.05
"""Between two pieces of a tenth of all copies."""
REPORT_SECONDS = 0.25


class Rank:
    def __init__(self, model: Model, rank: int, attachment: Attachment, seed: int, plant: bool) -> None:
        """`plant`: store a wrong byte now and then (the harness has to notice)."""
        self._model = model
        self._rank = rank
        self._attachment = attachment
        self._rng = random.Random(f"{seed} {model.label} {rank}")
        self._plant = plant
        self._layers: list[torch.Tensor] = []
        for group in range(len(model.spec.groups)):
            shape = (BLOCKS, model.layer_block_bytes(group, rank))
            self._layers += [torch.full(shape, FREED, dtype=torch.uint8) for _ in range(LAYERS)]
        self._copier = CpuCopier(self._layers)
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []

    def do(self, op: RankOp) -> Copied | None:
        match op:
            case Fill(objects):
                self._expect_freed((group, block) for one in objects for group, ids in one.blocks for block in ids)
                for placed in objects:
                    self._fill(placed)
            case Free(blocks):
                for group, block in blocks:
                    for layer in self._of_group(group):
                        layer[block] = FREED
            case Store():
                return Copied(op.number, *self._store(op))
            case Load():
                self._expect_freed((group, block) for one in op.objects for group, ids in one.blocks for block in ids)
                return Copied(op.number, *self._load(op))
        return None

    def _of_group(self, group: int) -> list[torch.Tensor]:
        return self._layers[group * LAYERS : (group + 1) * LAYERS]

    def _expect_freed(self, blocks: Iterator[tuple[int, int]]) -> None:
        for group, block in blocks:
            for layer in self._of_group(group):
                if not bool((layer[block] == FREED).all()):
                    self.findings.append(f"I6: block {block} of group {group} was written after it was freed")
                    layer[block] = FREED

    def _fill(self, placed: Placed) -> None:
        for group, ids in placed.blocks:
            part = self._model.part(placed.known, group, self._rank)
            for number, layer in enumerate(self._of_group(group)):
                for at, block in enumerate(ids):
                    layer[block] = torch.from_numpy(part[number, at].copy())

    def _store(self, op: Store) -> tuple[bool, str]:
        arena = self._arena(op.arena_id)
        if arena is None:
            return False, "another arena"
        if self._plant and self._rng.random() < 0.05:
            group, ids = op.objects[0].blocks[0]
            self._of_group(group)[0][ids[0], 0] ^= 1
        extents = parse_extents(op.extents, arena.size_bytes)
        rows, granted = extents.granted(placed.index for placed in op.objects)
        if not arena.check(rows, granted):
            return False, "not granted any more"
        pieces = list(self._pieces(op.objects, extents, writing=True).split(PIECE_BYTES))
        for _ in self._copy(arena, pieces[: len(pieces) // 2] if op.torn else pieces, Direction.STORE):
            pass
        self.counts["stored_objects"] += len(op.objects)
        return arena.check(rows, granted), "not granted any more"

    def _load(self, op: Load) -> tuple[bool, str]:
        arena = self._arena(op.arena_id)
        if arena is None:
            return False, "another arena"
        extents = parse_extents(op.extents, arena.size_bytes)
        rows, granted = extents.granted(placed.index for placed in op.objects)
        if not arena.check(rows, granted):
            return False, "generation"
        pieces = list(self._pieces(op.objects, extents, writing=False).split(PIECE_BYTES))
        for _ in self._copy(arena, pieces, Direction.LOAD):
            if time.monotonic() >= op.deadline:
                return False, "deadline"
        if not arena.check(rows, granted):
            return False, "generation"
        for placed in op.objects:
            self._compare(placed)
        return True, ""

    def _arena(self, arena_id: int) -> ArenaMap | None:
        arena = self._attachment.arena
        return arena if isinstance(arena, ArenaMap) and arena.arena_id == arena_id else None

    def _copy(self, arena: ArenaMap, pieces: list[CopyBatch], direction: Direction) -> Iterator[None]:
        slow = self._rng.random() < SLOW_SHARE
        for piece in pieces:
            yield
            time.sleep(SLOW_SECONDS if slow else self._rng.uniform(0, PAUSE_SECONDS_MAX))
            self._copier.copy(arena, piece, direction)
        self._copier.wait()
        self.counts["copied_bytes"] += sum(piece.size_bytes for piece in pieces)

    def _pieces(self, objects: tuple[Placed, ...], extents: Extents, *, writing: bool) -> CopyBatch:
        """The rank's share. Of a replicated part rank 0 writes, everyone reads."""
        planner = self._model.planner
        found = []
        for placed in objects:
            for group, ids in placed.blocks:
                if writing and self._rank and self._model.spec.groups[group].replicated:
                    continue
                start, _ = planner.part_range(placed.known.kind, group, self._rank)
                sizes = [self._model.layer_block_bytes(group, self._rank)] * LAYERS
                layers = range(group * LAYERS, (group + 1) * LAYERS)
                blocks = planner.blocks_in_object(group)
                found.append(object_pieces(extents, [placed.index], start, layers, sizes, blocks, [ids]))
        return concatenate(found)

    def _compare(self, placed: Placed) -> None:
        for group, ids in placed.blocks:
            part = self._model.part(placed.known, group, self._rank)
            for number, layer in enumerate(self._of_group(group)):
                found = layer[list(ids)].numpy()
                self.counts["checked_bytes"] += found.size
                if not (found == part[number]).all():
                    where = describe_difference(found.ravel(), part[number].ravel())
                    name = f"{placed.known.kind.name.lower()} {placed.known.key.hex()} of {self._model.label}"
                    self.findings.append(f"I1: wrong bytes: {name}, rank {self._rank}, layer {number}: {where}")
        self.counts["checked_objects"] += 1


def main(
    endpoint: str, engine_id: str, label: str, rank: int, seed: int, plant: bool, ops: Connection, reports: Connection
) -> None:
    """The process. Ends with its scheduler."""
    torch.set_num_threads(1)
    model = MODELS[label]
    attachment = Attachment(
        Endpoint.parse(endpoint), EngineProcess(engine_id, scheduler=False, rank=rank, world_size=model.world_size)
    )
    attachment.start()
    one = Rank(model, rank, attachment, seed, plant)
    said_at = 0.0
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            try:
                if ops.poll(REPORT_SECONDS) and (done := one.do(ops.recv())) is not None:
                    ops.send(done)
            except (EOFError, ConnectionError):
                raise
            except Exception:  # noqa: BLE001 - I3: whatever it is, it is a finding
                one.findings.append(f"I3: rank {rank} of {engine_id}: {traceback.format_exc()}")
            for finding in one.findings:
                reports.send(Report(finding=finding))
            one.findings.clear()
            if time.monotonic() > said_at + REPORT_SECONDS:
                said_at = time.monotonic()
                reports.send(Report(counts=Counter(one.counts)))
    attachment.close()
