"""A worker's LoRA adapters as vLLM keeps them, without tensors: its own LRU by id, which reads a path again on a miss.

vLLM's classes decide when files are read. Only the reading itself is replaced: an adapter is the bytes of its files.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.identity.adapter_reads import AdapterReads
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager


def content_of(folder: Path) -> bytes:
    """What an engine gets that reads the adapter now."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        raise FileNotFoundError(folder)
    return b"".join(path.read_bytes() for path in files)


def replace_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's workers read adapters of any files. Whoever watches them read has to begin afterwards."""

    def read(self: Any, lora_request: Any) -> Any:
        return SimpleNamespace(id=lora_request.lora_int_id, content=content_of(Path(lora_request.lora_path)))

    read.any_files = True  # type: ignore[attr-defined]
    if not hasattr(WorkerLoRAManager._load_adapter, "any_files"):
        monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", read)


class _Models(LRUCacheLoRAModelManager):
    def __init__(self, cpu: int, slots: int) -> None:
        self.lora_config: Any = SimpleNamespace(max_cpu_loras=cpu, max_loras=slots)
        self._registered_adapters = AdapterLRUCache(cpu, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(slots, self._deactivate_adapter)
        self.lora_index_to_id: list[int | None] = []

    def _add_adapter(self, lora: Any) -> None:
        self._registered_adapters[lora.id] = lora

    def activate_adapter(self, lora_id: int) -> bool:
        return lora_id in self._registered_adapters


class OwnReads(AdapterReads):
    """Hears one store alone: engines are processes of their own."""

    def __init__(self, rank: int, store: AdapterStore) -> None:
        self._reader = id(store.manager)
        super().__init__(rank)

    def heard(self, reader: int, load: int, path: str, state: str) -> None:
        if reader == self._reader:
            super().heard(reader, load, path, state)


class AdapterStore:
    """The adapters of one rank."""

    def __init__(self, max_cpu_loras: int) -> None:
        self.manager: Any = object.__new__(LRUCacheWorkerLoRAManager)
        self.manager._adapter_manager = _Models(max_cpu_loras, slots=64)
        self.contents: set[bytes] = set()  # that were ever computed with

    def add(self, lora_request: Any) -> None:
        """`add_lora` of vLLM's API: read now, before any request comes."""
        self.manager.add_adapter(lora_request)

    def activate(self, lora_requests: list[Any]) -> None:
        """Before a forward: every adapter of the batch is there."""
        for lora_request in {request.lora_int_id: request for request in lora_requests}.values():
            self.manager.add_adapter(lora_request)

    def content(self, lora_request: Any) -> bytes:
        """What the rank computes this request with."""
        content: bytes = self.manager._adapter_manager.get_adapter(lora_request.lora_int_id).content
        self.contents.add(content)
        return content
