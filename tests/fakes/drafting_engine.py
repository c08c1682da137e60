"""A scripted engine that speculates: drafts are made, verified and rejected, on vLLM's own scheduler and block pool.

What vLLM's workers do with drafts is done here, by the code of vLLM 0.32 that each method names: block tables that only
grow, a running state with scratch columns behind it, the copies of states before a forward and after sampling, and the
KV of a draft model or MTP layer. Each forward checks every byte that it reads, and so does each forward of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tests.fakes.call_orders import DRAFT_FORWARD, POSTPROCESS, V1_DEFERRED
from tests.fakes.direct_session import DirectDepot
from tests.fakes.draft_audit import DraftAudit
from tests.fakes.drafting_memory import HISTORY, DraftingMemory, after, chain_of, chunk_end, state_shapes
from tests.fakes.scripted_engine import (
    CONTEXT,
    VOCABULARY,
    ScriptedEngine,
    cache_layout,
    engine_config,
    next_token,
)

DRAFT_LAYER: Final = "d0"
FROM_TOKENS: Final = ("ngram", "ngram_gpu", "suffix")
"""Methods without KV of their own."""
PLACEHOLDER: Final = -1


@dataclass
class Held:
    """What the workers know of a request between two steps."""

    tables: list[list[int]]  # by group; they only grow, whatever the scheduler does with its own
    computed: int  # tokens
    column: int | None = None  # of the running state
    accepted: int = 1  # tokens of the last step; the state after them is `accepted - 1` scratch columns further
    drafts: list[int] = field(default_factory=list)  # for the next step
    spoilt: bool = False  # vLLM has computed a wrong state of it, by no fault of a connector's


@dataclass
class Row:
    """What a step does for a request."""

    request_id: str
    held: Held
    before: int  # tokens that are computed
    count: int  # tokens of this step, with drafts
    drafts: list[int]
    speculative: bool  # the state after each token is kept, in a column of its own
    padded: bool  # the drafts are placeholders, with which vLLM fills up a row of one token
    loaded: bool  # it begins where a load has ended
    known: list[int]  # tokens before the step
    sampled: list[int]
    column: int = 0
    moved_from: int | None = None  # column of the running state before the step
    bias: int = 0

    @property
    def chain(self) -> list[bytes]:
        """By position: the digest of what the step computes with. Rejected drafts are in it."""
        return chain_of((*self.known, *self.drafts)[: self.before + self.count])

    @property
    def end(self) -> int:
        """Tokens that are computed after the step, without rejected drafts."""
        rejected = len(self.drafts) - max(len(self.sampled) - 1, 0)
        return self.before + self.count - rejected


class DraftingEngine(ScriptedEngine):
    """One engine with drafts, stepped by the test."""

    def __init__(
        self,
        depot: DirectDepot,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        method: str = "mtp",
        draft_tokens: int = 2,
        acceptance: float = 0.5,
        seed: int = 0,
        order: tuple[str, ...] = V1_DEFERRED,
        **options: Any,
    ) -> None:
        """`method`: as vLLM calls it. `draft_tokens`: of a step. `acceptance`: the share of drafts that are right.

        `order`: with `V1`, states are copied and drafts computed after all calls, as in no engine that drafts: there
        the connector's copies are earliest.
        """
        self._method = method
        self._draft_tokens = draft_tokens
        self._acceptance = acceptance
        self._random = Random(f"drafts {seed}")
        self._v2 = "finish_forward" in order
        self._held: dict[str, Held] = {}
        self._rows: dict[str, Row] = {}
        self._loaded: set[str] = set()  # requests that resume from what the connector has loaded
        self.rejected = self.accepted = 0
        self._spoilt = b""
        self._draft_audit = DraftAudit(depot, DRAFT_LAYER, self.lookahead_tokens)
        super().__init__(depot, folder, monkeypatch, order=order, **options)
        self._spoilt = f"spoilt by {self.name}".encode()
        for worker, memory in zip(self.workers, self.memories, strict=True):
            self._draft_audit.follow(worker, memory, self.requests)

    # --- what it is made of

    def _engine_config(self, folder: Path, **options: Any) -> VllmConfig:
        """vLLM's own resolving of draft models takes seconds, and leads to these values."""
        runner = "VLLM_USE_V2_MODEL_RUNNER"
        self._monkeypatch.setenv(runner, "0")  # the other one needs Triton, and so a GPU
        config = engine_config(folder, drafts=self._draft_tokens, **options)
        self._monkeypatch.setenv(runner, str(int(self._v2)))
        speculative: Any = config.speculative_config
        speculative.method = self._method
        if self._method not in FROM_TOKENS:
            speculative.model = str(folder)  # as that of MTP layers
            speculative.draft_model_config = config.model_config
            speculative.draft_parallel_config = config.parallel_config
        return config

    def _cache_layout(self, **options: Any) -> KVCacheConfig:
        """The draft layer lies in the group of its spec. vLLM marks that of MTP layers."""
        layout = cache_layout(**options)
        drafts = self._method not in FROM_TOKENS
        full = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in layout.kv_cache_groups]
        groups = []
        for group, is_full in zip(layout.kv_cache_groups, full, strict=True):
            spec, names = group.kv_cache_spec, list(group.layer_names)
            if isinstance(spec, MambaSpec):
                spec = replace(
                    spec,
                    num_speculative_blocks=self._draft_tokens,
                    shapes=state_shapes(self._draft_tokens),
                    dtypes=spec.dtypes * 2,
                )
            if is_full and drafts:
                names.append(DRAFT_LAYER)
            groups.append(KVCacheGroupSpec(names, spec, is_eagle_group=is_full and self._method == "mtp"))
        layout.kv_cache_groups = groups
        return layout

    def _rank_memory(self, layout: KVCacheConfig, rank: int) -> DraftingMemory:
        return DraftingMemory(layout, rank)

    @property
    def lookahead_tokens(self) -> int:
        """Tokens after a position on which the drafter's KV at it depends."""
        return int(self._method in ("eagle", "eagle3", "mtp"))

    # --- a step

    def generate(self, prompt: Sequence[int], max_tokens: int = 4) -> list[int]:
        request_id = self.add(prompt, max_tokens)
        self.run()
        return self.answer(request_id)

    def answer(self, request_id: str) -> list[int]:
        """What vLLM has given of a request. Drafts may have been right beyond its end."""
        return list(self.requests[request_id].output_token_ids)

    def step(self) -> Any:
        scheduled = super().step()
        if scheduled.num_scheduled_tokens and not self._ahead:  # v1/engine/core.py, post_step
            drafts = {name: list(self._held[name].drafts) for name in scheduled.num_scheduled_tokens}
            self.scheduler.update_draft_token_ids(DraftTokenIds([*drafts], [*drafts.values()]))
        return scheduled

    def _read(self, scheduled: Any, output: ModelRunnerOutput) -> None:
        kv = output.kv_connector_output
        assert kv is not None
        self._loaded |= (kv.finished_recving or set()) - kv.failed_recving
        super()._read(scheduled, output)

    def _sampled(self, scheduled: Any) -> dict[str, list[int]]:
        """Plan the step for all ranks. Return the accepted drafts of each request, and the token after them."""
        self._admit(scheduled)
        self._rows = {name: self._row(name, count, scheduled) for name, count in scheduled.num_scheduled_tokens.items()}
        for row in self._rows.values():
            self._finish_row(row)
        return {name: row.sampled for name, row in self._rows.items()}

    def _admit(self, scheduled: Any) -> None:
        """Take over block tables: v1/worker/gpu_model_runner.py and v1/worker/gpu/model_runner.py, _update_states."""
        for name in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self._held.pop(name, None)
            self._loaded.discard(name)
            self._draft_audit.left(name)
        for new in scheduled.scheduled_new_reqs:  # in the V2 runner also those that resume
            self._admit_one(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        told = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, blocks, computed in told:
            if name in cached.resumed_req_ids:
                assert blocks is not None
                self._admit_one(name, blocks, computed)
                continue
            held = self._held[name]
            for table, ids in zip(held.tables, blocks or [()] * len(held.tables), strict=True):
                table += ids
            assert held.computed == computed or (self._ahead and held.computed < computed), name

    def _admit_one(self, name: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        self._held[name] = Held([list(ids) for ids in blocks], computed)
        self._draft_audit.admitted(name, computed)

    def _row(self, name: str, count: int, scheduled: Any) -> Row:
        held, known = self._held[name], list(self.tokens[name])
        drafts = list(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        padded = bool(drafts) and not held.drafts
        if drafts and self._ahead and not padded:  # the scheduler knows their number alone
            drafts = held.drafts[: len(drafts)] + [PLACEHOLDER] * (len(drafts) - len(held.drafts))
        # v1/worker/gpu_model_runner.py, _prepare_inputs, num_decode_draft_tokens
        decodes = held.computed >= self.requests[name].num_prompt_tokens and count == 1
        speculative = decodes or (bool(drafts) and count == len(drafts) + 1)
        row = Row(name, held, held.computed, count, drafts, speculative, padded, name in self._loaded, known, [])
        self._loaded.discard(name)
        if row.before + count >= len(known):
            row.sampled = [next_token(known)]
            for draft in drafts:
                if draft != row.sampled[-1]:
                    break
                row.sampled.append(next_token((*known, *row.sampled)))
        return row

    def _finish_row(self, row: Row) -> None:
        """What the workers know after the step, and the next drafts."""
        held = row.held
        self._place_state(row)
        held.computed = row.end
        held.accepted = max(len(row.sampled), 1)
        self.accepted += max(len(row.sampled) - 1, 0)
        self.rejected += len(row.drafts) - max(len(row.sampled) - 1, 0)
        tokens = [*row.known, *row.sampled]
        held.drafts = []
        for _ in range(self._draft_tokens if row.sampled else 0):
            right = next_token((*tokens, *held.drafts))
            held.drafts.append(right if self._random.random() < self._acceptance else (right + 1) % VOCABULARY)

    def _place_state(self, row: Row) -> None:
        """Find the columns of the running state: v1/worker/mamba_utils.py, preprocess_mamba."""
        block = next((g.kv_cache_spec.block_size for g in self._state_groups), None)
        if block is None:
            return
        held = row.held
        before = held.column if held.column is not None else (row.before - 1) // block
        row.column = -(-(row.before + row.count) // block) - 1
        row.bias = held.accepted - 1
        if before not in (-1, row.column):
            row.moved_from = before
        held.column = row.column

    @property
    def _state_groups(self) -> list[KVCacheGroupSpec]:
        return [group for group in self.layout.kv_cache_groups if isinstance(group.kv_cache_spec, MambaSpec)]

    # --- the target's forward

    def _visit(self, rank: int, request_id: str, before: int, after: int) -> Callable[[Any], None]:
        del before, after  # by the scheduler, which counts on drafts that may have been rejected
        row = self._rows[request_id]

        def visit(memory: DraftingMemory) -> None:
            for group, table in zip(memory.layout.kv_cache_groups, row.held.tables, strict=True):
                spec = group.kv_cache_spec
                for name in group.layer_names:
                    where = f"{request_id}: rank {rank}, layer {name}"
                    if isinstance(spec, MambaSpec):
                        self._compute_state(memory, name, table, row, where)
                    elif name != DRAFT_LAYER:
                        window = getattr(spec, "sliding_window", None) or row.before + 1
                        self._compute_attention(memory, name, table, row, window, where)

        return visit

    def _compute_attention(
        self, memory: DraftingMemory, name: str, table: list[int], row: Row, window: int, where: str
    ) -> None:
        chain = row.chain
        for position in range(max(row.before - window + 1, 0), row.before):
            found = memory.slot_holds(name, table, position, chain[position])
            assert found, f"{where} reads wrong bytes of token {position}, {row.before} computed"
        for position in range(row.before, row.before + row.count):
            memory.write_slot(name, table, position, chain[position])

    def _compute_state(self, memory: DraftingMemory, name: str, table: list[int], row: Row, where: str) -> None:
        """Compute a state from the one before, in place (v1/attention/backends/gdn_attn.py).

        A speculative row keeps the state after each of its tokens, so that drafts can be rejected. Other rows have no
        drafts before them.

        The state after a row that vLLM has padded with placeholders is wrong: they are not rejected. Measured with the
        V1 runner, whose tokens are wrong from the second one on. If a load has led to it, that is found in the next
        step. vLLM's own hits may lead to it, too: such states must never be found where they were loaded.
        """
        chain, column = row.chain, row.column
        bias = row.bias
        if row.moved_from is not None:
            memory.move_state(name, table, row.moved_from, column, bias)
            bias = 0
        if row.before:
            assert row.speculative or not bias
            found = memory.holds_temporal(name, table[column + bias], chain[row.before - 1])
            found &= memory.holds_inputs(name, table[column], bias, chain, row.before)
            row.held.spoilt |= memory.holds_temporal(name, table[column + bias], chain[row.before - 1] + self._spoilt)
            assert found or row.held.spoilt, f"{where} resumes at {row.before} without the state"
        end = row.before + row.count
        row.held.spoilt |= row.padded and not row.loaded
        wrong = self._spoilt if row.held.spoilt else b""
        if row.padded or not row.speculative:
            memory.write_temporal(name, table[column], chain[end - 1] + wrong)
            memory.write_inputs(name, table[column], chain, end - HISTORY, end)
        else:
            memory.write_inputs(name, table[column], chain, row.before + 1 - HISTORY, end)
            for token in range(row.count):
                memory.write_temporal(name, table[column + token], chain[row.before + token] + wrong)
        written = row.count if row.speculative else 1
        for scratch in table[column + written : column + 1 + self._draft_tokens]:
            memory.poison_state(name, scratch)

    # --- after sampling

    def _postprocess(self, rank: int) -> None:
        """Copy the state at the last boundary into its block: v1/worker/mamba_utils.py, postprocess_mamba."""
        memory = self.memories[rank]
        for row in self._rows.values():
            running = row.before + row.count - len(row.drafts)
            for group, table in zip(memory.layout.kv_cache_groups, row.held.tables, strict=True):
                spec = group.kv_cache_spec
                if not isinstance(spec, MambaSpec):
                    continue
                boundary = row.end // spec.block_size * spec.block_size
                if boundary < running:
                    continue
                target = boundary // spec.block_size - 1
                if target == row.column:
                    row.held.accepted = 1
                if (target, boundary) != (row.column, running):
                    for name in group.layer_names:
                        memory.move_state(name, table, row.column, target, boundary - running)

    # --- the drafter's forward

    def _draft_forward(self, rank: int) -> None:
        """Compute the KV of draft layers, and check what that reads (v1/spec_decode/llm_base_proposer.py, propose)."""
        memory = self.memories[rank]
        for row in self._rows.values():
            for group, table in zip(memory.layout.kv_cache_groups, row.held.tables, strict=True):
                if DRAFT_LAYER in group.layer_names:
                    self._check_drafter(memory, table, row, rank)
                    (self._draft_ahead if self.lookahead_tokens else self._draft)(memory, table, row)

    def _check_drafter(self, memory: DraftingMemory, table: list[int], row: Row, rank: int) -> None:
        chain = row.chain
        for position in range(row.before):
            right = [chain[position]]
            if self.lookahead_tokens:
                right = [after(chain[position], row.known[position + 1]), chunk_end(chain[position])]
            if any(memory.slot_holds(DRAFT_LAYER, table, position, digest) for digest in right):
                continue
            own = self._draft_audit.is_own(memory, row.request_id, table, position, chain[position])
            stale = f"{row.request_id}: rank {rank}, stale draft KV of token {position}, {row.before} computed"
            assert own, stale

    def _draft_ahead(self, memory: DraftingMemory, table: list[int], row: Row) -> None:
        """MTP and EAGLE: the KV at a position is computed from the target's hidden state and the next token."""
        chain, tokens = row.chain, [*row.known, *row.sampled]
        for position in range(row.before, row.before + row.count):
            if position >= row.end:
                memory.poison_slot(DRAFT_LAYER, table, position)  # of a rejected draft
            elif position == row.end - 1 and not row.sampled and not self._v2:
                memory.write_slot(DRAFT_LAYER, table, position, chunk_end(chain[position]))
            else:
                memory.write_slot(DRAFT_LAYER, table, position, after(chain[position], tokens[position + 1]))
                self._draft_audit.computed(memory, table, position, chain[position])
        for position in range(row.end, min(row.end + self._draft_tokens - 1, CONTEXT)):
            memory.poison_slot(DRAFT_LAYER, table, position)  # from the drafter's own hidden states

    def _draft(self, memory: DraftingMemory, table: list[int], row: Row) -> None:
        """A draft model: the KV at a position is computed from the tokens up to it. Rejected ones are left out."""
        tokens = [*row.known, *row.sampled][: row.end + 1] if row.sampled else row.known[: row.end]
        drafted = chain_of((*tokens, *row.held.drafts[:-1]))
        for position in range(row.before, min(len(drafted), CONTEXT)):
            memory.write_slot(DRAFT_LAYER, table, position, drafted[position])
        if not row.sampled:  # the next token is taken for the last known one
            memory.poison_slot(DRAFT_LAYER, table, row.end)

    def _rank_output(self, rank: int, scheduled: Any, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        output = super()._rank_output(rank, scheduled, sampled)
        if POSTPROCESS not in self._order:
            self._postprocess(rank)
        if DRAFT_FORWARD not in self._order:
            self._draft_forward(rank)
        return output
