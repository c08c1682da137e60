"""One real multi-process vLLM engine behind a line-JSON pipe: the child of `demo.engine.Engine`.

Each line on standard input is a command `{"id": n, "do": name, ...}`; each line on
what was standard output at the start is `{"id": n, "ok": value}` or `{"id": n, "error": text}`.
Everything that vLLM prints goes to standard error, which the parent sends to a log file.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


@contextmanager
def _uncollected() -> Iterator[None]:
    """What is imported within is left out of every later collection, as vLLM does with what it has set up."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


# The scheduler's process and the ranks' import this module too, one behind the other: of the 20 s of a start on two
# cores more than three were collections.
with _uncollected():
    from kvdepot.client.vllm.base.stats import KVDepotStats
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

_STATS_DEADLINE_SECONDS = 60.0


class Totals(StatLoggerBase):  # type: ignore[misc]
    """vLLM's own counts of prompt tokens and draft tokens, summed since the engine's start."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.local_tokens = 0
        self.external_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.finished = 0  # at their length: not those aborted
        self.connector_tokens = 0
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
            hits = KVDepotStats(scheduler_stats.kv_connector_stats).data["counters"].get("hit_tokens", {})
            self.connector_tokens += sum(hits.values())
        if scheduler_stats is not None and scheduler_stats.spec_decoding_stats is not None:
            self.drafts += scheduler_stats.spec_decoding_stats.num_drafts
            self.draft_tokens += scheduler_stats.spec_decoding_stats.num_draft_tokens
            self.accepted_tokens += scheduler_stats.spec_decoding_stats.num_accepted_tokens
        if iteration_stats is not None:
            source = iteration_stats.prompt_token_stats
            self.prompt_tokens += source.total
            self.computed_tokens += source.computed
            self.local_tokens += source.local_cache_hit
            self.external_tokens += source.external_kv_transfer
            self.generated_tokens += iteration_stats.num_generation_tokens
            self.preemptions += iteration_stats.num_preempted_reqs
            self.finished += sum(str(done.finish_reason) == "length" for done in iteration_stats.finished_requests)

    def log_engine_initialized(self) -> None:
        """Nothing to say: the parent reports progress."""

    def as_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "local_tokens": self.local_tokens,
            "external_tokens": self.external_tokens,
            "generated_tokens": self.generated_tokens,
            "preemptions": self.preemptions,
            "finished": self.finished,
            "connector_tokens": self.connector_tokens,
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
        }


class EngineService:
    """Answers commands on one AsyncLLM."""

    def __init__(self, engine: AsyncLLM, totals: Totals, answers: TextIO) -> None:
        self._engine = engine
        self._totals = totals
        self._answers = answers

    async def serve(self, lines: asyncio.StreamReader) -> None:
        running: set[asyncio.Task[None]] = set()
        while line := await lines.readline():
            command = json.loads(line)
            if command["do"] == "close":
                self._answer({"id": command["id"], "ok": None})
                return
            task = asyncio.create_task(self._run(command))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _run(self, command: dict[str, Any]) -> None:
        identity, name = command.pop("id"), command.pop("do")
        try:
            value = await getattr(self, f"do_{name}")(**command)
        except Exception as error:  # noqa: BLE001 - whatever a command raises is its answer
            self._answer({"id": identity, "error": f"{type(error).__name__}: {error}"})
        else:
            self._answer({"id": identity, "ok": value})

    def _answer(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    async def do_generate(
        self, requests: list[dict[str, Any]], max_tokens: int, serial: bool, leads: bool
    ) -> list[dict[str, Any]]:
        if serial:
            return [await self._complete(request, max_tokens, leads) for request in requests]
        return list(await asyncio.gather(*(self._complete(request, max_tokens, leads) for request in requests)))

    async def _complete(self, request: dict[str, Any], max_tokens: int, leads: bool) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2 if leads else None,
            extra_args={"kv_transfer_params": request["params"]} if request["params"] is not None else None,
        )  # fmt: skip
        started = time.perf_counter()
        first, last, name = None, None, request["name"]
        lora = LoRARequest(**request["lora"]) if request["lora"] is not None else None
        prompt = {"prompt_token_ids": request["prompt"]}
        try:
            async for output in self._engine.generate(prompt, sampling, name, lora_request=lora):
                first = first if first is not None else time.perf_counter() - started
                last = output
        except Exception as error:  # noqa: BLE001 - a failed request is a result, the others go on
            return {"name": name, "error": f"{type(error).__name__}: {error}"}
        assert last is not None
        return {
            "name": name,
            "tokens": list(last.outputs[0].token_ids),
            "leads": [_lead(likely) for likely in last.outputs[0].logprobs or ()],
            "finish_reason": last.outputs[0].finish_reason,
            "cached_tokens": last.num_cached_tokens,
            "params": last.kv_transfer_params,
            "first_token_seconds": first,
            "seconds": time.perf_counter() - started,
        }

    async def do_abort(self, names: list[str]) -> None:
        await self._engine.abort(names)

    async def do_drain(self) -> None:
        """Return once no request and no store is in progress."""
        await self._engine.pause_generation(mode="wait", clear_cache=False)
        await self._engine.resume_generation()

    async def do_reset_prefix_cache(self, reset_connector: bool) -> bool:
        return bool(await self._engine.reset_prefix_cache(reset_connector=reset_connector))

    async def do_call_workers(self, method: str, arguments: list[Any]) -> list[Any]:
        """A method of vLLM's `worker_extension_cls`, on each worker."""
        return list(await self._engine.collective_rpc(method, args=tuple(arguments)))

    async def do_totals(self, finished: int) -> dict[str, int]:
        """vLLM's sums, once at least `finished` requests have finished in them (they trail the outputs)."""
        until = time.monotonic() + _STATS_DEADLINE_SECONDS
        while self._totals.finished < finished:
            if time.monotonic() > until:
                raise TimeoutError(f"vLLM has counted {self._totals.finished} of {finished} finished requests")
            await asyncio.sleep(0.002)
        return self._totals.as_json()


def _lead(likely: dict[int, Any]) -> float:
    first, second, *_ = sorted((one.logprob for one in likely.values()), reverse=True)
    return float(first - second)


async def _serve(arguments: dict[str, Any], answers: TextIO) -> None:
    made: list[Totals] = []

    def totals(vllm_config: Any, engine_index: int = 0) -> Totals:
        made.append(Totals(vllm_config, engine_index))
        return made[-1]

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[totals])
    lines = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    cache = engine.vllm_config.cache_config
    ready = {"block_size": cache.block_size, "mamba_block_size": getattr(cache, "mamba_block_size", None)}
    answers.write(json.dumps({"id": 0, "ok": ready}) + "\n")
    answers.flush()
    try:
        await EngineService(engine, made[0], answers).serve(lines)
    finally:
        engine.shutdown(timeout=10)


def main(arguments: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(_serve(arguments, private))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
