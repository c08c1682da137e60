"""A scripted engine with a second connector next to kvdepot, as vLLM's MultiConnector calls the two.

kvdepot is asked first. What it has not, the other one loads: within the step, or asynchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.fakes.rank_memory import RankMemory
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine


class SiblingEngine(ScriptedEngine):
    """For models with attention alone: vLLM takes failed blocks from no other.

    `sibling_tokens`: so many of each prompt the other one has. `sibling_async`: how it loads. `sibling_fails`: its next
    load within a step gets its first two blocks alone. `sibling_is_kvdepot`: what `WeightedMultiConnector` tells.
    """

    sibling_tokens = 0
    sibling_async = False
    sibling_fails = False
    sibling_is_kvdepot = False

    def __init__(self, *args: Any, **options: Any) -> None:
        self._invalid_blocks: set[int] = set()  # reported in the next step with tokens
        self._unsound_steps = 0  # may read anything: vLLM drops their output
        self._chosen: set[str] = set()
        self._arriving: set[str] = set()
        super().__init__(*args, **options)
        self._ask, self._allocated = (
            self.connector.get_num_new_matched_tokens, self.connector.update_state_after_alloc
        )  # fmt: skip
        self.connector.get_num_new_matched_tokens = self._matched
        self.connector.update_state_after_alloc = self._allocate

    def fail_blocks(self, block_ids: Iterable[int]) -> None:
        """Report blocks as not loaded in the next step. An engine that runs ahead takes one more before it hears."""
        self._invalid_blocks = set(block_ids)
        self._unsound_steps = 1 + self._ahead

    def _matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        own: tuple[int | None, bool] = self._ask(request, local)
        self._chosen.discard(request.request_id)
        whole = (request.num_tokens - 1) // BLOCK * BLOCK
        tokens = min(self.sibling_tokens, whole) - local
        if own[0] != 0 or tokens <= 0:
            return own
        self._chosen.add(request.request_id)
        return tokens, self.sibling_async

    def _allocate(self, request: Any, blocks: Any, tokens: int) -> None:
        chosen = request.request_id in self._chosen
        self._allocated(request, blocks, 0 if chosen else tokens)
        if not chosen or not tokens:
            return
        if self.sibling_is_kvdepot:
            self.connector.sibling_loads(request, tokens)
        if self.sibling_async:
            self._arriving.add(request.request_id)
        ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        begin = (min(self.sibling_tokens, (request.num_tokens - 1) // BLOCK * BLOCK) - tokens) // BLOCK
        end = begin + tokens // BLOCK
        if self.sibling_fails and not self.sibling_async:
            self.sibling_fails = False
            self.fail_blocks(ids[0][begin + 2 : end])
            end = begin + 2
        for memory in self.memories:
            for group, table in zip(memory.layout.kv_cache_groups, ids, strict=True):
                for name in group.layer_names:
                    for index in (index for index in range(begin, end) if table[index]):
                        memory.write("kv", name, table[index], request.all_token_ids[: (index + 1) * BLOCK])

    def _visit(self, rank: int, request_id: str, before: int, after: int) -> Callable[[RankMemory], None]:
        visit = super()._visit(rank, request_id, before, after)
        if not self._unsound_steps:
            return visit

        def unchecked(memory: RankMemory) -> None:
            try:
                visit(memory)
            except AssertionError:
                return

        return unchecked

    def _rank_output(self, rank: int, scheduled: Any, sampled: dict[str, list[int]]) -> Any:
        output = super()._rank_output(rank, scheduled, sampled)
        if scheduled.num_scheduled_tokens:
            output.kv_connector_output.invalid_block_ids = set(self._invalid_blocks)
        if not scheduled.num_scheduled_tokens:
            output.kv_connector_output.finished_recving = (
                output.kv_connector_output.finished_recving or set()
            ) | self._arriving
        return output

    def step(self) -> Any:
        scheduled = super().step()
        if scheduled.num_scheduled_tokens:
            self._invalid_blocks = set()
            self._unsound_steps = max(0, self._unsound_steps - 1)
        else:
            self._arriving.clear()
        return scheduled
