"""A real daemon with a disk tier, what lies on its medium, and what its own events say lies there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

from kvdepot.core.calls import Kind
from kvdepot.core.report import DaemonStatus, TierStatus
from kvdepot.core.units import parse_size_bytes
from kvdepot.server.offline.fsck import Verdict, check_store
from kvdepot.server.offline.store_files import OfflineRefusalError
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import Deadline, wait_until
from tests.rigs.raw_client import status_of

TIER: Final = "medium"
RAM: Final = "456MiB"
"""The least there is: an arena of some 150 MiB, of which the watermarks below leave a third."""
_SAMPLE_SECONDS = 0.02
_UNCHANGED = 15  # looks at the status, at least 10 ms apart
_EVENT = re.compile(
    r"(durable|evicted|lost) tier=(\S+) sequence=(\d+) key=([0-9a-f]{32}) kind=(\w+)(?: reason=(\S+))?$"
)
_WORKER = b"kvdepot.server.io.worker"
_OPENER = b"kvdepot.server.tiers.disk.opener"


class Events:
    """The lines of logger `kvdepot.events`: which writes are durable, and what became of them."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = 0
        self.live: dict[int, tuple[str, str]] = {}  # sequence -> (key, kind)
        self.ended: dict[int, str] = {}  # since the last `restart`: sequence -> event and reason

    def follow(self) -> Self:
        """Take in what was written since. A last line without its end is left for the next time."""
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._at)
                whole, end, _ = file.read().rpartition(b"\n")
            self._at += len(whole) + len(end)
            for line in whole.decode().splitlines():
                self._take(line)
        return self

    def _take(self, line: str) -> None:
        match = _EVENT.search(line)
        if match is None:
            return
        event, sequence = match[1], int(match[3])
        if event == "durable":
            assert sequence not in self.live, f"durable twice: {line}"
            self.live[sequence] = match[4], match[5]
        else:
            self.live.pop(sequence, None)  # None: a crash came between its PUT and its event
            self.ended[sequence] = f"{event} {match[6] or ''}"

    def restart(self, indexed: dict[int, tuple[str, str]]) -> None:
        """A daemon's next run starts from its index, which has all that is durable.

        What is more may be there for two reasons: the crash came after its PUT and before its event, or after the
        event of its end and before the KILL.
        """
        self.follow()
        missing = {sequence: name for sequence, name in self.live.items() if indexed.get(sequence) != name}
        assert not missing, f"durable, never ended, and not in the index: {missing}"
        assert len(set(indexed.values())) == len(indexed), "an object lies there twice"
        self.live = dict(indexed)
        self.ended.clear()


class DiskDaemon:
    """Start, kill, reboot and look at one daemon with one disk tier."""

    def __init__(
        self, *, write: str = "commit", capacity: str = "64MiB", path: Path | None = None, options: str = "",
        deadline: str = "10s", tables: str = "", high: float = 0.35,
    ) -> None:  # fmt: skip
        """`path`: of an existing mount, else a directory of its own. `options`: further lines of the tier's table."""
        self.own = Path(tempfile.mkdtemp(prefix="kvdtier", dir="/tmp")) if path is None else None
        self.root = (self.own or path or Path()) / "tier"
        self.capacity_bytes = parse_size_bytes(capacity)
        config = f"""
[ram]
high_watermark = {high}
low_watermark = {high - 0.05}
[[tier]]
name = "{TIER}"
kind = "disk"
path = "{self.root}"
capacity = "{capacity}"
write = "{write}"
deadline = "{deadline}"
{options}
[breaker]
failures = 3
probe_every = "200ms"
{tables}
"""
        self.daemon = DaemonProcess(ram=RAM, config=config, options=("--log-level", "debug"))
        self.events = Events(self.daemon.log_path)

    def start(self, *, ready: bool = True) -> Self:
        self.daemon.start(ready=ready)
        if ready:
            self.wait_state("ready")
        return self

    def status(self) -> DaemonStatus:
        return status_of(self.daemon.socket)

    def tier(self) -> TierStatus:
        (tier,) = (tier for tier in self.status().tiers if tier.name == TIER)
        return tier

    def counter(self, name: str) -> float:
        return self.status().counters.get(name, 0.0)

    def wait_state(self, *states: str, seconds: float = 60.0) -> None:
        wait_until(lambda: self.tier().state in states, f"tier is {' or '.join(states)}", seconds)

    def wait_written(self, seconds: float = 60.0) -> None:
        """Until nothing waits to be written, and nothing has changed for a while: the last PUT may be under way."""
        unchanged: list[tuple[int, int]] = []

        def over() -> bool:
            status, tier = self.status(), self.tier()
            if status.tiers[0].lent_bytes or tier.queued_objects or [(tier.objects, tier.used_bytes)] != unchanged[-1:]:
                unchanged.clear()
            unchanged.append((tier.objects, tier.used_bytes))
            return len(unchanged) >= _UNCHANGED

        wait_until(over, "all is written", seconds)

    def drop_arena(self) -> None:
        """As a reboot does. The daemon does not run."""
        assert self.daemon.process is None
        for path in self.daemon.arena_directory.iterdir():
            path.unlink()

    def fsck(self) -> Verdict:
        """What lies on the medium. The daemon does not run; its processes may still be ending."""
        assert self.daemon.process is None
        until = Deadline(60)
        while True:
            try:
                return check_store(self.root)
            except OfflineRefusalError:
                assert not until.is_over(), "the directory is still held"
                time.sleep(0.02)

    @property
    def workers(self) -> list[int]:
        """Processes that may touch the medium for the daemon, without its opening process."""
        return children(self.daemon.pid, _WORKER)

    @property
    def openers(self) -> list[int]:
        return children(self.daemon.pid, _OPENER)

    def close(self) -> None:
        self.daemon.close()
        if self.own is not None:
            shutil.rmtree(self.own, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:  # what does not begin must not stay either
            self.close()
            raise

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(*(line for line in self.daemon.log.splitlines() if " error " in line), sep="\n")
        self.close()


def indexed(verdict: Verdict) -> dict[int, tuple[str, str]]:
    """As `Events.live`."""
    return {put.sequence: (put.name.key.hex(), Kind(put.name.kind).name.lower()) for put in verdict.index.puts}


def on_medium(verdict: Verdict) -> tuple[int, int]:
    """Return how many objects lie there, and their bytes."""
    return len(verdict.index.puts), sum(put.medium_bytes for put in verdict.index.puts)


def differences(verdict: Verdict, tier: TierStatus, counters: Mapping[str, float]) -> str:
    """Say how what lies on the medium differs from what the tier counted before it stopped; empty if it does not.

    A place where a write failed counts as used until the tier closes (`Space.shun`), also if two workers were killed
    over it.
    """
    objects, used_bytes = on_medium(verdict)
    failed = counters.get(f"tier_writes.{tier.name}/{IoOutcome.IO_ERROR}", 0.0)
    shunned_bytes_max = tier.capacity_bytes // 64 if failed else 0
    if objects == tier.objects and 0 <= tier.used_bytes - used_bytes <= shunned_bytes_max:
        return ""
    return f"I4: {objects} objects and {used_bytes} bytes on the medium, {tier} before the stop"


def medium_bytes(root: Path) -> int:
    """As du(1) counts: blocks, of directories too."""
    total = 0
    folders = [os.fspath(root)]
    while folders:
        folder = folders.pop()
        with contextlib.suppress(OSError):
            total += Path(folder).stat().st_blocks * 512
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += _file_bytes(entry)
    return total


def _file_bytes(entry: os.DirEntry[str]) -> int:
    """0: it was removed in between."""
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def sampled(root: Path) -> Iterator[list[int]]:
    """`medium_bytes` of the directory, again and again."""
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            samples.append(medium_bytes(root))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
