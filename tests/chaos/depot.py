"""The daemon of a chaos run and what it stands on: a mount that can hang, fail and fill up, and a configuration."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from kvdepot.core.report import DaemonStatus, TierStatus
from kvdepot.core.units import parse_size_bytes
from kvdepot.server.io.jobs import Part
from kvdepot.server.offline.fsck import Verdict, check_store
from kvdepot.server.offline.store_files import OfflineRefusalError, layout_as_found
from kvdepot.server.tiers.disk.layout import generation_of
from kvdepot.server.tiers.disk.records import SEQUENCE_BITS

from tests.chaos.shared_directory import SHARED_CAPACITY, SharedDirectory
from tests.chaos.stepped_clock import ALLOWED_SECONDS, WallClock
from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patience
from tests.rigs.raw_client import status_of

TIER: Final = "medium"
LEASE_SECONDS: Final = 3.0
GRACE_SECONDS: Final = 3.0
READY_SECONDS: Final = 60.0
"""From its start, on a machine with other things to do."""
STOP_SECONDS: Final = 30.0
RAMS: Final = ("512MiB", "544MiB")
RAMS_SHARED: Final = ("608MiB", "640MiB")
"""Where there is a shared tier too: each tier takes some."""
CAPACITIES: Final = ("40MiB", "64MiB", "96MiB")
CODECS: Final = ("none", "lz4", "bitshuffle-lz4")
WORKERS: Final = (1, 2)
"""What sizes and shapes a restart chooses from."""
QUOTAS: Final = (
    "",
    '[[quota]]\ntier = "ram"\ncapacity = "24MiB"\n',
    '[[quota]]\nnamespace = "large"\ncapacity = "10MiB"\n',
)
SHARED: Final = "pool"
_MEDIUM: Final = {1: "160m", 2: "384m"}
"""By nodes."""
_CONFIG: Final = """
[ram]
high_watermark = 0.28
low_watermark = 0.24
[sessions]
credit = "24MiB"
grace = "{grace}s"
[policy]
lease_deadline = "{lease}s"
eviction = "{eviction}"
[[tier]]
name = "{tier}"
kind = "disk"
path = "{path}"
capacity = "{capacity}"
write = "{write}"
codec = "{codec}"
io_workers = {io_workers}
deadline = "2s"
fsync = {fsync}
[breaker]
failures = 3
probe_every = "300ms"
[scrub]
rate = "4MiB/s"
quarantine_capacity = "4MiB"
"""
_SHARED_TIER: Final = """
[[tier]]
name = "{tier}"
kind = "shared"
path = "{path}"
capacity = "{capacity}"
write = "commit"
io_workers = 1
deadline = "2s"
on_root_filesystem = true
"""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file of the medium that the harness has changed: nothing that lies there need be whole."""

    file: str
    start: int
    end: int

    def touches(self, part: Part) -> bool:
        return self.file == part.file and self.start < part.offset + part.length and part.offset < self.end


def unexplained(verdict: Verdict, damages: Sequence[Damage]) -> str:
    """What fsck finds damaged and nobody of us has touched.

    An index that has lost records brings back what was dropped before, and may lie below what was written since.
    """
    layout = layout_as_found(verdict.store)
    generation = max((generation_of(Path(damage.file).name) or 0 for damage in damages), default=0)
    for finding in verdict.findings:
        parts = layout.parts(finding.put.fragments, finding.put.medium_bytes)
        touched = any(damage.touches(part) for damage in damages for part in parts)
        if not touched and finding.put.sequence >> SEQUENCE_BITS > generation:
            return f"fsck: damaged, and not by us: {finding}"
    return ""


@dataclass(slots=True)
class Settings:
    """What a restart may change."""

    ram: str = "456MiB"  # the least there is: an arena of some 180 MiB, of which the watermarks leave a quarter
    capacity: str = "64MiB"
    write: str = "commit"
    codec: str = "none"
    eviction: str = "adaptive"
    io_workers: int = 2
    fsync: bool = False
    quota: str = ""
    shared: Path | None = None  # of a tier below the disk's

    def text(self, path: Path) -> str:
        text = _CONFIG.format(
            grace=GRACE_SECONDS, lease=LEASE_SECONDS, tier=TIER, path=path, capacity=self.capacity, write=self.write,
            codec=self.codec, eviction=self.eviction, io_workers=self.io_workers, fsync=str(self.fsync).lower(),
        )  # fmt: skip
        if self.shared is not None:
            text += _SHARED_TIER.format(tier=SHARED, path=self.shared, capacity=SHARED_CAPACITY)
        return text + self.quota


class Mount:
    """Where the tiers of all nodes lie: a tmpfs of limited size behind FUSE, as far as this machine allows either."""

    def __init__(self, nodes: int = 1) -> None:
        self.left_out: list[str] = []
        self.allowed_seconds = ALLOWED_SECONDS * patience()
        self.fuse: FuseDirectory | None = None
        self.small = False
        reason = why_no_fuse()
        if reason:
            self.left_out.append(f"hung, slow and failing mounts: {reason}")
            self.own = Path(tempfile.mkdtemp(prefix="kvdchaos", dir="/tmp"))
            self.path = self.backing = self.own
        else:
            self.fuse = FuseDirectory()
            self.path, self.backing = self.fuse.path, self.fuse.backing
        try:
            self._make(nodes)
        except BaseException:  # also SIGTERM: what does not begin must not stay either
            self.close()
            raise
        self.shared = SharedDirectory(self.backing)
        """One, whichever node is struck: what was damaged is known to it."""

    def _make(self, nodes: int) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_MEDIUM[nodes]}", "tmpfs", str(self.backing)]
        self.small = subprocess.run(command, check=False, capture_output=True).returncode == 0
        if not self.small:
            self.left_out.append("full file systems: mounting a tmpfs needs root")
        if nodes > 1:
            (self.backing / "shared").mkdir()

    def close(self) -> None:
        if self.fuse is not None:
            with contextlib.suppress(ProcessLookupError):
                self.fuse.go_on()
        if os.path.ismount(self.backing):  # `small` is not known yet while it is mounted
            subprocess.run(["umount", "-l", str(self.backing)], check=False)
        if self.fuse is not None:
            self.fuse.close()
        else:
            shutil.rmtree(self.own, ignore_errors=True)


@dataclass(slots=True)
class Expected:
    """What the harness itself is doing to the daemon: it need not answer meanwhile."""

    up: bool = False
    since: float = field(default_factory=time.monotonic)


class Depot:
    """One daemon, killed, stopped and restarted; its medium, damaged."""

    def __init__(self, mount: Mount, settings: Settings, node: int = 0) -> None:
        self.mount = mount
        self.settings = settings
        self.node = node
        self.root = mount.path / f"tier{node}"
        self.backing = mount.backing / f"tier{node}"
        self.away = mount.backing / f"away{node}"
        self.shared = mount.shared
        self.filler = mount.backing / f"filler{node}"
        self.damages: list[Damage] = []
        self.expected = Expected()
        self.starts = 0
        self.capacity_bytes_max = parse_size_bytes(settings.capacity)
        self.clock = WallClock(mount.backing / f"clock{node}")
        under = ("tests.chaos.stepped_clock", str(self.clock.path), str(mount.allowed_seconds))
        self.daemon = DaemonProcess(ram=settings.ram, config=settings.text(self.root), under=under)

    # --- the process

    def start(self) -> None:
        """Returns at once."""
        self.starts += 1
        self.capacity_bytes_max = max(self.capacity_bytes_max, parse_size_bytes(self.settings.capacity))
        self.daemon.config = self.settings.text(self.root)
        self.daemon.ram = self.settings.ram
        self.daemon.start(ready=False)
        self._expect(up=True)

    def wait_ready(self) -> str:
        """Empty, or what is wrong."""
        began = time.monotonic()
        while time.monotonic() < began + READY_SECONDS * patience():
            if self.ended:
                return f"the daemon ended by itself: {self.daemon.log[-2000:]}"
            with contextlib.suppress(grpc.RpcError):
                status = self.status()
                if status.ready and status.tiers[0].state == "ready":
                    return ""
            time.sleep(0.05)
        return f"the daemon is not ready within {READY_SECONDS:.0f} s: {self.daemon.log[-2000:]}"

    @property
    def running(self) -> bool:
        return self.daemon.process is not None

    @property
    def ended(self) -> bool:
        """Without the harness."""
        return self.daemon.process is not None and self.daemon.process.poll() is not None

    def kill(self) -> None:
        self._expect(up=False)
        self.daemon.kill()

    def stop(self) -> str:
        """Orderly. Empty, or what is wrong."""
        self._expect(up=False)
        process = self.daemon.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_SECONDS * patience())
        except subprocess.TimeoutExpired:
            return f"I4: the daemon does not end within {STOP_SECONDS:.0f} s of SIGTERM"
        self.daemon.process = None
        return "" if code == 0 else f"an orderly stop ended with {code}: {self.daemon.log[-2000:]}"

    def suspend(self) -> None:
        self._expect(up=False)
        self.daemon.suspend()

    def resume(self) -> None:
        self.daemon.resume()
        self._expect(up=True)

    def _expect(self, *, up: bool) -> None:
        self.expected = Expected(up)

    def status(self) -> DaemonStatus:
        return status_of(self.daemon.socket)

    def tier(self) -> TierStatus:
        return self.status().tiers[1]

    def children(self, module: str) -> list[int]:
        """Its processes that run `module`."""
        return children(self.daemon.pid, module.encode()) if self.running else []

    # --- the medium

    def files(self, folder: str, suffix: str) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(path for path in (self.backing / folder).iterdir() if path.suffix == suffix)
        return []

    def flip(self, rng: random.Random, count: int) -> int:
        """Flip bits anywhere in segments. How many."""
        segments = self.files("segments", ".seg")
        done = 0
        for _ in range(count if segments else 0):
            path = rng.choice(segments)
            with contextlib.suppress(OSError), path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                at = rng.randrange(size) if size else 0
                found = os.pread(file.fileno(), 1, at)
                if found:
                    self.damaged(path, at, at + 1)
                    os.pwrite(file.fileno(), bytes([found[0] ^ 1 << rng.randrange(8)]), at)
                    done += 1
        return done

    def damaged(self, path: Path, start: int = 0, end: int = 1 << 60) -> None:
        self.damages.append(Damage(str(path.relative_to(self.backing)), start, end))

    def flip_arena(self, rng: random.Random, count: int) -> None:
        """Flip bits anywhere in the payloads. The daemon does not run, and nobody reads or writes any."""
        with self.daemon.data.open("r+b") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            for _ in range(count):
                at = rng.randrange(size_bytes)
                (found,) = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([found ^ 1 << rng.randrange(8)]), at)

    def drop_arena(self) -> None:
        """As a reboot does. The daemon does not run."""
        for path in self.daemon.arena_directory.iterdir():
            path.unlink()

    def fsck(self) -> Verdict | str:
        """The daemon does not run; its processes may still be ending."""
        until = time.monotonic() + STOP_SECONDS * patience()
        while True:
            try:
                return check_store(self.root)
            except OfflineRefusalError as error:
                if time.monotonic() > until:
                    return f"fsck is refused: {error}"
                time.sleep(0.05)

    def close(self) -> None:
        self.daemon.close()
