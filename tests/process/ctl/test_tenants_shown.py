"""What operators see of tenants: their table, JSON, and listings of one tenant, from a real daemon (T8, S4)."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
from kvdepot.core.arena import SESSIONS_MAX

from tests.rigs.ctl_process import kvdepotctl, record, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.raw_client import OBJECT_BYTES, RawEngine, dense_spec, keys_of

NOBODY = 61009
CREDIT = 4 * OBJECT_BYTES
CONFIG = f"""
[[tenant]]
name = "own"
users = ["{os.getuid()}"]
credit = "{CREDIT}B"
sessions = 3
[[tenant]]
name = "other"
users = ["{NOBODY}"]
"""


@pytest.mark.requirement("T8", "S4")
def test_status_and_ls_show_what_each_tenant_has_and_was_refused() -> None:
    spec = replace(dense_spec("shown"), tenant="own")
    with DaemonProcess(config=CONFIG) as daemon, RawEngine(daemon.socket, "engine", spec=spec) as engine:
        keys = keys_of("p", 6)
        engine.store(keys[:2])
        lease, _, _ = engine.acquire(keys[:2])
        engine.reserve(keys, first=2)
        own, other = record(daemon, "status")["tenants"]
        assert other.pop("credit_bytes") > CREDIT, "what the other tenant leaves"
        assert other.pop("sessions_max") == SESSIONS_MAX - 3
        assert own == {
            "name": "own", "used_bytes": 4 * OBJECT_BYTES, "credit_bytes": CREDIT, "credit_used_bytes": CREDIT,
            "sessions": 1, "sessions_max": 3, "refused_objects": 1, "refused_loads": 0,
        }  # fmt: skip
        assert other == {
            "name": "other", "used_bytes": 0, "credit_used_bytes": 0, "sessions": 0, "refused_objects": 0,
            "refused_loads": 0,
        }  # fmt: skip
        engine.acquire(keys[:2])
        assert record(daemon, "status")["tenants"][0]["credit_used_bytes"] == CREDIT, "lent twice, counted once"
        table = text(daemon, "status", "--wide")
        (line,) = [line for line in table.splitlines() if line.startswith("own ") and "1/3" in line]
        used, _, credit = re.split(r" {2,}", line.strip())[1:4]
        assert used == credit
        engine.release(lease)
        (listed,) = record(daemon, "ls", "--tenant", "own")["namespaces"]
        assert (listed["label"], listed["tenant"]) == ("shown", "own")
        assert record(daemon, "ls", "--tenant", "other")["namespaces"] == []
        assert "no namespace" in text(daemon, "ls", "--tenant", "other")
        both = kvdepotctl(daemon, "ls", "--tenant", "own", listed["namespace_id"])
        assert both.returncode == 2 and "--tenant" in both.stderr
