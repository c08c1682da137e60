"""The worker process by itself: what it loads, what ends it, what does not, how much memory it takes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.core.data_mapping import pack_parts
from kvdepot.server.io.context import SCRATCH_KEPT_BYTES
from kvdepot.server.io.framing import HEAD
from kvdepot.server.io.jobs import ANSWERS, JOBS, STARTED, Job, Probe
from kvdepot.server.io.pool import worker_reserve_bytes
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.child_processes import as_the_daemon_starts_it
from tests.rigs.io_pool_rig import is_gone
from tests.rigs.io_rig import ARENA_BYTES, MIB, IoRig, verify_only
from tests.rigs.patience import Deadline, patient

MODULE = "kvdepot.server.io.worker"
PROBE = Probe(".probe")
STRANGE = [bytes(HEAD.size), HEAD.pack(1 << 31, 0, 1), HEAD.pack(3, 0, 1) + b"abc", HEAD.pack(0, 99, 1)]


class Worker:
    """One process, spoken to directly."""

    def __init__(self, rig: IoRig) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(patient(10))
        arguments = (pack_parts([(rig.arena_fd, ARENA_BYTES)]), theirs.fileno(), os.getpid(), rig.directory, "")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *map(str, arguments)],
                pass_fds=(rig.arena_fd, theirs.fileno()),
                stderr=subprocess.PIPE,
                env=as_the_daemon_starts_it(),
            )

    def ask(self, job: Job, number: int = 1) -> IoOutcome:
        self.socket.sendall(JOBS.pack(job, number))
        received = bytearray()
        while not (answers := [answer for answer in ANSWERS.take(received) if answer[0] != STARTED]):
            data = self.socket.recv(1 << 16)
            assert data, "the worker ended"
            received += data
        [(answered, answer)] = answers
        assert answered == number
        return answer.outcome

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.socket.close()


@pytest.fixture
def worker(rig: IoRig) -> Iterator[Worker]:
    worker = Worker(rig)
    yield worker
    worker.close()


def test_a_worker_loads_nothing_heavy() -> None:
    heavy = "numpy", "grpc", "google", "asyncio", "pydantic", "numcodecs", "kvdepot.core.arena"
    code = f"import sys, {MODULE}; print(*[name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.split() == []


@pytest.mark.requirement("I4")
def test_a_worker_takes_less_memory_than_is_kept_free_for_it(rig: IoRig, worker: Worker) -> None:
    for seed in range(4):
        write = rig.write(seed, 12 * MIB)
        assert worker.ask(write) is IoOutcome.OK
        assert worker.ask(rig.read_of(write)) is IoOutcome.OK
        assert worker.ask(verify_only(rig.read_of(write))) is IoOutcome.OK
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    kib = {
        line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith(("Rss", "VmPTE"))
    }
    private = (kib["RssAnon"] + kib["RssFile"] + kib["VmPTE"]) * 1024
    assert private < worker_reserve_bytes(ARENA_BYTES, codec=False)
    assert private > 4 * MIB, "the figure is of something else"


@pytest.mark.requirement("T4")
def test_a_worker_maps_the_arena_when_its_path_has_answered(rig: IoRig, worker: Worker) -> None:
    """Before, it is perhaps one of many on a mount that hangs, and engines wait for the processors that this takes."""
    rig.arena[:] = bytes(ARENA_BYTES)  # as the daemon populates it

    def mapped_bytes() -> int:
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssShmem"))

    assert worker.ask(verify_only(rig.read_of(rig.write(1, MIB)))) is IoOutcome.MAGIC
    time.sleep(0.5)
    assert mapped_bytes() < MIB
    assert worker.ask(PROBE, 2) is IoOutcome.OK
    until = Deadline(15)
    while mapped_bytes() < ARENA_BYTES:
        assert not until.is_over(), mapped_bytes()
        time.sleep(0.02)


def test_memory_kept_for_a_worker_grows_with_the_arena_it_maps() -> None:
    small, large = (worker_reserve_bytes(gib << 30, codec=False) for gib in (1, 65))
    assert large - small == (64 << 30) // 512
    assert worker_reserve_bytes(1 << 30, codec=True) >= small + 2 * SCRATCH_KEPT_BYTES


def test_the_end_of_the_stream_ends_it(worker: Worker) -> None:
    assert worker.ask(PROBE) is IoOutcome.OK
    worker.socket.close()
    assert worker.process.wait(patient(10)) == 0


def test_signals_for_the_daemon_do_not_end_it(worker: Worker) -> None:
    assert worker.ask(PROBE) is IoOutcome.OK
    worker.process.send_signal(signal.SIGINT)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ask(PROBE, 2) is IoOutcome.OK


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("frame", STRANGE)
def test_bytes_that_are_no_job_end_it(worker: Worker, frame: bytes) -> None:
    assert worker.ask(PROBE) is IoOutcome.OK
    worker.socket.sendall(frame)
    _, log = worker.process.communicate(timeout=patient(10))
    assert worker.process.returncode == 1
    assert b"FrameError" in log


def test_a_job_that_raises_ends_it(rig: IoRig) -> None:
    """Whatever is wrong with it then, the next worker has not."""
    ours, theirs = socket.socketpair()
    code = (
        f"import sys, {MODULE} as worker; worker.perform = lambda job, context: 1 / 0;"
        f"sys.exit(worker.main(['', '{theirs.fileno()}', '{os.getpid()}', '{rig.directory}', '']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)
    theirs.close()
    ours.sendall(JOBS.pack(PROBE, 1))
    _, log = process.communicate(timeout=patient(10))
    assert process.returncode == 1
    assert b"ZeroDivisionError" in log
    ours.close()


def test_it_ends_with_the_process_that_made_it(rig: IoRig) -> None:
    """Also when that is killed, and the other end of the socket lives on elsewhere."""
    ours, theirs = socket.socketpair()
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', '{MODULE}', '', '{theirs.fileno()}', str(os.getpid()),"
        f" '{rig.directory}', ''], pass_fds=({theirs.fileno()},))\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE, env=as_the_daemon_starts_it()
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    ours.sendall(JOBS.pack(PROBE, 1))
    ours.settimeout(patient(10))
    assert ours.recv(100)
    parent.kill()
    parent.communicate()
    until = Deadline(10)
    while not is_gone(child):
        assert not until.is_over()
        time.sleep(0.01)
    with contextlib.closing(ours), contextlib.closing(theirs):
        pass


def test_an_idle_worker_holds_no_file_open(rig: IoRig, worker: Worker) -> None:
    assert worker.ask(rig.write(1, MIB)) is IoOutcome.OK
    open_files = Path(f"/proc/{worker.process.pid}/fd")

    def holds() -> bool:
        return any(fd.resolve() == rig.segment for fd in open_files.iterdir())

    assert holds()
    until = Deadline(15)
    while holds():
        assert not until.is_over()
        time.sleep(0.1)
