"""A vLLM engine as a process that can be driven, restarted and killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol, Self

from demo.toys import CONTEXT_TOKENS_MAX, Toy

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_SECONDS = 600.0
CALL_TIMEOUT_SECONDS = 120.0
POOL_BYTES = 1 << 28
LOAD_ALWAYS = 1000.0
"""A `load_weight` for what is about bytes: toys compute a token in microseconds, and rightly wait for no disk."""


class EngineProcessError(RuntimeError):
    """The engine process died, or answered a command with an error. The message says where its log is."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request. `cached_tokens` is vLLM's own figure, local and external together."""

    name: str
    tokens: tuple[int, ...] = ()
    leads: tuple[float, ...] = ()  # log probability of each token less the next likely one's; empty if not asked for
    cached_tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    finish_reason: str = ""
    error: str = ""
    params: dict[str, Any] | None = None  # `kv_transfer_params` of the output


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Where prompt tokens came from, and what became of draft tokens, as vLLM counts them."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    local_tokens: int = 0
    external_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    connector_tokens: int = 0  # loaded, by the connector's own count
    drafts: int = 0  # steps that verified tokens which a drafter proposed
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of the draft tokens

    def since(self, earlier: PromptTokens) -> PromptTokens:
        return PromptTokens(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a request. vLLM gives an adapter that is loaded again another `number`."""

    name: str
    number: int
    folder: Path

    def as_json(self) -> dict[str, Any]:
        return {"lora_name": self.name, "lora_int_id": self.number, "lora_path": str(self.folder)}


ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # One core for scheduler and copies. vLLM reserves one more for an engine with a connector; on two
    # cores none would be left, so it reserves nothing at all: the engine would run on other cores than
    # the one without a connector that it is compared with.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
}
"""Of every engine of a toy model."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to start an engine. `connector` is vLLM's kv_transfer_config, None for an engine without one."""

    toy: Toy
    model: Path
    connector: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def connector_settings(self) -> dict[str, Any]:
        return dict((self.connector or {}).get("kv_connector_extra_config", {}))

    def engine_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "dtype": self.toy.dtype,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "max_model_len": CONTEXT_TOKENS_MAX,
            "max_num_batched_tokens": CONTEXT_TOKENS_MAX,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": POOL_BYTES,
            "disable_log_stats": True,
        }
        arguments |= self.toy.engine | self.arguments
        if self.connector is not None:
            arguments["kv_transfer_config"] = self.connector
        return arguments

    def process_environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        # What this process was told to import comes first in its engines too, also where another copy is installed.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return inherited | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)} | self.environment


def depot_connector(endpoint: str, /, **extra: Any) -> dict[str, Any]:
    """The kv_transfer_config for a daemon at `endpoint`, unless `extra` names another one."""
    return {
        "kv_connector": "KVDepotConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint} | extra,
    }


class EngineProcess(Protocol):
    """The front of an engine: the part of `subprocess.Popen` that `Engine` needs. It leads a process group."""

    pid: int
    stdin: IO[str] | None
    stdout: IO[str] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start_process(options: EngineOptions, log: Path) -> EngineProcess:
    """Start the front of an engine as a fresh process."""
    with log.open("a") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "demo.engine_process", json.dumps(options.engine_arguments())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT,
            env=options.process_environment(), process_group=0,  # no session of its own: see `Daemon.start`
        )  # fmt: skip


class Engine:
    """One engine process group. Not thread-safe, but commands may overlap (`begin`)."""

    def __init__(
        self,
        options: EngineOptions,
        log: Path,
        start: Callable[[EngineOptions, Path], EngineProcess] = start_process,
        patience: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`patience`: how many times as long as usual an answer may take, asked for each wait."""
        self.options = options
        self.log = log
        self._start_process = start
        self._patience = patience
        self.ready: dict[str, Any] = {}
        self._ids = itertools.count(1)
        self._names = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._finished = 0
        self._process: EngineProcess | None = None

    def launch(self) -> Future[Any]:
        """Start the process; the future resolves when the engine serves."""
        assert self._process is None
        ready: Future[Any] = Future()
        self._waiting[0] = ready
        self._process = self._start_process(self.options, self.log)
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return ready

    def wait_ready(self, launched: Future[Any]) -> None:
        self.ready = self._result(launched, START_TIMEOUT_SECONDS)

    def start(self) -> Self:
        self.wait_ready(self.launch())
        return self

    def _read(self, process: EngineProcess) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["id"])
            if "error" in answer:
                waiting.set_exception(EngineProcessError(f"{answer['error']} (log: {self.log})"))
            else:
                waiting.set_result(answer["ok"])
        for waiting in list(self._waiting.values()):
            waiting.set_exception(EngineProcessError(f"the engine process ended; its log is {self.log}"))
        self._waiting.clear()

    def _send(self, do: str, **arguments: Any) -> Future[Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise EngineProcessError("the engine is not running")
        answer: Future[Any] = Future()
        identity = next(self._ids)
        self._waiting[identity] = answer
        try:
            process.stdin.write(json.dumps({"id": identity, "do": do} | arguments) + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineProcessError(f"the engine process ended; its log is {self.log}") from error
        return answer

    def _result(self, answer: Future[Any], timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> Any:
        seconds = timeout_seconds * self._patience()
        try:
            return answer.result(seconds)
        except TimeoutError as error:
            raise EngineProcessError(f"no answer within {seconds:.0f} s; the engine's log is {self.log}") from error

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        names: Sequence[str] = (),
        serial: bool = False,
        leads: bool = False,
        params: dict[str, Any] | None = None,
        adapter: Adapter | None = None,
    ) -> Future[Any]:
        """Send prompts, all at once unless `serial`; pass the future to `finish`. `params`: `kv_transfer_params`."""
        names = names or [f"r{next(self._names)}" for _ in prompts]
        lora = None if adapter is None else adapter.as_json()
        requests = [
            {"name": name, "prompt": list(ids), "params": params, "lora": lora}
            for name, ids in zip(names, prompts, strict=True)
        ]
        return self._send("generate", requests=requests, max_tokens=max_tokens, serial=serial, leads=leads)

    def finish(self, begun: Future[Any], timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> list[Completion]:
        answers = self._result(begun, timeout_seconds)
        completions = [
            Completion(**answer | {name: tuple(answer.get(name, ())) for name in ("tokens", "leads")})
            for answer in answers
        ]
        self._finished += sum(1 for completion in completions if completion.finish_reason == "length")
        return completions

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, serial: bool = False) -> list[Completion]:
        return self.finish(self.begin(prompts, max_tokens, serial=serial))

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        params: dict[str, Any] | None = None,
        adapter: Adapter | None = None,
    ) -> Answer:
        """One request alone: its completion and where its prompt tokens came from."""
        before = self.totals()
        (completion,) = self.finish(self.begin([prompt], max_tokens, params=params, adapter=adapter))
        if completion.error:
            raise EngineProcessError(f"{completion.error} (log: {self.log})")
        return Answer(completion, self.totals().since(before))

    def totals(self) -> PromptTokens:
        return PromptTokens(**self._result(self._send("totals", finished=self._finished)))

    @staticmethod
    def pause(seconds: float) -> None:
        """Let requests in flight get somewhere before something is done to them."""
        time.sleep(seconds)

    def abort(self, names: Sequence[str]) -> None:
        self._result(self._send("abort", names=list(names)))

    def drain(self) -> None:
        """Wait until no request and no store is in progress. A store begins after its request's last token."""
        self._result(self._send("drain"))

    def reset_prefix_cache(self, timeout_seconds: float = 60.0) -> None:
        """Empty the engine's own cache; repeated while blocks are pinned (vLLM then answers False)."""
        seconds = timeout_seconds * self._patience()
        until = time.monotonic() + seconds
        while not self._result(self._send("reset_prefix_cache", reset_connector=False)):
            if time.monotonic() > until:
                raise EngineProcessError(f"reset_prefix_cache still refused after {seconds:.0f} s (log: {self.log})")
            time.sleep(0.02)

    def reset_connector(self) -> None:
        """Tell the connector that the weights have changed in place, whatever is running."""
        self._result(self._send("reset_prefix_cache", reset_connector=True))

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """What each worker answers; `method` is one of vLLM's `worker_extension_cls`."""
        answers: list[Any] = self._result(self._send("call_workers", method=method, arguments=list(arguments)))
        return answers

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self) -> list[int]:
        """The pids of the engine's process group: front end, scheduler (engine core), workers."""
        assert self._process is not None
        group = self._process.pid
        members = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    if os.getpgid(int(entry.name)) == group:
                        members.append(int(entry.name))
        return sorted(members)

    def _shared_memory(self) -> set[Path]:
        """vLLM's own message queues in shared memory: a killed engine leaves their files behind."""
        found = set()
        for pid in self.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                found.update(re.findall(r"/dev/shm/psm_\w+", maps))
        return {Path(name) for name in found}

    def kill(self) -> None:
        """SIGKILL to every process of the engine at once."""
        if self._process is None:
            return
        left = self._shared_memory()
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(CALL_TIMEOUT_SECONDS)
        for file in left:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Ask the engine to shut down; kill what is left."""
        if self._process is None:
            return
        with contextlib.suppress(EngineProcessError, subprocess.TimeoutExpired):
            self._result(self._send("close"), 5)
            self._process.wait(30)
        self.kill()

    def __enter__(self) -> Self:
        if self._process is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """What `Engine.ask` saw of one request."""

    completion: Completion
    prompt: PromptTokens

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completion.tokens

    @property
    def external_tokens(self) -> int:
        return self.prompt.external_tokens

    @property
    def local_tokens(self) -> int:
        return self.prompt.local_tokens
