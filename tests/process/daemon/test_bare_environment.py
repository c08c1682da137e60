"""A real daemon on a host that lacks what most have: a home, an entry in passwd, a temporary directory, tidy mounts.

It runs in a mount namespace of its own: all that is there is read-only, but for one directory of the test's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from kvdepot.server.daemon.app import EXIT_CONFIG

from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.raw_client import RawEngine, keys_of, payload_of

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="making mounts needs root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare"),
]
ODD_NAMES: Final = (
    b"not \xff utf-8",
    b"a space",
    b"a\ttab",
    b"a\nline",
    b"a\\backslash",
    b"a#hash",
    b"as \\040 written",
)
_READ_ONLY: Final = """
set -e
mount --bind "$1" "$1"
for name in "$1"/mounts/*; do mount -t tmpfs -o size=64m none "$name"; done
mount --bind /dev/null /etc/passwd
[ ! -e /etc/nsswitch.conf ] || mount --bind /dev/null /etc/nsswitch.conf  # some services make up an entry
for mount in / /root /home /tmp /var/tmp /usr/tmp; do mount -o remount,ro,bind "$mount" 2>/dev/null || true; done
cd /
shift
exec "$@"
"""
_PROGRAM: Final = (sys.executable, "-m", "kvdepot.server.daemon.app")
_CTL: Final = (sys.executable, "-m", "kvdepot.client.ctl.app")


class BareHost:
    """Runs commands there. `folder` is the one directory that they may write to; `mounts` are those with odd names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.runtime.mkdir(mode=0o700)
        self.mounts = [folder / "mounts" / os.fsdecode(name) for name in ODD_NAMES]
        for mount in self.mounts:
            mount.mkdir(parents=True)
        self.log = folder / "log"

    def command(self, program: Sequence[str]) -> list[str]:
        namespace = ["unshare", "--mount", "--propagation", "private"]
        return [*namespace, "sh", "-c", _READ_ONLY, "sh", str(self.folder), *program]

    def environment(self, *, runtime: bool) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        return kept | {"PYTHONDONTWRITEBYTECODE": "1"} | ({"XDG_RUNTIME_DIR": str(self.runtime)} if runtime else {})

    def run(self, *program: str, runtime: bool = True) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.command(program), env=self.environment(runtime=runtime), capture_output=True, timeout=patient(60),
        )  # fmt: skip

    def start(self, *program: str, runtime: bool = True) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as out:
            return subprocess.Popen(
                self.command(program), env=self.environment(runtime=runtime), stdout=out, stderr=out,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip


@pytest.fixture
def host() -> Iterator[BareHost]:
    folder = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
    try:
        yield BareHost(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def arena_directory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvd", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def wait_ready(host: BareHost, daemon: subprocess.Popen[bytes]) -> None:
    deadline = Deadline(60.0)
    while b"ready to serve" not in host.log.read_bytes():
        assert daemon.poll() is None and not deadline.is_over(), host.log.read_text(errors="replace")
        wait_until(lambda: b"ready to serve" in host.log.read_bytes() or daemon.poll() is not None, "it serves")


def test_a_daemon_serves_without_a_home_a_name_or_a_temporary_directory(host: BareHost, arena_directory: Path) -> None:
    options = ("--ram", "320MiB", "--arena-dir", str(arena_directory), "--metrics", "127.0.0.1:0")
    daemon = host.start(*_PROGRAM, "serve", *options)
    try:
        wait_ready(host, daemon)
        keys = keys_of("bare", 4)
        with RawEngine(host.runtime / "kvdepot/kvdepot.sock") as engine:
            engine.store(keys)
            assert engine.load(keys) == [payload_of(key) for key in keys]
        status = host.run(*_CTL, "status")
        assert (status.returncode, status.stderr) == (0, b"")
        doctor = host.run(*_CTL, "doctor")
        assert b"Traceback" not in doctor.stdout + doctor.stderr
    finally:
        daemon.terminate()
        assert daemon.wait(patient(20)) == 0
    log = host.log.read_text(errors="replace")
    assert "no disk tier: no home directory" in log
    assert "Traceback" not in log


def test_without_a_directory_for_its_socket_it_says_so_in_one_line(host: BareHost) -> None:
    for verb in ("serve", "check-config"):
        ended = host.run(*_PROGRAM, verb, runtime=False)
        assert ended.returncode == 1
        assert ended.stderr.startswith(b"kvdepotd: embedded default: daemon.listen: "), ended.stderr
        assert ended.stderr.count(b"\n") == 1
    status = host.run(*_CTL, "status", runtime=False)
    assert status.returncode == 3
    assert b"/run/kvdepot/kvdepot.sock" in status.stderr and b"Traceback" not in status.stderr


def refused(host: BareHost, mount: Path, exit_code: int = 1) -> str:
    """Return the last line of a daemon whose arena is to be a file on this mount."""
    config = host.folder / "kvdepot.toml"
    config.write_text("[ram]\nsealed = false\n")
    options = ("--socket", str(host.runtime / "d.sock"), "--ram", "320MiB", "--metrics", "")
    ended = host.run(*_PROGRAM, "serve", str(config), *options, "--arena-dir", str(mount))
    assert ended.returncode == exit_code
    assert b"Traceback" not in ended.stderr
    return ended.stderr.decode(errors="backslashreplace").splitlines()[-1]


@pytest.mark.long(seconds=15)
def test_an_arena_on_a_mount_with_an_odd_name_is_bounded_by_that_file_system(host: BareHost) -> None:
    """64 MiB each. A name that no configuration can have is refused."""
    not_text, *others = host.mounts
    line = refused(host, not_text, EXIT_CONFIG)
    assert "ram.path" in line and "is not UTF-8" in line
    for mount in others:
        line = refused(host, mount)
        assert re.search(
            r"ram\.capacity: a capacity of 320 MiB needs .*, and the free space of .* is 6[34] MiB;", line
        ), line
