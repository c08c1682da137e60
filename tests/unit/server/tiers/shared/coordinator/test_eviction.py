"""What a shared directory's janitor deletes: in which order, never another file, and until there is room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import ObjectDamageError, ObjectHeader, ObjectName
from kvdepot.server.platform import beneath
from kvdepot.server.storage.shared_layout import FOLDERS, MARKER, Marker, object_file, trash_file
from kvdepot.server.tiers.shared.coordinator import deletion, files, scan
from kvdepot.server.tiers.shared.coordinator.deletion import delete_object, settle
from kvdepot.server.tiers.shared.coordinator.opening import Known, NotThereError, open_directory
from kvdepot.server.tiers.shared.coordinator.order import in_order
from kvdepot.server.tiers.shared.coordinator.purge import purge_quarantine, purge_temporaries
from kvdepot.server.tiers.shared.coordinator.scan import ROW, Columns, Quarantined, Scan

from tests.fakes.shared_directory import MIB, Nodes, key_of, name_of, put


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    return tmp_path


def scanned(root: Path) -> Scan:
    scan = Scan(root)
    for _ in scan.steps():
        pass
    return scan


def order_of(root: Path) -> list[str]:
    columns = scanned(root).columns
    return [columns.file(row) for row in in_order(columns, lambda file: header_of(root / file)) if row is not None]


def header_of(path: Path) -> ObjectName | None:
    with suppress(ObjectDamageError):
        return ObjectHeader.unpack(path.read_bytes()).name
    return None


def test_the_oldest_hour_goes_first_and_in_it_the_deepest(root: Path) -> None:
    put(root, 0, path="young", age_hours=0.01)
    old = [put(root, number, path="old", age_hours=50 + number / 100) for number in range(5)]
    older = [put(root, number, path="older", age_hours=90) for number in range(3)]
    assert order_of(root) == [*reversed(older), *reversed(old), object_file(name_of(0, "young"))]


def test_no_chunk_goes_before_what_continues_it_although_its_time_is_an_hour_older(root: Path) -> None:
    ages = (30.9, 30.5, 30.2, 29.95)  # refreshed within the hour, so a parent's stays behind
    path = [put(root, number, age_hours=age) for number, age in enumerate(ages)]
    assert order_of(root) == path[::-1]


def test_a_state_goes_before_the_attention_that_it_needs(root: Path) -> None:
    attention = [put(root, number, age_hours=40.9) for number in range(3)]
    state = put(root, 2, kind=Kind.STATE, age_hours=40)
    window = put(root, 2, kind=Kind.WINDOW, age_hours=40)
    order = order_of(root)
    assert set(order[:2]) == {state, window}
    assert order[2:] == attention[::-1]


def test_what_nobody_finds_any_more_goes_before_all_of_its_hour(root: Path) -> None:
    whole = [put(root, number, path="whole", age_hours=40) for number in range(6)]
    cut = [put(root, number, path="cut", age_hours=40) for number in range(3)]
    (root / cut[1]).unlink()
    (root / put(root, 9, path="torn", age_hours=40)).write_bytes(b"no header")
    os.utime(root / object_file(name_of(9, "torn")), ns=((root / whole[0]).stat().st_mtime_ns,) * 2)
    order = order_of(root)
    assert set(order[:2]) == {cut[2], object_file(name_of(9, "torn"))}


def test_only_headers_of_the_hours_in_question_are_read(root: Path) -> None:
    for number in range(20):
        put(root, number, age_hours=number * 3)
    columns = scanned(root).columns
    read: list[str] = []

    def look(file: str) -> ObjectName | None:
        read.append(file)
        return header_of(root / file)

    assert next(row for row in in_order(columns, look) if row is not None) >= 0
    assert read == [object_file(name_of(19))]


@pytest.mark.requirement("T3")
def test_a_file_used_or_replaced_since_the_scan_stays(root: Path) -> None:
    file = put(root, 0, age_hours=5)
    mtime_ns = (root / file).stat().st_mtime_ns
    os.utime(root / file)
    assert delete_object(root, file, mtime_ns) == 0
    assert (root / file).exists()
    assert list((root / ".tmp").iterdir()) == []
    assert delete_object(root, file, (root / file).stat().st_mtime_ns) == 8192
    assert not (root / file).exists()
    assert delete_object(root, file, mtime_ns) == 0


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_file_replaced_at_the_last_moment_is_put_back(
    root: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Between the janitor's look at it and its rename another daemon publishes."""
    file = put(root, 0, age_hours=5)
    mtime_ns = (root / file).stat().st_mtime_ns
    look = files.status_within

    def look_and_be_overtaken(directory: Path, name: str) -> os.stat_result:
        status = look(directory, name)
        monkeypatch.setattr(deletion, "status_within", look)
        new = root / ".tmp" / "node-1.tmp"
        new.write_bytes(b"published anew")
        os.utime(new, ns=(mtime_ns, mtime_ns))  # as coarse as clocks of file systems are
        new.rename(root / file)
        return status

    monkeypatch.setattr(deletion, "status_within", look_and_be_overtaken)
    if not links:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(95, "no links here")))
    assert delete_object(root, file, mtime_ns) == 0
    assert (root / file).read_bytes() == b"published anew"
    assert list((root / ".tmp").iterdir()) == []


@pytest.mark.requirement("T3")
def test_a_deletion_that_a_janitor_left_half_done_is_ended(root: Path) -> None:
    meant, other = put(root, 0), put(root, 1)
    for file, off in ((meant, 0), (other, 1)):
        status = (root / file).stat()
        number = 0 if file == meant else 1
        trash = trash_file(
            name_of(0).namespace, key_of(number), Kind.ATTENTION, status.st_mtime_ns + off, status.st_ino
        )
        (root / file).rename(root / trash)
    freed = sum(purge_temporaries(root, (), lambda _: 0.0))
    assert freed == 8192
    assert not (root / meant).exists()
    assert (root / other).exists()
    assert list((root / ".tmp").iterdir()) == []


def test_what_was_published_meanwhile_is_not_replaced_by_what_is_put_back(root: Path) -> None:
    file = put(root, 0)
    status = (root / file).stat()
    trash = trash_file(name_of(0).namespace, key_of(0), Kind.ATTENTION, status.st_mtime_ns + 1, status.st_ino)
    (root / file).rename(root / trash)
    (root / file).write_bytes(b"newer")
    assert settle(root, trash) == 0
    assert (root / file).read_bytes() == b"newer"


def test_temporaries_of_living_nodes_stay_and_of_others_go(root: Path) -> None:
    for name in ("living-1.tmp", "gone-1.tmp", "stray-1.tmp", "foreign"):
        (root / ".tmp" / name).write_bytes(b"x")
    list(purge_temporaries(root, ["living", "gone"], lambda _: 0.0, gone=["gone"]))
    assert {path.name for path in (root / ".tmp").iterdir()} == {"living-1.tmp", "stray-1.tmp", "foreign"}
    list(purge_temporaries(root, ["living"], lambda _: 61.0))
    assert {path.name for path in (root / ".tmp").iterdir()} == {"living-1.tmp", "foreign"}
    list(purge_temporaries(root, ["living"], lambda _: 3_601.0))
    assert {path.name for path in (root / ".tmp").iterdir()} == {"foreign"}


def test_what_a_killed_worker_s_probe_left_goes_by_age_alone(root: Path) -> None:
    """Its pid is one of another host, perhaps: this process's own says nothing either."""
    here = f"probe.{os.getpid()}.7"
    for name in (here, "probe.999999999.1.tmp", "probe", "probe.1", "probe.x.1", "probes.1.2"):
        (root / ".tmp" / name).write_bytes(b"x" * 4096)
    list(purge_temporaries(root, ["node"], lambda _: 3_599.0))
    assert len(list((root / ".tmp").iterdir())) == 6
    assert sum(purge_temporaries(root, ["node"], lambda _: 3_601.0)) == 8192
    assert {path.name for path in (root / ".tmp").iterdir()} == {"probe", "probe.1", "probe.x.1", "probes.1.2"}


def test_quarantine_is_bounded_by_age_and_size_oldest_first(root: Path) -> None:
    files = [Quarantined(f"{number}.kvd", number, 8192) for number in range(6)]
    for file in files:
        (root / ".quarantine" / file.file_name).write_bytes(bytes(8192))
    ages = {0: 5_000.0, 1: 900.0, 2: 800.0, 3: 700.0, 4: 600.0, 5: 10.0}
    list(purge_quarantine(root, files, lambda ctime: ages[ctime], keep_seconds=1_000, capacity_bytes=3 * 8192))
    assert sorted(path.name for path in (root / ".quarantine").iterdir()) == ["3.kvd", "4.kvd", "5.kvd"]
    list(purge_quarantine(root, files[3:], lambda _: 10.0, keep_seconds=1_000, capacity_bytes=0))
    assert len(list((root / ".quarantine").iterdir())) == 3  # one that was quarantined just now may be put back


@pytest.mark.requirement("I4")
def test_rows_are_small_and_their_number_is_bounded() -> None:
    assert ROW.itemsize <= 48
    columns = Columns(objects_max=3)
    for number in range(5):
        columns.add(bytes(16), key_of(number), Kind.STATE, Path.cwd().stat())
    assert (len(columns), columns.left_out) == (3, 2)


@pytest.mark.requirement("I4")
def test_of_more_namespaces_than_rows_can_tell_apart_the_first_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_NAMESPACES_MAX", 2)
    columns = Columns()
    for number in (0, 1, 2, 1, 0, 3):
        columns.add(key_of(number), key_of(10 + number), Kind.STATE, Path.cwd().stat())
    assert columns.namespaces == [key_of(0), key_of(1)]
    assert (columns.rows["namespace"].tolist(), columns.left_out) == ([0, 1, 1, 0], 2)


@pytest.mark.requirement("I4")
def test_above_the_high_watermark_the_directory_is_brought_to_the_low_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1, capacity_bytes=8 * MIB)
    nodes.go_on(1)
    ages = [(200 - number) * 2 for number in range(200)]
    files = [put(nodes.root, 0, path=f"{age}", payload_bytes=60_000, age_hours=age) for age in ages]
    nodes.go_on(30)
    used = int(subprocess.run(["du", "-s", "--block-size=1", nodes.root], capture_output=True).stdout.split()[0])
    assert used <= 8 * MIB
    left = [file for file in files if (nodes.root / file).exists()]
    assert left == files[-len(left) :]
    assert 60 <= len(left) <= 110
    assert nodes.reports[0].objects == len(left)
    assert nodes.reports[0].limit_bytes > 0


@pytest.mark.parametrize("seconds", [12_000_000_000, -10_000_000], ids=["2350", "1969"])
def test_a_file_of_an_impossible_time_keeps_no_other_from_being_deleted(tmp_path: Path, seconds: int) -> None:
    """Somebody has set it: no such file ends the coordinator, which would meet it in each count."""
    nodes = Nodes(tmp_path / "shared", 1, 4 * MIB)
    nodes.go_on(10)
    files = [put(nodes.root, number, payload_bytes=MIB // 4, age_hours=2) for number in range(14)]
    os.utime(nodes.root / files[0], (seconds, seconds))
    if (nodes.root / files[0]).stat().st_mtime != seconds:
        pytest.skip("the file system has no such times")
    nodes.coordinators[0].janitor._counted_at = None
    nodes.go_on(10)
    left = [file for file in files if (nodes.root / file).exists()]
    assert files[0] in left
    assert 5 < len(left) < 14
    assert "1 objects are counted, and not deleted" in nodes.reports[0].reason


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1, capacity_bytes=8 * MIB)
    nodes.go_on(1)
    file = put(nodes.root, 0)
    strangers = [nodes.root / "stranger", (nodes.root / file).with_name("not-an-object.kvd")]
    for path in strangers:
        path.write_bytes(bytes(8 * MIB))
        os.utime(path, (0, 0))
    nodes.go_on(30)
    assert all(path.exists() for path in strangers)
    assert not (nodes.root / file).exists()
    assert nodes.reports[0].limit_bytes == 0
    assert "no object left to delete" in nodes.reports[0].reason


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("at", range(0, 40, 3))
def test_a_count_during_which_the_directory_is_moved_away_and_back_has_everything(tmp_path: Path, at: int) -> None:
    """Found by an hour of chaos: what was not at its path just then was left out, and handed out a second time."""
    root = tmp_path / "shared"
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
    for number in range(24):
        put(root, number)
    whole = scanned(root)
    away = tmp_path / "away"
    scan = Scan(root)
    for step, _ in enumerate(scan.steps()):
        if step == at:
            root.rename(away)
        elif step == at + 20:
            away.rename(root)
    if away.exists():
        away.rename(root)
    assert (scan.used_bytes, len(scan.columns), scan.skipped) == (whole.used_bytes, len(whole.columns), 0)


@pytest.mark.requirement("I4")
def test_a_count_is_given_up_when_its_files_are_missing_because_the_directory_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that finds open folders by their paths. One file that is missing is none."""
    (root / MARKER).write_text("{}")
    for number in range(4):
        put(root, number)
    whole = scanned(root)
    scan, look = Scan(root), os.stat
    away = False

    def missing(path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if away and dir_fd is not None:
            raise FileNotFoundError(2, "No such file or directory")
        return look(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "stat", missing)
    for step, _ in enumerate(scan.steps()):
        away = step == 9
    assert scan.used_bytes < whole.used_bytes, "one was deleted meanwhile"
    with pytest.raises(OSError, match="went away while it was counted"):
        for step, _ in enumerate(Scan(root).steps()):
            if step == 9:
                away = True
                (root / MARKER).unlink()


@pytest.mark.requirement("T3", "I4")
def test_a_sparse_file_longer_than_any_object_does_not_fill_the_tier(root: Path) -> None:
    """Neither as an object nor as anything else. A large file whose blocks are there counts by them."""
    put(root, 0)
    before = scanned(root)
    for file in (object_file(name_of(1)), ".quarantine/1-1.corrupt.kvd", "anything"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
        os.truncate(root / file, 1 << 43)
    after = scanned(root)
    assert (before.oversized, after.oversized) == (0, 3)
    assert after.used_bytes - before.used_bytes < MIB
    assert len(after.columns) == len(before.columns) == 1
    assert after.quarantined == []


@pytest.mark.requirement("T3", "I4")
def test_a_sparse_file_that_no_daemon_made_does_not_fill_the_tier(root: Path) -> None:
    """Nobody deletes it, so its length does not count. An object counts by its length, and is deleted by its age."""
    put(root, 0)
    before = scanned(root)
    for file in ("anything", f"{'ab' * 16}/anything", ".anything/1.kvd"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
        os.truncate(root / file, 48 << 30)
    (root / "anything").write_bytes(bytes(3 << 20))
    after = scanned(root)
    assert 3 * MIB <= after.used_bytes - before.used_bytes < 4 * MIB
    sparse = root / object_file(name_of(1))
    sparse.parent.mkdir(parents=True, exist_ok=True)
    sparse.touch()
    os.truncate(sparse, 1 << 30)
    with_object = scanned(root)
    assert with_object.used_bytes - after.used_bytes >= 1 << 30
    assert len(with_object.columns) == 2


@contextmanager
def mounted(path: Path, kind: str, options: str) -> Iterator[Path]:
    """Mount a file system there. Skip the test where that is not possible."""
    path.mkdir()
    if subprocess.run(["mount", "-t", kind, "-o", options, kind, str(path)], check=False).returncode:
        pytest.skip(f"no {kind} can be mounted")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.requirement("I4")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_files_are_counted_where_each_has_the_device_of_its_layer_and_no_other_mount_is(tmp_path: Path) -> None:
    """Overlayfs shows them so if its layers are on different file systems, as over the image of a live system."""
    with ExitStack() as mounts:
        lower = mounts.enter_context(mounted(tmp_path / "lower", "tmpfs", "size=1m"))
        upper = mounts.enter_context(mounted(tmp_path / "upper", "tmpfs", "size=2m"))
        for folder in ("files", "work"):
            (upper / folder).mkdir()
        layers = f"lowerdir={lower},upperdir={upper / 'files'},workdir={upper / 'work'},xino=off"
        root = mounts.enter_context(mounted(tmp_path / "shared", "overlay", layers))
        for folder in FOLDERS:
            (root / folder).mkdir()
        assert (root / put(root, 0, payload_bytes=100_000)).stat().st_dev != root.stat().st_dev
        found = scanned(root)
        assert len(found.columns) == 1
        assert found.used_bytes >= 100_000
        other = mounts.enter_context(mounted(root / "other", "tmpfs", "size=1m"))
        (other / "file").write_bytes(bytes(500_000))
        assert scanned(root).used_bytes < 300_000


@pytest.mark.parametrize("openat2", [True, False])
def test_nothing_is_deleted_or_renamed_through_a_symbolic_link(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, openat2: bool
) -> None:
    if not openat2:
        monkeypatch.setattr(beneath, "_OPENAT2", 1 << 20)  # no such system call: the kernel answers ENOSYS
    outside = tmp_path_factory.mktemp("outside")
    file = put(root, 0, age_hours=5)
    mtime_ns = (root / file).stat().st_mtime_ns
    folder = (root / file).parent
    folder.rename(outside / folder.name)
    folder.symlink_to(outside / folder.name)
    before = sorted(outside.rglob("*"))
    assert delete_object(root, file, mtime_ns) == 0
    (outside / "node-9-1.tmp").write_bytes(b"somebody's")
    os.utime(outside / "node-9-1.tmp", (0, 0))
    (root / ".tmp").rmdir()
    (root / ".tmp").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        list(purge_temporaries(root, [], lambda _: 1e9))
    (outside / "node-9-1.tmp").unlink()
    assert sorted(outside.rglob("*")) == before


def test_a_directory_whose_folder_is_a_symbolic_link_is_not_used(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (root / ".quarantine").rmdir()
    (root / ".quarantine").symlink_to(tmp_path_factory.mktemp("outside"))
    (root / MARKER).write_bytes(Marker("ab" * 16, "a test").pack())
    with pytest.raises(NotThereError, match=r"\.quarantine is a symbolic link"):
        open_directory(root, Known(), "a test", on_root_filesystem=True)
