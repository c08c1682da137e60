"""Start engines by fork: one process imports vLLM once, and each process of an engine is a copy of it.

An engine is three processes. Started as a user starts it, each of them imports vLLM, for 5 s of a core. A server
(`tests/rigs/fork_server.py`) forks an engine's front for the driver, and for that front and its EngineCore what they
start by multiprocessing's `spawn`. A copy joins the process group of the process that asked for it.

- Two servers take turns (`start_forked`), so a key that depended on the seed of `hash()` would not be found by the next
  engine.
- A test about an engine that a user starts again starts a fresh process (`Fleet.restart`).
- A process whose environment differs in a variable that may be read at import starts fresh too (`same_at_import`).
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    process,
    reduction,
    resource_tracker,
    spawn,
)
from multiprocessing.context import set_spawning_popen
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

from tests.rigs.fork_server import STREAMS, Client, Server, close_all

FRONT: Final = "demo.engine_process"
PRELOAD: Final = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
"""Not the connector: its import takes 0.1 s, and what it makes then would be shared."""
LATE: Final = ("KVDEPOT_", "PYTEST_", "LOCAL_WORLD_SIZE", "VLLM_SSM_CONV_STATE_LAYOUT")
"""Beginnings of the names of variables that no module reads when it is imported."""
BY_VLLM: Final = (
    "LD_PRELOAD",
    "NUMEXPR_MAX_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
"""Variables that vLLM sets for what an engine starts (vllm/platforms/cpu.py)."""
_client: Client | None = None
"""In a copy: how it asks for further ones."""


# --- the environment


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server that forks engines with this one: as vLLM makes it for an engine's children."""
    preloaded = [*_package("vllm").glob("libs/libtcmalloc_minimal*.so*"), *_package("torch").glob("lib/libgomp*.so*")]
    values = (":".join(map(str, preloaded)), str(len(os.sched_getaffinity(0))), "1", "1", "1", "spawn")
    return dict(environment) | dict(zip(BY_VLLM, values, strict=True))


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def same_at_import(wanted: Mapping[str, str], server: Mapping[str, str]) -> bool:
    """Whether a process with the environment `wanted` would import what a server with its own has imported."""
    return all(
        wanted.get(name) == server.get(name) or (name in BY_VLLM and name not in wanted)
        for name in wanted.keys() | server.keys()
        if not name.startswith(LATE)
    )


# --- asking for a copy


class _Copied(popen_forkserver.Popen):
    """A process of multiprocessing that an engine's process starts: the standard library's, but for the server."""

    _fds: list[int]

    def _launch(self, process_obj: process.BaseProcess) -> None:
        assert _client is not None
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            pickle.dump(dict(os.environ), data)
            reduction.dump(spawn.get_preparation_data(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        tracker = resource_tracker.getfd()
        assert tracker is not None
        fds = [*STREAMS, tracker, *self._fds]
        self.pid, self.sentinel, parent = _client.fork(fds, os.getpgrp(), data.getvalue(), None)
        self.finalizer = Finalize(self, close_all, (parent, self.sentinel))


def _start(process_obj: process.BaseProcess) -> Any:
    assert _client is not None
    if same_at_import(os.environ, _client.environment):
        return _Copied(process_obj)
    return popen_spawn_posix.Popen(process_obj)


# --- the server


def serve(listener_fd: int, alive_fd: int, front: str, *preload: str) -> Callable[[], Any]:
    """Fork copies until the driver's end of `alive_fd` is closed. Return what the calling process then has to do.

    Args:
        front: module whose `main` is the job of a copy that leads a group.
        preload: further modules to import before the first fork.
    """
    global _client
    before = dict(os.environ)
    gc.disable()
    for name in (front, *preload):
        importlib.import_module(name)
    gc.freeze()  # no collection of a copy writes to what it shares
    gc.enable()
    importlib.import_module("setproctitle").setproctitle("fork server of engines")  # once, or no copy ever can
    os.register_at_fork(after_in_child=importlib.import_module("numpy").random.seed)
    context.SpawnProcess._Popen = staticmethod(_start)  # type: ignore[method-assign]
    with socket.socket(fileno=listener_fd) as listener:
        _client = Client(listener.getsockname(), dict(os.environ))
        imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
        return Server(listener, alive_fd, partial(_work, front, imported), whole_groups=True).run()


def _work(front: str, imported: dict[str, str], data: int, inherited: list[int]) -> Any:
    """In a copy: do what the process that asked has sent, as multiprocessing's `spawn` and `forkserver` do.

    `imported`: variables that vLLM sets when it is imported.
    """
    parent = os.dup(data)
    with os.fdopen(data, "rb") as file:
        environment = pickle.load(file)
        os.environ.clear()
        os.environ.update(environment | imported)
        if not inherited:
            return importlib.import_module(front).main(pickle.load(file))
        tracker, *forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
        current = process.current_process()
        current._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(pickle.load(file))
            target = pickle.load(file)
        finally:
            del current._inheriting  # type: ignore[attr-defined]
    sys.exit(target._bootstrap(parent))
