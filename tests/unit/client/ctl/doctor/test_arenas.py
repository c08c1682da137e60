"""`kvdepotctl doctor` about arenas that no daemon uses."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from kvdepot.client.ctl.doctor.arenas import check_unused_arenas
from kvdepot.client.ctl.doctor.findings import Outcome
from kvdepot.client.ctl.doctor.settings import Place, Settings

OWN = "/dev/shm/kvdepot-0/kvdepot-0-0123456789ab.arena"
SETTINGS = Settings("a.toml", 1 << 30, (Place("ram", "ram", "/dev/shm", 1 << 30),), arena=OWN)


def arena(path: str, *, unused: bool = True) -> dict[str, Any]:
    return {"path": path, "memory_bytes": 1 << 30, "unused": unused}


def says(text: str, code: int = 0) -> tuple[str, ...]:
    return sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"


@pytest.mark.requirement("O1")
def test_memory_that_no_daemon_uses_is_a_warning_with_its_size() -> None:
    found = [arena("/a"), arena("/b", unused=False), arena("/c"), arena(OWN)]
    finding = check_unused_arenas(SETTINGS, says(json.dumps(found)))
    assert finding.outcome is Outcome.WARN
    assert "2 of this user have 2.00 GiB" in finding.message
    assert "kvdepotd arena list" in finding.fix


@pytest.mark.requirement("O1")
def test_the_arena_of_the_configuration_may_wait_for_its_daemon() -> None:
    for found in ([], [arena(OWN)], [arena("/b", unused=False)]):
        assert check_unused_arenas(SETTINGS, says(json.dumps(found))).outcome is Outcome.OK


@pytest.mark.parametrize("said", ["no JSON", "3", "null", "[3]", '[{"path": "/a"}]', '[{"unused": true}]'])
def test_a_program_that_answers_something_else_is_no_finding(said: str) -> None:
    assert check_unused_arenas(SETTINGS, says(said)).outcome is Outcome.SKIPPED


def test_a_program_that_fails_or_hangs_is_no_finding() -> None:
    assert check_unused_arenas(SETTINGS, says("", 1)).outcome is Outcome.SKIPPED
    hangs = (sys.executable, "-c", "import time; time.sleep(60)")
    assert check_unused_arenas(SETTINGS, hangs, seconds=0.05).outcome is Outcome.SKIPPED
