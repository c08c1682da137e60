"""The audit file: one JSON line per object stored or loaded, with digests of the engine's own blocks.

For tests, and for operators who want proof: equal objects (namespace, key, kind, group, rank) have equal digests
wherever they appear. Off unless a path is set, because it reads every byte a second time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import xxhash
from kvdepot.core.calls import Kind

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.operations import ObjectCopy
    from kvdepot.client.vllm.worker.layers import RankLayers

STORED: Final = "stored"
LOADED: Final = "loaded"


class Audit:
    """Appends to `<path>.<pid>.rank<rank>.jsonl`. Used on the copying thread only."""

    def __init__(self, path: str, rank: int, layers: RankLayers) -> None:
        self._layers = layers
        self._rank = rank
        self._file = Path(f"{path}.{os.getpid()}.rank{rank}.jsonl").open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - lives as long as the rank

    def record(self, event: str, request_id: str, objects: Sequence[ObjectCopy]) -> None:
        """Write digests of the engine's blocks as they are now, block by block in object order."""
        for copied in objects:
            for span in copied.spans:
                line = {
                    "event": event,
                    "request": request_id,
                    "key": copied.key.hex(),
                    "kind": Kind(copied.kind).name.lower(),
                    "boundary_tokens": copied.boundary_tokens,
                    "rank": self._rank,
                    "group": span.group,
                    "first_block": span.object_block,
                    "blocks": [self._digest(span.group, block_id) for block_id in span.block_ids],
                }
                self._file.write(json.dumps(line) + "\n")

    def _digest(self, group: int, block_id: int) -> str:
        """Return XXH3-128 over one block of every layer of the group, in the object's order."""
        total = xxhash.xxh3_128()
        for index in self._layers.of_group(group):
            block = self._layers.views[index][block_id].contiguous().cpu()
            total.update(block.view(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()

    def close(self) -> None:
        self._file.close()
