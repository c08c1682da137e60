"""The coordinator of a shared directory over real files and a test's clock: opening, election, limits, silence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.client.ctl.doctor.probe import TEMPORARY
from kvdepot.server.storage.shared_layout import JANITOR, MARKER, NODES, is_node, node_file
from kvdepot.server.tiers.shared.coordinator import janitor, opening
from kvdepot.server.tiers.shared.coordinator.coordinator import Coordinator, new_node
from kvdepot.server.tiers.shared.coordinator.files import replace_small, taken_bytes
from kvdepot.server.tiers.shared.coordinator.ledger import Ledger
from kvdepot.server.tiers.shared.coordinator.nodes import read_node, registered
from kvdepot.server.tiers.shared.coordinator.records import JanitorRecord, Lease, NodeRecord
from kvdepot.server.tiers.shared.coordinator.settings import Before, CoordinatorSettings
from kvdepot.server.tiers.shared.links import Failed, Report
from kvdepot.server.tiers.shared.quota_grant import OBJECT_SHARE

from tests.fakes.shared_directory import MIB, Nodes, lease_of, put


def settings_of(root: Path, capacity_bytes: int = 64 * MIB) -> CoordinatorSettings:
    return CoordinatorSettings(root, capacity_bytes, on_root_filesystem=True)


def test_a_new_directory_is_marked_and_one_node_becomes_janitor(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 3)
    nodes.go_on(20)
    assert sum(report.is_janitor for report in nodes.reports) == 1
    assert {report.janitor for report in nodes.reports} == {lease_of(nodes.root).holder}
    assert all(report.limit_bytes > MIB for report in nodes.reports)
    assert len({report.directory_id for report in nodes.reports}) == 1
    assert json.loads((nodes.root / MARKER).read_text())["id"] == nodes.reports[0].directory_id


@pytest.mark.requirement("T5")
def test_a_folder_that_is_missing_is_not_made_and_found_when_it_is_there(tmp_path: Path) -> None:
    root = tmp_path / "mount" / "shared"
    root.parent.mkdir()
    coordinator = Coordinator(settings_of(root), Before(), lambda: 0.0)
    message = coordinator.heartbeat()
    assert isinstance(message, Failed)
    assert f"{root} is not there: not mounted?" in message.reason
    assert list(root.parent.iterdir()) == []
    root.mkdir()
    assert isinstance(coordinator.heartbeat(), Report)


@pytest.mark.requirement("T5")
def test_on_the_root_file_system_a_directory_is_begun_only_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder there is where a mount is missing, most of the time."""
    monkeypatch.setattr(opening, "ROOT_FILESYSTEM", tmp_path)
    settings = CoordinatorSettings(tmp_path, 64 * MIB)
    coordinator = Coordinator(settings, Before(), lambda: 0.0)
    message = coordinator.heartbeat()
    assert isinstance(message, Failed)
    assert "not mounted?" in message.reason
    assert "on_root_filesystem" in message.reason
    assert list(tmp_path.iterdir()) == []
    assert isinstance(Coordinator(settings_of(tmp_path), Before(), lambda: 0.0).heartbeat(), Report)
    assert isinstance(coordinator.heartbeat(), Report), "what somebody has begun there is used"


@pytest.mark.requirement("T5")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_mount_that_comes_late_is_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "ROOT_FILESYSTEM", tmp_path)
    (tmp_path / "shared").mkdir()
    coordinator = Coordinator(CoordinatorSettings(tmp_path / "shared", 64 * MIB), Before(), lambda: 0.0)
    assert isinstance(coordinator.heartbeat(), Failed)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=755", "tmpfs", str(tmp_path / "shared")], check=True)
    try:
        assert isinstance(coordinator.heartbeat(), Report)
        assert (tmp_path / "shared" / MARKER).exists()
    finally:
        subprocess.run(["umount", str(tmp_path / "shared")], check=True)
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_directory_that_is_not_empty_is_refused_without_a_marker(tmp_path: Path) -> None:
    (tmp_path / "somebody's").write_text("")
    coordinator = Coordinator(settings_of(tmp_path), Before(), lambda: 0.0)
    message = coordinator.heartbeat()
    assert isinstance(message, Failed)
    assert "is not empty" in message.reason
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's"]


def test_what_a_probe_has_left_in_an_empty_directory_keeps_nobody_from_it(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY}1-00").write_text("")
    assert isinstance(Coordinator(settings_of(tmp_path), Before(), lambda: 0.0).heartbeat(), Report)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 9, "compatible_since": 9, "id": "", "created_by": ""}'])
def test_a_marker_that_is_not_understood_is_a_reason(tmp_path: Path, content: str) -> None:
    (tmp_path / MARKER).write_text(content)
    assert isinstance(Coordinator(settings_of(tmp_path), Before(), lambda: 0.0).heartbeat(), Failed)


@pytest.mark.requirement("T5")
def test_an_empty_mount_point_of_a_known_directory_is_left_alone(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(5)
    nodes.root.rename(tmp_path / "away")
    nodes.root.mkdir()
    nodes.go_on(3)
    assert not nodes.reports[0].marker_ok
    restarted = Coordinator(settings_of(nodes.root), Before(0, nodes.reports[0].directory_id), nodes.clock)
    assert isinstance(restarted.heartbeat(), Failed)
    assert nodes.listed() == []
    nodes.root.rmdir()
    (tmp_path / "away").rename(nodes.root)
    nodes.go_on(3)
    assert nodes.reports[0].marker_ok


@pytest.mark.requirement("T5")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_directory_that_comes_back_on_another_device_is_the_same_by_its_marker(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(5)
    before = nodes.reports[0]
    nodes.root.rename(tmp_path / "away")
    nodes.root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(nodes.root)], check=True)
    try:
        nodes.go_on(2)
        empty = nodes.reports[0]
        shutil.copytree(tmp_path / "away", nodes.root, dirs_exist_ok=True)
        nodes.go_on(2)
        assert (empty.marker_ok, nodes.reports[0].marker_ok) == (False, True)
        assert nodes.reports[0].device == nodes.root.stat().st_dev != before.device
    finally:
        subprocess.run(["umount", "-l", str(nodes.root)], check=True)


def test_another_directory_in_its_place_is_not_taken(tmp_path: Path) -> None:
    first, second = Nodes(tmp_path / "shared", 1), Nodes(tmp_path / "other", 1)
    first.go_on(5)
    second.go_on(5)
    first.root.rename(tmp_path / "away")
    second.root.rename(first.root)
    first.go_on(1)
    assert not first.reports[0].marker_ok
    assert "another" in first.reports[0].reason or MARKER in first.reports[0].reason


@pytest.mark.requirement("T3")
def test_a_janitor_that_is_gone_is_followed_by_another(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 3)
    nodes.go_on(20)
    first = lease_of(nodes.root)
    nodes.stopped.add(nodes.janitor)
    nodes.go_on(30)
    assert lease_of(nodes.root).term > first.term
    assert lease_of(nodes.root).holder != first.holder
    assert sum(report.is_janitor for at, report in enumerate(nodes.reports) if at not in nodes.stopped) == 1


@pytest.mark.requirement("T3")
def test_a_janitor_that_was_stopped_does_nothing_on_its_old_term(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(20)
    old = nodes.janitor
    nodes.stopped.add(old)
    nodes.clock.seconds += 30  # nobody has taken over yet
    assert not nodes.coordinators[old].work()
    assert not nodes.coordinators[old].janitor.holding
    nodes.go_on(30)
    term = lease_of(nodes.root).term
    nodes.stopped.clear()
    nodes.go_on(10)
    assert lease_of(nodes.root).term == term
    assert [report.is_janitor for report in nodes.reports].count(True) == 1


def test_a_lease_that_was_written_late_is_written_over(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(10)
    late = (nodes.root / JANITOR).read_bytes()
    nodes.stopped.add(nodes.janitor)
    nodes.go_on(30)
    lease = lease_of(nodes.root)
    (nodes.root / JANITOR).write_bytes(late)
    limits = [report.limit_bytes for report in nodes.reports]
    nodes.go_on(3)
    assert lease_of(nodes.root) == lease
    assert all(new.limit_bytes >= old for new, old in zip(nodes.reports, limits, strict=True))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"format": 1}', b"[" * 100_000, b" " * (1 << 20)])
def test_what_is_not_understood_is_passed_over(tmp_path: Path, content: bytes) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(10)
    (nodes.root / NODES / "strange.json").write_bytes(content)
    (nodes.root / JANITOR).write_bytes(content)
    nodes.go_on(20)
    assert sum(report.is_janitor for report in nodes.reports) == 1
    assert "1 files of nodes are not understood" in nodes.reports[nodes.janitor].reason
    assert JanitorRecord.unpack(content) is None
    assert NodeRecord.unpack(content) is None


@pytest.mark.parametrize("name", ["../../elsewhere", "two messages", 5, None])
def test_a_record_that_names_what_is_no_node_is_not_understood(name: object) -> None:
    node, janitor = NodeRecord(1, 2, Lease()), JanitorRecord(Lease(), 3, 4, 5, 6, {})
    assert (NodeRecord.unpack(node.pack()), JanitorRecord.unpack(janitor.pack())) == (node, janitor)
    for field in ("janitor", "owner"):
        assert NodeRecord.unpack(json.dumps(json.loads(node.pack()) | {field: name}).encode()) is None
    values = json.loads(janitor.pack())
    assert JanitorRecord.unpack(json.dumps(values | {"holder": name}).encode()) is None
    assert JanitorRecord.unpack(json.dumps(values | {"shares": {str(name) + "/": [1, 2, 0]}}).encode()) is None


def test_a_lease_whose_count_has_run_for_longer_than_dates_go_back_is_not_understood() -> None:
    """Each tier that waits for room shows since when."""
    lease = JanitorRecord(Lease(), None, 0, 0, 0, {}, counting_seconds=(1 << 31) - 1)
    assert JanitorRecord.unpack(lease.pack()) == lease
    assert JanitorRecord.unpack(replace(lease, counting_seconds=1 << 31).pack()) is None


@pytest.mark.requirement("T3")
def test_clocks_an_hour_apart_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wall clock is asked at all; each node's other clock began when its machine did."""
    for name in ("time", "time_ns"):
        monkeypatch.setattr(f"time.{name}", lambda: pytest.fail("a wall clock was asked"))
    nodes = Nodes(tmp_path / "shared", 3, offsets=(0.0, 3_600.0, -3_600.0))
    nodes.go_on(20)
    term = lease_of(nodes.root).term
    nodes.go_on(100)
    assert lease_of(nodes.root).term == term
    assert sum(report.is_janitor for report in nodes.reports) == 1
    assert len(registered(nodes.root)) == 3


@pytest.mark.requirement("T3")
def test_a_janitor_that_ends_before_the_server_s_clock_is_set_back_is_followed(tmp_path: Path) -> None:
    """Its files are of a time to come, so they are never old by the server's clock."""
    nodes = Nodes(tmp_path / "shared", 3)
    nodes.go_on(20)
    first, ended = lease_of(nodes.root), nodes.janitor
    nodes.stopped.add(ended)
    nodes.set_server_back(86_400.0)
    nodes.go_on(3)
    assert lease_of(nodes.root) == first, "it may be alive"
    nodes.go_on(30)
    assert lease_of(nodes.root).term > first.term
    assert sum(report.is_janitor for at, report in enumerate(nodes.reports) if at != ended) == 1
    nodes.go_on(400)
    assert len(registered(nodes.root)) == 2, "what the node was allowed is free"


@pytest.mark.requirement("I4")
def test_a_limit_read_beside_a_new_janitor_is_not_acted_under(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(20)
    other = 1 - nodes.janitor
    before = nodes.reports[other].limit_bytes
    found = JanitorRecord.unpack((nodes.root / JANITOR).read_bytes())
    assert found is not None
    found.shares[nodes.reports[other].node].limit_bytes += MIB
    (nodes.root / JANITOR).write_bytes(found.pack())
    write = replace_small

    def and_another_comes(root: Path, file: str, data: bytes, temporary: str) -> None:
        write(root, file, data, temporary)
        later = JanitorRecord(Lease("late-1", found.lease.term + 1), None, 0, 0, 0, {})
        (root / JANITOR).write_bytes(later.pack())

    monkeypatch.setattr("kvdepot.server.tiers.shared.coordinator.spare.replace_small", and_another_comes)
    message = nodes.coordinators[other].heartbeat()
    assert isinstance(message, Report)
    assert message.limit_bytes == before
    told = NodeRecord.unpack((nodes.root / node_file(message.node)).read_bytes())
    assert told is not None
    assert told.limit_bytes == before + MIB  # whoever is janitor now, reckons with it


@pytest.mark.requirement("I4")
def test_a_node_that_was_taken_for_gone_registers_anew_without_anything(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(20)
    other = 1 - nodes.janitor
    nodes.coordinators[other].publish(12_345)
    nodes.go_on(2)
    report = nodes.reports[other]
    (nodes.root / node_file(report.node)).unlink()
    again = nodes.coordinators[other].heartbeat()
    assert isinstance(again, Report)
    assert again.node != report.node
    assert again.limit_bytes == 12_345
    nodes.go_on(5)
    assert nodes.reports[other].limit_bytes > 12_345 + MIB


@pytest.mark.requirement("I4")
def test_a_node_that_slept_registers_anew(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(20)
    other = 1 - nodes.janitor
    report = nodes.reports[other]
    nodes.offsets[other] += 301
    again = nodes.coordinators[other].heartbeat()
    assert isinstance(again, Report)
    assert (again.node != report.node, again.limit_bytes) == (True, 0)


def test_nodes_that_are_silent_for_ten_minutes_are_removed_with_their_temporaries(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 3)
    nodes.go_on(20)
    gone = next(at for at in range(3) if at != nodes.janitor)
    name = nodes.reports[gone].node
    nodes.stopped.add(gone)
    left = nodes.root / ".tmp" / f"{name}-7.tmp"
    left.write_bytes(bytes(8192))
    nodes.age(name, 700)
    nodes.go_on(140, each=4)
    assert left.exists()
    nodes.go_on(40, each=4)
    assert not left.exists()
    assert not (nodes.root / node_file(name)).exists()
    nodes.go_on(160, each=4)
    found = JanitorRecord.unpack((nodes.root / JANITOR).read_bytes())
    assert found is not None
    assert name not in found.shares  # after a count that began later


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("settled", [True, False])
def test_what_nodes_that_ended_were_allowed_is_free_once_their_writes_are_proven_over(
    tmp_path: Path, *, settled: bool
) -> None:
    """A daemon, or its coordinator, ends again and again within ten minutes; the negative shows what it would hold."""
    nodes = Nodes(tmp_path / "shared", 2)
    nodes.go_on(20)
    nodes.stopped.add(1 - nodes.janitor)
    kept = put(nodes.root, 0)
    limits, temporaries = [], []
    settings = replace(settings_of(nodes.root), owner="arena-shared")
    for _ in range(40):
        nodes.coordinators.append(Coordinator(settings, Before(), nodes.clock))
        nodes.messages.append(None)
        nodes.go_on(1)
        nodes.coordinators[-1].publish(0, 0, nodes.reports[-1].node if settled else "")
        nodes.go_on(8)
        report = nodes.reports[-1]
        limits.append(report.limit_bytes)
        nodes.stopped.add(len(nodes.coordinators) - 1)
        temporaries.append(nodes.root / ".tmp" / f"{report.node}-7.tmp")
        temporaries[-1].write_bytes(bytes(8192))
    nodes.go_on(8)
    assert (min(limits) >= MIB, (nodes.root / kept).exists()) == (settled, settled)
    assert [file.exists() for file in temporaries] == [not settled] * 39 + [True]
    assert len(registered(nodes.root)) == (3 if settled else 42)


@pytest.mark.requirement("I4")
def test_only_nodes_of_the_same_owner_are_inherited_and_only_by_the_node_that_is_named(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(5)
    owned = replace(settings_of(nodes.root), owner="arena-shared")
    names: list[str] = []

    def heartbeat(coordinator: Coordinator) -> str:
        message = coordinator.heartbeat()
        assert isinstance(message, Report)
        names.append(message.node)
        return message.node

    def left() -> Counter[tuple[str, bool]]:
        told = [read_node(nodes.root, node)[1] for node in registered(nodes.root)]
        return Counter((one.owner, one.left) for one in told if one)

    heartbeat(Coordinator(replace(owned, owner="arena-other"), Before(), nodes.clock))
    heartbeat(Coordinator(owned, Before(), nodes.clock))
    nobody = Coordinator(settings_of(nodes.root), Before(), nodes.clock)
    nobody.publish(0, 0, heartbeat(nobody))
    heartbeat(nobody)
    coordinator = Coordinator(owned, Before(), nodes.clock)
    coordinator.publish(
        0, 0, names[1]
    )  # the daemon has not heard of this node yet: what it begins is the earlier one's
    assert heartbeat(coordinator) != names[1]
    assert left() == {("", False): 2, ("arena-other", False): 1, ("arena-shared", False): 2}
    coordinator.publish(0, 0, names[-1])
    heartbeat(coordinator)
    assert left() == {("", False): 2, ("arena-other", False): 1, ("arena-shared", True): 1, ("arena-shared", False): 1}
    nodes.clock.seconds += 301  # it sleeps, and registers anew: what it began may go on
    assert heartbeat(coordinator) not in names[:-1]
    heartbeat(coordinator)
    assert left()["arena-shared", True] == 1
    coordinator.publish(0, 0, names[-1])
    heartbeat(coordinator)
    assert left() == {("", False): 2, ("arena-other", False): 1, ("arena-shared", True): 2, ("arena-shared", False): 1}


@pytest.mark.requirement("I4")
def test_everything_below_the_root_is_counted(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(2)
    for number in range(20):
        put(nodes.root, number, payload_bytes=5_000)
    (nodes.root / "foreign" / "deep").mkdir(parents=True)
    (nodes.root / "foreign" / "deep" / "file").write_bytes(bytes(70_000))
    (nodes.root / ".quarantine" / "0000000001-x.attention.corrupt.kvd").write_bytes(bytes(9_000))
    nodes.go_on(10)
    on_disk = sum(
        taken_bytes(Path(folder, name).lstat()) for folder, _, names in os.walk(nodes.root) for name in (".", *names)
    )
    assert on_disk <= nodes.reports[0].used_bytes <= on_disk + (1 << 16)
    assert nodes.reports[0].objects == 20
    assert nodes.reports[0].quarantined_bytes == 12_288


def test_an_object_larger_than_a_first_quota_grant_gets_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(10)
    limit = nodes.reports[0].limit_bytes
    nodes.coordinators[0].publish(0, 4 * limit)
    nodes.go_on(5)
    assert nodes.reports[0].limit_bytes >= 4 * limit


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("share", [1 / OBJECT_SHARE, 0.5, 0.9, 1.1])
@pytest.mark.parametrize("wanting", [1, 4, 6])
def test_no_room_that_nodes_want_costs_most_of_what_is_there(tmp_path: Path, wanting: int, share: float) -> None:
    """A want above what is ever given, of a node of another version say, or of more nodes than there is room for."""
    nodes = Nodes(tmp_path / "shared", wanting + 1)
    nodes.go_on(8)
    for number in range(200):
        put(nodes.root, number, payload_bytes=200 << 10)  # 40 MiB of 64
    nodes.go_on(20)
    for coordinator in nodes.coordinators[:wanting]:
        coordinator.publish(0, int(64 * MIB * share))
    nodes.go_on(60)
    left = sum(path.stat().st_size for path in nodes.root.glob("*/*/*.kvd"))
    assert left > 10 * MIB
    given = sum(report.limit_bytes >= 64 * MIB // OBJECT_SHARE for report in nodes.reports[:wanting])
    assert given >= (1 if share > 1 / OBJECT_SHARE else min(wanting, 3))


def test_ids_of_nodes_are_names_of_files() -> None:
    assert is_node(new_node())
    assert new_node() != new_node()


def test_settings_survive_the_command_line(tmp_path: Path) -> None:
    settings = CoordinatorSettings(tmp_path, 1 << 40, heartbeat_seconds=0.5, on_root_filesystem=True)
    assert CoordinatorSettings.unpack(settings.pack()) == settings


@pytest.mark.requirement("I4")
def test_what_was_published_during_a_count_is_not_told_twice() -> None:
    ledger = Ledger(100, used_bytes=0)
    ledger.meet("a", 80)
    count = ledger.begin_count({"a": 0})
    ledger.end_count(count, used_bytes=60)  # of 60 that were published meanwhile
    assert ledger.estimate({"a": 60}) == 100, "120 cannot be: no more than 100 may be published"
    ledger.end_count(ledger.begin_count({"a": 60}), used_bytes=60)
    assert ledger.estimate({"a": 70}) == 70
    ledger.end_count(ledger.begin_count({"a": 70}), used_bytes=130)
    assert ledger.estimate({"a": 70}) == 130, "what others put there is not hidden"


@pytest.mark.requirement("T5")
def test_the_janitor_says_that_its_work_failed_until_it_got_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(20)

    def refuse(*_: object) -> Iterator[int]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(janitor, "purge_temporaries", refuse)
        nodes.go_on(32)
        assert "given up" in nodes.reports[0].reason
    nodes.go_on(32)
    assert nodes.reports[0].reason == ""


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_directory_that_every_user_may_write_to_is_not_used_until_that_ends(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    coordinator = Coordinator(settings_of(tmp_path), Before(), lambda: 0.0)
    message = coordinator.heartbeat()
    assert isinstance(message, Failed)
    assert str(tmp_path) in message.reason and "run `chmod o-w`" in message.reason
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o770)
    assert isinstance(coordinator.heartbeat(), Report)
