"""`kvdepotctl doctor` of what NIXL can use: by the UCX that it brings, and by programs in its place."""

from __future__ import annotations

import json
import sys

import pytest
from kvdepot.client.ctl.doctor.findings import Outcome
from kvdepot.client.ctl.doctor.transports import check_transports

from tests.rigs.patience import patient


def saying(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (["tcp/eth0", "rc_mlx5/mlx5_0:1", "cma/memory"], Outcome.OK),
        (["srd/rdmap0:1"], Outcome.OK),
        (["tcp/eth0", "cma/memory"], Outcome.WARN),
        (["self/memory", "cma/memory"], Outcome.FAIL),
        ([], Outcome.FAIL),
    ],
)
def test_rdma_is_ok_and_what_reaches_no_other_host_fails(found: list[str], outcome: Outcome) -> None:
    finding = check_transports(None, saying(f"print({json.dumps(json.dumps(found))})"))
    assert finding.outcome is outcome
    assert all(one in finding.message for one in found)
    assert bool(finding.fix) == (outcome is not Outcome.OK)


def test_a_ucx_that_crashes_or_is_missing_or_hangs_is_a_finding() -> None:
    crashed = check_transports(None, saying("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert crashed.outcome is Outcome.FAIL and "exit status -11" in crashed.message
    missing = check_transports(None, saying("raise SystemExit('there is no UCX of NIXL')"))
    assert missing.outcome is Outcome.FAIL and "there is no UCX of NIXL" in missing.message
    other = check_transports(None, saying("print('no JSON')"))
    assert other.outcome is Outcome.FAIL and "no JSON" in other.message
    hangs = check_transports(None, saying("import time; time.sleep(600)"), seconds=0.1)
    assert hangs.outcome is Outcome.FAIL and "within 0.1 s" in hangs.message


def test_the_ucx_of_nixl_is_asked_with_the_daemon_s_variables() -> None:
    finding = check_transports({"UCX_TLS": "tcp", "PATH": "/nowhere"}, seconds=patient(20.0))
    assert finding.outcome is Outcome.WARN, finding
    assert "tcp/lo" in finding.message and "cma" not in finding.message
