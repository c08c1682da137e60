"""When this process's engine reads a LoRA adapter's files, and in which state they are then (docs/adr/0046).

vLLM tells connectors neither that it loads an adapter nor that it reads one again, which its own cache
(`max_cpu_loras`) had dropped. Its loader is therefore wrapped. What it returns or raises is never touched.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvdepot.client.vllm.base import worker_hooks
from kvdepot.client.vllm.base.metadata import AdapterRead, RankMeta
from kvdepot.client.vllm.identity import file_state

_LISTENERS: Final[weakref.WeakSet[AdapterReads]] = weakref.WeakSet()


class AdapterReads:
    """Readings that one rank has not reported yet. Used on the worker's thread only."""

    def __init__(self, rank: int) -> None:
        """Listen to this process's engine. Raise ConfigError if this vLLM loads adapters in another way."""
        self._rank = rank
        self._reads: dict[tuple[int, int], AdapterRead] = {}
        loader, name = worker_hooks.adapter_loader()
        worker_hooks.wrap_once(loader, name, _watched)
        _LISTENERS.add(self)

    def heard(self, reader: int, load: int, path: str, state: str) -> None:
        """Of several reads of one load the last one counts, but one that differs from it makes it unknown."""
        key = (reader, load)
        before = self._reads.get(key)
        if before is not None and (before.path, before.state) != (path, state):
            state = ""
        self._reads[key] = AdapterRead(self._rank, reader, time.monotonic_ns(), load, path, state)

    def add_to(self, meta: RankMeta | None) -> RankMeta | None:
        """Put them into this step's message."""
        if self._reads:
            meta = meta or RankMeta()
            meta.adapters += tuple(self._reads.values())
            self._reads = {}
        return meta


def _watched(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def watched(loader: Any, lora_request: Any) -> Any:
        before = _state(lora_request)
        adapter = load(loader, lora_request)
        state = before if before == _state(lora_request) else ""
        for listener in list(_LISTENERS):
            listener.heard(id(loader), int(lora_request.lora_int_id), str(lora_request.lora_path), state)
        return adapter

    return watched


def _state(lora_request: Any) -> str:
    try:
        return file_state.fingerprint(Path(lora_request.lora_path))
    except Exception:  # noqa: BLE001 - I3: the engine loads it all the same
        return ""
