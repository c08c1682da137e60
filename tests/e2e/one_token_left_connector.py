"""The connector without its padding rule: a load may leave one token to compute, also where vLLM would pad it."""

from __future__ import annotations

from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.connector import KVDepotConnector
from kvdepot.core.planner import Planner


class OneTokenLeftConnector(KVDepotConnector):
    """`KVDepotConnector`, but for the deepest boundary that it offers."""


def _high_boundary(self: Planner, num_tokens: int) -> int:
    return max(num_tokens - 1, 0) // self.chunk_tokens * self.chunk_tokens


Planner.high_boundary = _high_boundary  # type: ignore[method-assign]
compat.register(OneTokenLeftConnector)
