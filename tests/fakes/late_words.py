"""Ranks' messages to the scheduler side that come twice, late and out of order.

vLLM 0.33 replays what workers said in a step in which one of them failed (`ft_defer_kv_connector_outputs`), merged with
what they say later.
"""

from __future__ import annotations

import copy
from random import Random

from kvdepot.client.vllm.base.metadata import RankMeta


class LateWords:
    """For `ScriptedEngine.deliver`. Every message arrives at least once, and none for ever."""

    def __init__(self, random: Random, *, late: float = 0.3, twice: float = 0.3) -> None:
        """`late`, `twice`: how many of all messages."""
        self._random = random
        self._late = late
        self._twice = twice
        self._waiting: list[RankMeta] = []

    def __call__(self, said: list[RankMeta]) -> list[RankMeta]:
        """What arrives in this step, where the ranks have just said this."""
        arrives: list[RankMeta] = []
        for meta in said:
            if self._random.random() < self._twice:
                self._waiting.append(copy.deepcopy(meta))
            (self._waiting if self._random.random() < self._late else arrives).append(meta)
        for meta in list(self._waiting):
            if self._random.random() < 0.3:
                self._waiting.remove(meta)
                arrives.append(meta)
        self._random.shuffle(arrives)
        return arrives

    def calm(self) -> None:
        """From now on every message comes at once; what waits comes too."""
        self._late = self._twice = 0.0
