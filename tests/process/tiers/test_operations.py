"""Whatever call a file system refuses, and however: a tier serves, or says which call on which path, and recovers."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of
from kvdepot.server.tiers.health import State

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.patience import Deadline, patient
from tests.rigs.tier_live import PATIENCE_SECONDS, TierLive, tier_on

needs_fuse = pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="an immutable file needs root")
KINDS = ("disk", "shared")
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
OPERATIONS = (
    "create", "fallocate", "fdatasync", "flush", "fsync", "fsyncdir", "getattr", "link", "mkdir", "open",
    "open_direct", "open_write", "read", "readdir", "rename", "rmdir", "statfs", "truncate", "unlink", "utimens",
    "write",
)  # fmt: skip
ELSE_TO_THE_KERNEL = {
    (operation, errno.ENOSYS) for operation in ("create", "flush", "open", "open_direct", "open_write")
}
"""What FUSE takes for "do it without me from now on"."""
DONE_WITHOUT = {"fallocate", "fsync", "fdatasync", "fsyncdir", "link", "statfs", "utimens", "open_direct"}
"""Nothing but their refusal is ever seen of these, where it says that there is no such call."""
CALLS = (
    "open", "read", "write", "fsync", "fdatasync", "fallocate", "truncate", "rename", "mkdir", "unlink", "stat",
    "readdir", "close", "utimensat", "lock",
)  # fmt: skip
TROUBLE_SECONDS = 1.0


class Objects:
    """What was stored in a tier, and is read again."""

    def __init__(self, live: TierLive) -> None:
        self.live = live
        self.stored: dict[int, ObjectName] = {}
        self.numbers = iter(range(1, 10_000))

    async def put(self) -> bool:
        """Whether another one is stored now."""
        name = name_of(next(self.numbers))
        if not self.live.tier.writable:
            return False
        written = await self.live.write(name)
        if written.outcome is IoOutcome.OK:
            self.stored[written.handle] = name
        return written.outcome is IoOutcome.OK

    async def get(self) -> bool:
        """Whether the first one is read; what is dead is forgotten."""
        if not self.stored or not self.live.tier.readable:
            return False
        handle = next(iter(self.stored))
        outcome = await self.live.read(handle, self.stored[handle])
        if outcome in (IoOutcome.GONE, IoOutcome.BAD_PLACE) or handle in self.live.listener.lost_handles:
            del self.stored[handle]
        return outcome is IoOutcome.OK

    async def suffer(self, seconds: float = TROUBLE_SECONDS) -> tuple[int, set[str]]:
        """Puts and gets for a while: how many of either failed, and every reason there was."""
        until, failed, reasons = time.monotonic() + seconds, 0, set()
        while time.monotonic() < until:
            failed += not await self.put()
            failed += not await self.get()
            reasons.add(self.live.tier.status().reason)
            await asyncio.sleep(0.03)
        return failed, reasons - {""}

    async def recover(self) -> None:
        """It writes and reads, and says that all is well; what a janitor gave up is said until it is done again."""
        until = Deadline(PATIENCE_SECONDS)
        while not (await self.put() and await self.get() and self._all_is_well):
            assert not until.is_over(), self.live.tier.status()
            await asyncio.sleep(0.05)

    @property
    def _all_is_well(self) -> bool:
        status = self.live.tier.status()
        return status.state == State.READY and (not status.reason or "work was given up" in status.reason)


def names_a_call(reason: str, root: Path) -> bool:
    return os.fspath(root) in reason and any(f"{call}: " in reason for call in CALLS)


async def endures(kind: str, root: Path, fuse: FuseDirectory, operation: str, numbers: tuple[int, ...]) -> None:
    async with tier_on(kind, root, fsync=True) as live:
        objects = Objects(live)
        assert await objects.put()
        for number in numbers:
            fuse.fault(**{operation: number})
            failed, reasons = await objects.suffer()
            if operation in DONE_WITHOUT and number != errno.EPERM:
                assert (failed, reasons) == (0, set())
            assert failed < 4 or reasons, "what fails says so"
            fuse.fault()
            await objects.recover()
        kept = list(objects.stored.values())
    async with tier_on(kind, root) as again:
        await again.look_up(*kept)
        await again.until(lambda: len(again.listener.found_objects) >= len(kept), "all is found")
        for handle, name in again.listener.found_objects:
            assert await again.read(handle, name) is IoOutcome.OK


@needs_fuse
def test_a_disk_tier_works_where_directories_cannot_be_synced(fuse: FuseDirectory) -> None:
    root = fuse.path / "disk"
    root.mkdir()
    asyncio.run(endures("disk", root, fuse, "fsyncdir", (errno.EINVAL,)))


@needs_fuse
@pytest.mark.long(seconds=6)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_may_be_refused_in_every_way(fuse: FuseDirectory, kind: str, operation: str) -> None:
    root = fuse.path / kind
    root.mkdir()
    numbers = tuple(number for number in REFUSALS if (operation, number) not in ELSE_TO_THE_KERNEL)
    asyncio.run(endures(kind, root, fuse, operation, numbers))


@needs_fuse
@pytest.mark.long(seconds=6)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_tier_that_opens_while_a_call_is_refused_serves_or_names_it(
    fuse: FuseDirectory, kind: str, operation: str
) -> None:
    async def run() -> None:
        for number in REFUSALS:
            if (operation, number) in ELSE_TO_THE_KERNEL:
                continue
            root = fuse.path / f"{kind}-{number}"
            root.mkdir()
            fuse.fault(**{operation: number})
            async with tier_on(kind, root, opens=False) as live:
                objects = Objects(live)
                await live.until(
                    lambda: live.tier.writable or names_a_call(live.tier.status().reason, root),  # noqa: B023 - now
                    f"{operation}, {number}: it serves or says why",
                )
                await objects.suffer()
                assert live.tier.writable or names_a_call(live.tier.status().reason, root), live.tier.status()
                fuse.fault()
                await objects.recover()

    asyncio.run(run())


# Faults that the probe's own file does not share


@needs_fuse
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("disk", "open_write segments/"),
        pytest.param("shared", "rename .attention.kvd", marks=pytest.mark.long(seconds=6)),
    ],
)
def test_a_fault_of_the_files_of_jobs_alone_is_seen_all_the_while(fuse: FuseDirectory, kind: str, fault: str) -> None:
    """Also while nobody writes; and a shared tier, whose probe renames another file, from its second return on."""

    async def run() -> None:
        root = fuse.path / kind
        root.mkdir()
        async with tier_on(kind, root) as live:
            objects = Objects(live)
            assert await objects.put()
            fuse.fault(**{fault: errno.EPERM})
            os.kill(next(iter(live.registry.pids.values())), 9)  # what has the file open could still write
            seen = Deadline(PATIENCE_SECONDS)
            while live.tier.status().state == State.READY:
                assert not seen.is_over(), live.tier.status()
                await objects.suffer(0.1)
            await objects.suffer(patient(2.0))
            for _ in range(30):
                await objects.put()
                status = live.tier.status()
                assert status.state != State.READY, status
                assert names_a_call(status.reason, root), status
                await asyncio.sleep(0.03)
            assert await objects.get(), "it is read all the while"
            fuse.fault()
            await objects.recover()

    asyncio.run(run())


def chattr(flag: str, *paths: Path) -> bool:
    return not subprocess.run(["chattr", "-f", flag, *paths], check=False).returncode


@pytest.fixture
def immutable(tmp_path: Path) -> Iterator[Path]:
    """A directory where files can be made so."""
    probe = tmp_path / "probe"
    probe.touch()
    if not shutil.which("chattr") or not chattr("+i", probe):
        pytest.skip("no chattr +i here")
    yield tmp_path
    for path in tmp_path.rglob("*"):
        chattr("-i", path)


@needs_root
@pytest.mark.long(seconds=5)
def test_segments_that_are_immutable_are_named_until_they_are_not(immutable: Path) -> None:
    async def run() -> None:
        root = immutable / "tier"
        async with tier_on("disk", root) as live:
            objects = Objects(live)
            assert await objects.put()
            segments = list((root / "segments").iterdir())
            chattr("+i", *segments)
            await objects.suffer(2.0)
            status = live.tier.status()
            assert status.state == State.READ_ONLY and "permission denied" in status.reason
            assert names_a_call(status.reason, root / "segments")
            assert await objects.get(), "it is read all the while"
            chattr("-i", *segments)
            await objects.recover()

    asyncio.run(run())
