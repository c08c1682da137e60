"""The chaos run itself, and that it would find what it looks for. `KVDEPOT_SEED` repeats a plan; docs/chaos.md."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from kvdepot.client.session import DepotSession
from kvdepot.core.calls import Kind
from kvdepot.core.listing import NamespaceContents, TierContents
from kvdepot.core.report import DaemonStatus, QuotaOwnerStatus, QuotaStatus, SessionStatus, TierStatus
from kvdepot.server.config import config
from kvdepot.server.offline.fsck import check_store
from kvdepot.server.tiers.shared.tier import COUNTING, NO_GRANT

from tests.chaos.all_faults import GROUPS, name_of
from tests.chaos.depot import (
    CAPACITIES,
    CODECS,
    QUOTAS,
    RAMS,
    RAMS_SHARED,
    WORKERS,
    Damage,
    Depot,
    Expected,
    Mount,
    Settings,
    unexplained,
)
from tests.chaos.harness import KEPT_OBJECTS_MIN, kept_by_a_kill
from tests.chaos.models import FLEETS, SMALL
from tests.chaos.plan import ALONE, QUIET_EVERY, phases
from tests.chaos.process_clock import queued_seconds
from tests.chaos.scheduler import Scheduler
from tests.chaos.stepped_clock import WallClock
from tests.chaos.watch import Judge, Watch, accounts, degraded, owed
from tests.fakes import fuse_directory
from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.disk_rig import PAGE, DiskRig, flip
from tests.rigs.patience import Deadline, patient
from tests.rigs.seeds import RUN_SEED

ROOT = Path(__file__).parents[2]
_END_SECONDS: Final = 90.0
FAULTS = {name_of(fault): group for group, faults in GROUPS.items() for fault in faults}
RAM = TierStatus("ram", "ram", capacity_bytes=1 << 20, ready_bytes=1 << 20, used_bytes=131_072, objects=2)
STATUS = DaemonStatus("", 1, 1.0, True, "", 1, 1, tiers=(RAM,), counters={"hits": 5.0})
LISTED = (NamespaceContents(bytes(16), "small", tiers=(TierContents("ram", {Kind.ATTENTION: 2}),)),)


def _run(tmp_path: Path, seconds: int, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """With the seed of this run of tests."""
    report = tmp_path / "chaos.json"
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        "--seed",
        str(RUN_SEED),
        "--seconds",
        str(seconds),
        "--json",
        str(report),
    ]
    with _started([*command, *options]) as process:
        out, err = process.communicate()
    print(out, err, sep="\n")
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    return done, json.loads(report.read_text()) if report.exists() else {}


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A run that is ended with the test, also by a timeout: killed, it would leave a daemon and mounts behind."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=patient(_END_SECONDS))


def _below(pid: int) -> set[int]:
    """All processes that it has started, and theirs."""
    found = {pid}
    children: list[str] = []
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                children += (task / "children").read_text().split()
    return found.union(*(_below(int(child)) for child in children))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:  # it has ended, perhaps just now
        return ""


def _holds(tmp_path: Path, seconds: int, faults_min: int, *, nodes: int) -> None:
    done, report = _run(tmp_path, seconds, "--nodes", str(nodes), "--faults", str(faults_min))
    assert done.returncode == 0, report.get("finding", done.stderr[-2000:])  # all that was said is captured
    assert sum(report["faults"].values()) >= faults_min
    assert report["quiet_looks"] >= 1
    assert min(report["samples"][what] for what in ("status", "medium", "memory")) > 0
    counts = report["counts"]
    assert min(counts[name] for name in ("hits", "commit_committed", "checked_objects", "checked_bytes")) > 0


@pytest.mark.requirement("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8")
@pytest.mark.timeout(900)
def test_every_invariant_holds_in_a_minute_of_chaos(tmp_path: Path) -> None:
    _holds(tmp_path, 60, faults_min=3, nodes=2)


@pytest.mark.requirement("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8")
@pytest.mark.long(seconds=330)
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_invariant_holds_in_five_minutes_of_chaos(nodes: int, tmp_path: Path) -> None:
    _holds(tmp_path, 300, faults_min=2 * QUIET_EVERY, nodes=nodes)


@pytest.mark.timeout(600)
def test_a_planted_wrong_byte_is_found(tmp_path: Path) -> None:
    done, report = _run(tmp_path, 300, "--plant")
    assert done.returncode == 1
    assert "I1: wrong bytes" in report["finding"]
    assert "VIOLATED, seed" in done.stdout


@pytest.mark.timeout(300)
def test_a_run_that_is_ended_leaves_no_process_no_mount_and_no_directory() -> None:
    with _started([sys.executable, "-m", "tests.chaos", "--seed", "1", "--seconds", "200"]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith(" started\n"):
                break
        commands = {pid: _command(pid) for pid in _below(process.pid)}
        process.terminate()
        _, err = process.communicate(timeout=patient(_END_SECONDS))
    assert process.returncode == 128 + signal.SIGTERM, err[-2000:]
    assert any("kvdepot.server.daemon.app" in command for command in commands.values())
    until = Deadline(_END_SECONDS)
    while left := [command for pid, command in commands.items() if command and _command(pid) == command]:
        assert not until.is_over(), left
        time.sleep(0.05)
    used = {path for command in commands.values() for path in re.findall(r"(?:/tmp|/dev/shm)/kvd\w+", command)}
    assert used
    assert not [path for path in used if Path(path).exists()]
    assert not [path for path in used if path in Path("/proc/mounts").read_text()]


@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
def test_mounts_that_do_not_begin_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    server = b"tests.fakes.fuse_directory"
    before = children(os.getpid(), server)
    with pytest.raises(KeyError):
        Mount(nodes=max(FLEETS) + 1)
    assert children(os.getpid(), server) == before
    monkeypatch.setattr(fuse_directory, "START_SECONDS", 0.0)
    with pytest.raises(AssertionError, match="does not mount"):
        FuseDirectory()
    assert children(os.getpid(), server) == before


def test_engines_ask_for_prompts_that_no_daemon_can_have_yet_and_twice() -> None:
    one = Scheduler(SMALL, cast("DepotSession", None), (), 1, random.Random(3))
    drawn = Counter(one.draw_prompt() for _ in range(2000))
    fresh = [times for number, times in drawn.items() if number >= SMALL.prompts]
    assert fresh.count(2) >= 20 and set(fresh) <= {1, 2}
    assert drawn[0] > drawn[SMALL.prompts // 2] > 0


def test_a_watch_that_cannot_look_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(self: Watch) -> list[str]:
        raise KeyError("Pss:")

    monkeypatch.setattr(Watch, "_status", blind)
    watch = Watch(cast("Depot", None))
    watch.stop()  # where the run did not begin, there is nothing to wait for
    watch = Watch(cast("Depot", None))
    watch.start()
    until = Deadline(30)
    while not (found := watch.take()):
        assert not until.is_over()
        time.sleep(0.05)
    watch.stop()
    assert "the watch failed" in found[0] and "Pss:" in found[0]


def test_no_memory_is_looked_at_while_a_daemon_has_no_arena() -> None:
    """A rebooted one, as it starts."""
    daemon = DaemonProcess()
    watch = Watch(cast("Depot", SimpleNamespace(daemon=daemon, expected=Expected(up=True), settings=Settings())))
    try:
        with pytest.raises(FileNotFoundError):
            assert daemon.arena
        daemon.start()
        assert not watch._memory() and watch.samples["memory"] == 1
        daemon.arena.unlink()
        assert not watch._memory() and watch.samples["memory"] == 1
    finally:
        daemon.close()


def test_the_same_seed_makes_the_same_plan_and_each_fault_comes_once_before_any_comes_again() -> None:
    first, again, other = (list(itertools.islice(phases(seed, FAULTS), 2 * len(FAULTS))) for seed in (7, 7, 8))
    assert first == again != other
    for half in (first[: len(FAULTS)], first[len(FAULTS) :]):
        assert sorted(phase.faults[0] for phase in half) == sorted(FAULTS)
    together = [[FAULTS[name] for name in phase.faults] for phase in first if len(phase.faults) > 1]
    assert together
    assert all(len(set(groups)) == len(groups) and ALONE not in groups for groups in together)


@pytest.mark.parametrize(
    ("later", "what"),
    [
        (replace(STATUS, counters={"hits": 4.0}), "counter hits went from 5.0 to 4.0"),
        (replace(STATUS, counters={}), "counter hits went from 5.0 to 0.0"),
        (replace(STATUS, tiers=(replace(RAM, used_bytes=(1 << 20) + 1),)), "uses more than it has"),
        (replace(STATUS, tiers=(replace(RAM, lent_bytes=131_073),)), "lent more than is used"),
        (replace(STATUS, tiers=(replace(RAM, queued_bytes=-1),)), "negative"),
        (replace(STATUS, sessions=(SessionStatus("e", credit_bytes=1, credit_used_bytes=2),)), "credit of e"),
    ],
)
def test_what_a_status_says_wrong_is_found(later: DaemonStatus, what: str) -> None:
    judge = Judge()
    assert not list(judge.findings(STATUS))
    (finding,) = judge.findings(later)
    assert what in finding
    assert not list(Judge().findings(replace(later, tiers=(RAM,), sessions=()))), "another run may begin with less"


def test_a_kill_keeps_the_objects_that_have_a_checksum_whatever_was_summed_before() -> None:
    many = replace(RAM, objects=KEPT_OBJECTS_MIN + 5)
    counters = {"checksummed_objects": 1_000.0}
    for pending, kept in ((0, KEPT_OBJECTS_MIN + 5), (5, KEPT_OBJECTS_MIN), (6, 0), (KEPT_OBJECTS_MIN + 5, 0)):
        status = replace(STATUS, tiers=(replace(many, pending_checksums=pending),), counters=counters)
        assert kept_by_a_kill(status) == kept


def test_every_configuration_that_a_run_may_choose_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "kvdepot.toml"
    sizes = [(ram, None) for ram in RAMS] + [(ram, tmp_path / "shared") for ram in RAMS_SHARED]
    for (ram, shared), capacity, codec, workers in itertools.product(sizes, CAPACITIES, CODECS, WORKERS):
        settings = Settings(ram, capacity, codec=codec, io_workers=workers, shared=shared)
        path.write_text(settings.text(tmp_path / "tier"))
        config.load(path, {"ram": {"capacity": ram}})
    for quota in QUOTAS:
        path.write_text(Settings(quota=quota).text(tmp_path / "tier"))
        config.load(path, {"ram": {"capacity": Settings().ram}})


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not say")
def test_a_thread_that_waits_for_a_processor_is_not_held_up() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        os.sched_setaffinity(spinning.pid, {min(allowed)})
        queued, until = queued_seconds(), Deadline(30)
        while queued_seconds() < queued + 0.05:
            assert not until.is_over()
    finally:
        os.sched_setaffinity(0, allowed)
        spinning.kill()
        spinning.wait()


def test_the_wall_clock_of_a_daemon_is_stepped_while_it_runs(tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock")
    with DaemonProcess(under=("tests.chaos.stepped_clock", str(clock.path), "10")) as daemon:
        clock.step_to(100.0 - time.time())
        assert daemon.stop() == 0
        started, stopped = daemon.log.splitlines()[0], daemon.log.splitlines()[-1]
    assert stopped.startswith("1970-01-01T00:0") and not started.startswith("1970")


def test_a_tier_that_is_of_no_use_is_found() -> None:
    disk = TierStatus("medium", "disk", 1 << 20, state="ready", breaker="closed")
    shared = replace(disk, name="pool", kind="shared", janitor="node")

    def found(*tiers: TierStatus) -> list[str]:
        return degraded(replace(STATUS, tiers=(RAM, *tiers)))

    assert not found(disk, replace(shared, reason="of the last count"))
    assert found(replace(disk, reason="of the last write"))
    assert found(replace(disk, breaker="open"), shared)
    assert found(replace(shared, state="offline"))
    assert found(replace(shared, janitor=""))
    assert found(replace(shared, reason=f"{NO_GRANT}; of the last count"))
    assert found(replace(shared, reason=f"{COUNTING} 7 files since 2026-11-25T18:22:10Z"))


def test_damage_is_ours_where_we_touched_the_object_or_the_index_before_it(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path)
    rig.stored(1)
    rig.crash()
    rig.drop(next(iter(rig.listener.held)))
    rig.settle()
    rig.stored(2)  # over it
    (journal,) = (tmp_path / "journal").iterdir()
    journal.unlink()
    verdict = check_store(tmp_path)
    (finding,) = verdict.findings
    assert unexplained(verdict, [])
    assert unexplained(verdict, [Damage("segments/00000.seg", 8 * PAGE, 9 * PAGE)])
    assert not unexplained(verdict, [Damage(finding.file, 2 * PAGE, 2 * PAGE + 1)])
    assert not unexplained(verdict, [Damage(f"journal/{journal.name}", 0, 1)])
    rig.crash()
    flip(rig, rig.stored(3), PAGE)  # written since
    assert unexplained(check_store(tmp_path), [Damage(f"journal/{journal.name}", 0, 1)])


def test_what_is_owed_and_what_is_lost_are_found() -> None:
    assert not owed(STATUS, set())
    assert not accounts(STATUS, LISTED)
    assert owed(replace(STATUS, sessions=(SessionStatus("e", leases=1),)), {"e"})
    assert owed(replace(STATUS, sessions=(SessionStatus("gone"),)), {"e"})
    assert owed(replace(STATUS, tiers=(replace(RAM, lent_bytes=1),)), set())
    away = TierStatus("medium", "disk", 1 << 30, state="offline", queued_objects=7)
    (said,) = owed(replace(STATUS, tiers=(RAM, away)), set())
    assert said.startswith("tier medium, offline: 0 bytes lent, 7 queued")  # it waits because the tier is of no use
    assert SMALL.planner.object_bytes(Kind.ATTENTION) * 2 == RAM.used_bytes
    assert accounts(replace(STATUS, tiers=(replace(RAM, used_bytes=RAM.used_bytes + 4096),)), LISTED)
    assert accounts(replace(STATUS, tiers=(replace(RAM, objects=3),)), LISTED)
    quota = QuotaStatus("*", "", "ram", 1 << 20, owners=(QuotaOwnerStatus("", used_bytes=RAM.used_bytes),))
    assert not accounts(replace(STATUS, quotas=(quota,)), LISTED)
    assert accounts(replace(STATUS, quotas=(replace(quota, capacity_bytes=1),)), LISTED)
    assert accounts(replace(STATUS, quotas=(replace(quota, owners=()),)), LISTED)
