"""What `kvdepotctl doctor` prints: what to do first, and nothing about the rest unless it is asked for."""

from __future__ import annotations

import io

import pytest
from kvdepot.client.ctl.commands.doctor import echo_table
from kvdepot.client.ctl.doctor.findings import Check, Finding
from rich.console import Console

OK = Check("kernel", "host").ok("6.18")
SKIPPED = Check("write", "nvme").skipped("needs root")
WARN = Check("clock", "nfs").warn("9 s off", "NTP on both")
FAIL = Check("room", "nvme").fail("the file system is full", "lower the capacity")


def printed(*findings: Finding, every: bool = False) -> str:
    console = Console(file=io.StringIO(), width=100)
    echo_table(findings, console, every=every)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.requirement("P10")
def test_failures_come_first_then_warnings_and_the_rest_is_only_counted() -> None:
    text = printed(OK, WARN, SKIPPED, FAIL)
    assert -1 < text.index("lower the capacity") < text.index("NTP on both")
    assert "6.18" not in text and "needs root" not in text
    assert text.splitlines()[-1] == "1 ok, 1 warn, 1 fail, 1 skipped (--all lists each)"


@pytest.mark.requirement("P10")
def test_all_lists_each_check_once() -> None:
    text = printed(OK, WARN, SKIPPED, FAIL, every=True)
    places = [text.index(what) for what in ("lower the capacity", "NTP on both", "needs root", "6.18")]
    assert places == sorted(places)
    assert text.splitlines()[-1] == "1 ok, 1 warn, 1 fail, 1 skipped"


@pytest.mark.requirement("P10")
def test_a_host_without_a_fault_has_one_line() -> None:
    assert printed(OK, SKIPPED).splitlines() == ["1 ok, 0 warn, 0 fail, 1 skipped (--all lists each)"]
