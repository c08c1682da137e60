"""Another directory in the place of the one that was opened: a copy of it, what was restored of it, or a stranger."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kvdepot.server.storage.shared_layout import JANITOR, MARKER, node_file
from kvdepot.server.tiers.shared.coordinator import coordinator as coordinator_module
from kvdepot.server.tiers.shared.coordinator import spare
from kvdepot.server.tiers.shared.coordinator.files import replace_small, taken_bytes
from kvdepot.server.tiers.shared.coordinator.opening import Known, check_directory
from kvdepot.server.tiers.shared.coordinator.records import JanitorRecord, Lease, NodeRecord
from kvdepot.server.tiers.shared.links import Report

from tests.fakes.shared_directory import MIB, Nodes, lease_of, put

CAPACITY = 16 * MIB
OBJECT = MIB // 4
COST = OBJECT + (32 << 10)
"""Of an object with its header, and of new folders, at most."""


def used_bytes(root: Path) -> int:
    return sum(taken_bytes(path.lstat()) for path in (root, *root.rglob("*")))


def count_again(nodes: Nodes) -> None:
    nodes.coordinators[nodes.janitor].janitor._counted_at = None
    nodes.go_on(3)


def copy_of(nodes: Nodes) -> Path:
    """Return a copy as `cp -a` makes it."""
    return Path(shutil.copytree(nodes.root, nodes.root.with_name("copy"), copy_function=shutil.copy2))


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def write_all_that_is_allowed(nodes: Nodes, at: int, heartbeats: int) -> None:
    written = 0
    for heartbeat in range(heartbeats):
        nodes.go_on(1)
        while written + COST <= nodes.reports[at].limit_bytes:
            put(nodes.root, written, path=f"{at} {heartbeat}", payload_bytes=OBJECT)
            written += COST
        nodes.coordinators[at].publish(written)
        assert used_bytes(nodes.root) <= CAPACITY


@pytest.mark.requirement("I4")
def test_a_janitor_counts_a_copy_that_comes_in_the_place_of_its_directory(tmp_path: Path) -> None:
    """The directory was emptied after it was copied, so its count says nothing of the copy."""
    nodes = Nodes(tmp_path / "shared", 1, CAPACITY)
    nodes.go_on(10)
    files = [put(nodes.root, number, payload_bytes=OBJECT) for number in range(48)]
    count_again(nodes)
    copy = copy_of(nodes)
    for file in files:
        (nodes.root / file).unlink()
    count_again(nodes)
    assert nodes.reports[0].objects == 0
    exchange(nodes.root, copy)
    write_all_that_is_allowed(nodes, 0, 12)
    assert nodes.reports[0].objects > 20


@pytest.mark.requirement("I4")
def test_what_a_node_was_allowed_after_a_copy_was_made_counts_for_nothing_in_the_copy(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 2, CAPACITY)
    nodes.go_on(20)
    at = 1 - nodes.janitor
    copy, before = copy_of(nodes), nodes.reports[at]
    for published in range(1, 5):
        nodes.coordinators[at].publish(published * OBJECT)
        nodes.go_on(3)
    assert nodes.reports[at].limit_bytes > before.limit_bytes
    exchange(nodes.root, copy)
    report = nodes.coordinators[at].heartbeat()
    assert isinstance(report, Report)
    assert report.node != before.node
    assert report.limit_bytes == 4 * OBJECT, "what is published"
    nodes.go_on(10)
    assert nodes.reports[at].limit_bytes > 4 * OBJECT + MIB // 2
    assert [report.is_janitor for report in nodes.reports].count(True) == 1


@pytest.mark.requirement("I4", "T3")
def test_a_janitor_grants_nothing_in_another_directory_whose_term_is_lower(tmp_path: Path) -> None:
    """It came between a heartbeat and the work after it."""
    ours, theirs = Nodes(tmp_path / "ours", 2), Nodes(tmp_path / "theirs", 1)
    ours.go_on(10)
    ours.stopped.add(ours.janitor)
    ours.go_on(30)
    ours.stopped.clear()
    ours.go_on(10)
    theirs.go_on(10)
    assert lease_of(ours.root).term > lease_of(theirs.root).term
    before = (theirs.root / JANITOR).read_bytes()
    coordinator = ours.coordinators[ours.janitor]
    report = coordinator.heartbeat()
    assert isinstance(report, Report)
    assert report.is_janitor
    exchange(ours.root, theirs.root)
    while coordinator.work():
        pass
    assert not coordinator.janitor.holding
    exchange(ours.root, theirs.root)
    assert (theirs.root / JANITOR).read_bytes() == before
    ours.go_on(5)
    assert any(report.is_janitor for report in ours.reports)


@pytest.mark.requirement("I4", "T5")
def test_another_directory_that_comes_during_a_heartbeat_is_known_by_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Nodes(tmp_path / "ours", 1), Nodes(tmp_path / "theirs", 1)
    ours.go_on(10)
    theirs.go_on(10)
    before = (theirs.root / JANITOR).read_bytes()

    def check(root: Path, known: Known) -> Known:
        found = check_directory(root, known)
        exchange(ours.root, theirs.root)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(coordinator_module, "check_directory", check)
        report = ours.coordinators[0].heartbeat()
    assert isinstance(report, Report)
    assert not report.marker_ok
    assert "another directory" in report.reason
    exchange(ours.root, theirs.root)
    assert (theirs.root / JANITOR).read_bytes() == before
    ours.go_on(5)
    assert ours.reports[0].marker_ok
    assert ours.reports[0].is_janitor


def test_a_renewal_that_failed_and_was_done_all_the_same_costs_no_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    node = nodes.reports[0].node

    def done_and_failed(root: Path, file: str, data: bytes, temporary: str) -> None:
        replace_small(root, file, data, temporary)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(spare, "replace_small", done_and_failed)
        nodes.go_on(3)
    assert "Input/output error" in nodes.reports[0].reason
    nodes.go_on(3)
    assert (nodes.reports[0].node, nodes.reports[0].reason) == (node, "")


def test_a_file_whose_time_the_server_sets_later_costs_no_registration(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    node = nodes.reports[0].node
    os.utime(nodes.root / node_file(node))
    nodes.go_on(1)
    assert nodes.reports[0].node == node
    assert nodes.reports[0].is_janitor


def test_files_of_a_version_that_says_neither_renewals_nor_the_directory_are_understood() -> None:
    node, janitor = NodeRecord(1, 2, Lease(), renewals=3), JanitorRecord(Lease(), 3, 4, 5, 6, {}, directory_id="ab")
    packed = node.pack().replace(b', "renewals": 3', b"")
    assert NodeRecord.unpack(packed) == NodeRecord(1, 2, Lease())
    packed = janitor.pack().replace(b', "directory": "ab"', b"")
    old = JanitorRecord.unpack(packed)
    assert old is not None
    assert old.is_of("ab")
    assert old.is_of("cd")
    assert not janitor.is_of("cd")


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("gone", [[".tmp"], [".nodes"], [".tmp", ".nodes", ".quarantine"]], ids=" ".join)
def test_folders_that_were_removed_or_not_restored_are_made_again_beside_the_marker_alone(
    tmp_path: Path, gone: list[str]
) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(10)
    for folder in gone:
        shutil.rmtree(nodes.root / folder)
    marker = nodes.root / MARKER
    marker.rename(tmp_path / "marker")
    nodes.go_on(3)
    assert not set(gone) & set(nodes.listed()), "not mounted, perhaps"
    (tmp_path / "marker").rename(marker)
    nodes.go_on(20)
    assert [report.reason for report in nodes.reports] == ["", ""]
    assert {*gone, MARKER} <= set(nodes.listed())
    assert [report.is_janitor for report in nodes.reports].count(True) == 1
    assert all(report.limit_bytes > MIB for report in nodes.reports)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_directory_without_its_folders_is_read_where_they_cannot_be_made(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    shutil.rmtree(nodes.root / ".tmp")
    nodes.go_on(1)
    subprocess.run(["mount", "--bind", nodes.root, nodes.root], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", nodes.root], check=True)
        for _ in range(3):
            report = nodes.coordinators[0].heartbeat()
            assert isinstance(report, Report)
            assert report.marker_ok
            assert "Read-only file system" in report.reason
    finally:
        subprocess.run(["umount", nodes.root], check=True)
    nodes.go_on(3)
    assert nodes.reports[0].reason == ""
