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
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from kvdepot.client.vllm import connector as connector_module
from kvdepot.client.vllm.base import packages
from kvdepot.client.vllm.identity import file_state
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    WeightTransferConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.fakes.adapter_store import AdapterStore, OwnReads, replace_reading
from tests.fakes.call_orders import DRAFT_FORWARD, FORWARD, POSTPROCESS, V1, V2_LOAD_ARGUMENTS
from tests.fakes.direct_session import DirectAttachment, DirectDepot, DirectSession
from tests.fakes.rank_memory import RankMemory
from tests.fakes.sleep_mode import SleepMode
from tests.fakes.visits import BLOCK, Prefix, Visit

try:
    from vllm.v1.core.kv_cache_planning import _project_kv_cache_groups_to_worker
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker

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
    engine_id: str | None = None,
    pipeline: bool = False,
    drafts: int = 0,
    state_block: int = BLOCK,
    events: bool = False,
    runs_ahead: bool = False,
    weights_arrive: bool = False,
) -> VllmConfig:
    """A resolved configuration of a real engine. `drafts`: speculated tokens a step, of the n-gram kind.

    `events`: it publishes KV events, to nobody. `weights_arrive`: a trainer sends it others than its files have.
    """
    extra: dict[str, Any] = {"endpoint": "unix:///tmp/none.sock", "chunk_tokens": state_block, "min_load_tokens": 1}
    patient = {"lookup_timeout_seconds": 5.0, "lookup_min_seconds": 5.0}  # what is late on a busy machine is no miss
    extra |= patient | (settings or {})
    config = VllmConfig(
        model_config=_model_config(str(folder)),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=step_tokens,
            max_model_len=CONTEXT,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=runs_ahead,
        ),
        cache_config=CacheConfig(block_size=state_block, **({"enable_prefix_caching": True} | (cache or {}))),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVDepotConnector",
            kv_connector_module_path="kvdepot.client.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
            engine_id=engine_id,
        ),
    )
    if weights_arrive:
        config.weight_transfer_config = WeightTransferConfig()
    if events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )  # fmt: skip
    config.cache_config.mamba_cache_mode = "align" if hybrid else "none"
    config.parallel_config.world_size = ranks
    config.parallel_config.tensor_parallel_size = 1 if pipeline else ranks
    config.parallel_config.pipeline_parallel_size = ranks if pipeline else 1
    return config


def cache_layout(
    *,
    hybrid: bool,
    blocks: int,
    retention: int | None,
    state_block: int = BLOCK,
    windows: Sequence[int] = (),
    latent: bool = False,
    mixed: bool = False,
    full: bool = True,
) -> KVCacheConfig:
    """One attention group of two layers, with `hybrid` two recurrent groups, and a group of one layer a window.

    `latent`: attention keeps one latent vector a token, the same on every rank (MLA). `mixed`: its first layer does,
    and the other one keeps heads of its own, as a drafter of another kind. `full` False: windows alone.
    `state_block`: tokens of a block of the recurrent groups; the others have `BLOCK`.
    """
    heads: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": torch.float32}
    own, shared = FullAttentionSpec(head_size=8, **heads), MLAAttentionSpec(head_size=16, max_tp_shards=1, **heads)
    attention: Any = shared if latent else own
    if mixed:
        by_layer = dict(zip(ATTENTION_LAYERS, (shared, own), strict=True))
        attention = UniformTypeKVCacheSpecs(BLOCK, kv_cache_specs=by_layer)
    groups = [KVCacheGroupSpec(list(ATTENTION_LAYERS), attention)] if full else []
    for window in windows:
        sliding = SlidingWindowSpec(head_size=8, sliding_window=window, **heads)
        groups.append(KVCacheGroupSpec([f"w{window}"], sliding))
    if hybrid:
        state = MambaSpec(
            block_size=state_block, shapes=((3, 7),), dtypes=(torch.float32,), page_size_padded=2048,
            mamba_cache_mode="align",
        )  # fmt: skip
        groups = [*(KVCacheGroupSpec([name], state) for name in STATE_GROUPS), *groups]
    layout = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    layout.prefix_cache_retention_interval = retention if hybrid or windows else None  # vLLM refuses it for the rest
    layout.hash_block_size = BLOCK
    return layout


def stage_layout(layout: KVCacheConfig, stage: int, stages: int) -> KVCacheConfig:
    """What one stage of a pipeline has of it, as vLLM tells its workers: the same groups, its own layers of each."""
    specs = {name: group.kv_cache_spec for group in layout.kv_cache_groups for name in group.layer_names[stage::stages]}
    return replace(layout, kv_cache_groups=_project_kv_cache_groups_to_worker(layout.kv_cache_groups, specs))


def next_token(tokens: Sequence[int]) -> int:
    return int.from_bytes(blake2b(repr(list(tokens)).encode(), digest_size=4).digest(), "little") % VOCABULARY


_packages = functools.cache(packages.computing_packages)
"""They stay the same for all engines of a process, and to look for them takes 15 ms of CPU time."""


def _worker(config: VllmConfig, memory: RankMemory) -> Any:
    """The connector of a rank."""
    config.parallel_config.rank = memory.rank
    worker = connector_module.KVDepotConnector(config, KVConnectorRole.WORKER, memory.layout)
    with mock.patch.object(packages, "computing_packages", _packages):
        worker.register_kv_caches(memory.caches)
    return worker


class ScriptedEngine(SleepMode):
    """One engine, stepped by the test."""

    _names = itertools.count()

    def __init__(
        self,
        depot: DirectDepot,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        hybrid: bool = False,
        ranks: int = 1,
        blocks: int = 64,
        retention: int | None = None,
        streams: bool = False,
        state_block: int = BLOCK,
        windows: Sequence[int] = (),
        latent: bool = False,
        mixed: bool = False,
        full: bool = True,
        pipeline: bool = False,
        wait: bool = True,
        heard: int | None = None,
        order: tuple[str, ...] = V1,
        runs_ahead: bool = False,
        max_cpu_loras: int = 8,
        **config: Any,
    ) -> None:
        """`streams`: its ranks do not map the arena, each has a proxy process. `pipeline`: its ranks are stages.

        The groups are `cache_layout`'s. `wait`: until it may load and store. `order`: of the calls in a step.
        `heard`: so many ranks say their facts at the start.
        `runs_ahead`: asynchronous scheduling. A step is scheduled and computed before the scheduler knows the tokens
        of the one before (v1/engine/core.py, step_with_batch_queue).
        """
        self.threads_before = set(threading.enumerate())
        self._order = order
        self._unread: deque[tuple[Any, ModelRunnerOutput]] = deque()  # steps whose output the scheduler has not seen
        self._ahead = int(runs_ahead)
        self.depot = depot
        self.ranks = ranks
        self.name = f"engine-{next(self._names)}"
        self._begin(monkeypatch, max_cpu_loras)
        self._connect(monkeypatch, streams)
        config |= {"engine_id": self.name, "pipeline": pipeline, "state_block": state_block, "runs_ahead": runs_ahead}
        layout = self._cache_layout(
            hybrid=hybrid, blocks=blocks, retention=retention, state_block=state_block, windows=windows, latent=latent,
            mixed=mixed, full=full,
        )  # fmt: skip
        self.layout = generate_scheduler_kv_cache_config([layout])
        self.memories = self._rank_memories(layout, pipeline=pipeline)
        configure = functools.partial(self._engine_config, folder, hybrid=hybrid, ranks=ranks, **config)
        self.workers = [_worker(configure(), memory) for memory in self.memories]
        self.config = configure()
        self.config.cache_config.num_gpu_blocks = blocks
        self.scheduler = (AsyncScheduler if runs_ahead else Scheduler)(
            self.config, self.layout, StructuredOutputManager(self.config), state_block, BLOCK, log_stats=True
        )
        self.connector: Any = self.scheduler.connector
        self._pipeline = pipeline
        self.shake_hands(heard)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.hits: dict[str, int] = {}
        self.handed: dict[str, dict[str, Any]] = {}  # `kv_transfer_params` of outputs
        self.observe: Callable[[Any], None] | None = None  # gets vLLM's statistics of each step
        self.loaded_reports: list[str] = []
        self.failed_reports: list[str] = []
        self.deliver: Callable[[list[Any]], list[Any]] | None = None  # which of the ranks' messages arrive when
        if wait:
            self.wait_attached()

    def wait_attached(self) -> None:
        """Step until the connector may load and store."""
        while self.side is not None and not (self.side.namespaces.registered_id and self.side.namespaces.ranks_ready):
            assert not self.side.namespaces.problem, self.side.namespaces.problem
            self.step()

    def _begin(self, monkeypatch: pytest.MonkeyPatch, max_cpu_loras: int) -> None:
        """The connector that is made next takes this for its process's start."""
        init_none_hash(sha256)
        self._max_cpu_loras = max_cpu_loras
        started_ns = time.time_ns()
        monkeypatch.setattr(file_state, "process_started_ns", lambda: started_ns)
        self._monkeypatch = monkeypatch

    def _connect(self, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
        """The connector that is made next calls the depot directly."""
        depot = self.depot
        self.session = DirectSession(depot, self.name, self.ranks)
        self.proxies = [depot.proxy(attached) for attached in self.session.ranks if streams]
        self.attachments = [DirectAttachment(depot, *self.proxies[rank : rank + 1]) for rank in range(self.ranks)]
        attach = iter(self.attachments)

        depot.engines[self.name] = self

        def session(_endpoint: Any, engine_id: str, world_size: int, **_: Any) -> DirectSession:
            engine = depot.engines[engine_id]
            if engine.session.started:
                engine.session = DirectSession(depot, engine_id, world_size)
            found: DirectSession = engine.session
            return found

        monkeypatch.setattr("kvdepot.client.vllm.scheduling.sides.DepotSession", session)
        monkeypatch.setattr(connector_module, "Attachment", lambda *_, **__: next(attach))

    def _cache_layout(self, **options: Any) -> KVCacheConfig:
        return cache_layout(**options)

    def _rank_memories(self, layout: KVCacheConfig, *, pipeline: bool) -> list[Any]:
        ranks = range(self.ranks)
        layouts = [stage_layout(layout, rank, self.ranks) if pipeline else layout for rank in ranks]
        return [self._rank_memory(layout, rank) for rank, layout in zip(ranks, layouts, strict=True)]

    def _rank_memory(self, layout: KVCacheConfig, rank: int) -> Any:
        return RankMemory(layout, rank)

    def _engine_config(self, folder: Path, **options: Any) -> VllmConfig:
        return engine_config(folder, **options)

    @property
    def side(self) -> Any:
        return self.connector.sides.current if self.connector.sides is not None else None

    @property
    def copies(self) -> list[Any]:
        """The ranks' copying threads."""
        sides: list[Any] = [worker.worker_side for worker in self.workers]
        return [side._copies for side in sides]

    @functools.cached_property
    def adapters(self) -> list[AdapterStore]:
        """Each rank's LoRA adapters. They begin with the first one, as an engine without any imports none of it."""
        replace_reading(self._monkeypatch)
        self.scheduler.lora_config = SimpleNamespace(max_loras=self._max_cpu_loras)  # in one batch
        stores = [AdapterStore(self._max_cpu_loras) for _ in self.workers]
        for rank, worker in enumerate(self.workers):
            worker._adapter_reads = OwnReads(rank, stores[rank])
        return stores

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
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def generate(self, prompt: Sequence[int], max_tokens: int = 4) -> list[int]:
        """One request, alone, to its end and the end of its stores."""
        request_id = self.add(prompt, max_tokens)
        self.run()
        return self.outputs[request_id]

    def run(self, steps: int = 20_000) -> None:
        """Step as vLLM's engine does, until there is nothing left to do."""
        for _ in range(steps):
            if not self.scheduler.has_requests() and not self._unread:
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
        admitted = (new.req_id for new in scheduled.scheduled_new_reqs)  # the V2 runner's are those that resume, too
        for request_id in (*scheduled.scheduled_cached_reqs.resumed_req_ids, *admitted):  # workers are told its tokens
            known = self.requests[request_id].num_tokens
            prompt = len(self.tokens[request_id]) - len(self.outputs[request_id])
            del self.tokens[request_id][known:]
            del self.outputs[request_id][known - prompt :]
        sampled = self._sampled(scheduled)
        outputs = [self._rank_output(rank, scheduled, sampled) for rank in range(self.ranks)]
        for request_id, tokens in sampled.items():
            self.tokens[request_id] += tokens
            self.outputs[request_id] += tokens
        said = [output.kv_connector_output.kv_connector_worker_meta for output in outputs if output.kv_connector_output]
        output = self._aggregator.aggregate(outputs) if self.ranks > 1 else outputs[0]
        assert output is not None and output.kv_connector_output is not None
        if self.deliver is not None:  # merged as vLLM does it
            arrived = self.deliver([meta for meta in said if meta is not None])
            merged = functools.reduce(lambda one, other: one.aggregate(other), arrived) if arrived else None
            output.kv_connector_output.kv_connector_worker_meta = merged
        self._unread.append((scheduled, output))
        while len(self._unread) > (self._ahead if scheduled.num_scheduled_tokens else 0):
            self._read(*self._unread.popleft())
        if not scheduled.num_scheduled_tokens:
            time.sleep(0.001)
        return scheduled

    def _read(self, scheduled: Any, output: ModelRunnerOutput) -> None:
        """The scheduler sees what became of a step."""
        kv = output.kv_connector_output
        assert kv is not None
        self.loaded_reports += sorted((kv.finished_recving or set()) - kv.failed_recving)
        self.failed_reports += sorted(kv.failed_recving)
        for answered in self.scheduler.update_from_output(scheduled, output).values():
            if self.observe is not None and answered.scheduler_stats is not None:
                self.observe(answered.scheduler_stats)
            for output_of_one in answered.outputs:
                if output_of_one.kv_transfer_params is not None:
                    self.handed[output_of_one.request_id] = output_of_one.kv_transfer_params

    def _check_and_compute(self, rank: int, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            self.hits[new.req_id] = new.num_computed_tokens
        loras = [self.requests[name].lora_request for name in scheduled.num_scheduled_tokens]
        if any(loras):
            self.adapters[rank].activate([lora for lora in loras if lora is not None])
        computed = self._computed(scheduled)
        visits = [
            self._visit(rank, request_id, computed[request_id], computed[request_id] + count)
            for request_id, count in scheduled.num_scheduled_tokens.items()
        ]

        def compute() -> None:
            memory = self.memories[rank]
            for copy in scheduled.kv_cache_block_copies or ():
                for cache in memory.caches.values():
                    cache[copy.dst_block_id] = cache[copy.src_block_id]
            for block_id in scheduled.new_block_ids_to_zero or ():
                for name in memory.caches:
                    memory.block(name, block_id).zero_()
            for visit in visits:
                visit(memory)

        self._launch(rank, scheduled, compute)

    def _launch(self, rank: int, scheduled: Any, compute: Callable[[], None]) -> None:
        compute()

    def _postprocess(self, rank: int) -> None:
        """Without drafts, a state is in its boundary's block as soon as it is computed."""

    def _draft_forward(self, rank: int) -> None:
        """Drafts of the n-gram kind are no work of a rank's."""

    @staticmethod
    def _computed(scheduled: Any) -> dict[str, int]:
        """By request: its tokens before the step."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        return computed | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def _prefix(self, request_id: str) -> Prefix:
        tokens = list(self.tokens[request_id])
        return lambda count: tokens[:count]

    def _contents(self, rank: int, request_id: str) -> tuple[bytes, Sequence[bytes]]:
        """Return the adapter's content that a rank computes a request with, and those that it may read KV of."""
        lora = self.requests[request_id].lora_request
        if lora is None:
            return b"", [b""]
        # vLLM's own cache knows an adapter's name alone: what it keeps may be of any content that was loaded by it.
        return self.adapters[rank].content(lora), list(self.adapters[rank].contents)

    def _misread(self, _request_id: str, what: str) -> bytes:
        """A step reads wrong bytes. Return the content that it then computes with."""
        raise AssertionError(what)

    def _visit(self, rank: int, request_id: str, before: int, after: int) -> Callable[[RankMemory], None]:
        """Computes a request's tokens `before` to `after` in a rank's memory, and checks what that reads."""
        tables = [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(request_id)]
        visit = Visit(request_id, tables, self._prefix(request_id), before, after)
        adapter, readable = self._contents(rank, request_id)

        def computed(memory: RankMemory) -> None:
            wrong = visit.misread(memory, readable)
            visit.write(memory, self._misread(request_id, wrong) if wrong else adapter)

        return computed

    def _rank_output(self, rank: int, scheduled: Any, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        worker = self.workers[rank]
        meta = pickle.loads(pickle.dumps(scheduled.kv_connector_metadata))
        load_arguments = dict.fromkeys(V2_LOAD_ARGUMENTS) if "finish_forward" in self._order else {}
        calls: dict[str, Callable[[], Any]] = {
            "handle_preemptions": lambda: worker.handle_preemptions(meta),
            "bind_connector_metadata": lambda: worker.bind_connector_metadata(meta),
            FORWARD: lambda: self._check_and_compute(rank, scheduled),
            POSTPROCESS: lambda: self._postprocess(rank),
            DRAFT_FORWARD: lambda: self._draft_forward(rank),
            "start_load_kv": lambda: worker.start_load_kv(None, **load_arguments),
            "get_transfer_results": lambda: worker.get_transfer_results(scheduled.finished_req_ids),
        }
        answers = {call: calls[call]() if call in calls else getattr(worker, call)() for call in self._order}
        results = answers["get_transfer_results"]
        assert not answers["get_block_ids_with_load_errors"], "hybrid models refuse these"
        kv = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=pickle.loads(pickle.dumps(answers["get_kv_connector_stats"])),
            kv_connector_worker_meta=pickle.loads(pickle.dumps(answers["build_connector_worker_meta"])),
        )
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=kv,
        )

    def _sampled(self, scheduled: Any) -> dict[str, list[int]]:
        """By request: a token where the step reaches the end of what is known."""
        computed = self._computed(scheduled)
        sampled = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            tokens = self.tokens[request_id]
            sampled[request_id] = [next_token(tokens)] if computed[request_id] + count >= len(tokens) else []
        return sampled

    # --- what must hold at the end

    def reset(self) -> None:
        assert self.scheduler.reset_prefix_cache(), "a block is still in use"

    def assert_clean(self, lent: int = 0) -> None:
        """No pin, no watch, no lease is left, no lent extent but `lent` of others; no guard has swallowed anything."""
        assert not self.side.holds.pinned_blocks
        assert not self.side.holds.held_blocks
        assert not self.side.loads.active
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert self.depot.lent() == lent
        assert all(memory.null_block_untouched() for memory in self.memories)
        for connector in (self.connector, *self.workers):
            assert not connector.failures.counts, connector.failures.counts

    def close(self) -> None:
        for connector in (*self.workers, self.connector):
            connector.shutdown()


__all__ = ["BLOCK", "DirectDepot", "ScriptedEngine", "cache_layout", "engine_config", "model_folder", "next_token"]
