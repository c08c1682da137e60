"""A daemon of the benchmark's own, in a temporary directory, and the client's calls as a benchmark needs them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from kvdepot.client.attachment import Attachment, EngineProcess, Transport
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.session import DepotSession
from kvdepot.core.arena import PAGE_BYTES, ArenaFormatError, Superblock
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.report import DaemonStatus, GetStatusCall
from kvdepot.proto.methods import BY_CALL
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.proto.v1 import depot_pb2_grpc

from benchmarks.paths import environment

SHM = Path("/dev/shm")
START_SECONDS_MAX = 120.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Daemon:
    endpoint: Endpoint
    pid: int
    arena_directory: Path
    started: float  # time.monotonic() just before the process was made

    @property
    def arena_bytes(self) -> int:
        """Of its data; 0 before it is made."""
        for path in self.arena_directory.glob("*.arena"):
            with contextlib.suppress(ArenaFormatError), path.open("rb") as tables:
                return Superblock.unpack(tables.read(PAGE_BYTES)).layout.data_bytes
        return 0


@contextlib.contextmanager
def daemon(ram: str, *options: str, config: Path | None = None, memory: Path = SHM) -> Iterator[Daemon]:
    """`kvdepotd serve`, ended by SIGTERM, without a disk unless `config` has one. Its log is printed when it fails.

    `memory`: where its arena is made.
    """
    directory = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
    arena = Path(tempfile.mkdtemp(prefix="kvd", dir=memory))
    socket, log = directory / "d.sock", directory / "log"
    command = [
        sys.executable,
        "-m",
        "kvdepot.server.daemon.app",
        "serve",
        *([str(config)] if config else ["--disk", ""]),
    ]
    command += ["--socket", str(socket), "--arena-dir", str(arena), "--ram", ram, "--metrics", "127.0.0.1:0", *options]
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment())
    try:
        yield Daemon(Endpoint.parse(f"unix://{socket}"), process.pid, arena, started)
        if process.poll() is not None:
            raise SystemExit(f"the daemon ended:\n{log.read_text()}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(arena, ignore_errors=True)


class Status:
    """Operator.GetStatus over a channel that stays open."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._channel = grpc.insecure_channel(
            endpoint.admin_target,
            options=(("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 20)),
        )
        self._stub = depot_pb2_grpc.OperatorStub(self._channel)  # type: ignore[no-untyped-call]

    def __call__(self) -> DaemonStatus:
        reply = self._stub.GetStatus(pb.GetStatusRequest(), timeout=START_SECONDS_MAX, wait_for_ready=True)
        return BY_CALL[GetStatusCall].reply.decode(reply)  # type: ignore[no-any-return]

    def wait_populated(self, daemon: Daemon) -> None:
        """Returns when the whole arena is populated."""
        while self().tiers[0].ready_bytes < daemon.arena_bytes:
            time.sleep(_POLL_SECONDS)

    def wait_summed(self) -> None:
        """Returns when the checksum worker has nothing left to read: it does so beside whatever is measured."""
        while self().tiers[0].pending_checksums:
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def engine(
    endpoint: Endpoint, spec: NamespaceSpec, name: str = "benchmark", transport: Transport = Transport.SHM
) -> Iterator[tuple[DepotSession, Attachment]]:
    """Scheduler and worker of one engine, attached and registered."""
    session = DepotSession(endpoint, name)
    worker = Attachment(endpoint, EngineProcess(name, scheduler=False, rank=0), transport=transport)
    session.start()
    worker.start()
    session.register(spec)
    until = time.monotonic() + START_SECONDS_MAX
    while not (session.registered(spec.namespace_id()) and session.ranks_attached == 1 and worker.arena is not None):
        if time.monotonic() > until:
            raise SystemExit(f"not attached: {session.refusal or worker.refusal or 'no answer'}")
        time.sleep(0.001)
    try:
        yield session, worker
    finally:
        session.close()
        worker.close()
