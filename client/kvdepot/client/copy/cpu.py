"""Copies for KV tensors in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvdepot.client.arena_map import ArenaMap
    from kvdepot.client.copy.base import CopyBatch, Direction


class CpuCopier:
    """Copies blocks of CPU tensors. Each layer is a view [num_blocks, ...] of any dtype and stride."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of a layer, without padding."""
        raise NotImplementedError

    def copy(self, arena: ArenaMap, batch: CopyBatch, direction: Direction) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        raise NotImplementedError
