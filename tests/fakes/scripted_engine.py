"""A vLLM engine without a model: the real Scheduler and block pool, the real connector on both sides, and
a "forward" that writes bytes which are a function of the token prefix.

Before it computes, the forward checks every byte it would read: whoever put the wrong
bytes into a block, or none, is found out in that step. The tokens it samples depend on
the prefix alone, so they are equal however the prefix came to be.
"""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvdepot.client.vllm import connector as connector_module
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.fakes.direct_session import Depot, DirectAttachment, DirectSession

BLOCK = 16
VOCABULARY = 1000
ATTENTION_LAYERS = ("a0", "a1")
STATE_GROUPS = ("s0", "s1")
CONTEXT = 4096


def model_folder(folder: Path) -> Path:
    """A model by its configuration alone, with a file that stands for its weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 64, "max_position_embeddings": CONTEXT, "torch_dtype": "float32",
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@functools.cache
def _model_config(folder: str) -> ModelConfig:
    """Resolving an architecture takes seconds; the result is only read."""
    return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=CONTEXT)


def engine_config(
    folder: Path,
    *,
    hybrid: bool = False,
    settings: dict[str, Any] | None = None,
    policy: str = "recompute",
    step_tokens: int = 2048,
    ranks: int = 1,
    cache: dict[str, Any] | None = None,
) -> VllmConfig:
    """A resolved configuration of a real engine."""
    extra = {"endpoint": "unix:///tmp/none.sock", "chunk_tokens": BLOCK, "min_load_tokens": 1} | (settings or {})
    config = VllmConfig(
        model_config=_model_config(str(folder)),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=step_tokens,
            max_model_len=CONTEXT,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, **({"enable_prefix_caching": True} | (cache or {}))),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVDepotConnector",
            kv_connector_module_path="kvdepot.client.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        ),
    )
    config.cache_config.mamba_cache_mode = "align" if hybrid else "none"
    config.parallel_config.world_size = ranks
    config.parallel_config.tensor_parallel_size = ranks
    return config


def cache_layout(*, hybrid: bool, blocks: int, retention: int | None) -> KVCacheConfig:
    """One attention group of two layers, and with `hybrid` two recurrent groups."""
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(list(ATTENTION_LAYERS), full)]
    if hybrid:
        state = MambaSpec(
            block_size=BLOCK, shapes=((3, 7),), dtypes=(torch.float32,), page_size_padded=2048, mamba_cache_mode="align"
        )
        groups = [*(KVCacheGroupSpec([name], state) for name in STATE_GROUPS), *groups]
    layout = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    layout.prefix_cache_retention_interval = retention if hybrid else None  # vLLM refuses it for attention alone
    layout.hash_block_size = BLOCK
    return layout


def pattern(kind: str, layer: str, rank: int, tokens: Sequence[int], size_bytes: int) -> np.ndarray[Any, Any]:
    """The bytes that a layer holds of a prefix."""
    seed = blake2b(repr((kind, layer, rank, list(tokens))).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed, "little")).integers(0, 256, size_bytes, dtype=np.uint8)


def next_token(tokens: Sequence[int]) -> int:
    return int.from_bytes(blake2b(repr(list(tokens)).encode(), digest_size=4).digest(), "little") % VOCABULARY


class RankMemory:
    """The KV tensors of one rank. Layers of different groups overlay each other, as in vLLM."""

    def __init__(self, layout: KVCacheConfig, rank: int) -> None:
        self.rank = rank
        self.layout = layout
        page = 2048
        self.raw = torch.zeros(2 * layout.num_blocks * page, dtype=torch.int8)
        self.caches: dict[str, torch.Tensor] = {}
        for group in layout.kv_cache_groups:
            for place, name in enumerate(group.layer_names):
                if isinstance(group.kv_cache_spec, MambaSpec):
                    size, shape = 84, (layout.num_blocks, 1, 1, 84)
                else:
                    size, shape = 1024, (layout.num_blocks, 1, BLOCK, 64)
                self.caches[name] = torch.as_strided(
                    self.raw, shape, (page, size, shape[3], 1), place * layout.num_blocks * page
                )

    def block(self, layer: str, block_id: int) -> torch.Tensor:
        return self.caches[layer][block_id].view(-1)

    def write(self, kind: str, layer: str, block_id: int, tokens: Sequence[int]) -> None:
        block = self.block(layer, block_id)
        block.copy_(torch.from_numpy(pattern(kind, layer, self.rank, tokens, block.numel()).view(np.int8)))

    def holds(self, kind: str, layer: str, block_id: int, tokens: Sequence[int]) -> bool:
        block = self.block(layer, block_id)
        return bool((block.numpy().view(np.uint8) == pattern(kind, layer, self.rank, tokens, block.numel())).all())


class ScriptedEngine:
    """One engine, stepped by the test."""

    _names = itertools.count()

    def __init__(
        self,
        depot: Depot,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        hybrid: bool = False,
        ranks: int = 1,
        blocks: int = 64,
        retention: int | None = None,
        **config: Any,
    ) -> None:
        self.depot = depot
        self.ranks = ranks
        self.name = f"engine-{next(self._names)}"
        self.session = DirectSession(depot, self.name, ranks)
        self.attachments = [DirectAttachment(depot) for _ in range(ranks)]
        attach = iter(self.attachments)
        monkeypatch.setattr(connector_module, "DepotSession", lambda *_, **__: self.session)
        monkeypatch.setattr(connector_module, "Attachment", lambda *_, **__: next(attach))
        self.layout = cache_layout(hybrid=hybrid, blocks=blocks, retention=retention)
        self.memories = [RankMemory(self.layout, rank) for rank in range(ranks)]
        self.workers = []
        for memory in self.memories:
            own = engine_config(folder, hybrid=hybrid, ranks=ranks, **config)
            own.parallel_config.rank = memory.rank
            worker = connector_module.KVDepotConnector(own, KVConnectorRole.WORKER, self.layout)
            worker.register_kv_caches(memory.caches)
            self.workers.append(worker)
        self.config = engine_config(folder, hybrid=hybrid, ranks=ranks, **config)
        self.config.cache_config.num_gpu_blocks = blocks
        self.scheduler = Scheduler(
            self.config, self.layout, StructuredOutputManager(self.config), BLOCK, BLOCK, log_stats=False
        )
        self.connector: Any = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}
        self.loaded_reports: list[str] = []
        self.failed_reports: list[str] = []
        while self.side is not None and not (self.side.namespaces.usable and self.side.namespaces.ranks_ready):
            assert not self.side.namespaces.problem, self.side.namespaces.problem
            self.step()

    @property
    def side(self) -> Any:
        return self.connector.scheduler_side

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    # --- requests

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **kwargs: Any) -> str:
        request_id = f"{self.name}-r{len(self.tokens)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kwargs.pop("params", {}))
        request = Request(request_id, list(prompt), params, None, block_hasher=self._hasher, **kwargs)
        self.tokens[request_id] = list(prompt)
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def generate(self, prompt: Sequence[int], max_tokens: int = 4) -> list[int]:
        """One request, alone, to its end and the end of its stores."""
        request_id = self.add(prompt, max_tokens)
        self.run()
        return self.outputs[request_id]

    def run(self, steps: int = 3000) -> None:
        """Step as vLLM's engine does, until there is nothing left to do."""
        for _ in range(steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"still busy after {steps} steps: {self.side.counters}")

    def settle(self, seconds: float = 0.05) -> None:
        """Some steps, with time for the copying threads between them."""
        for _ in range(3):
            self.step()
            time.sleep(seconds)
        self.step()

    # --- a step

    def step(self) -> Any:
        """One scheduler step, on every rank."""
        scheduled = self.scheduler.schedule()
        for rank in range(self.ranks):
            self._check_and_compute(rank, scheduled)
        outputs = [self._rank_output(rank, scheduled) for rank in range(self.ranks)]
        output = self._aggregator.aggregate(outputs) if self.ranks > 1 else outputs[0]
        assert output is not None
        kv = output.kv_connector_output
        assert kv is not None
        self.loaded_reports += sorted((kv.finished_recving or set()) - kv.failed_recving)
        self.failed_reports += sorted(kv.failed_recving)
        self.scheduler.update_from_output(scheduled, output)
        if not scheduled.num_scheduled_tokens:
            time.sleep(0.001)
        return scheduled

    def _check_and_compute(self, rank: int, scheduled: Any) -> None:
        memory = self.memories[rank]
        for block_id in scheduled.new_block_ids_to_zero or ():
            for name in ATTENTION_LAYERS:
                memory.block(name, block_id).zero_()
        for new in scheduled.scheduled_new_reqs:
            self.hits[new.req_id] = new.num_computed_tokens
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in scheduled.num_scheduled_tokens.items():
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            before = computed[request_id]
            for group, table in zip(self.layout.kv_cache_groups, tables, strict=True):
                self._visit(memory, group, table, request_id, before, before + count)

    def _visit(
        self, memory: RankMemory, group: Any, table: list[int], request_id: str, before: int, after: int
    ) -> None:
        tokens = self.tokens[request_id]
        for name in group.layer_names:
            if isinstance(group.kv_cache_spec, MambaSpec):
                if before:
                    found = memory.holds("state", name, table[(before - 1) // BLOCK], tokens[:before])
                    assert found, f"{request_id}: rank {memory.rank} resumes at {before} without the state of {name}"
                memory.write("state", name, table[(after - 1) // BLOCK], tokens[:after])
                continue
            for index in range(before // BLOCK):
                found = memory.holds("kv", name, table[index], tokens[: (index + 1) * BLOCK])
                assert found, f"{request_id}: rank {memory.rank} reads wrong bytes in block {index} of {name}"
            for index in range(before // BLOCK, after // BLOCK):
                memory.write("kv", name, table[index], tokens[: (index + 1) * BLOCK])

    def _rank_output(self, rank: int, scheduled: Any) -> ModelRunnerOutput:
        worker = self.workers[rank]
        meta = pickle.loads(pickle.dumps(scheduled.kv_connector_metadata))
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        kv = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=pickle.loads(pickle.dumps(worker.build_connector_worker_meta())),
        )
        worker.clear_connector_metadata()
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [self._sample(request_id, scheduled, rank) for request_id in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=kv,
        )

    def _sample(self, request_id: str, scheduled: Any, rank: int) -> list[int]:
        """A token when the step reached the end of what is known; rank 0's counts."""
        request = self.scheduler.requests[request_id]
        if request.num_computed_tokens < request.num_tokens:
            return []
        tokens = self.tokens[request_id]
        if rank:
            return [tokens[-1]]
        tokens.append(next_token(tokens))
        self.outputs[request_id].append(tokens[-1])
        return [tokens[-1]]

    # --- what must hold at the end

    def reset(self) -> None:
        assert self.scheduler.reset_prefix_cache(), "a block is still in use"

    def assert_clean(self) -> None:
        """No pin, no watch, no lease, no lent extent is left, and nothing was swallowed by a guard."""
        assert not self.side.holds.pinned_blocks
        assert not self.side.holds.held_blocks
        assert not self.side.loads.active
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert self.depot.lent() == 0
        for connector in (self.connector, *self.workers):
            assert not connector.failures.counts, connector.failures.counts

    def close(self) -> None:
        for connector in (*self.workers, self.connector):
            connector.shutdown()


__all__ = ["BLOCK", "Depot", "ScriptedEngine", "cache_layout", "engine_config", "model_folder", "next_token"]
