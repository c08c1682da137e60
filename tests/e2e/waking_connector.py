"""vLLM 0.33's calls around a sleep, for engines of any version and platform: the CPU backend has no sleep mode.

The connector hears the handshake again with the first request after a `reset_cache`: in 0.33 `wake_up` says it, before
the scheduler goes on. `Sleeper` is the worker's half, called by `collective_rpc`.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

import torch
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.connector import KVDepotConnector
from vllm.distributed.kv_transfer import get_kv_transfer_group


class WakingConnector(KVDepotConnector):
    """Says again what it was told at the start."""

    _said: bytes = b""
    _asleep = False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._said = pickle.dumps(metadata)
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    def reset_cache(self) -> bool | None:
        self._asleep = True
        return super().reset_cache()

    def on_new_request(self, request: Any) -> None:
        if self._asleep:
            self._asleep = False
            self.set_xfer_handshake_metadata_pp_aware(pickle.loads(self._said))
        super().on_new_request(request)


class Sleeper:
    """vLLM's `worker_extension_cls`."""

    model_runner: Any

    def take_kv_memory(self) -> None:
        get_kv_transfer_group().unregister_kv_caches()

    def give_kv_memory(self) -> None:
        get_kv_transfer_group().restore_kv_caches()

    def scale_weights(self, factor: float) -> None:
        """Powers of two are exact: what was multiplied and divided is what it was."""
        with torch.no_grad():
            for name, parameter in self.model_runner.model.named_parameters():
                if "layers.0" in name and "norm" in name:
                    parameter.mul_(factor)

    def kvdepot_threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvdepot"))


compat.register(WakingConnector)
