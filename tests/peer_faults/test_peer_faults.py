"""The run of faults between peers itself, and that it would find what it looks for. `KVDEPOT_SEED` repeats a plan."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.peer_faults.faults import FAULTS, GROUPS
from tests.peer_faults.runner import Outcome, plan
from tests.peer_faults.world import SOURCES
from tests.rigs.child_processes import children
from tests.rigs.network import why_no_network
from tests.rigs.patience import patient, wait_until
from tests.rigs.seeds import RUN_SEED

ROOT = Path(__file__).parents[2]
_END_SECONDS: Final = 60.0
_FLIPS_MIN: Final = 5
"""Faults that flip bits, of which at least one has met a packet with data. One alone may begin when all is loaded."""
needs_network = pytest.mark.skipif(bool(why_no_network()), reason=why_no_network())


@contextmanager
def _started(*options: str) -> Iterator[subprocess.Popen[str]]:
    """A run that is ended with the test, also by a timeout: killed, it would leave daemons behind."""
    command = [sys.executable, "-m", "tests.peer_faults", "--seed", str(RUN_SEED), *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=patient(_END_SECONDS))


def _run(tmp_path: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    report = tmp_path / "faults.json"
    with _started("--json", str(report), *options) as process:
        out, _ = process.communicate()
    print(out)
    return process.returncode, out, json.loads(report.read_text()) if report.exists() else {}


def _holds(tmp_path: Path, *options: str, faults_min: int) -> dict[str, Any]:
    code, out, report = _run(tmp_path, *options)
    assert code == 0, out[-3000:]
    assert sum(report["faults"].values()) >= faults_min and report["under_way"] > 0
    assert report["late_bytes"] == report["over"] == 0
    assert min(report["compared_pieces"], report["own_objects"], report["quiet"]["hit"]) > 0
    assert report["packets"]["carried"] > 0
    assert report["packets"].get("flipped", 0) > 0 or report["faults"].get("bit flips", 0) < _FLIPS_MIN
    return report


@needs_network
@pytest.mark.requirement("N1", "N2", "N3")
@pytest.mark.timeout(300)
def test_what_is_promised_of_peers_holds_with_some_faults(tmp_path: Path) -> None:
    _holds(tmp_path, "--seconds", "8", "--faults", "20", faults_min=1)


@needs_network
@pytest.mark.requirement("N1", "N2", "N3")
@pytest.mark.long(seconds=600)
@pytest.mark.timeout(3600)
def test_what_is_promised_of_peers_holds_with_many_faults(tmp_path: Path) -> None:
    _holds(tmp_path, "--faults", "300", faults_min=300)


@needs_network
@pytest.mark.requirement("N1", "N2", "N3")
@pytest.mark.long(seconds=60)
@pytest.mark.timeout(600)
def test_what_is_promised_of_peers_holds_over_nixl(tmp_path: Path) -> None:
    _holds(tmp_path, "--lane", "nixl", "--faults", "30", faults_min=30)


@needs_network
@pytest.mark.requirement("N1", "N2", "N3")
@pytest.mark.long(seconds=60)
@pytest.mark.timeout(600)
def test_what_is_promised_of_peers_holds_where_another_one_has_the_object_too(tmp_path: Path) -> None:
    _holds(tmp_path, "--listed", "--faults", "30", faults_min=30)


@needs_network
@pytest.mark.requirement("N1", "N2", "N3")
@pytest.mark.long(seconds=60)
@pytest.mark.timeout(600)
def test_what_is_promised_of_peers_holds_where_only_their_disks_have_the_objects(tmp_path: Path) -> None:
    report = _holds(tmp_path, "--disk", "--faults", "40", faults_min=40)
    assert report["disk_reads"] > 0


@needs_network
@pytest.mark.timeout(300)
def test_a_byte_that_is_written_late_is_found(tmp_path: Path) -> None:
    code, out, report = _run(tmp_path, "--plant", "--faults", "1")
    assert code == 1
    assert "N1: 1 pieces changed" in report["finding"] and report["late_bytes"] > 0
    assert f"VIOLATED, seed {RUN_SEED}" in out


@needs_network
@pytest.mark.long(seconds=10)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", [os.kill, os.killpg], ids=["it alone", "its group, as timeout(1) does"])
def test_a_run_that_is_ended_leaves_no_process(end: Callable[[int, signal.Signals], None]) -> None:
    with _started("--faults", "100") as process:
        assert process.stdout is not None
        next(line for line in process.stdout if " s; " in line)
        pids = [pid for child in children(process.pid) for pid in (child, *children(child))]
        end(process.pid, signal.SIGTERM)
        process.communicate(timeout=patient(_END_SECONDS))
    assert process.returncode == 128 + signal.SIGTERM
    assert len(pids) > SOURCES
    wait_until(lambda: not [pid for pid in pids if (Path("/proc") / str(pid)).exists()], "all have ended")


def test_each_fault_comes_once_before_any_comes_again_and_a_seed_repeats_the_plan() -> None:
    first, again, other = (list(itertools.islice(plan(seed), len(FAULTS))) for seed in (7, 7, 8))
    assert first == again != other
    names = [name for names in first for name in names]
    assert sorted(names[: len(FAULTS)]) == sorted(FAULTS)
    assert max(map(len, first)) > 1
    assert all(len({GROUPS[name] for name in names}) == len(names) for names in first), "each of another group"


def test_the_ratio_of_acquires_compares_windows_with_faults_to_those_without() -> None:
    outcome = Outcome(1, acquire_p99_ms={"quiet": 2.0, "fault": 3.0})
    assert outcome.record()["acquire_p99_ratio"] == outcome.acquire_p99_ratio == 1.5
    assert Outcome(1, acquire_p99_ms={"fault": 3.0}).acquire_p99_ratio == 0.0, "nothing to compare with"
