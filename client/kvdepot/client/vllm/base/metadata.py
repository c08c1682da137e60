"""Messages between the scheduler side and the ranks, inside vLLM's own messages.

Plain numbers and bytes in dataclasses: they are pickled with every step, and most steps carry an empty one. A message
that arrives twice, late or out of order changes nothing, because operations and steps are numbered, and
acknowledgements name their ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kvdepot.client.vllm.base.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvdepot.client.vllm.base.operations import LayerFacts, LoadOp, StoreOp
from kvdepot.core.planner import GroupSpec
from kvdepot.proto.loaded_code import LoadedCode

CODE: Final = LoadedCode("kvdepot.core", "kvdepot.proto", "kvdepot.client").digest
"""Of this process. An upgrade in place while an engine loads its model gives ranks and scheduler side other code."""
NUMBERS: Final = itertools.count(1)
"""Numbers of operations and steps. One count for the process, so that a former side's numbers never come again."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What every rank needs to find its part of an object: the other ranks' sizes too."""

    chunk_tokens: int
    groups: tuple[GroupSpec, ...]
    ranks: tuple[str, ...] = ()  # digest of each rank's facts: another rank's geometry would be wrong bytes


@dataclass(slots=True)
class StepMeta(KVConnectorMetadata):
    """Scheduler side to every rank, each step."""

    number: int = 0  # grows from step to step; 0: not numbered
    geometry: Geometry | None = None  # in the first step of a scheduler side only
    probe_id: int = 0  # a new number asks each rank what it is attached to
    resets: int = 0  # of the engine's caches, that have begun an epoch of this engine alone
    computes: bool = False  # tokens, in this step
    idle: bool = False  # nothing is computed in this step, and nobody waits for it

    loads: list[LoadOp] = field(default_factory=list)
    stores: list[StoreOp] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)  # request ids no rank will see an op for
    cancelled_loads: list[int] = field(default_factory=list)  # op ids that must not succeed any more


@dataclass(frozen=True, slots=True)
class RankArena:
    """A rank's report of what it is attached to, sent when it changes and when the rank is asked."""

    arena_id: int  # 0 while it is not
    probe_id: int  # of the last question
    reported_at: float = field(default=0.0, compare=False)  # CLOCK_MONOTONIC, seconds; an older report is ignored


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """The engine has read a LoRA adapter's files on a rank."""

    rank: int
    reader: int  # tells apart the engines of one process
    at_ns: int  # of the host's monotonic clock: messages may come twice, or late
    load: int  # the engine's id of the adapter
    path: str
    state: str  # of the files, as `file_state.fingerprint`; empty: they changed meanwhile, or nobody could look


@dataclass(slots=True)
class RankMeta(KVConnectorWorkerMetadata):
    """Ranks to the scheduler side: finished operations, and the arena that each is attached to.

    `loads`: op id -> (ranks that finished, ranks that failed). `stores`: op id -> (ranks that
    finished, indices of objects that some rank failed). Ranks are sets of bits, 1 << rank:
    counts would take a repeated message for another rank's.
    """

    arenas: dict[int, RankArena] = field(default_factory=dict)  # by rank
    loads: dict[int, tuple[int, int]] = field(default_factory=dict)
    stores: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    suspended: frozenset[int] = frozenset()  # of `loads`, those that failed because KV memory was taken away
    corrupt: frozenset[int] = frozenset()  # of `loads`, those whose bytes in RAM did not match their checksums
    adapters: tuple[AdapterRead, ...] = ()  # read since the last message

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankMeta:
        """Merge both, as vLLM merges the ranks of one step."""
        assert isinstance(other, RankMeta)
        merged = RankMeta(
            dict(self.arenas), dict(self.loads), dict(self.stores), self.suspended | other.suspended,
            self.corrupt | other.corrupt, self.adapters + other.adapters,
        )  # fmt: skip
        for rank, report in other.arenas.items():
            merged.arenas[rank] = max(report, self.arenas.get(rank, report), key=lambda each: each.reported_at)
        for op_id, (ranks, failed) in other.loads.items():
            had_ranks, had_failed = merged.loads.get(op_id, (0, 0))
            merged.loads[op_id] = (had_ranks | ranks, had_failed | failed)
        for op_id, (ranks, indices) in other.stores.items():
            had_ranks, had_indices = merged.stores.get(op_id, (0, frozenset()))
            merged.stores[op_id] = (had_ranks | ranks, had_indices | indices)
        return merged


@dataclass(frozen=True, slots=True)
class RankFacts(KVConnectorHandshakeMetadata):
    """What a worker knows and the scheduler side does not. Sent once the KV tensors exist; vLLM 0.33 repeats it.

    `code` is first: a pickle has values without names, so other code reads it in a place where it cannot be.
    """

    code: str = field(default=CODE, kw_only=True)
    rank: int
    boot_id: str  # of the host: ranks on several nodes are refused
    layers: tuple[LayerFacts, ...]
    software: tuple[tuple[str, str], ...]  # torch, device, instruction set, ...: what may change a byte
    problem: str = ""  # why this rank can copy nothing; empty if it can
    one_shard_groups: tuple[int, ...] = ()  # of the planner, those of which tensor parallel ranks hold the same bytes

    @property
    def digest(self) -> str:
        """Digest of all facts: two ranks' facts are equal if their digests are."""
        return blake2b(repr(self).encode(), digest_size=16).hexdigest()
