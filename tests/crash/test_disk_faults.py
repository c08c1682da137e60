"""T5 through the daemon: the medium is full, read-only, failing, forbidden or gone.

Each time the tier says so once in the log and always in status and metrics, RAM serves on, and
it recovers by itself. Hung mounts: `test_hung_tier.py`.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvdepot.core.calls import AcquireOutcome

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.disk_daemon import TIER, DiskDaemon
from tests.rigs.known_objects import Known, KnownEngine, dense
from tests.rigs.patience import patient, wait_until

needs_fuse = pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
SPEC = dense(200_000)
MIB = 1 << 20
QUICK = '[scrub]\nrate = "0MiB/s"\n'
TROUBLE_SECONDS = 2.0
RECOVERY_SECONDS = 30.0
_PAUSE_SECONDS = 0.05
GRANTED = AcquireOutcome.GRANTED


def _metrics(world: DiskDaemon) -> dict[str, float]:
    with urllib.request.urlopen(f"{world.daemon.metrics}/metrics", timeout=patient(10)) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def _health(world: DiskDaemon) -> str:
    """What /healthz says besides that it serves."""
    with urllib.request.urlopen(f"{world.daemon.metrics}/healthz", timeout=patient(10)) as answer:
        found = json.load(answer)
    assert found["ready"]
    return str(found["reason"])


def _says_that_it_is_degraded(world: DiskDaemon) -> bool:
    """In status and metrics alike."""
    found = _metrics(world)
    flags = (found[f'kvdepot_tier_{name}{{tier="{TIER}"}}'] for name in ("degraded", "breaker_open"))
    return bool(world.tier().reason) and any(flags)


def _objects(engine: KnownEngine, first: int, count: int) -> list[Known]:
    """Without parents or children."""
    return [engine.prompt(10 * number, 1)[0] for number in range(first, first + count)]


def _put(engine: KnownEngine, objects: list[Known]) -> None:
    for known in objects:
        assert engine.put([known]) == 1
        assert engine.get([known]) is GRANTED


class Trouble:
    """A daemon in trouble: how it gets into it, what must hold in it and after it."""

    def __init__(self, world: DiskDaemon, begin: Callable[[], object], end: Callable[[], object] | None) -> None:
        self.world = world
        self.begin = begin
        self.end = end

    def run(self, expected: str, *, lines_max: int = 2, still_read: bool) -> None:
        """`expected` stands in the reason. `still_read`: what lies there is served in it."""
        world = self.world
        with KnownEngine(world.daemon.socket, SPEC) as engine:
            before = _objects(engine, 0, 12)
            _put(engine, before)
            wait_until(lambda: world.tier().objects == len(before), "all is written")
        world.daemon.stop()
        world.drop_arena()
        world.start()
        at = len(world.daemon.log)
        with KnownEngine(world.daemon.socket, SPEC) as engine:
            assert engine.get(before[:1]) is GRANTED
            self.begin()
            during = self._suffer(engine, expected)
            assert not still_read or engine.get(before[1:2]) is GRANTED
            said = [line for line in world.daemon.log[at:].splitlines() if " warning " in line]
            assert 1 <= len(said) <= lines_max, "\n".join(said)
            if self.end is not None:
                self._recover(engine, before, during)
        assert world.daemon.stop() == 0

    def _suffer(self, engine: KnownEngine, expected: str) -> list[Known]:
        """RAM takes and serves everything all the while."""
        until = time.monotonic() + TROUBLE_SECONDS
        wait_until(
            lambda: (
                self._more(engine) and _says_that_it_is_degraded(self.world) and expected in self.world.tier().reason
            ),
            "it says so, and why",
        )
        while time.monotonic() < until:
            self._more(engine)
            assert self.world.status().ready
        assert _says_that_it_is_degraded(self.world)
        assert f"tier {TIER}: " in _health(self.world)
        return _objects(engine, 100, self._stored)

    _stored = 0

    def _more(self, engine: KnownEngine) -> bool:
        """One object that the tier would be given. Slowly: RAM keeps them all, and the tier has room for them later."""
        time.sleep(_PAUSE_SECONDS)
        _put(engine, _objects(engine, 100 + self._stored, 1))
        self._stored += 1
        return True

    def _recover(self, engine: KnownEngine, before: list[Known], during: list[Known]) -> None:
        world = self.world
        assert self.end is not None
        self.end()
        wait_until(lambda: not world.tier().reason, "the tier comes back", RECOVERY_SECONDS)
        assert (world.tier().state, world.tier().breaker) == ("ready", "closed")
        assert not _says_that_it_is_degraded(world) and not _health(world)
        assert {engine.get([known]) for known in [*before, *during]} == {GRANTED}
        _put(engine, after := _objects(engine, 5000, 5))
        keys = {(known.key.hex(), "attention") for known in after}
        wait_until(lambda: keys <= set(world.events.follow().live.values()), "it takes objects again")


@pytest.mark.requirement("T5")
@needs_fuse
@pytest.mark.parametrize(
    ("faults", "reason", "still_read"),
    [
        ({"write": errno.ENOSPC, "create": errno.ENOSPC}, "the file system is full", True),
        pytest.param(
            {"write": errno.EDQUOT, "create": errno.EDQUOT},
            "the file system is full",
            True,
            marks=pytest.mark.long(seconds=8),
        ),
        ({"write": errno.EROFS, "create": errno.EROFS}, "the file system is read-only", True),
        ({"write": errno.EIO, "read": errno.EIO}, "io_error", False),
        (dict.fromkeys(("open", "create", "write"), errno.EACCES), "", False),
    ],
    ids=["ENOSPC", "EDQUOT", "EROFS", "EIO", "EACCES"],
)
def test_a_mount_that_answers_errors(
    fuse: FuseDirectory, faults: dict[str, float], reason: str, still_read: bool
) -> None:
    with DiskDaemon(path=fuse.path, capacity="32MiB", tables=QUICK) as world:
        Trouble(world, lambda: fuse.fault(**faults), fuse.fault).run(reason, lines_max=4, still_read=still_read)


@pytest.mark.requirement("P6")
@needs_fuse
def test_what_cannot_be_read_now_is_a_miss_and_not_lost(fuse: FuseDirectory) -> None:
    with DiskDaemon(path=fuse.path, capacity="16MiB", tables=QUICK) as world:
        with KnownEngine(world.daemon.socket, SPEC) as engine:
            objects = _objects(engine, 0, 4)
            _put(engine, objects)
            wait_until(lambda: world.tier().objects == len(objects), "all is written")
        world.daemon.stop()
        world.drop_arena()
        world.start()
        with KnownEngine(world.daemon.socket, SPEC) as engine:
            fuse.fault(open=errno.EACCES)
            assert engine.get(objects[:1]) is AcquireOutcome.MISSING
            assert world.counter(f"tier_reads.{TIER}/unreadable") == 1
            fuse.fault()
            wait_until(lambda: world.tier().breaker == "closed", "the path is in use")
            assert {engine.get([known]) for known in objects} == {GRANTED}
        assert world.tier().objects == len(objects)
        assert not world.tier().quarantined_bytes


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


@pytest.mark.requirement("T5")
def test_a_directory_that_goes_away_and_comes_back(directory: Path) -> None:
    with DiskDaemon(path=directory, capacity="32MiB", tables=QUICK) as world:
        away = directory / "away"
        trouble = Trouble(world, lambda: world.root.rename(away), lambda: away.rename(world.root))
        trouble.run("", lines_max=4, still_read=False)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs smaller than the capacity."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.requirement("T5", "T2")
@needs_root
def test_a_file_system_that_fills_up(small: Path) -> None:
    """Somebody else's file takes all that is left; when it goes, the tier goes on."""
    filler = small / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))

    with DiskDaemon(path=small, capacity="16MiB", tables=QUICK) as world:
        Trouble(world, fill, filler.unlink).run("full", lines_max=4, still_read=True)


@pytest.mark.requirement("T5")
@needs_root
def test_a_file_system_smaller_than_the_capacity_is_used_as_far_as_it_goes(small: Path) -> None:
    with DiskDaemon(path=small, capacity="64MiB", tables=QUICK) as world, KnownEngine(world.daemon.socket, SPEC) as one:
        _put(one, objects := _objects(one, 0, 100))
        wait_until(lambda: "cannot be made" in world.tier().reason, "it says so")
        world.wait_written()  # what had waited for the segment was told
        tier = world.tier()
        assert tier.state == "degraded"
        assert _says_that_it_is_degraded(world)
        assert "degraded: segment" in world.daemon.log
        assert 20 < tier.objects < 70
        assert tier.used_bytes <= tier.ready_bytes < 14 * MIB
        room = os.statvfs(small)
        assert room.f_bavail * room.f_frsize >= 14 * MIB // 64, "what is left is for others"
        assert {one.get([known]) for known in objects} == {GRANTED}


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A file system in a file, that a switch in /sys makes read-only, as an error of its device would."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    made = subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=False).returncode
    mounted = made or subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, mount], check=False).returncode
    if mounted:
        pytest.skip("no loop devices here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.requirement("T5")
@needs_root
def test_a_file_system_that_turned_read_only(ext4: Path) -> None:
    source = subprocess.run(["findmnt", "-no", "SOURCE", ext4], capture_output=True, text=True, check=True).stdout
    switch = Path("/sys/fs/ext4", Path(source.strip()).name, "trigger_fs_error")
    with DiskDaemon(path=ext4, capacity="24MiB", tables=QUICK) as world:
        Trouble(world, lambda: switch.write_text("1"), None).run("the file system is read-only", still_read=True)
