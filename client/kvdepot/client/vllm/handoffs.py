"""What one engine tells the next of a conversation, in `kv_transfer_params` (docs/adr/0034).

Keys are of content, so whatever engine gets the next turn finds all there is without being
told. What it cannot know is what is still on its way: the engine before it has answered the
last token, and commits a few milliseconds later. That is what it is told here.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.requests import EngineRequest, Lookup, RequestState, token_count, transfer_params
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.vllm.namespaces import Namespaces
    from kvdepot.core.planner import Planner

LOGGER = logging.getLogger("vllm.kvdepot")
PREFIX: Final = "kvdepot:"
"""Of keys in the params; behind it the arena's id in hexadecimal, so that those of two daemons do not collide."""
ASK_SECONDS: Final = 0.005
"""Between two lookups of a request for what is on its way."""
_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
MAY_COME: Final = frozenset(
    {
        MissReason.UNKNOWN,
        MissReason.LOOKED_UP_ABSENT,
        MissReason.BEING_WRITTEN,
        MissReason.NO_CHECKPOINT,
        MissReason.INCOMPLETE,
    }
)
"""What the daemon says of objects that an engine is storing. For anything else nobody waits."""


class HandoffOutcome(StrEnum):
    """What became of one engine's word to another. Labels of a counter."""

    MET = "met"  # all of it was there, or the engine had it itself
    SHORT = "short"  # it did not come in time, or was gone
    OTHER_DAEMON = "other_daemon"
    OTHER_NAMESPACE = "other_namespace"
    MALFORMED = "malformed"


class Handoffs:
    """What this engine says, and what it makes of what others said. Used on the scheduler's thread only."""

    def __init__(self, namespaces: Namespaces, planner: Planner, counters: Counter[str], wait_seconds: float) -> None:
        self._namespaces = namespaces
        self._planner = planner
        self._counters = counters
        self._wait_seconds = wait_seconds
        self._warned = False

    @property
    def _key(self) -> str:
        return f"{PREFIX}{self._namespaces.arena_id:016x}"

    # --- out

    def params(self, state: RequestState) -> dict[str, Any] | None:
        """For the output of a request that came with params itself; None where there is nothing to tell."""
        namespace = self._namespaces.usable
        if transfer_params(state.request) is None or namespace is None or not self._namespaces.ranks_ready:
            return None
        if state.excluded or state.store_epoch != self._namespaces.epoch_number:
            return None
        return {self._key: {"namespace": namespace.hex(), "boundary_tokens": self._reached(state)}}

    def _reached(self, state: RequestState) -> int:
        """The deepest boundary that the daemon has of the request, or that this engine is storing."""
        presence = {kind: bytearray(len(state.keys)) for kind in self._planner.kinds}
        for chunk, kind in state.stored - state.given_up:
            presence[kind][chunk] = 1
        stored = self._planner.longest_boundary(presence, 0, len(state.keys) * self._planner.chunk_tokens)
        found = state.lookup.boundary_tokens if state.lookup is not None and not state.load_failed else 0
        return max(stored, found)

    # --- in

    def awaited(self, state: RequestState, lookup: Lookup, boundary: int, local_tokens: int, now: float) -> bool:
        """Whether another engine is storing more of the request than the daemon or this engine has.

        Not for long: at most for `wait_seconds`, and one lookup more. `boundary` is the lookup's.
        """
        own = self._namespaces.usable
        if own is None or not self._namespaces.ranks_ready:
            return False
        if state.handed_tokens is None:
            state.handed_tokens = self._read(state.request, own.hex())
            state.handed_until = now + self._wait_seconds
        wanted = min(state.handed_tokens, self._planner.high_boundary(state.request.num_tokens))
        if state.load_tokens_max is not None:
            wanted = min(wanted, local_tokens + state.load_tokens_max)
        wanted -= wanted % self._planner.chunk_tokens
        if not wanted:
            return False
        short = max(boundary, local_tokens) < wanted
        if short and lookup.miss in MAY_COME and lookup.asked_at < state.handed_until:
            return True
        state.handed_tokens = 0
        self._count(HandoffOutcome.SHORT if short else HandoffOutcome.MET)
        return False

    def _read(self, request: EngineRequest, own: str) -> int:
        """Tokens that another engine says it has stored; 0 where that is of no use here."""
        params = transfer_params(request) or {}
        said = params.get(self._key)
        if said is None:
            if any(isinstance(key, str) and key.startswith(PREFIX) for key in params):
                self._count(HandoffOutcome.OTHER_DAEMON)
            return 0
        namespace = said.get("namespace") if isinstance(said, dict) else None
        tokens = token_count(said.get("boundary_tokens")) if isinstance(said, dict) else None
        if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace) or tokens is None:
            self._count(HandoffOutcome.MALFORMED)
            return 0
        if namespace != own:
            self._count(HandoffOutcome.OTHER_NAMESPACE)
            self._warn(own, namespace)
            return 0
        return tokens

    def _warn(self, own: str, other: str) -> None:
        if not self._warned:
            LOGGER.warning(
                "kvdepot: a request comes from an engine that shares nothing with this one; "
                "`kvdepotctl describe %s --differs %s` says why. Reported once.",
                own,
                other,
            )
        self._warned = True

    def _count(self, outcome: HandoffOutcome) -> None:
        self._counters[f"handoffs.{outcome}"] += 1
