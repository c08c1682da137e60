"""A whole daemon with quotas: two tenants, three namespaces, RAM and a disk, a restart with smaller quotas (T8, I4)."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvdepot.core.calls import CommitCall, CommitItem, ReserveOutcome
from kvdepot.core.report import DaemonStatus, QuotaStatus
from kvdepot.proto.methods import encode

from tests.rigs.ctl_process import record, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CALL_SECONDS, OBJECT_BYTES, RawEngine, dense_spec, keys_of, payload_of, status_of

ON_DISK_BYTES = OBJECT_BYTES + 4096
NAMES = (("a", "llama"), ("a", "qwen"), ("b", "llama"))
CONFIG = """
[[tier]]
name = "nvme"
kind = "disk"
path = "{path}"
capacity = "128MiB"
write = "commit"
[[quota]]
tier = "ram"
capacity = "{total}KiB"
[[quota]]
namespace = "*"
tier = "nvme"
capacity = "{disk}KiB"
"""


def config(path: Path, objects_in_ram: int, objects_on_disk: int) -> str:
    return CONFIG.format(
        path=path, total=objects_in_ram * OBJECT_BYTES // 1024, disk=objects_on_disk * ON_DISK_BYTES // 1024
    )  # fmt: skip


def attach(stack: ExitStack, node: DaemonProcess) -> list[RawEngine]:
    specs = [replace(dense_spec(label), tenant=tenant) for tenant, label in NAMES]
    return [stack.enter_context(RawEngine(node.socket, f"engine-{at}", spec=spec)) for at, spec in enumerate(specs)]


def status(node: DaemonProcess) -> DaemonStatus:
    return status_of(node.socket)


def store(engine: RawEngine, keys: list[bytes]) -> None:
    """Asking again while a worker of the daemon touches what would make room, and until a tick has dropped orphans."""

    def stored() -> bool:
        lease, outcomes, extents = engine.reserve(keys)
        assert set(outcomes) <= {ReserveOutcome.GRANTED, ReserveOutcome.PRESENT, ReserveOutcome.LATER}
        engine.write(keys, extents)
        granted = np.flatnonzero(np.array(outcomes) == ReserveOutcome.GRANTED).astype("<u4")
        call = CommitCall(engine.session, (CommitItem(lease, granted.tobytes()),))
        engine.stub.Commit(encode(call), timeout=patient(CALL_SECONDS))
        return ReserveOutcome.LATER not in outcomes

    wait_until(stored, "there is room", seconds=30)


def quota(node: DaemonProcess, tier: str) -> QuotaStatus:
    (found,) = [one for one in status(node).quotas if one.tier == tier]
    return found


def settled(node: DaemonProcess, tier: str, owners: int) -> Callable[[], bool]:
    """Whether so many owners are known by tenant, and all are within the quota."""

    def condition() -> bool:
        found = quota(node, tier)
        known = [owner for owner in found.owners if owner.tenant is not None]
        return len(known) == owners and all(owner.used_bytes <= found.capacity_bytes for owner in known)

    return condition


@pytest.mark.requirement("T8", "I4")
def test_quotas_hold_over_ram_disk_and_a_restart_and_are_reported(directory: Path) -> None:
    with DaemonProcess(ram="512MiB", config=config(directory, 16, 10)) as node:
        with ExitStack() as stack:
            one, two, other = engines = attach(stack, node)
            wait_until(lambda: status(node).tiers[1].state == "ready", "the disk opens", seconds=30)
            other.store(keys_of("kept", 8))
            for number in range(12):
                for engine in engines[:2]:
                    store(engine, keys_of(f"p{number}", 2))
                wait_until(lambda: status(node).tiers[1].queued_objects == 0, "all is written or dropped", seconds=30)
                assert all(owner.used_bytes <= 16 * OBJECT_BYTES for owner in quota(node, "ram").owners)
                assert all(owner.used_bytes <= 10 * ON_DISK_BYTES for owner in quota(node, "nvme").owners)
            assert other.load(keys_of("kept", 8)) == [payload_of(key) for key in keys_of("kept", 8)]
            lease, outcomes, _ = one.reserve(keys_of("long", 20))
            assert ReserveOutcome.LATER in outcomes and ReserveOutcome.GRANTED in outcomes
            one.commit(lease, outcomes.count(ReserveOutcome.GRANTED))
            wait_until(lambda: status(node).tiers[1].queued_objects == 0, "all is written or dropped", seconds=30)
            assert {(owner.tenant, owner.namespace) for owner in quota(node, "ram").owners} == {("a", ""), ("b", "")}
            assert {owner.namespace for owner in quota(node, "nvme").owners} == {e.namespace.hex() for e in engines}
            assert quota(node, "ram").evicted_objects and quota(node, "ram").refused_objects
            assert quota(node, "nvme").evicted_objects
            wait_until(lambda: below_watermark(quota(node, "ram")), "a tick has trimmed the owner", seconds=30)
            check_reports(node)
        node.stop()
        node.config = config(directory, 4, 5)
        node.start()
        with ExitStack() as stack:
            one, two, other = attach(stack, node)
            wait_until(lambda: status(node).tiers[1].state == "ready", "the disk opens", seconds=30)
            wait_until(settled(node, "ram", 2), "RAM is within the smaller quota", seconds=30)
            wait_until(settled(node, "nvme", 3), "the disk is within the smaller quota", seconds=30)
            for tier in ("ram", "nvme"):
                wait_until(lambda tier=tier: below_watermark(quota(node, tier)), "no tick takes more", seconds=30)
            held = other.locate(keys_of("kept", 8)) // 256
            assert 0 < held <= 4
            assert other.load(keys_of("kept", held)) == [payload_of(key) for key in keys_of("kept", held)]
            store(two, keys_of("new", 2))
            assert settled(node, "ram", 2)()


def below_watermark(found: QuotaStatus) -> bool:
    """Whether no tick evicts any more, so that several looks see the same."""
    return all(owner.used_bytes <= 0.95 * found.capacity_bytes for owner in found.owners)


def check_reports(node: DaemonProcess) -> None:
    """What status said, in the table, in JSON and in the metrics."""
    fullest = quota(node, "ram").owners[0]
    table = text(node, "status", "--wide")
    assert "quotas" in table
    assert any(line.split()[:3] == ["a", "(total)", "ram"] for line in table.splitlines()), table
    assert record(node, "status")["quotas"][0]["owners"][0]["used_bytes"] == fullest.used_bytes
    with urllib.request.urlopen(f"{node.metrics}/metrics", timeout=patient(10)) as answer:
        lines = [
            line.rpartition(" ") for line in answer.read().decode().splitlines() if line.startswith("kvdepot_quota")
        ]
    metrics = {name: float(value) for name, _, value in lines}
    label = '{namespace="",tenant="*",tier="ram"}'
    assert metrics[f"kvdepot_quota_used_bytes{label}"] == fullest.used_bytes
    assert metrics[f"kvdepot_quota_owners{label}"] == 2
    assert metrics['kvdepot_quota_owners{namespace="*",tenant="*",tier="nvme"}'] == 3
    assert metrics[f"kvdepot_quota_evicted_objects_total{label}"] == quota(node, "ram").evicted_objects
    assert len(metrics) == 2 * 5, "one of each a quota, however many it is about"
