"""Faults of a connector, one at a time: each takes a rule away that keeps bytes of one prefix from another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, Final

import pytest
from kvdepot.client.vllm.base.operations import LoadOp
from kvdepot.client.vllm.scheduling.candidates import StoreCandidates
from kvdepot.client.vllm.scheduling.pins import BlockHolds
from kvdepot.client.vllm.scheduling.requests import RequestState
from kvdepot.client.vllm.scheduling.sides import SchedulerSides
from kvdepot.client.vllm.scheduling.state_offers import StateOffers
from kvdepot.client.vllm.worker import copy_thread
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome
from kvdepot.client.vllm.worker.copy_thread import CopyThread
from kvdepot.core.calls import Kind

from tests.fakes.scripted_engine import BLOCK

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


def _hashes(request: Any, ignored: str) -> list[bytes]:
    """Return what a connector would use that makes hashes of its own, and ignores a part of a request."""
    lora, hashes = request.lora_request, list[bytes]()
    named = {"adapter": "", "path": lora and lora.lora_name}.get(ignored, lora and (lora.lora_name, lora.lora_path))
    salt = "" if ignored == "salt" else request.cache_salt
    pictures = [] if ignored == "pictures" else request.mm_features or []
    for end in range(BLOCK, len(request.block_hashes) * BLOCK + 1, BLOCK):
        shown = [(item.identifier, item.mm_position) for item in pictures if item.mm_position.offset < end]
        content = (hashes[-1:], list(request.all_token_ids[end - BLOCK : end]), named, salt, shown)
        hashes.append(blake2b(repr(content).encode(), digest_size=32).digest())
    return hashes


def _ignoring(ignored: str) -> Mutant:
    def mutate(patch: Patch) -> None:
        update = RequestState.update_keys

        def updated(state: RequestState, *arguments: int) -> int:
            request, salt = state.request, state.salt
            state.request = SimpleNamespace(block_hashes=_hashes(request, ignored), num_tokens=request.num_tokens)
            state.salt = b"" if ignored in ("adapter", "path") else salt
            try:
                return update(state, *arguments)
            finally:
                state.request, state.salt = request, salt

        patch.setattr(RequestState, "update_keys", updated)

    return mutate


def _resets(patch: Patch) -> None:
    patch.setattr(SchedulerSides, "reset", lambda _: None)


def _reused_blocks(patch: Patch) -> None:
    patch.setattr(BlockHolds, "readable", lambda *_: True)


def _first_tables(patch: Patch) -> None:
    take, tables_of = StoreCandidates.take, dict[Any, Any]()

    def taken(candidates: Any, state: RequestState, tokens: int, tables: Sequence[Sequence[int]], offers: Any) -> Any:
        known = tables_of.setdefault(state, [list(table) for table in tables])
        merged = [[*old, *new[len(old) :]] for old, new in zip(known, tables, strict=True)]
        tables_of[state] = merged
        return take(candidates, state, tokens, merged, offers)

    patch.setattr(StoreCandidates, "take", taken)


def _states_of_tables(patch: Patch) -> None:
    candidate = StoreCandidates._candidate

    def of_table(candidates: Any, state: RequestState, planned: Any, tables: Any) -> Any:
        made = candidate(candidates, state, planned, tables)
        if made is None or planned.kind is not Kind.STATE:
            return made
        last = [tuple(tables[candidates._group_ids[span.group]][-1:]) for span in planned.spans]
        spans = tuple(
            type(span)(span.group, span.object_block, ids) for span, ids in zip(made.spans, last, strict=True)
        )
        return type(made)(planned, spans, candidates._holds.hold(tuple(block for ids in last for block in ids)))

    patch.setattr(StoreCandidates, "_candidate", of_table)


def _states_of_the_boundary_before(patch: Patch) -> None:
    add = StateOffers.add

    def added(offers: Any, state: RequestState, offered: Any) -> None:
        later = [(group, block, boundary + offers._chunk_tokens) for group, block, boundary in offered]
        add(offers, state, later)

    patch.setattr(StateOffers, "add", added)
    patch.setattr(StateOffers, "is_named", lambda *_: True)


def _failed_loads(patch: Patch) -> None:
    outcome = CopyOutcome

    def made(op: Any, failed: Any, *rest: Any) -> Any:
        return outcome(op, frozenset() if isinstance(op, LoadOp) else failed, *rest)

    made.memory_gone, made.all_failed = outcome.memory_gone, outcome.all_failed  # type: ignore[attr-defined]
    patch.setattr(copy_thread, "CopyOutcome", made)


def _reports_before_copies(patch: Patch) -> None:
    copy = CopyThread._copy

    def reported(thread: Any, op: Any, mark: Any) -> None:
        if not isinstance(op, LoadOp):
            copy(thread, op, mark)
            return
        thread._done.append(CopyOutcome(op, frozenset()))
        time.sleep(0.005)
        copy(thread, op, mark)
        with thread._wake:
            thread._done.pop()

    patch.setattr(CopyThread, "_copy", reported)


MUTANTS: Final[dict[str, tuple[Mutant, str]]] = {
    "salt ignored": (_ignoring("salt"), "dense"),
    "adapter ignored": (_ignoring("adapter"), "dense"),
    "adapter's path ignored": (_ignoring("path"), "dense"),
    "pictures ignored": (_ignoring("pictures"), "dense"),
    "resets without consequence": (_resets, "dense"),
    "blocks stored after their reuse": (_reused_blocks, "dense"),
    "windows from an earlier table": (_first_tables, "windows"),
    "loads reported before their copies": (_reports_before_copies, "dense"),
    "failed loads taken for good": (_failed_loads, "dense"),
    "states from the block table": (_states_of_tables, "hybrid"),
    "states a boundary late": (_states_of_the_boundary_before, "hybrid"),
}
