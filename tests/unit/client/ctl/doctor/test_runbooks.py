"""Findings of doctor that need a fix link to an entry of operations.md."""

from __future__ import annotations

import pytest
from kvdepot.client.ctl.doctor.findings import DAEMON, HOST, RUNBOOK, RUNBOOKS, Check

from tests.rigs.manual import anchor, sections

ANCHORS = {anchor(title) for level in (2, 3) for title in sections("operations.md", level)}


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_finding_links_to_an_entry_that_exists(name: str) -> None:
    for subject in (DAEMON, HOST, "nvme"):
        for finding in (Check(name, subject).warn("wrong", "repair"), Check(name, subject).fail("wrong", "repair")):
            assert finding.runbook.startswith(RUNBOOK) and finding.runbook.removeprefix(RUNBOOK) in ANCHORS
    assert Check(name, HOST).ok("good").runbook == ""


def test_a_finding_without_an_entry_has_no_link() -> None:
    assert Check("vLLM", HOST).fail("wrong", "repair").runbook == ""
