"""What became of an operation: the copying thread makes it, the worker's side reports it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.operations import LoadOp, StoreOp
    from kvdepot.client.vllm.worker.places import ObjectPlaces


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """A finished operation. `failed` has object indices; of a load, any failed object means all of them."""

    op: LoadOp | StoreOp
    failed: frozenset[int]
    seconds: float = 0.0  # of copying
    places: ObjectPlaces | None = None  # by which it was copied
    verified: bool | None = None  # whether a load was right, where it was read back
    intact: bool | None = None  # whether a load's objects had their checksums, where it was compared
    suspended: bool = False  # it failed because the engine has taken its KV memory away

    @classmethod
    def all_failed(cls, op: LoadOp | StoreOp) -> CopyOutcome:
        """Return an outcome in which every object of the operation failed."""
        return cls(op, frozenset(copied.index for copied in op.objects))

    @classmethod
    def memory_gone(cls, op: LoadOp | StoreOp) -> CopyOutcome:
        """Return the outcome of an operation whose KV memory the engine has taken away."""
        return replace(cls.all_failed(op), suspended=True)
