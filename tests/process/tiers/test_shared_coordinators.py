"""Coordinators of several daemons on one directory: one janitor, whatever happens to it (T3), and a bound (I4)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.storage.shared_layout import object_path, temporary_file
from kvdepot.server.tiers.shared.coordinator.settings import CoordinatorSettings
from kvdepot.server.tiers.shared.coordinator_process import CoordinatorProcess
from kvdepot.server.tiers.shared.links import Ended, Failed, Message, Report

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.fakes.shared_directory import MIB, NAMESPACE, key_of, lease_of, put
from tests.rigs import logged_coordinator
from tests.rigs.patience import Deadline, until
from tests.rigs.stopping import stop

HEARTBEAT_SECONDS = 0.4


class Daemon:
    """What a daemon has of its coordinator."""

    def __init__(self, root: Path, capacity_bytes: int = 64 * MIB) -> None:
        settings = CoordinatorSettings(
            root, capacity_bytes, heartbeat_seconds=HEARTBEAT_SECONDS, on_root_filesystem=True
        )
        if root.parent.is_dir():  # as an operator does
            root.mkdir(exist_ok=True)
        self.root = root
        self.coordinator = CoordinatorProcess(settings, asyncio.get_running_loop())
        self.messages: list[Message] = []
        self.coordinator.start(self.messages.append)

    @property
    def report(self) -> Report | None:
        return next((message for message in reversed(self.messages) if isinstance(message, Report)), None)

    @property
    def is_janitor(self) -> bool:
        return self.report is not None and self.report.is_janitor and isinstance(self.messages[-1], Report)


def janitor_of(daemons: list[Daemon]) -> Daemon | None:
    found = [daemon for daemon in daemons if daemon.is_janitor]
    return found[0] if len(found) == 1 else None


async def found_janitor(daemons: list[Daemon]) -> tuple[Daemon, Daemon]:
    """And the other one of two."""
    await until(lambda: janitor_of(daemons), "one janitor")
    janitor = janitor_of(daemons)
    assert janitor is not None
    return janitor, daemons[1 - daemons.index(janitor)]


def ended(*daemons: Daemon) -> None:
    for daemon in daemons:
        daemon.coordinator.end()


@pytest.mark.requirement("T3")
def test_one_of_two_is_janitor_and_when_it_is_killed_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        daemons = [Daemon(tmp_path / "shared"), Daemon(tmp_path / "shared")]
        await until(lambda: all(d.report and d.report.limit_bytes > MIB for d in daemons), "both may write")
        janitor, other = await found_janitor(daemons)
        term = lease_of(tmp_path / "shared").term
        janitor.coordinator.end()  # by SIGKILL
        await until(lambda: other.is_janitor, "the other takes over")
        assert lease_of(tmp_path / "shared").term > term
        ended(other)

    asyncio.run(scenario())


@pytest.mark.long(seconds=12)
def test_a_coordinator_that_dies_is_made_again_and_registers_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        daemon = Daemon(tmp_path / "shared")
        await until(lambda: daemon.report and daemon.report.limit_bytes > MIB, "it may write")
        node = daemon.report.node  # type: ignore[union-attr]
        daemon.coordinator.publish(12_345)
        os.kill(daemon.coordinator.pid, signal.SIGKILL)
        await until(lambda: any(isinstance(message, Ended) for message in daemon.messages), "its end is heard")
        await until(lambda: daemon.report and daemon.report.node != node, "a new one registers")
        first = next(message for message in daemon.messages if isinstance(message, Report) and message.node != node)
        assert first.limit_bytes == 12_345
        await until(lambda: daemon.report and daemon.report.limit_bytes > 12_345 + MIB, "and may write")
        ended(daemon)

    asyncio.run(scenario())


@pytest.mark.requirement("T3")
def test_a_janitor_that_was_stopped_deletes_nothing_on_its_old_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, log = tmp_path / "shared", tmp_path / "log"
    monkeypatch.setenv(logged_coordinator.LOG, str(log))
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parents[3])
    )  # children do not import from the current directory
    monkeypatch.setattr("kvdepot.server.tiers.shared.coordinator_process._MODULE", "tests.rigs.logged_coordinator")

    def lines() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    def fill(path: str) -> None:
        for number in range(300):
            put(root, number, path=path, payload_bytes=30_000, age_hours=30)

    async def scenario() -> None:
        first = Daemon(root)
        await until(lambda: first.report, "the directory is there")
        ended(first)
        fill("first")
        daemons = [Daemon(root, 8 * MIB), Daemon(root, 8 * MIB)]
        janitor, other = await found_janitor(daemons)
        await until(lambda: len(lines()) > 5, "it deletes")
        stop(janitor.coordinator.pid)
        fill("second")
        await until(lambda: other.is_janitor, "the other takes over")
        begun = len(lines())
        await until(lambda: len(lines()) > begun + 5, "that one deletes")
        os.kill(janitor.coordinator.pid, signal.SIGCONT)
        begun = len(lines())
        await until(lambda: len(lines()) > begun + 5, "it goes on")
        await until(lambda: janitor_of(daemons), "one janitor")
        ended(*daemons)

    asyncio.run(scenario())
    terms = [int(line) for line in lines()]
    assert len(set(terms)) > 1
    assert terms == sorted(terms)


def test_a_coordinator_that_says_nothing_is_told_of_kept_and_heard_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        daemon = Daemon(tmp_path / "shared")
        await until(lambda: daemon.report and daemon.report.limit_bytes, "it may write")
        pid, limit = daemon.coordinator.pid, daemon.report.limit_bytes  # type: ignore[union-attr]
        stop(pid)
        heard = len(daemon.messages)
        await until(lambda: isinstance(daemon.messages[-1], Failed), "its silence is told")
        assert sum(isinstance(message, Failed) for message in daemon.messages[heard:]) == 1
        daemon.coordinator.publish(4096)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: isinstance(daemon.messages[-1], Report), "it is heard again")
        assert daemon.coordinator.pid == pid
        assert daemon.report.limit_bytes >= limit  # type: ignore[union-attr]
        ended(daemon)

    asyncio.run(scenario())


@pytest.mark.requirement("T5")
def test_a_directory_that_cannot_be_is_a_reason_until_it_can(tmp_path: Path) -> None:
    root = tmp_path / "missing" / "shared"

    async def scenario() -> None:
        daemon = Daemon(root)
        await until(lambda: daemon.messages and isinstance(daemon.messages[-1], Failed), "a reason")
        root.mkdir(parents=True)
        await until(lambda: daemon.is_janitor, "it comes by itself")
        ended(daemon)

    asyncio.run(scenario())


@pytest.mark.requirement("T4")
@pytest.mark.long(seconds=12)
@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
def test_a_coordinator_that_hangs_in_its_scan_holds_up_nobody(tmp_path: Path) -> None:
    async def scenario(fuse: FuseDirectory) -> None:
        stuck = Daemon(fuse.path / "shared")
        await until(lambda: stuck.is_janitor, "the first one is janitor")
        for number in range(2_000):
            put(fuse.backing / "shared", number, payload_bytes=10)
        os.kill(stuck.coordinator.pid, signal.SIGKILL)  # its next term begins with a scan
        begun = len(stuck.messages)
        await until(lambda: stuck.is_janitor and len(stuck.messages) > begun, "it is janitor again, and scans")
        fuse.hang()
        await until(lambda: isinstance(stuck.messages[-1], Failed), "its silence is told")
        other = Daemon(fuse.backing / "shared")
        await until(lambda: other.is_janitor, "a node whose mount answers takes over")
        limit = Deadline(10)
        stuck.coordinator.end()
        assert not limit.is_over(), "it waits for the mount"
        ended(other)

    with FuseDirectory() as fuse:
        asyncio.run(scenario(fuse))


class Publisher:
    """Writes objects as a tier does: within what it may, temporary, rename, told when it is over."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self._daemon = daemon
        self._name = name
        self.written = 0
        self.total_bytes = 0

    def write(self) -> bool:
        report = self._daemon.report
        size = PAGE_BYTES + 98_000
        cost = -(-size // PAGE_BYTES) * PAGE_BYTES + 4 * PAGE_BYTES
        if report is None or self.total_bytes + cost > report.limit_bytes:
            return False
        self.written += 1
        root, key = self._daemon.root, key_of(self.written, self._name)
        temporary = root / temporary_file(report.node, self.written)
        temporary.write_bytes(bytes(size))
        path = root / object_path(NAMESPACE, key, Kind.ATTENTION)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(path)
        self.total_bytes += cost
        self._daemon.coordinator.publish(self.total_bytes)
        return True


def taken_below(root: Path) -> int:
    """As `du` has it; what goes away meanwhile is not there."""
    total = 0
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder) / name for name in names)):
            try:
                total += path.lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@pytest.mark.requirement("I4")
def test_two_publishers_never_fill_it_above_its_capacity(tmp_path: Path) -> None:
    capacity_bytes, root = 16 * MIB, tmp_path / "shared"

    async def scenario() -> None:
        daemons = [Daemon(root, capacity_bytes), Daemon(root, capacity_bytes)]
        publishers = [Publisher(daemon, str(at)) for at, daemon in enumerate(daemons)]
        most = 0
        give_up = Deadline(90)
        while sum(publisher.total_bytes for publisher in publishers) < 2 * capacity_bytes:
            assert not give_up.is_over(), [publisher.total_bytes for publisher in publishers]
            progress = [publisher.write() for publisher in publishers]
            if not any(progress):
                await asyncio.sleep(0.05)
            elif publishers[0].written % 8 == 0:
                most = max(most, taken_below(root))
                await asyncio.sleep(0)
        most = max(most, taken_below(root))
        ended(*daemons)
        assert all(publisher.written for publisher in publishers)
        assert capacity_bytes // 2 < most <= capacity_bytes

    asyncio.run(scenario())
