"""The router of NVIDIA Dynamo: a public decoder and index of KV events that knows nothing of kvdepot.

It is the selection service of the package ai-dynamo-runtime, in this process. It needs no etcd, NATS or port: it
subscribes to the socket on which an engine's own publisher sends. Without the package tests skip with a reason, and
fail in CI.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    BlockStored,
    EventPublisher,
    EventPublisherFactory,
    KVEventBatch,
)

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.patience import wait_until

NEEDS_ROUTER: Final = pytest.mark.skipif(
    "CI" not in os.environ and find_spec("dynamo") is None, reason="there is no router (pip: ai-dynamo-runtime)"
)
MODEL: Final = "model"
_PROBES: Final = 1 << 20
"""From here on tokens are in no prompt."""


class Blocks(NamedTuple):
    """How many blocks of a prompt a worker has: those in its own cache, and those that follow them in others."""

    gpu: int
    cpu: int
    disk: int


class Publisher(EventPublisher):
    """Publishes as an engine does (`--kv-events-config`), over a socket that is a file.

    With `outside_only` the events of the engine's own cache are left out, so that a router knows the daemon's blocks
    alone. Stored blocks are published with `changes`.
    """

    def __init__(self, folder: Path, *, outside_only: bool, changes: dict[str, Any]) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self.events: list[Any] = []
        self._outside_only = outside_only
        self._changes = changes
        self._zmq = EventPublisherFactory.create(
            KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=self.endpoint)
        )

    def publish(self, events: KVEventBatch) -> None:
        if self._outside_only:
            events.events = [event for event in events.events if getattr(event, "medium", "GPU") != "GPU"]
        for event in events.events:
            if isinstance(event, BlockStored):
                for name, value in self._changes.items():
                    setattr(event, name, value)
        if events.events:
            self.events += events.events
            self.send(events)

    def send(self, events: KVEventBatch) -> None:
        """Publish what is none of the engine's events."""
        self._zmq.publish(events)

    def shutdown(self) -> None:
        self._zmq.shutdown()


class DynamoRouter:
    """A router, and what it knows of each engine that it follows."""

    def __init__(self) -> None:
        os.environ.setdefault("DYN_LOG", "error")  # read when the module is imported
        from dynamo._core import SelectionService

        self._service: Any = SelectionService(indexer_threads=1)
        self._runner = asyncio.Runner()
        self._publishers: list[Publisher] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kvdepot-router-")  # short: a socket's path has 107 bytes
        self._probes = itertools.count()

    def follow(
        self, engine: ScriptedEngine, *, outside_only: bool = False, changes: dict[str, Any] | None = None
    ) -> int:
        """Subscribe to an engine's events from now on, and return its id for the router. See `Publisher`."""
        worker = len(self._publishers)
        folder = Path(self._folder.name) / str(worker)
        folder.mkdir()
        publisher = Publisher(folder, outside_only=outside_only, changes=changes or {})
        self._publishers.append(publisher)
        facts = {
            "worker_id": worker,
            "model_name": MODEL,
            "endpoint": "none",  # to which requests would be sent
            "block_size": BLOCK,
            "kv_events_endpoints": {0: publisher.endpoint},
        }
        self._run(lambda: self._service.upsert_worker(facts))
        self.catch_up(worker)
        engine.scheduler.kv_event_publisher = publisher
        return worker

    def catch_up(self, worker: int) -> None:
        """Return when the router has taken in what the engine has published so far.

        It may miss events at first, because a subscription takes a while. So the probe is repeated.
        """
        number = next(self._probes)
        tokens = [_PROBES + number] * BLOCK
        probe = BlockStored(
            block_hashes=[number], parent_block_hash=None, token_ids=tokens, block_size=BLOCK, lora_id=None,
            medium="CPU", lora_name=None,
        )  # fmt: skip

        def arrives() -> bool:
            self._publishers[worker].send(KVEventBatch(ts=0.0, events=[probe]))
            return self.blocks(tokens, worker).cpu == 1

        wait_until(arrives, "the router has subscribed")

    def blocks(self, tokens: Sequence[int], worker: int = 0, **request: Any) -> Blocks:
        """Return what the router knows of a prompt. `request`: what else names it, as `lora_name`."""
        scores = self._run(lambda: self._service.overlap_scores(_prompt(tokens, request)))
        (found,) = (row for row in scores["workers"] if row["worker_id"] == worker)
        return Blocks(found["device_blocks"], found["host_pinned_extension_blocks"], found["disk_extension_blocks"])

    def wait(self, expected: Blocks, tokens: Sequence[int], worker: int = 0, **request: Any) -> None:
        """Until the router knows this of a prompt."""
        wait_until(
            lambda: self.blocks(tokens, worker, **request) == expected,
            lambda: f"{expected}, not {self.blocks(tokens, worker, **request)}",
        )

    def select(self, tokens: Sequence[int]) -> int:
        """Return the worker to which a request would be sent."""
        chosen: int = self._run(lambda: self._service.select(_prompt(tokens, {})))["worker_id"]
        return chosen

    def events(self, worker: int = 0) -> list[Any]:
        """Return what the engine has published since `follow`."""
        return self._publishers[worker].events

    def close(self) -> None:
        self._service.shutdown()
        self._runner.close()
        for publisher in self._publishers:
            publisher.shutdown()
        self._folder.cleanup()

    def _run(self, call: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return await call()  # which is to begin in a running loop

        return self._runner.run(called())


def _prompt(tokens: Sequence[int], request: dict[str, Any]) -> dict[str, Any]:
    return {"model_name": MODEL, "token_ids": list(tokens)} | request
