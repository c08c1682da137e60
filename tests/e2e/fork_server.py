"""Start engines by fork: one process imports vLLM once, and each process of an engine is a copy of it.

An engine is three processes. Started as a user starts it, each of them imports vLLM, for 5 s of a core. `ForkServer` is
the driver's end of a process that has imported vLLM and does nothing else. The server forks an engine's front for the
driver, and for that front and its EngineCore what they start by multiprocessing's `spawn`.

Fork is safe while the forking process has one thread: `check_forkable` refuses otherwise. So gRPC, torch's OpenMP pool
and everything of the connector begin in the copies. A copy gets the environment, directory, standard streams and
process group of the process that asked for it. It is a child of the server, which passes its exit status on.

Copies share the server's seed of `hash()`, and what modules read of the environment when they were imported.
- Two servers take turns (`start_forked`), so a key that depended on the seed would not be found by the next engine.
- A test about an engine that a user starts again starts a fresh process (`Fleet.restart`).
- A process whose environment differs in a variable that may be read at import starts fresh too (`same_at_import`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
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
from multiprocessing.connection import wait
from multiprocessing.context import set_spawning_popen
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

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
_FDS_MAX: Final = 64
_STREAMS: Final = (0, 1, 2)
_client: Client | None = None
"""In a copy: how it asks for further ones."""


class NoForkError(RuntimeError):
    """The server forks nothing in the state in which it is, or for this process."""


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


class Client:
    """What a process needs to have copies forked."""

    def __init__(self, address: str, environment: dict[str, str]) -> None:
        self.address = address
        self.environment = environment  # that the server was started for

    def fork(self, fds: list[int], group: int, payload: bytes, timeout_seconds: float | None) -> tuple[int, int, int]:
        """The pid of a new copy, the descriptor that says its exit status, and one that it sees closed at our end.

        `group`: process group that the copy joins; 0 for a copy that leads a new one.
        """
        status_r, status_w = os.pipe()
        data_r, data_w = os.pipe()
        sentinel = os.dup(data_w)
        try:
            with os.fdopen(data_w, "wb") as file:
                try:
                    with socket.socket(socket.AF_UNIX) as server:
                        server.connect(self.address)
                        socket.send_fds(server, [group.to_bytes(8, "little")], [data_r, status_w, *fds])
                finally:
                    _close(data_r, status_w)
                file.write(payload)
            if not wait([status_r], timeout_seconds):
                raise NoForkError(f"no answer within {timeout_seconds} s")
            return forkserver.read_signed(status_r), status_r, sentinel
        except BaseException as error:
            _close(status_r, sentinel)
            if isinstance(error, EOFError | OSError):
                raise NoForkError(f"{error!r}: see the server's log") from error
            raise


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


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
        fds = [*_STREAMS, tracker, *self._fds]
        self.pid, self.sentinel, parent = _client.fork(fds, os.getpgrp(), data.getvalue(), None)
        self.finalizer = Finalize(self, _close, (parent, self.sentinel))


def _start(process_obj: process.BaseProcess) -> Any:
    assert _client is not None
    if same_at_import(os.environ, _client.environment):
        return _Copied(process_obj)
    return popen_spawn_posix.Popen(process_obj)


# --- the server


def check_forkable() -> None:
    tasks = len(list(Path("/proc/self/task").iterdir()))
    if tasks != 1 or threading.active_count() != 1:
        raise NoForkError(f"{tasks} threads, of Python's: {[thread.name for thread in threading.enumerate()]}")


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
        return _Server(listener, alive_fd, front, imported).run()


class _Server:
    def __init__(self, listener: socket.socket, alive_fd: int, front: str, imported: dict[str, str]) -> None:
        self._listener = listener
        self._front = front
        self._imported = imported  # variables that vLLM sets when it is imported
        self._alive_fd = alive_fd
        self._statuses: dict[int, int] = {}  # by the pids of copies: where their exit status is awaited
        self._fronts: set[int] = set()  # leaders of groups
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)

    def run(self) -> Callable[[], Any]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)
        with selectors.DefaultSelector() as selector:
            for source in (self._listener, self._alive_fd, self._woken):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._alive_fd in ready:
                    for pid in self._statuses:
                        os.killpg(os.getpgid(pid), signal.SIGKILL)
                    shutil.rmtree(Path(self._listener.getsockname()).parent)
                    return lambda: None
                if self._woken in ready:
                    os.read(self._woken, 1 << 16)
                    self._reap()
                elif self._listener.fileno() in ready:
                    job = self._answer()
                    if job is not None:
                        return job

    def _reap(self) -> None:
        while self._statuses:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            if ended.si_pid in self._fronts:
                self._fronts.remove(ended.si_pid)
                if ended.si_code == os.CLD_KILLED:  # with what joined its group since
                    os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            where = self._statuses.pop(ended.si_pid)
            with contextlib.suppress(BrokenPipeError):
                forkserver.write_signed(where, os.waitstatus_to_exitcode(status))
            os.close(where)

    def _answer(self) -> Callable[[], Any] | None:
        """In the new copy: its job."""
        with self._listener.accept()[0] as asking:
            message, fds, _, _ = socket.recv_fds(asking, 8, _FDS_MAX)
        group, (data, status, *inherited) = int.from_bytes(message, "little"), fds
        try:
            check_forkable()
            if group and group not in self._fronts:
                raise NoForkError(f"process group {group} has ended")
        except NoForkError as refused:
            print(refused, file=sys.stderr, flush=True)
            _close(*fds)
            return None
        pid = os.fork()
        if not pid:
            os.setpgid(0, group)
            self._leave(status, inherited[: len(_STREAMS)])
            return lambda: self._work(data, inherited[len(_STREAMS) :])
        os.setpgid(pid, group or pid)  # both: neither knows which comes first
        self._statuses[pid] = status
        if not group:
            self._fronts.add(pid)
        with contextlib.suppress(BrokenPipeError):
            forkserver.write_signed(status, pid)
        _close(data, *inherited)
        return None

    def _leave(self, status: int, streams: list[int]) -> None:
        """In a copy: let go of what is the server's, and take the streams that were sent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listener.close()
        _close(self._alive_fd, self._woken, self._wake, status, *self._statuses.values())
        for number, stream in zip(_STREAMS, streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)

    def _work(self, data: int, inherited: list[int]) -> Any:
        """In a copy: do what the process that asked has sent, as multiprocessing's `spawn` and `forkserver` do."""
        parent = os.dup(data)
        with os.fdopen(data, "rb") as file:
            environment = pickle.load(file)
            os.environ.clear()
            os.environ.update(environment | self._imported)
            if not inherited:
                return importlib.import_module(self._front).main(pickle.load(file))
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
