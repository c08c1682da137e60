"""Benchmarks for machines that we do not have are rehearsed on a stand-in, so that they run on the day there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kvdepot.core.limits import RESERVED_PER_CALL_MAX

from benchmarks import copy_overhead
from tests.rigs.network import why_no_network
from tests.rigs.patience import patient

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("copies", ["auto", pytest.param("gather", marks=pytest.mark.long(seconds=8))])
def test_copies_on_gpus_are_measured_and_compared_on_a_stand_in(tmp_path: Path, copies: str) -> None:
    there = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.cuda", "--stand-in", "--mib", "32", "--rounds", "1"]
    command += ["--copies", copies, "--json", str(there)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=patient(120), capture_output=True)
    figures = json.loads(there.read_text())
    assert {"store_ratio", "load_ratio", "pin_seconds_per_gib"} <= set(str(figures).replace("'", " ").split())


@pytest.mark.long(seconds=90)
def test_the_cost_of_each_call_is_measured_with_few_and_many_objects_and_with_a_disk(tmp_path: Path) -> None:
    there = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.control", "--objects", "12000", "--engines", "2"]
    subprocess.run([*command, "--json", str(there)], check=True, cwd=ROOT, timeout=patient(300), capture_output=True)
    figures = json.loads(there.read_text())
    assert 0 < figures["load_us"] < figures["store_us"]
    assert figures["write_us"] > 0 and figures["read_us"] > 0


@pytest.mark.long(seconds=20)
@pytest.mark.skipif(bool(why_no_network()), reason=why_no_network())
@pytest.mark.parametrize(
    ("lane", "bare"), [("stream", ("tls_1", "tls_2", "tls_4")), ("nixl", ("bare_nixl_1",))], ids=["stream", "nixl"]
)
def test_loads_from_a_peer_are_compared_with_a_bare_transfer(tmp_path: Path, lane: str, bare: tuple[str, ...]) -> None:
    there = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.peer_stream", "--lane", lane, "--objects", "4", "--rounds", "1"]
    subprocess.run([*command, "--json", str(there)], check=True, cwd=ROOT, timeout=patient(300), capture_output=True)
    figures = json.loads(there.read_text())
    assert figures[f"{lane}_ratio"] > 0 and figures[f"{lane}_gb_s"] > 0
    assert min(figures[f"{name}_gb_s"] for name in bare) > 0


@pytest.mark.long(seconds=20)
def test_summaries_of_peers_are_measured(tmp_path: Path) -> None:
    there = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.peer_summaries", "--objects", "20000", "--places", "6"]
    subprocess.run([*command, "--json", str(there)], check=False, cwd=ROOT, timeout=patient(300), capture_output=True)
    figures = json.loads(there.read_text())
    assert figures["summary_bytes"] == pytest.approx(25_000, rel=0.01)
    assert 0 < figures["hold_ms_p50"] <= figures["hold_ms"] and figures["first_move_s"] > 0


@pytest.mark.long(seconds=60)
@pytest.mark.timeout(600)
def test_the_ram_tier_is_measured_with_the_largest_batch_that_a_call_may_reserve(tmp_path: Path) -> None:
    there = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.ram", "--rounds", "1", "--batches", str(RESERVED_PER_CALL_MAX)]
    subprocess.run([*command, "--json", str(there)], check=True, cwd=ROOT, timeout=patient(500), capture_output=True)
    figures = json.loads(there.read_text())
    assert figures[f"put_ratio_{RESERVED_PER_CALL_MAX}"] > 0 and figures[f"get_ratio_{RESERVED_PER_CALL_MAX}"] > 0


@pytest.mark.requirement("G2")
@pytest.mark.parametrize(("took_ms", "status"), [(0.1, 0), (0.2, 1)])
def test_copies_that_cost_the_thread_more_than_the_aim_fail_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], took_ms: float, status: int
) -> None:
    def cost(work: Callable[[], object]) -> float:
        work()
        return took_ms

    monkeypatch.setattr(copy_overhead, "cpu_ms", cost)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["copy_overhead", "--rounds", "1"])
    assert copy_overhead.main() == status
    assert capsys.readouterr().out.count("MISSED") == 2 * status
