"""Engines of one process, one after another, and what the daemon and that process have while none is there."""

from __future__ import annotations

import gc
import mmap
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random
from typing import Final, Self

from kvdepot.client.attachment import Transport
from kvdepot.client.copy.base import Direction
from kvdepot.core.arena import ArenaTables, Superblock
from kvdepot.core.calls import (
    AcquireReply,
    AttachCall,
    CommitOutcome,
    LocateCall,
    LocateReply,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.records import RECORDS_MAX
from kvdepot.proto import codec

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_client import CHUNK_TOKENS, EngineClient, prompt_keys
from tests.rigs.flatness import count, grown, private_mib
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import attach_socket, exchange, status_of

GRACE_SECONDS: Final = 1
CONFIG: Final = """
[sessions]
grace = "{grace}s"
[[tier]]
name = "disk"
kind = "disk"
path = "{disk}"
capacity = "64MiB"
write = "second_use"
io_workers = {io_workers}
"""
IO_WORKERS: Final = 2
LABELS: Final = 150
"""Namespaces: more than the daemon has room for, so that they come and go too."""
PROMPTS: Final = 4
CHUNKS: Final = 4
IN_FLIGHT: Final = 128
SETTLED_LOOKS: Final = 5
RISE_MIB_MAX: Final = 6.0
"""From the second quarter of the samples to the last: of 5,000 engines, 2.5 KiB each."""
SLACK: Final = {"daemon_fds": 4, "daemon_threads": 3, "own_fds": 4, "own_threads": 2}


@dataclass(frozen=True, slots=True)
class Sample:
    """Taken while no engine is there."""

    engines: int
    seconds: float
    daemon_fds: int
    daemon_threads: int
    daemon_children: int
    sessions: int
    slots: int  # of the attachment table
    daemon_mib: float
    own_fds: int
    own_threads: int
    own_mib: float

    @staticmethod
    def head() -> str:
        return " ".join(f"{one.name:>15}" for one in fields(Sample))

    def line(self) -> str:
        values = (getattr(self, one.name) for one in fields(self))
        return " ".join(f"{value:>15.1f}" if isinstance(value, float) else f"{value:>15}" for value in values)


class LongLife:
    """Makes engines on a daemon of its own. `run` returns the samples."""

    def __init__(self, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> None:
        self._daemon = DaemonProcess(ram="512MiB")
        self._random = Random(seed)
        self._say = say
        self._began = time.monotonic()
        self.engines = 0
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        disk = self._daemon.directory / "disk"
        disk.mkdir(mode=0o700)
        self._daemon.config = CONFIG.format(grace=GRACE_SECONDS, disk=disk, io_workers=IO_WORKERS)
        try:
            self._daemon.start()
            wait_until(lambda: self._slots() == IO_WORKERS, "the I/O workers have their slots")
        except BaseException:
            self._daemon.close()
            raise
        self._say(Sample.head())
        return self

    def __exit__(self, *_: object) -> None:
        self._daemon.close()

    def run(self, *, engines: int, seconds: float, samples: int) -> list[Sample]:
        """So many engines, or for so long, whichever ends first."""
        self._fill_records()
        until = time.monotonic() + seconds
        self.sample()
        for number in range(samples):
            count, pause_at = engines * (number + 1) // samples, time.monotonic() + seconds / samples
            while self.engines < count and time.monotonic() < min(pause_at, until):
                self.one()
            self.sample()
        return self.samples

    def _fill_records(self) -> None:
        """Those of requests are all that the daemon keeps of an engine that is gone: so many, whatever comes."""
        with EngineClient(self._daemon.endpoint, "records") as engine:
            for first in range(0, RECORDS_MAX, IN_FLIGHT):
                answers: queue.SimpleQueue[object] = queue.SimpleQueue()
                keys = b"".join(prompt_keys(f"record-{first}", CHUNKS))
                for number in range(first, first + IN_FLIGHT):
                    call = LocateCall(b"", engine.namespace, keys, 1 << 20, f"record-{number}")
                    engine.session.submit(call, 60.0, answers.put)
                while answers.qsize() < IN_FLIGHT:
                    assert engine.session.wait(patient(60.0)), "they are not answered"

    def one(self) -> None:
        """An engine, from its start to its end: its name is new, or the last one's; most of them do something."""
        kind = self._random.random()
        name = f"engine-{self.engines // 2 if kind < 0.2 else self.engines}"
        transport = Transport.STREAM if kind > 0.99 else Transport.SHM
        label = f"model-{self._random.randrange(LABELS)}"
        with EngineClient(self._daemon.endpoint, name, label, transport) as engine:
            if kind > 0.1:
                self._use(engine, f"prompt-{self._random.randrange(PROMPTS)}")
        self.engines += 1

    def brief(self) -> None:
        """An engine that attaches and goes."""
        call = AttachCall(1, 1, f"engine-{self.engines}", scheduler=True, rank=0, world_size=1)
        with attach_socket(self._daemon.attach_socket) as connection:
            reply, descriptors = exchange(connection, codec.encode_attach_call(call))
            for descriptor in descriptors:
                os.close(descriptor)
            assert reply.protocol, reply.error
        self.engines += 1

    @staticmethod
    def _use(engine: EngineClient, prompt: str) -> None:
        keys = prompt_keys(prompt, CHUNKS)
        lease, reply = engine.reserve(keys)
        assert isinstance(reply, ReserveReply), reply
        if reply.extents:
            assert engine.copy(reply, 0, Direction.STORE)
            granted = [at for at, outcome in enumerate(reply.outcomes) if outcome == ReserveOutcome.GRANTED]
            outcomes: list[bytes] = []
            engine.session.commit(lease, granted, outcomes.append)
            wait_until(lambda: bool(engine.session.wait(0.05) and outcomes), "it is committed")
            assert CommitOutcome.LOST not in outcomes[0]
        located = engine.locate(keys)
        assert isinstance(located, LocateReply), located
        chunks = located.boundary_tokens // CHUNK_TOKENS
        if chunks:
            lease, acquired = engine.acquire(keys[:chunks])
            assert isinstance(acquired, AcquireReply), acquired
            engine.session.release((lease,))
        engine.session.end_request("r")

    def sample(self) -> Sample:
        """Once the last engine's session has gone."""
        self.samples.append(self._at_rest())
        self._say(self.samples[-1].line())
        return self.samples[-1]

    def _at_rest(self) -> Sample:
        wait_until(lambda: not status_of(self._daemon.socket).sessions, "no session is left", 60.0)
        gc.collect()
        pid, own = self._daemon.pid, os.getpid()
        least = min(_settled(own) for _ in range(SETTLED_LOOKS))
        return Sample(
            engines=self.engines,
            seconds=time.monotonic() - self._began,
            daemon_fds=count(pid, "fd"),
            daemon_threads=count(pid, "task"),
            daemon_children=len(children(pid)),
            sessions=len(status_of(self._daemon.socket).sessions),
            slots=self._slots(),
            daemon_mib=private_mib(pid),
            own_fds=least[0],
            own_threads=least[1],
            own_mib=private_mib(own),
        )

    def _slots(self) -> int:
        with self._daemon.arena.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            layout = Superblock.unpack(mapped[:4096]).layout
            return int(ArenaTables(memoryview(mapped[: layout.tables_bytes]), layout).attachments["used"].sum())


def trouble(samples: list[Sample]) -> list[str]:
    """What was not flat, from the second quarter of the samples to the last."""
    names = ("daemon_fds", "daemon_threads", "daemon_children", "sessions", "slots", "own_fds", "own_threads")
    counts = {name: SLACK.get(name, 0) for name in names}
    return grown(samples, counts, {"daemon_mib": RISE_MIB_MAX, "own_mib": RISE_MIB_MAX})


def _settled(pid: int) -> tuple[int, int]:
    """Descriptors and threads, a moment later: gRPC closes what it has after its channel was closed."""
    time.sleep(0.1)
    return count(pid, "fd"), count(pid, "task")
