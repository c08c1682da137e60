"""Quotas changed at run time: the real command against a real daemon with engines of two tenants (row T8, I4)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.calls import ReserveOutcome
from kvdepot.core.errors import InvalidArgument, LimitExceeded, NotFound
from kvdepot.core.report import DaemonStatus, QuotaStatus, TierStatus

from tests.rigs.ctl_process import answered, kvdepotctl, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, dense_spec, keys_of, status_of

CONFIG = f"""
[[tier]]
name = "nvme"
kind = "disk"
path = "{{path}}"
capacity = "128MiB"
write = "commit"
[[quota]]
tenant = "a"
tier = "ram"
capacity = "{8 * OBJECT_BYTES // 1024}KiB"
"""
ON_DISK_BYTES = OBJECT_BYTES + 4096
TENANT_A = ("--tenant", "a", "--tier", "ram")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    (tmp_path / "nvme").mkdir()
    with DaemonProcess(ram="640MiB", config=CONFIG.format(path=tmp_path / "nvme")) as running:
        yield running


def quota(daemon: DaemonProcess, *arguments: str) -> Any:
    return json.loads(answered(daemon, "quota", *arguments, "--json"))


def attached(daemon: DaemonProcess, tenant: str) -> RawEngine:
    return RawEngine(daemon.socket, f"engine-{tenant}", spec=replace(dense_spec(tenant), tenant=tenant))


def held_bytes(daemon: DaemonProcess, tenant: str, tier: str) -> int:
    (found,) = [one for one in status_of(daemon.socket).quotas if (one.tenant, one.tier) == (tenant, tier)]
    return sum(owner.used_bytes for owner in found.owners)


def status(daemon: DaemonProcess) -> DaemonStatus:
    return status_of(daemon.socket)


def disk(found: DaemonStatus) -> TierStatus:
    return found.tiers[1]


def disk_quota(found: DaemonStatus) -> QuotaStatus:
    (of_disk,) = [one for one in found.quotas if one.tier == "nvme"]
    return of_disk


def on_disk(daemon: DaemonProcess, engine: RawEngine, key: bytes) -> bool:
    shown = json.loads(answered(daemon, "describe", f"{engine.namespace.hex()}/{key.hex()}", "--json"))
    return any(one["tier"] == "nvme" for one in shown["objects"])


@pytest.mark.requirement("T8", "I4")
def test_a_quota_that_is_set_holds_at_once_and_ends_with_it(daemon: DaemonProcess) -> None:
    with attached(daemon, "a") as one, attached(daemon, "b") as other:
        one.store(keys_of("one", 8))
        other.store(keys_of("other", 8))
        capacity = 4 * OBJECT_BYTES
        assert quota(daemon, "set", f"{capacity // 1024}KiB", *TENANT_A)["not_persisted"] == ""
        fresh = keys_of("fresh", 5)  # more than the tenant may hold now
        assert ReserveOutcome.GRANTED not in one.reserve(fresh[:5])[1][4:]
        wait_until(lambda: held_bytes(daemon, "a", "ram") <= capacity, "it is evicted to what was set", 60)
        assert other.locate(keys_of("other", 8)) > 0, "the other tenant loses nothing"
        found = quota(daemon, "get", *TENANT_A)
        assert (found["capacity_bytes"], found["by_operator"], found["tiers"][0]["tier"]) == (capacity, True, "ram")
        assert "evicted" in answered(daemon, "quota", "get", *TENANT_A)
        answered(daemon, "quota", "delete", *TENANT_A)
        assert quota(daemon, "get", *TENANT_A)["capacity_bytes"] == 8 * OBJECT_BYTES
        assert "configuration" in answered(daemon, "quota", "list")


@pytest.mark.requirement("T8", "I4")
def test_a_quota_of_a_disk_that_had_none_holds_from_then_on(daemon: DaemonProcess) -> None:
    """Of the tenant whom nothing limits in RAM: all that it stores is due on the disk."""
    capacity = 4 * ON_DISK_BYTES
    wait_until(lambda: disk(status(daemon)).state == "ready", "the disk opens", 60)
    with attached(daemon, "a") as other, attached(daemon, "b") as one:
        other.store(keys_of("other", 2))
        one.store(keys_of("one", 8))
        wait_until(lambda: disk(status(daemon)).objects == 10, "they are written", 60)
        shown = quota(daemon, "set", f"{capacity}B", "--tenant", "b", "--tier", "nvme")
        assert shown["tiers"][0]["owners"][0]["used_bytes"] > 0, "what lay there before counts"
        wait_until(lambda: held_bytes(daemon, "b", "nvme") <= capacity, "the disk is evicted to it", 60)
        found = status(daemon)
        evicted = disk_quota(found).evicted_objects
        assert disk(found).objects == 10 - evicted, "nothing else went"
        for number in range(1, 7):
            one.store(keys_of(f"later{number}", 2))
            written = 10 + 2 * number
            wait_until(lambda: one.counter("tier_writes.nvme/ok") == written, "what fits is written", 60)  # noqa: B023
            assert held_bytes(daemon, "b", "nvme") <= capacity
        assert disk_quota(status(daemon)).evicted_objects > evicted
        assert all(on_disk(daemon, other, key) for key in keys_of("other", 2))
        assert one.locate(keys_of("one", 8)) == 8 * CHUNK_TOKENS, "RAM is limited by nothing"


@pytest.mark.requirement("I8")
def test_quotas_outlive_the_daemon_and_a_reload_and_then_hold(daemon: DaemonProcess) -> None:
    answered(daemon, "quota", "set", "none", *TENANT_A)
    answered(daemon, "quota", "set", f"{4 * OBJECT_BYTES}B", "--tenant", "b", "--tier", "ram")
    answered(daemon, "quota", "set", "1GiB", "--namespace", "ABCDEF12")
    shown = quota(daemon, "list")
    assert [(one["tenant"], one["namespace"], one["tier"], one["capacity_bytes"]) for one in shown] == [
        ("a", None, "ram", None),
        ("b", None, "ram", 4 * OBJECT_BYTES),
        ("*", "abcdef12", "*", 1 << 30),
    ]
    daemon.kill()
    daemon.start()
    assert "restored operator quota: tenant 'b' in tier 'ram'" in daemon.log
    assert quota(daemon, "list") == shown
    with attached(daemon, "a") as unlimited, attached(daemon, "b") as limited:
        unlimited.store(keys_of("many", 20))
        assert limited.reserve(keys_of("many", 5))[1] == [ReserveOutcome.GRANTED] * 4 + [ReserveOutcome.LATER]
    path = daemon.directory / "kvdepot.toml"
    path.write_text(path.read_text().replace(f"{8 * OBJECT_BYTES // 1024}KiB", "16MiB"))
    start = len(daemon.log)
    (change,) = json.loads(answered(daemon, "reload", "--json"))["changes"]
    assert change["key"] == "quota[tenant=a,namespace=(total),tier=ram].capacity"
    assert "operator quotas stay in effect" in daemon.log[start:]
    assert quota(daemon, "list") == shown
    assert not [one for one in status_of(daemon.socket).quotas if one.tenant == "a"], "no limit any more"
    answered(daemon, "quota", "delete", *TENANT_A)
    answered(daemon, "quota", "delete", "--namespace", "ABCDEF12")
    found = quota(daemon, "get", *TENANT_A)
    assert (found["capacity_bytes"], found["by_operator"]) == (16 << 20, False), "the file as it is now"
    assert len(quota(daemon, "list")) == 2


def test_an_entry_that_names_the_tier_is_shown_apart_and_by_itself_in_metrics(daemon: DaemonProcess) -> None:
    everywhere = ("--tenant", "a")
    assert [one["tier"] for one in quota(daemon, "set", "1GiB", *everywhere)["tiers"]] == ["nvme"]
    assert [one["tier"] for one in quota(daemon, "set", "2GiB", *TENANT_A)["tiers"]] == ["ram"]
    with urllib.request.urlopen(f"{daemon.metrics}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("kvdepot_quota_capacity")]
    assert lines == [
        'kvdepot_quota_capacity_bytes{namespace="",tenant="a",tier="ram"} 2.147483648e+09',
        'kvdepot_quota_capacity_bytes{namespace="",tenant="a",tier="nvme"} 1.073741824e+09',
    ]
    assert "nobody" in answered(daemon, "quota", "set", "1GiB", "--tenant", "who-is-not-there")


def test_what_a_configuration_may_not_say_is_refused(daemon: DaemonProcess) -> None:
    before = quota(daemon, "list")
    for arguments in (
        ("set", "lots"),
        ("set", "0B"),
        ("set", "10"),
        ("set", "99999999PiB"),
        ("set", "1GiB", "--tier", "floppy"),
        ("set", "1GiB", "--tier", ""),
        ("set", "1GiB", "--namespace", "abc"),
        ("set", "1GiB", "--namespace", ""),
        ("get", "--namespace", "abc"),
        ("delete", "--namespace", "abc"),
    ):
        with pytest.raises(InvalidArgument):
            answered(daemon, "quota", *arguments)
    with pytest.raises(LimitExceeded, match="tenant"):
        answered(daemon, "quota", "set", "1GiB", "--tenant", "x" * 1000)
    with pytest.raises(NotFound, match="no runtime quota for tenant 'a' in tier 'ram'"):
        answered(daemon, "quota", "delete", *TENANT_A)
    with pytest.raises(NotFound):
        answered(daemon, "quota", "delete", "--tier", "floppy")
    assert json.loads(text(daemon, "quota", "list", "--json")) == before
    for code, what, line in (
        (1, "there is no quota for tenant 'nobody'", "get --tenant nobody"),
        (1, "kvdepotctl reload", "delete --tenant a --tier ram"),
        (2, "choose one of: *, ram, nvme", "set 1GiB --tier floppy"),
    ):
        refused = kvdepotctl(daemon, "quota", *line.split())
        assert (refused.returncode, what in refused.stderr) == (code, True), refused.stderr
