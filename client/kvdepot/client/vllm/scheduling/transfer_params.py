"""`kv_transfer_params`: what one engine tells the next one of a conversation (docs/adr/0034).

Keys are digests of content, so any engine finds what is stored. It cannot find what is still being stored: an engine
commits a few milliseconds after its last token. So the params say how far the stores will reach. They also say by whose
daemon: another daemon may have it as a peer (docs/adr/0080).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.base.engine_types import EngineRequest
from kvdepot.client.vllm.scheduling.requests import Lookup, RequestState, token_count, transfer_params
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.vllm.scheduling.namespaces import Namespaces
    from kvdepot.core.planner import Planner

LOGGER = logging.getLogger("vllm.kvdepot")
PREFIX: Final = "kvdepot:"
"""Prefix of a key in the params. The arena's id follows in hexadecimal, so that two daemons' keys differ."""
ASK_SECONDS: Final = 0.005
"""Pause between two lookups for objects that another engine is storing."""
_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_KEY: Final = re.compile(PREFIX + "([0-9a-f]{16})")
_KEYS_READ_MAX: Final = 64
"""Keys of params that are looked at for another daemon."""
MAY_COME: Final = frozenset(
    {
        MissReason.UNKNOWN,
        MissReason.PROBE_ABSENT,
        MissReason.BEING_WRITTEN,
        MissReason.NO_CHECKPOINT,
        MissReason.INCOMPLETE,
    }
)
"""Reasons of misses of objects that an engine may be storing. No request waits for any other reason."""


class TransferOutcome(StrEnum):
    """What came of another engine's params. Labels of a counter."""

    MET = "met"  # everything was there, or the engine had it itself
    SHORT = "short"  # something did not come in time, or was gone
    OTHER_DAEMON = "other_daemon"  # and no peer of this engine's
    OTHER_NAMESPACE = "other_namespace"  # of this daemon, or of another one, whether it is a peer or not
    MALFORMED = "malformed"


class TransferParams:
    """Writes this engine's params, and reads those of others. Used on the scheduler's thread only."""

    def __init__(self, namespaces: Namespaces, planner: Planner, counters: Counter[str]) -> None:
        self._namespaces = namespaces
        self._planner = planner
        self._counters = counters
        self._warned = False

    @property
    def _key(self) -> str:
        return f"{PREFIX}{self._namespaces.arena_id:016x}"

    # --- out

    def params(self, state: RequestState) -> dict[str, Any] | None:
        """Return params for the output of a request that came with params, or None if there is nothing to tell."""
        namespace = self._namespaces.registered_id
        if transfer_params(state.request) is None or namespace is None or not self._namespaces.ranks_ready:
            return None
        if state.excluded or state.store_epoch != self._namespaces.epoch_number:
            return None
        return {self._key: {"namespace": namespace.hex(), "boundary_tokens": self._reached(state)}}

    def _reached(self, state: RequestState) -> int:
        """Return the deepest boundary that the daemon has of the request, or that this engine is storing."""
        presence = {kind: bytearray(len(state.keys)) for kind in self._planner.kinds}
        for chunk, kind in state.stored - state.given_up:
            presence[kind][chunk] = 1
        stored = self._planner.longest_boundary(presence, 0, len(state.keys) * self._planner.chunk_tokens)
        located = state.lookup.boundary_tokens if state.lookup is not None and not state.load_failed else 0
        return max(stored, located)

    # --- in

    def source_id(self, request: EngineRequest, namespace: bytes) -> int:
        """Return the arena of another daemon that has KV of the request, as its params say, or 0.

        Whether that is a peer, the daemon of this engine knows.
        """
        params = transfer_params(request)
        if not params or not self._namespaces.ranks_ready:
            return 0
        return self._named(params, namespace.hex())[0]

    def awaited(self, state: RequestState, lookup: Lookup, boundary: int, local_tokens: int, now: float) -> bool:
        """Return whether another engine is storing more of the request than the daemon or this engine has.

        It returns True for at most the `wait_seconds` of the first lookup, and one lookup more. `boundary` is the
        lookup's.
        """
        own_namespace = self._namespaces.registered_id
        if own_namespace is None or not self._namespaces.ranks_ready:
            return False
        if state.handed_tokens is None:
            state.handed_tokens = self._read(state.request, own_namespace.hex(), lookup.source_tier)
            state.handed_until = now + lookup.wait_seconds
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
        self._count(TransferOutcome.SHORT if short else TransferOutcome.MET)
        return False

    def _named(self, params: dict[Any, Any], own_namespace: str) -> tuple[int, int]:
        """Return arena and tokens of the first other daemon that has this namespace, or zeros if there is none.

        Few keys are read: params may have any number. This engine's own daemon is asked anyway.
        """
        if self._key not in params:
            for arena, said in _entries(params):
                if said is not None and said[0] == own_namespace:
                    return arena, said[1]
        return 0, 0

    def _read(self, request: EngineRequest, own_namespace: str, source_tier: str) -> int:
        """Return the tokens that another engine has stored by its params; 0 if this engine cannot use them.

        `source_tier`: by which the daemon asks the daemon that they name.
        """
        params = transfer_params(request) or {}
        here = self._key in params
        if source_tier and not here:
            return self._named(params, own_namespace)[1]
        entries = [_said(params[self._key])] if here else [said for _, said in _entries(params)]
        told = [said for said in entries if said is not None]
        tokens = next((tokens for namespace, tokens in told if namespace == own_namespace), None)
        if here and tokens is not None:
            return tokens
        if tokens is not None:
            self._count(TransferOutcome.OTHER_DAEMON)
        elif told:
            self._count(TransferOutcome.OTHER_NAMESPACE)
            self._warn(own_namespace, told[0][0], here=here)
        elif entries:
            self._count(TransferOutcome.MALFORMED)
        return 0

    def _warn(self, own_namespace: str, other: str, *, here: bool) -> None:
        """Log that nothing is shared. `here`: an engine of this daemon, which then can compare both namespaces."""
        if not self._warned:
            LOGGER.warning(
                "kvdepot: a request comes from an engine that shares nothing with this one; "
                "`kvdepotctl describe %s%s%s`%s says why; reported once",
                own_namespace,
                " --differs " if here else "`, compared with `kvdepotctl describe ",
                other,
                "" if here else " on the other node,",
            )
        self._warned = True

    def _count(self, outcome: TransferOutcome) -> None:
        self._counters[f"transfer_params.{outcome}"] += 1


def _entries(params: dict[Any, Any]) -> Iterator[tuple[int, tuple[str, int] | None]]:
    """Yield arena and content of each of the engines' entries among the first keys. None: it has another form."""
    for key, entry in islice(params.items(), _KEYS_READ_MAX):
        if isinstance(key, str) and key.startswith(PREFIX):
            arena = _KEY.fullmatch(key)
            yield (0, None) if arena is None else (int(arena[1], 16), _said(entry))


def _said(entry: Any) -> tuple[str, int] | None:
    """Return namespace and boundary of an entry that came from outside, or None if it has another form."""
    if not isinstance(entry, dict):
        return None
    namespace, tokens = entry.get("namespace"), token_count(entry.get("boundary_tokens"))
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace) or tokens is None:
        return None
    return namespace, tokens
