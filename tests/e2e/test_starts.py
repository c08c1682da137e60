"""An engine that does not start in time ends with all that it started, and no other engine's test waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvdepot.core.report import SessionStatus

from demo.engine import ROOT, EngineOptions, EngineProcess, EngineProcessError
from demo.toys import DENSE
from tests.e2e import fleet as fleets
from tests.e2e.fleet import Fleet, attached
from tests.rigs.patience import Deadline, wait_until

SERVES = 'print(\'{"id": 0, "ok": {}}\', flush=True); '
NEVER_READY = (
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']); {}time.sleep(3600)"
)
END_SECONDS = 30.0
Started = list[EngineProcess]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Fronts with a child of their own in their group. Only 'ready' serves."""
    found: Started = []

    def start(options: EngineOptions, log: Path) -> EngineProcess:
        program = NEVER_READY.format(SERVES if "ready" in log.stem else "")
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )
        found.append(process)
        return process

    monkeypatch.setattr(fleets, "start_forked", start)
    monkeypatch.setattr(fleets, "patience", lambda: 1.0)
    monkeypatch.setattr(fleets, "START_TIMEOUT_SECONDS", 2.0)
    return found


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, ROOT / "build" / "toys") as fleet:
        for name in ("ready", "hung", "other"):
            fleet.define(name, DENSE, {})
        yield fleet


def running(process: EngineProcess) -> list[str]:
    """The pids of its group that are no zombies."""
    stats = {folder.name: _stat(folder) for folder in Path("/proc").glob("[0-9]*")}
    return [pid for pid, (state, _, group, *_) in stats.items() if (group, state != "Z") == (str(process.pid), True)]


def _stat(folder: Path) -> list[str]:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["Z", "", ""]


def await_end(process: EngineProcess) -> None:
    wait_until(lambda: not running(process), lambda: f"{running(process)} still there", END_SECONDS)


def test_an_engine_that_is_late_ends_with_all_it_started_and_those_beside_it_go_on(
    fleet: Fleet, started: Started
) -> None:
    fleet.launch(["hung", "ready"])
    hung, ready = started
    assert fleet.names_running == {"ready"} and "not ready within" in str(fleet.refused["hung"])
    await_end(hung)
    assert running(ready)
    with pytest.raises(EngineProcessError, match="not ready within"):
        fleet.start("other")
    await_end(started[2])


def test_a_set_up_that_is_interrupted_ends_every_process_that_it_started(
    fleet: Fleet, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> Deadline:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleets, "Deadline", interrupted)  # made before an engine is waited for
    with pytest.raises(KeyboardInterrupt):
        fleet.launch(["hung", "other"])
    assert len(started) == 2
    for process in started:
        await_end(process)
    assert not fleet.names_running


DEAD = 1 << 30  # no pid is as high
COMPLETE = SessionStatus("ours", world_size=2, ranks_attached=2, scheduler_attached=True, pids=(11, 12, 13))


@pytest.mark.parametrize(
    ("sessions", "right"),
    [
        ([COMPLETE], True),
        ([], False),
        ([SessionStatus("ours", 2, 1, scheduler_attached=True, pids=(11, 12))], False),
        ([SessionStatus("ours", 2, 2, scheduler_attached=False, pids=(12, 13))], False),
        ([COMPLETE, SessionStatus("starting", 1, pids=(os.getpid(),))], True),
        ([COMPLETE, SessionStatus("ended", 1, 1, scheduler_attached=True, pids=(DEAD,))], False),
        ([COMPLETE, SessionStatus("former", 2, 2, scheduler_attached=True, pids=(11, 12))], False),
    ],
)
def test_an_engine_is_waited_for_by_its_processes(
    monkeypatch: pytest.MonkeyPatch, sessions: list[SessionStatus], right: bool
) -> None:
    exists: Callable[[Path], bool] = Path.exists
    ours = [f"/proc/{pid}" for pid in COMPLETE.pids]
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in ours or exists(path))
    assert attached(sessions, [{10, *COMPLETE.pids}]) is right
