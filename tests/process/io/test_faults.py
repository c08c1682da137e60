"""I/O workers on media that fail or hang: FUSE that answers errors, late or nothing, a full and a read-only tmpfs."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import Allocate, Append, Part, Priority, Probe, Quarantine
from kvdepot.server.io.perform import perform
from kvdepot.server.io.pool import processes_max
from kvdepot.server.storage.base import IoOutcome

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.io_pool_rig import Lent, is_gone, pool_on, until
from tests.rigs.io_rig import MIB, PATTERN, IoRig, pattern
from tests.rigs.patience import Deadline

needs_fuse = pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")


@pytest.fixture(scope="module")
def mounted() -> Iterator[FuseDirectory]:
    with FuseDirectory() as fuse:
        yield fuse


@pytest.fixture
def fuse(mounted: FuseDirectory) -> FuseDirectory:
    """Without a fault, and nothing left of the test before but its files."""
    mounted.go_on()  # one that failed may have left it hanging
    mounted.fault()
    return mounted


@pytest.fixture
def rig(fuse: FuseDirectory) -> Iterator[IoRig]:
    rig = IoRig(fuse.path, segment_bytes=8 * MIB)
    yield rig
    rig.close()


@pytest.mark.requirement("P6", "T5")
@needs_fuse
@pytest.mark.parametrize(
    ("operation", "number", "outcome"),
    [
        ("open", errno.EACCES, IoOutcome.UNREADABLE),
        ("open", errno.ENOENT, IoOutcome.GONE),
        ("read", errno.EIO, IoOutcome.IO_ERROR),
        ("read", errno.ESTALE, IoOutcome.GONE),
        ("write", errno.EIO, IoOutcome.IO_ERROR),
        ("write", errno.ENOSPC, IoOutcome.NO_SPACE),
        ("write", errno.EDQUOT, IoOutcome.NO_SPACE),
        ("write", errno.EROFS, IoOutcome.READ_ONLY),
    ],
)
def test_what_a_mount_answers_is_told_apart(
    fuse: FuseDirectory, rig: IoRig, operation: str, number: int, outcome: IoOutcome
) -> None:
    async def run() -> None:
        async with pool_on(rig, failures=100) as under:
            write = rig.write(1, MIB + 5)
            assert (await under.ask(write)).outcome is IoOutcome.OK
            fuse.fault(**{operation: number})
            if operation == "open":  # a worker of before has the file open
                os.kill(under.pid, 9)
            job = write if operation == "write" else rig.read_of(write)
            assert (await under.ask(job, under.lent())).outcome is outcome
            fuse.fault()
            assert (await under.ask(rig.read_of(write))).outcome is IoOutcome.OK

    asyncio.run(run())


@pytest.mark.requirement("T5")
@needs_fuse
def test_errors_take_the_path_out_of_use_and_it_comes_back_by_itself(fuse: FuseDirectory, rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, workers=2) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            fuse.fault(read=errno.EIO, write=errno.EIO)
            asked = [under.ask(rig.read_of(write), under.lent()) for _ in range(12)]
            assert {(await future).outcome for future in asked} == {IoOutcome.IO_ERROR, IoOutcome.CANCELLED}
            assert "io_error" in under.pool.why_unusable
            await asyncio.sleep(0.5)
            assert "io_error" in under.pool.why_unusable
            fuse.fault()
            await until(lambda: under.pool.usable, "the path is in use again")
            assert (await under.ask(rig.read_of(write), under.lent())).outcome is IoOutcome.OK

    asyncio.run(run())


@pytest.mark.requirement("T5")
@needs_fuse
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_path_that_can_only_be_read_is_in_use(fuse: FuseDirectory, rig: IoRig, number: int) -> None:
    async def run() -> None:
        async with pool_on(rig, failures=1) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            fuse.fault(read=errno.EIO, write=number)
            await under.ask(rig.read_of(write))
            assert not under.pool.usable
            fuse.fault(write=number)
            await until(lambda: under.pool.usable, "the path is in use again")
            assert (await under.ask(rig.read_of(write))).outcome is IoOutcome.OK

    asyncio.run(run())


@pytest.mark.requirement("T4")
@needs_fuse
def test_a_hung_mount_ends_every_job_by_its_deadline_and_comes_back_by_itself(fuse: FuseDirectory, rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, workers=2, deadline=0.5, failures=5) as under:
            write = rig.write(1, MIB)
            await under.ask(write, deadline_seconds=20)
            fuse.hang()
            loans = [under.lent() for _ in range(20)]
            asked = [under.ask(rig.read_of(write), loan) for loan in loans]
            outcomes = [(await future).outcome for future in asked]
            assert outcomes.count(IoOutcome.TIMEOUT) < 10, "one after the other"
            assert set(outcomes) == {IoOutcome.TIMEOUT, IoOutcome.CANCELLED}
            assert "timeout" in under.pool.why_unusable
            assert (await under.ask(rig.read_of(write))).outcome is IoOutcome.CANCELLED
            await asyncio.sleep(2)  # probes hang too
            assert len(under.pool.pids) <= processes_max(2)

            fuse.go_on()
            await until(lambda: under.pool.usable, "the path is in use again")
            assert (await under.ask(rig.read_of(write), under.lent(), deadline_seconds=20)).outcome is IoOutcome.OK
            await until(lambda: not under.pool.abandoned, "the workers that hung are dead")
            assert [loan.held_by for loan in loans] == [None] * 20

    asyncio.run(run())


@pytest.mark.requirement("I1a")
@needs_fuse
def test_extents_of_a_worker_stuck_in_the_kernel_stay_lent_until_it_is_gone(fuse: FuseDirectory, rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, failures=100) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            stuck = under.pid
            fuse.fault(read=0, seconds=60)  # late, and right: the server has the request, so the kernel waits for it
            read = rig.read_of(write)
            assert read.extents is not None
            [(offset, length)] = read.extents
            loan = under.lent()
            # Time enough for a busy machine to bring the request to the server: before it is there, a kill ends it.
            assert (await under.ask(read, loan, deadline_seconds=3)).outcome is IoOutcome.TIMEOUT
            await asyncio.sleep(0.3)
            assert not is_gone(stuck), "not stuck: killed, and gone"
            assert (loan.held_by, under.pool.abandoned) == (1, 1)
            await until(lambda: under.counts["io_workers.abandoned"] == 1, "it is known to hang")
            fuse.fault()

            # Another worker serves meanwhile, from and to other extents.
            again = rig.read_of(write, start=24 * MIB)
            other = under.lent()
            assert (await under.ask(again, other)).outcome is IoOutcome.OK
            assert (other.begun, other.held_by) == (1, None)
            assert again.extents is not None
            assert rig.taken(again.extents) == pattern(MIB, 1)
            assert loan.held_by == 1

            fuse.let_go()
            # Until the stuck one is gone the late data may come, and does: nobody else could have had these pages.
            await until(lambda: loan.held_by is None, "the loan ended")
            assert is_gone(stuck)
            assert set(rig.arena[offset : offset + length]) != {PATTERN}
            rig.arena[offset : offset + length] = bytes([PATTERN]) * length
            await asyncio.sleep(1)
            assert set(rig.arena[offset : offset + length]) == {PATTERN}

    asyncio.run(run())


@pytest.mark.requirement("I4")
@needs_fuse
def test_workers_stuck_in_the_kernel_are_not_replaced_without_end(fuse: FuseDirectory, rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, deadline=3.0, failures=100) as under:
            write = rig.write(1, MIB)
            await under.ask(write, deadline_seconds=20)
            fuse.fault(read=0, seconds=60)
            loans = [under.lent() for _ in range(8)]
            outcomes = [(await under.ask(rig.read_of(write), loan)).outcome for loan in loans]
            assert outcomes == [IoOutcome.TIMEOUT] * 2 + [IoOutcome.CANCELLED] * 6
            assert under.pool.abandoned == 2
            assert "hang in the kernel" in under.pool.why_unusable
            assert [loan.held_by for loan in loans[:2]] == [1, 2]
            fuse.fault()
            fuse.let_go()
            await until(lambda: under.pool.usable, "a worker could be made again")
            assert (await under.ask(rig.read_of(write), under.lent(), deadline_seconds=20)).outcome is IoOutcome.OK

    asyncio.run(run())


@pytest.mark.requirement("T5")
@needs_fuse
def test_a_deadline_begins_when_a_worker_has_a_thread_for_its_job(fuse: FuseDirectory, rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, deadline=2.0, quick_seconds=60.0) as under:
            write = rig.write(1, MIB // 256)
            await under.ask(write)
            fuse.fault(read=0, seconds=1.2)
            asked = [under.ask(rig.read_of(write), under.lent()) for _ in range(4)]
            assert under.pool.in_flight == 4
            assert [(await answer).outcome for answer in asked] == [IoOutcome.OK] * 4, "the last ones after 2.4 s"
            assert not under.pool.abandoned

    asyncio.run(run())


@pytest.mark.requirement("I6", "T5")
@needs_fuse
def test_what_a_hanging_worker_has_not_begun_is_answered_soon_and_stays_lent(fuse: FuseDirectory, rig: IoRig) -> None:
    async def run() -> None:
        async with pool_on(rig, deadline=0.5, quick_seconds=60.0) as under:
            write = rig.write(1, MIB)
            await under.ask(write, deadline_seconds=20)
            fuse.fault(read=0, seconds=3600)
            loans = [under.lent() for _ in range(4)]
            asked = [under.ask(rig.read_of(write), loan) for loan in loans]
            assert under.pool.in_flight == 4
            limit = Deadline(10)
            assert [(await answer).outcome for answer in asked] == [IoOutcome.TIMEOUT] * 4
            assert not limit.is_over()
            assert under.pool.usable, "what was not begun says nothing about the path"
            assert [loan.held_by for loan in loans] == [1] * 4
            fuse.fault()
            fuse.let_go()
            await until(lambda: [loan.held_by for loan in loans] == [None] * 4, "the worker is dead")
            assert (await under.ask(rig.read_of(write), under.lent(), deadline_seconds=20)).outcome is IoOutcome.OK

    asyncio.run(run())


@pytest.mark.requirement("T4")
@needs_fuse
def test_close_ends_in_time_beside_a_hung_mount() -> None:
    with FuseDirectory() as fuse:
        _close_beside(fuse)


def _close_beside(fuse: FuseDirectory) -> None:
    rig = IoRig(fuse.path, segment_bytes=8 * MIB)

    async def run() -> tuple[tuple[int, ...], list[Lent]]:
        async with pool_on(rig, workers=2) as under:
            write = rig.write(1, MIB)
            await under.ask(write)
            fuse.fault(read=0, seconds=3600)
            loans = [under.lent() for _ in range(6)]
            asked = [under.ask(rig.read_of(write), loan) for loan in loans]
            await asyncio.sleep(0.5)
            pids = under.pool.pids
            limit = Deadline(10)
            assert await under.pool.close(3.0) == 2, "both have asked the mount by then, and hang in the kernel"
            assert not limit.is_over()
            outcomes = [(await future).outcome for future in asked]
            assert outcomes == [IoOutcome.TIMEOUT] * 4 + [IoOutcome.CANCELLED] * 2
            assert set(under.registry.pids.values()) == set(pids)
            return pids, loans

    pids, loans = asyncio.run(run())
    assert [loan.held_by is None for loan in loans] == [False] * 4 + [True] * 2  # written down for the next daemon
    assert [is_gone(pid) for pid in pids] == [False, False]
    rig.close()


# Real file systems.


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.requirement("T5")
@needs_root
def test_a_full_file_system_is_told_apart_and_left_as_it_was(tiny: Path) -> None:
    rig = IoRig(tiny, segment_bytes=0)
    rig.segment.touch()

    async def run() -> None:
        async with pool_on(rig) as under:
            assert (await under.ask(Allocate("segments/1.seg", 4 * MIB))).outcome is IoOutcome.NO_SPACE
            assert (await under.ask(Append("j", 0, b"record", sync=True))).outcome is IoOutcome.OK
            write = rig.write(1, 4 * MIB)
            assert (await under.ask(write, under.lent(), priority=Priority.STORE)).outcome is IoOutcome.NO_SPACE
            assert (await under.ask(Append("j", 6, bytes(3 * MIB), sync=True))).outcome is IoOutcome.NO_SPACE
            assert (
                await under.ask(Quarantine((Part("segments/00000.seg", 0, MIB),), "q"))
            ).outcome is IoOutcome.NO_SPACE
            assert (await under.ask(Probe(".probe"))).outcome is IoOutcome.NO_SPACE
            assert under.pool.usable
            os.truncate(rig.segment, 0)
            assert (await under.ask(Append("j", 6, b"more", sync=True))).outcome is IoOutcome.OK

    asyncio.run(run())
    assert (tiny / "j").read_bytes() == b"recordmore"
    assert sorted(path.name for path in tiny.rglob("*")) == ["00000.seg", "j", "segments"]
    rig.close()


@pytest.mark.requirement("T5")
@needs_root
def test_a_read_only_file_system_is_told_apart_and_still_read(tiny: Path) -> None:
    rig = IoRig(tiny, segment_bytes=MIB + 4096)
    write = rig.write(1, MIB)
    context = Context(os.fspath(tiny), rig.arena)
    assert perform(write, context).outcome is IoOutcome.OK
    context.close()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny)], check=True)
    for job in (write, Append("j", 0, b"x", sync=True), Allocate("s", 1), Probe(".probe")):
        assert perform(job, context).outcome is IoOutcome.READ_ONLY
    assert perform(rig.read_of(write), context).outcome is IoOutcome.OK
    context.close()
    subprocess.run(["mount", "-o", "remount,rw", str(tiny)], check=True)
    assert perform(write, context).outcome is IoOutcome.OK
    context.close()
    rig.close()


@pytest.mark.requirement("T5")
@needs_root
def test_a_file_system_without_o_direct_is_used_through_the_page_cache_and_said_so(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "ramfs", "ramfs", str(tmp_path)], check=True)
    rig = IoRig(tmp_path, segment_bytes=0)
    rig.segment.write_bytes(bytes(4 * MIB))

    async def run() -> None:
        async with pool_on(rig) as under:
            write = rig.write(1, MIB + 5)
            answer = await under.ask(write, under.lent())
            assert (answer.outcome, answer.direct) == (IoOutcome.OK, False)
            read = rig.read_of(write)
            assert (await under.ask(read, under.lent())).outcome is IoOutcome.OK
            assert read.extents is not None
            assert rig.taken(read.extents) == pattern(MIB + 5, 1)
            assert not under.pool.direct
            assert under.counts["io_buffered_jobs"] == 2
            assert under.changes == [True, True]  # usable; then usable, and not direct

    try:
        asyncio.run(run())
    finally:
        rig.close()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
