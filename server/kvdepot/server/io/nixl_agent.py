"""NIXL as kvdepot uses it: one agent of a process, over UCX, that has the arena registered (ADR 82).

Only processes that may die at any moment import this: a reader's workers, and the process that lends. NIXL cannot
cancel a read, so a read that is not known to be over ends the worker. Nothing calls NIXL while it waits, and there is
no thread that makes progress: that thread would take most of a processor, day and night.
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Final

import xxhash
from kvdepot.core.allocator import Extent
from kvdepot.core.nixl_packages import PACKAGES
from kvdepot.server.io.lifeline import ProcessEndError
from kvdepot.server.io.peer_wire import Lender

BATCH_BYTES: Final = 64 << 20
"""Of one transfer: with shared memory NIXL copies all of it in one call, and nothing else happens there meanwhile."""
POLL_SECONDS: Final = 0.00005
"""Between two looks at a transfer. With it TCP was as fast as without, for a tenth of the CPU time (ADR 82)."""
_LENDERS_MAX: Final = 16
"""That an agent keeps: each start of the process that lends makes one."""
_AGAIN_SECONDS: Final = 60.0
"""After a lender was not reached. Until then nothing is borrowed: each attempt costs a connection."""
_BACKEND: Final = "UCX"
_MEMORY: Final = "DRAM"
_SEGMENT: Final = {"UCX_TCP_TX_SEG_SIZE": "64k"}
"""What UCX sends at once over TCP, for each of which the kernel is called: its own 8 KiB cost half of the speed.

An end that receives has memory for `UCX_TCP_RX_SEG_SIZE`, 64 KiB by default, and does not check what comes. UCX refuses
a context that sends more than it receives. So this value, set at both ends, also keeps what they receive large enough.
"""
_ENVIRONMENT: Final = {
    "NIXL_LOG_LEVEL": "WARN",
    "OPENBLAS_NUM_THREADS": "1",  # nothing is computed here, and each thread takes memory
    "UCX_MEM_EVENTS": "n",  # it would patch code to notice unmapped memory, which the unit forbids; the arena stays
}
Place = tuple[int, int, int]
"""Offset here, offset there, and length of bytes that are in a row on both sides."""


class NixlError(ProcessEndError):
    """NIXL does not do what was asked. Whether it still writes is not known: the process has to end."""


class NotReachedError(Exception):
    """NIXL cannot reach a lender. No read has begun, so nothing is written."""


def installed() -> str:
    """Return the package of NIXL that is installed; empty if none is. Nothing is imported."""
    return next((name for name in PACKAGES if find_spec(name) is not None), "")


class _Agent:
    """The agent, with all of the arena registered. Raise NixlError if there is none."""

    def __init__(self, arena: memoryview) -> None:
        self._arena = arena  # NIXL does not keep it mapped
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.update(_SEGMENT)  # whatever somebody has set
        package = installed()
        if not package:
            raise NixlError(f"none of these packages is installed: {', '.join(PACKAGES)}")
        try:
            import numpy as np

            api = importlib.import_module(f"{package}._api")
            config = api.nixl_agent_config(
                backends=[_BACKEND], enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            self.nixl: Any = api.nixl_agent(f"kvdepot-{os.getpid()}-{secrets.token_hex(8)}", config)
            if _BACKEND not in self.nixl.backends:
                raise NixlError(f"this NIXL has no {_BACKEND}")
            self.base = int(np.frombuffer(arena, dtype=np.uint8).ctypes.data)  # of memory that may be for reading alone
            self._registered = self.nixl.register_memory([(self.base, len(arena), 0, "")], _MEMORY)
        except NixlError:
            raise
        except Exception as error:  # NIXL has exceptions of its own, for each of its codes
            raise NixlError(f"NIXL does not start: {type(error).__name__}: {error}") from error


class LendingAgent:
    """The agent of the process that lends. Its arena may be mapped for reading alone."""

    def __init__(self, arena: memoryview) -> None:
        """Start it. Raise NixlError."""
        self._agent = _Agent(arena)
        metadata = bytes(self._agent.nixl.get_agent_metadata())
        self.lender = Lender(metadata, xxhash.xxh3_128_intdigest(metadata), self._agent.base)

    def serve(self) -> None:
        """Do what there is to do for readers. TCP needs it: with RDMA or shared memory reads need nobody here."""
        self._agent.nixl.get_new_notifs()


class ReadingAgent:
    """The agent of a reader's worker, for all of its threads."""

    def __init__(self, arena: memoryview, seconds: float) -> None:
        """Start it. `seconds`: for one read; the daemon's deadline comes first. Raise NixlError."""
        self._agent = _Agent(arena)
        self._seconds = seconds
        self._names: dict[int, Any] = {}
        self._adding = threading.Lock()
        self._pause = threading.Event()
        self._why_not = ""
        self._again_at = 0.0

    @property
    def why_not(self) -> str:
        """Return why nothing is read now. It is empty otherwise, and again a while after a lender was not reached."""
        return self._why_not if time.monotonic() < self._again_at else ""

    def read(self, lender: Lender, here: Sequence[Extent], there: Sequence[Extent]) -> None:
        """Read bytes of the lender's extents into these of the arena, which are as long.

        Raise ValueError, before NIXL sees anything, for metadata that is not what was sent, or for other lengths. Raise
        NotReachedError before a read begins. After NixlError the extents may still be written to until the process
        ends.
        """
        if xxhash.xxh3_128_intdigest(lender.metadata) != lender.digest:
            raise ValueError("the metadata of its NIXL agent is damaged")
        places = list(in_rows(here, there))
        until = time.monotonic() + self._seconds
        name = self._name(lender)
        try:
            for batch in batches(places):
                self._transfer(name, lender.base, batch, until)
        except NixlError:
            raise
        except Exception as error:
            raise NixlError(f"a read over NIXL failed: {type(error).__name__}: {error}") from error

    def _name(self, lender: Lender) -> Any:
        with self._adding:
            name = self._names.get(lender.digest)
            if name is None:
                if len(self._names) >= _LENDERS_MAX:
                    raise NixlError(f"the agent knows {_LENDERS_MAX} lenders, most of which have ended")
                try:
                    name = self._agent.nixl.add_remote_agent(lender.metadata)
                except Exception as error:
                    self._why_not = f"NIXL does not reach the peer: {type(error).__name__}"
                    self._again_at = time.monotonic() + _AGAIN_SECONDS
                    raise NotReachedError(self._why_not) from error
                self._names[lender.digest] = name
            return name

    def _transfer(self, name: Any, base: int, batch: Sequence[Place], until: float) -> None:
        nixl = self._agent.nixl
        here = nixl.get_xfer_descs([(self._agent.base + at, length, 0) for at, _, length in batch], _MEMORY)
        there = nixl.get_xfer_descs([(base + at, length, 0) for _, at, length in batch], _MEMORY)
        handle = nixl.initialize_xfer("READ", here, there, name)
        state = nixl.transfer(handle)
        while state == "PROC":
            if time.monotonic() > until:
                raise NixlError(f"a read over NIXL was not over within {self._seconds:g} s")
            self._pause.wait(POLL_SECONDS)
            state = nixl.check_xfer_state(handle)
        if state != "DONE":
            raise NixlError(f"a read over NIXL ended as {state}")
        nixl.release_xfer_handle(handle)


def in_rows(here: Sequence[Extent], there: Sequence[Extent]) -> Iterator[Place]:
    """Yield what is in a row on both sides, in order. Raise ValueError if one side has more bytes."""
    ours, theirs = iter(here), iter(there)
    at, left = from_, more = 0, 0
    while True:
        while not left and (extent := next(ours, None)) is not None:
            at, left = extent
        while not more and (extent := next(theirs, None)) is not None:
            from_, more = extent
        length = min(left, more)
        if not length:
            break
        yield at, from_, length
        at, from_, left, more = at + length, from_ + length, left - length, more - length
    if left or more:
        raise ValueError(f"{left or more} bytes more on one side")


def batches(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Yield all of the places, at most BATCH_BYTES at once."""
    batch: list[Place] = []
    room = BATCH_BYTES
    for at, from_, total in places:
        done = 0
        while done < total:
            length = min(total - done, room)
            batch.append((at + done, from_ + done, length))
            done, room = done + length, room - length
            if not room:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch
