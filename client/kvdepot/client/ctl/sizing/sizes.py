"""What the prompts of a model take in the daemon: bytes of objects, of sessions, and the capacities that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.sizing.geometry import Engine, engine_planner
from kvdepot.core.arena import PAGE_BYTES
from kvdepot.core.calls import Kind
from kvdepot.core.ram_size import capacity_for
from kvdepot.core.units import SIZE_UNITS_BYTES

if TYPE_CHECKING:
    from kvdepot.client.ctl.sizing.architectures import Model
    from kvdepot.core.planner import Planner

_GIB: Final = SIZE_UNITS_BYTES["GiB"]
_TIER_DIVISOR: Final = 10
"""Of a disk's capacity: index, journals and the quarantine, which is at most a sixteenth."""
_TIER_GIB_MIN: Final = 4


@dataclass(frozen=True, slots=True)
class Load:
    """The sessions to make room for.

    Args:
        tokens: Length of a session in the end.
        sessions: How many are kept.
        turns: Prompts of a session. vLLM keeps the state of a hybrid model at the end of each.
    """

    tokens: int
    sessions: int = 1
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes for all ranks together. `window_bytes` and `state_bytes` are 0 if the model has no such object.

    `session_bytes` counts every object that is stored, `load_bytes` those that a load of the whole session moves.
    """

    chunk_tokens: int
    block_tokens: int
    attention_bytes: int
    window_bytes: int
    state_bytes: int
    session_chunks: int
    session_checkpoints: int
    session_bytes: int
    load_bytes: int
    all_bytes: int
    ram_capacity_bytes: int
    tier_capacity_bytes: int


def sizes(model: Model, engine: Engine, load: Load) -> Sizes:
    """Return the sizes. Raise PlannerError, LimitExceeded or InvalidArgument for what cannot be served."""
    planner = engine_planner(model, engine)
    chunks = load.tokens // planner.chunk_tokens
    checkpoints = _checkpoints(planner, engine, load, chunks)
    session = sum(
        count * _stored(planner, kind)
        for kind, count in ((Kind.ATTENTION, chunks), (Kind.WINDOW, chunks), (Kind.STATE, checkpoints))
    )
    everything = session * load.sessions
    return Sizes(
        planner.chunk_tokens,
        planner.scheduler_block_tokens,
        planner.object_bytes(Kind.ATTENTION),
        planner.object_bytes(Kind.WINDOW),
        planner.object_bytes(Kind.STATE),
        chunks,
        checkpoints,
        session,
        sum(planner.object_bytes(kind) for _, kind in planner.objects(chunks * planner.chunk_tokens)),
        everything,
        capacity_for(everything),
        max(-(-everything * _TIER_DIVISOR // (_TIER_DIVISOR - 1) // _GIB), _TIER_GIB_MIN) * _GIB,
    )


def _checkpoints(planner: Planner, engine: Engine, load: Load, chunks: int) -> int:
    if Kind.STATE not in planner.kinds:
        return 0
    if engine.retention_tokens:
        return chunks * planner.chunk_tokens // engine.retention_tokens
    return min(load.turns, chunks)


def _stored(planner: Planner, kind: Kind) -> int:
    """Return the room of an object in the arena: whole pages."""
    return -(-planner.object_bytes(kind) // PAGE_BYTES) * PAGE_BYTES
