"""A whole daemon whose I/O workers end before they have started."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.child_processes import kill
from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.disk_daemon import TIER, DiskDaemon
from tests.rigs.patience import wait_until

STARTED = f"io_workers.{TIER}/started"

_FAULT = """
import os, sys
if {module!r} in sys.orig_argv and os.path.exists({flag!r}):
    os._exit(3)
"""


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """While this file exists, each new worker ends at once."""
    flag = tmp_path / "no worker"
    (tmp_path / "sitecustomize.py").write_text(_FAULT.format(module="kvdepot.server.io.worker", flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    yield flag


@pytest.mark.requirement("T5")
def test_a_tier_without_workers_is_degraded_until_one_starts(flag: Path) -> None:
    with DiskDaemon() as world:
        flag.touch()
        kill(world.workers)
        world.wait_state("degraded")
        tier = world.tier()
        assert "no worker serves: I/O worker " in tier.reason and "ended with 3" in tier.reason
        assert tier.breaker == "closed", "it says nothing about the path"
        shown = kvdepotctl(world.daemon, "status", "--wide").stdout + kvdepotctl(world.daemon, "health").stdout
        assert shown.count("no worker serves: ") >= 2 and shown.count(TIER) >= 2
        with urllib.request.urlopen(f"{world.daemon.metrics}/healthz") as answer:
            assert f"tier {TIER}: degraded: no worker serves: " in json.load(answer)["reason"]
        started = world.counter(STARTED)
        wait_until(lambda: _degraded(world) and world.counter(STARTED) > started, "another worker was tried", 120)
        flag.unlink()
        world.wait_state("ready")
        assert not world.tier().reason


@pytest.mark.requirement("T5")
@pytest.mark.long(seconds=8)
def test_a_tier_whose_first_workers_end_at_once_does_not_stay_ready(flag: Path) -> None:
    flag.touch()
    with contextlib.closing(DiskDaemon()) as world:
        world.daemon.start()
        world.wait_state("degraded")
        flag.unlink()
        world.wait_state("ready")


def _degraded(world: DiskDaemon) -> bool:
    """Raise where the tier is anything else."""
    assert world.tier().state == "degraded"
    return True
