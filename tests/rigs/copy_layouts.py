"""Layers of one rank, of every shape that the engine hands out."""

from __future__ import annotations

import torch
from kvdepot.client.copy.native import MOVE_BYTES_MAX

from benchmarks.day_one.copies import filled, layer_sets


def layouts() -> dict[str, list[torch.Tensor]]:
    """Name -> the layers of one rank, of every shape the engine hands out."""
    long_runs = filled((20, 2, 90_000), torch.uint8)[:, :, : MOVE_BYTES_MAX + 1000]
    return layer_sets(torch.device("cpu")) | {"runs of more than one memmove": [long_runs]}
