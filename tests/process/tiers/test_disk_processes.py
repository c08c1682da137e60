"""The disk tier with its real processes: locks, workers, streams, ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.server.io.child_stream import NICENESS
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.layout import FOLDERS, DiskLayout, segment_name
from kvdepot.server.tiers.disk.messages import Message
from kvdepot.server.tiers.disk.opener_process import OpenerProcess
from kvdepot.server.tiers.disk.records import Put, pack_put
from kvdepot.server.tiers.disk.recovery import SnapshotFacts, make_store, write_generation

from tests.rigs.disk_live import PAYLOAD, QUARANTINE_BYTES, live
from tests.rigs.disk_rig import object_name
from tests.rigs.patience import until

CAPACITY_BYTES = 8 << 30


def run(*command: str | Path, check: bool = True) -> None:
    subprocess.run([str(part) for part in command], check=check)


def test_objects_outlive_the_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path / "tier") as first:
            for number in range(20):
                assert (await first.write(number)).outcome is IoOutcome.OK
        async with live(tmp_path / "tier") as second:
            assert len(second.listener.held) == 20
            for handle in list(second.listener.held):
                assert await second.read(handle) == (IoOutcome.OK, PAYLOAD)

    asyncio.run(scenario())


def test_a_second_daemon_on_the_directory_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.server.tiers.disk.tier._VERDICT_SECONDS", 60.0)  # on a busy machine

    async def scenario() -> None:
        async with live(tmp_path / "tier"):
            with pytest.raises(
                ConfigError, match=rf"tier\.disk\.path: .*/tier is held by the daemon with pid {os.getpid()}"
            ):
                async with live(tmp_path / "tier"):
                    pass
        async with live(tmp_path / "tier"):
            pass  # once the first is gone

    asyncio.run(scenario())


@pytest.mark.requirement("T5")
def test_a_directory_that_goes_away_and_comes_back_is_opened_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        root = tmp_path / "tier"
        async with live(root) as under:
            first = (await under.write(1)).handle
            shutil.copytree(root, tmp_path / "copy")
            second = (await under.write(2)).handle
            root.rename(tmp_path / "away")
            await under.until(lambda: not under.tier.readable, "noticed")
            assert under.tier.status().state == "offline"
            (tmp_path / "copy").rename(root)
            await under.until(lambda: under.tier.writable, "recovered")
            assert second not in under.listener.held
            assert await under.read(first) == (IoOutcome.OK, PAYLOAD)
            assert (await under.write(3)).outcome is IoOutcome.OK
            # A segment that is being made would be a new file in a folder that is being removed.
            await under.until(lambda: not under.tier._data.in_flight, "nothing is made")  # type: ignore[attr-defined]
            shutil.rmtree(root)
            await under.until(lambda: not under.tier.readable, "noticed")
            root.mkdir()
            await under.until(lambda: under.tier.writable, "recovered")
            assert not under.listener.held
            assert (await under.write(4)).outcome is IoOutcome.OK

    asyncio.run(scenario())


@pytest.mark.requirement("T5")
def test_a_directory_that_was_moved_is_another_daemon_s_and_if_it_comes_back_the_next_one_s(tmp_path: Path) -> None:
    """The first daemon does not know what the other one did there. Its next run does."""

    async def scenario() -> None:
        root, moved = tmp_path / "tier", tmp_path / "moved"
        async with live(root) as first:
            assert (await first.write(1)).outcome is IoOutcome.OK
            root.rename(moved)
            await first.until(lambda: not first.tier.readable, "noticed")
            async with live(moved) as second:
                (handle,) = second.listener.held
                assert await second.read(handle) == (IoOutcome.OK, PAYLOAD)
                assert (await second.write(2)).outcome is IoOutcome.OK
            moved.rename(root)
            await first.until(lambda: "only a restart" in first.tier.status().reason, "refused")
        async with live(root) as first:
            assert len(first.listener.held) == 2
            for handle in list(first.listener.held):
                assert await first.read(handle) == (IoOutcome.OK, PAYLOAD)

    asyncio.run(scenario())


@pytest.mark.requirement("T5")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_mounted_again_with_another_device_number_is_opened_again(tmp_path: Path) -> None:
    """Its store proves it. An empty folder on another device is still where a mount is missing."""

    async def scenario() -> None:
        root, away, disk = tmp_path / "tier", tmp_path / "away", tmp_path / "disk"
        disk.mkdir()
        run("mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", disk)
        try:
            async with live(root) as under:
                handle = (await under.write(1)).handle
                root.rename(away)
                root.mkdir()
                run("mount", "--bind", disk, root)
                await under.until(lambda: "not mounted?" in under.tier.status().reason, "an empty folder is refused")
                assert not any(disk.iterdir())
                run("umount", root)
                shutil.copytree(away, disk, dirs_exist_ok=True)
                run("mount", "--bind", disk, root)
                await under.until(lambda: under.tier.writable, "recovered")
                assert await under.read(handle) == (IoOutcome.OK, PAYLOAD)
                assert (await under.write(2)).outcome is IoOutcome.OK
        finally:
            run("umount", "-l", root, check=False)
            run("umount", "-l", disk)

    asyncio.run(scenario())


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("locks", [True, False], ids=["with its locks", "without"])
def test_another_store_in_its_place_loses_nothing_and_is_not_served(tmp_path: Path, *, locks: bool) -> None:
    """Sequences of two stores are alike, so what one tier knows of them means nothing in the other's directory."""

    async def scenario() -> None:
        root, other = tmp_path / "tier", tmp_path / "other"
        async with live(other) as under:
            for number in range(8):
                assert (await under.write(100 + number)).outcome is IoOutcome.OK
        if not locks:
            for name in ("daemon.lock", "workers.lock"):
                (other / name).unlink()
        async with live(root) as under:
            for number in range(5):
                assert (await under.write(number)).outcome is IoOutcome.OK
            under.tier.drop(next(iter(under.listener.held)))
            root.rename(tmp_path / "away")
            other.rename(root)
            await under.until(lambda: "holds another store than before" in under.tier.status().reason, "refused")
            assert not under.tier.readable
            root.rename(other)
            (tmp_path / "away").rename(root)
            await under.until(lambda: under.tier.writable, "recovered")
        async with live(other) as under:
            assert len(under.listener.held) == 8
            for handle in list(under.listener.held):
                assert await under.read(handle) == (IoOutcome.OK, PAYLOAD)

    asyncio.run(scenario())


def test_an_opening_process_that_dies_before_it_has_read_anything_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon starts, with its tier offline for a moment: memory may have been short."""
    start = OpenerProcess.start
    started: list[int] = []

    def starting(opener: OpenerProcess, hear: Callable[[Message], None]) -> None:
        start(opener, hear)
        started.append(opener.pid)
        if len(started) == 1:
            os.kill(opener.pid, signal.SIGKILL)

    monkeypatch.setattr(OpenerProcess, "start", starting)

    async def scenario() -> None:
        async with live(tmp_path / "tier") as under:
            assert len(started) == 2
            assert (await under.write(1)).outcome is IoOutcome.OK

    asyncio.run(scenario())


def test_opening_processes_that_ended_are_reaped_while_others_follow(tmp_path: Path) -> None:
    """A disk that is not mounted is tried again for as long as the daemon lives."""

    async def scenario() -> None:
        config = DiskConfig("disk", tmp_path / "missing" / "tier", CAPACITY_BYTES, quarantine_bytes=QUARANTINE_BYTES)
        opener = OpenerProcess(config, asyncio.get_running_loop())
        started: list[Path] = []
        for _ in range(6):
            opener.start(lambda _: None)
            assert not any(process.exists() for process in started), "the one before was reaped"
            started.append(Path("/proc", str(opener.pid)))
            opener.end()
            await until(lambda: state_of(started[-1]) == "Z", "the process has ended")

    asyncio.run(scenario())


def state_of(process: Path) -> str:
    """As the kernel calls it; Z also for one that is gone."""
    try:
        return (process / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"


@pytest.mark.requirement("P5")
def test_the_opening_process_lets_others_go_first_once_it_has_the_directory(tmp_path: Path) -> None:
    """A start waits for its word on who holds the directory; the index is read beside everything else."""

    async def scenario() -> None:
        async with live(tmp_path / "tier") as under:
            here = os.getpriority(os.PRIO_PROCESS, 0)
            pid = under.tier._openings.link.pid  # type: ignore[attr-defined]
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(here + NICENESS, 19)

    asyncio.run(scenario())


def test_the_opening_process_may_die(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path / "tier") as under:
            handle = (await under.write(1)).handle
            os.kill(under.tier._openings.link.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            await under.until(lambda: not under.tier.writable, "noticed")
            assert await under.read(handle) == (IoOutcome.OK, PAYLOAD)  # reading goes on
            await under.until(lambda: under.tier.writable, "recovered")
            assert (await under.write(2)).outcome is IoOutcome.OK
            assert await under.read(handle) == (IoOutcome.OK, PAYLOAD)

    asyncio.run(scenario())


def store_of(root: Path, objects: int) -> None:
    """What a daemon of some days has left, as far as an opening looks: no payload."""
    layout = DiskLayout.plan(CAPACITY_BYTES, QUARANTINE_BYTES)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
    store = make_store(root, layout, os.urandom)
    records: list[tuple[int, bytes]] = []
    for number in range(objects):
        name = object_name(number, raw_bytes=4 * 4096, boundary=32 * (1 + number % 500))
        fragments = ((number * 5 * 4096, 5 * 4096),)
        put = Put(name, (1 << 40) + number, 1, 0, name.raw_bytes, number, number, 1_800_000_000, fragments)
        records.append((number % 500, pack_put(put)))
    packed = [record for _, record in sorted(records)]
    write_generation(root, store, 1, packed, SnapshotFacts((1 << 40) + objects, (1 << 40) + objects, 0, 0, 0))
    for number in range(-(-objects * 5 * 4096 // layout.segment_bytes)):
        (root / segment_name(number)).touch()
        os.truncate(root / segment_name(number), layout.length_of(number))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.requirement("T2")
@pytest.mark.long(seconds=10)
def test_100_000_objects_are_back_in_five_seconds(tmp_path: Path) -> None:
    """One after the other, so what both take of a CPU is how long it takes where nothing else runs."""

    async def scenario() -> None:
        store_of(tmp_path / "tier", 100_000)
        started = time.process_time()
        async with live(tmp_path / "tier", opened=False, capacity_bytes=CAPACITY_BYTES) as under:
            await under.until(lambda: under.tier.readable, "opened", 60.0)
            daemon = time.process_time() - started
            opener = _cpu_seconds(under.tier._openings.link.pid)  # type: ignore[attr-defined]
            assert daemon + opener < 5.0, f"{daemon:.1f} s in the daemon, {opener:.1f} s in the opening process"
            assert len(under.listener.held) == 100_000
            boundaries = [name.boundary_tokens for name in under.listener.found_order]
            assert boundaries == sorted(boundaries)

    asyncio.run(scenario())


_WORKER_OF_A_DEAD_DAEMON = """
import sys, time
from pathlib import Path
from kvdepot.server.io.directory_guard import enter, read_token
path = Path(sys.argv[1])
assert enter(path, read_token(path)) is not None
print("in", flush=True)
sys.stdin.read()
"""


@pytest.mark.requirement("I6")
def test_it_waits_for_workers_of_the_last_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        root = tmp_path / "tier"
        async with live(root) as first:
            handle = (await first.write(1)).handle
            assert handle in first.listener.held
        arguments = [sys.executable, "-c", _WORKER_OF_A_DEAD_DAEMON, str(root / "workers.lock")]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:  # noqa: ASYNC220
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"in\n"
            async with live(root, opened=False) as second:
                await second.until(lambda: "workers of an earlier daemon" in second.tier.status().reason, "it waits")
                await asyncio.sleep(0.3)
                assert not second.tier.readable
                worker.kill()
                await second.until(lambda: second.tier.writable, "opened")
                assert len(second.listener.held) == 1

    asyncio.run(scenario())


def test_a_worker_with_an_old_token_does_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path / "tier", deadline_seconds=10.0) as under:
            assert (await under.write(1)).outcome is IoOutcome.OK
            under.tier._data.renew("another token")
            written = await under.write(2)
            assert written.outcome in (IoOutcome.IO_ERROR, IoOutcome.CANCELLED)

    asyncio.run(scenario())


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("file", ["journal", "store.json"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(tmp_path: Path, file: str) -> None:
    root = tmp_path / "tier"

    async def scenario() -> None:
        async with live(root):
            pass
        path = root / file if file == "store.json" else max((root / "journal").glob("*.log"))
        path.unlink()
        os.mkfifo(path)
        async with live(root, opened=False) as second:
            said = f"{path.name} is no regular file"
            await second.until(lambda: said in second.tier.status().reason, "the pipe is named")

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_directory_that_every_user_may_write_to_is_refused_with_advice(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "tier"
    root.mkdir()
    root.chmod(mode)

    async def scenario() -> None:
        async with live(root, opened=False) as under:
            await under.until(lambda: "run `chmod o-w`" in under.tier.status().reason, "it is refused")
            assert list(root.iterdir()) == []
            root.chmod(0o755)
            await under.until(lambda: under.tier.writable, "and used once that has ended")

    asyncio.run(scenario())


@pytest.mark.requirement("P6", "I6")
def test_a_pipe_in_the_place_of_a_segment_is_a_failed_read_and_holds_up_no_worker(tmp_path: Path) -> None:
    root = tmp_path / "tier"

    async def scenario() -> None:
        async with live(root, deadline_seconds=3600.0) as under:
            handle = (await under.write(1)).handle
            (segment,) = (path for path in (root / "segments").iterdir() if PAYLOAD in path.read_bytes())
            segment.rename(tmp_path / "segment")
            os.mkfifo(segment)
            outcome, _ = await under.read(handle)
            assert outcome is IoOutcome.IO_ERROR
            segment.unlink()
            (tmp_path / "segment").rename(segment)
            await under.until(lambda: under.tier.readable, "used again")
            assert await under.read(handle) == (IoOutcome.OK, PAYLOAD)

    asyncio.run(scenario())
