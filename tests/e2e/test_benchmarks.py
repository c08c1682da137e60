"""Benchmarks that need a real engine, once and small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from demo.engine import ROOT
from tests.rigs.network import why_no_network
from tests.rigs.patience import patient


@pytest.mark.long(seconds=180)
@pytest.mark.timeout(900)
def test_the_first_token_after_a_load_from_a_peer_is_compared_with_ram_and_the_wire(tmp_path: Path) -> None:
    if reason := why_no_network():
        pytest.skip(reason)
    there = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.first_token", "--models", "dense", "--rounds", "1", "--repeats", "1"]
    command += ["--only-peer", "--peer", "stream", "--json", str(there)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=patient(600), capture_output=True)
    figures = json.loads(there.read_text())
    assert figures["dense_stream_by_limit"] > 0
    assert figures["dense_stream_4618_ms"] > 0
