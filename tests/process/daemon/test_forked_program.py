"""How tests start daemons and commands: copies that differ from fresh processes in nothing that a test is about."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kvdepot.server.io import child

from tests.rigs import forked_children, forked_program
from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.disk_node import daemon, wait_ready
from tests.rigs.forked import ROOT
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import RawEngine


def parent(daemon: DaemonProcess) -> int:
    return int(Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_two_daemons_and_two_runs_of_one_have_other_seeds_of_hashes() -> None:
    """A seed is that of the server whose copy a daemon is."""
    with DaemonProcess() as first, DaemonProcess() as second:
        run = parent(first)
        assert run != parent(second)
        first.stop()
        first.start()
        assert run != parent(first) == parent(second)


def test_a_variable_that_may_be_read_at_import_needs_a_fresh_process() -> None:
    with Path(os.devnull).open("r+") as nothing:
        streams = (nothing.fileno(),) * 3

        def start(**variables: str) -> int | None:
            environment = os.environ | variables
            process = forked_program.start("kvdepot.client.ctl.app", ["--version"], streams, environment)
            return None if process is None else process.wait()

        assert start() == start(KVDEPOT_ENDPOINT="unix:///nowhere", COLUMNS="20") == 0
        assert start(PYTHONHASHSEED="1") is None
        assert start(LD_PRELOAD="") is None


def test_what_the_first_test_with_a_daemon_sets_at_import_is_not_taken_for_everyones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_program, "_servers", {})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with DaemonProcess() as fresh:
        assert parent(fresh) == os.getpid()
        assert f"PYTHONPATH={tmp_path}".encode() in Path(f"/proc/{fresh.pid}/environ").read_bytes().split(b"\0")
        monkeypatch.undo()
        monkeypatch.setattr(forked_program, "_servers", {})
        with DaemonProcess() as copy:
            assert parent(copy) != os.getpid()


def test_an_exit_code_and_a_signal_pass_to_who_started_the_daemon() -> None:
    with DaemonProcess() as daemon:
        assert daemon.stop() == 0
        daemon.start()
        assert daemon.kill() == -9


WORKER = b"kvdepot.server.io.worker"


def numbers(pid: int) -> set[int]:
    """Of its descriptors but the streams. A worker that begins has a file open for a moment."""
    return {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()} - {0, 1, 2}


def test_children_of_a_copy_are_its_own_with_their_commands_and_descriptors(directory: Path) -> None:
    with daemon(directory) as node, RawEngine(node.socket) as engine:
        wait_ready(engine)
        workers = children(node.pid, WORKER)
        for pid in workers:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            assert words[1:3] == [b"-Pm", WORKER] and words[5:7] == [str(node.pid).encode(), bytes(directory)]
            wait_until(lambda pid=pid: len(numbers(pid)) <= 4, "it has its socket, the arena and the directory's lock")
            assert int(words[4]) in numbers(pid)
            assert os.getpgid(pid) == os.getpgid(node.pid)
        assert children(node.pid, b"kvdepot.server.tiers.disk.opener")
        every = [pid for name in forked_children.MODULES for pid in children(node.pid, name.encode())]
        assert len(workers) > 1
        os.kill(workers[0], signal.SIGKILL)
        wait_until(lambda: workers[0] not in children(node.pid), "the daemon reaps a worker")
        node.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in every), "all children end with the daemon")


def in_a_fresh_process(job: Callable[[], None]) -> int:
    """The exit code of a fresh process that has imported what a copy of the daemon has, and then does this."""
    program = f"from {__name__} import {job.__name__} as job, forked_children as f; f.preload(); job()"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=patient(60)).returncode


def spawn(*arguments: str) -> subprocess.Popen[bytes]:
    """A checksum worker, whose socket is closed at our end: it ends by itself if it may."""
    process, ours, pidfd = child.spawn("kvdepot.server.io.checksum_worker", lambda fd: (*arguments, fd, os.getpid()))
    ours.close()
    os.close(pidfd)
    return process


def blocked(pid: int) -> int:
    """Its signals, one bit each."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0], 16)


def limits_and_mask() -> None:
    forked_children.begin()
    resource.setrlimit(resource.RLIMIT_NOFILE, (77, 77))
    process, ours, _ = child.spawn("kvdepot.server.io.checksum_worker", lambda fd: ("", fd, os.getpid()))
    assert isinstance(process, forked_children.Child) and process.poll() is None
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (77, 77)
    given = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1
    assert blocked(process.pid) & given == given  # from its first instruction on
    wait_until(lambda: blocked(process.pid) == given, "no other ones, as while it makes a thread")
    ours.close()
    assert process.wait() == 0
    other, _, _ = child.spawn("kvdepot.server.io.checksum_worker", lambda fd: ("", fd, os.getpid()))
    other.kill()
    assert other.wait() == -signal.SIGKILL


def failing() -> None:
    forked_children.begin()
    assert spawn("no such parts").wait() == 1


def not_preloaded() -> None:
    forked_children.begin()
    process, _, _ = child.spawn("kvdepot.server.io.lifeline", lambda fd: (fd,))
    assert type(process) is subprocess.Popen and process.wait() == 0


def without_room() -> None:
    os.setresuid(65534, 65534, 65534)
    forked_children.begin()
    nursery = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
    resource.prlimit(nursery, resource.RLIMIT_NPROC, (1, 1))
    with pytest.raises(BlockingIOError):  # EAGAIN
        spawn("")


def orphaned() -> None:
    """The daemon is killed while its child is made, which then waits for nobody."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    orphan = os.fork()
    if not orphan:
        forked_children._become(gone.pid, gone.pid, pickle.dumps(((), (), {}, "/", 0, ())), [])
    assert os.waitpid(orphan, 0) == (orphan, 0)


@pytest.mark.parametrize("job", [limits_and_mask, failing, not_preloaded, without_room, orphaned])
def test_children_of_a_copy_are_as_popen_would_start_them(job: Callable[[], None]) -> None:
    if job is without_room and os.getuid():
        pytest.skip("another user's limit of processes needs root")
    assert in_a_fresh_process(job) == 0
