"""What shows that files may have changed since a moment, whatever the change keeps of the old ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from kvdepot.client.vllm.identity import file_state, weights
from kvdepot.client.vllm.identity.file_state import FOREIGN_CLOCK_NS, changed_since, fingerprint, process_started_ns
from kvdepot.client.vllm.identity.weights import Digests, FileDigests, cache_path, folder_digest

from tests.rigs.patience import Deadline


def model(folder: Path, content: bytes = b"v1") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content * 100)
    return folder


def ticked(folder: Path) -> int:
    """A moment after all that was made there, by the file system's own clock: it counts in ticks."""
    probe, moment = folder / "tick", time.time_ns()
    made = 0
    while made <= moment:
        time.sleep(0.001)
        probe.touch()
        made = probe.stat().st_ctime_ns
        probe.unlink()
    return moment


def in_place(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"v2" * 100)


def same_times(folder: Path) -> None:
    """As `cp -p` and `rsync -a --inplace` of a file with the old one's size and mtime."""
    status = (folder / "model.safetensors").stat()
    in_place(folder)
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))


def renamed_file(folder: Path) -> None:
    """As `rsync -a`."""
    status = (folder / "model.safetensors").stat()
    new = folder.parent / "new"
    new.write_bytes(b"v2" * 100)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(folder / "model.safetensors")


def renamed_folder(folder: Path) -> None:
    """Prepared long ago."""
    folder.rename(folder.parent / "old")
    (folder.parent / "prepared").rename(folder)


def renamed_parent(folder: Path) -> None:
    root = folder.parent.parent
    folder.parent.rename(root / "former")
    (root / "release-2").rename(folder.parent)


def linked_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder.parent / "prepared" / "model.safetensors")


def hard_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").hardlink_to(folder.parent / "prepared" / "model.safetensors")


def added(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"v2")


def removed(folder: Path) -> None:
    (folder / "config.json").unlink()


def added_and_removed(folder: Path) -> None:
    added(folder)
    (folder / "model-2.safetensors").unlink()


def exchanged(folder: Path) -> None:
    """Two files change names, and keep all times of their own but the ctime."""
    (folder / "model.safetensors").rename(folder / "x")
    (folder / "config.json").rename(folder / "model.safetensors")
    (folder / "x").rename(folder / "config.json")


def in_subfolder(folder: Path) -> None:
    (folder / "sub" / "part").write_bytes(b"v2")


CHANGES = pytest.mark.parametrize(
    "change",
    [
        in_place, same_times, renamed_file, renamed_folder, renamed_parent, linked_file, hard_link, added, removed,
        added_and_removed, exchanged, in_subfolder,
    ],
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for release in ("release-1", "release-2"):
        for name in ("m", "prepared"):
            folder = model(tmp_path / release / name, release.encode())
            (folder / "sub").mkdir()
            (folder / "sub" / "part").write_bytes(b"v1")
    return tmp_path / "release-1" / "m"


@CHANGES
def test_every_change_of_files_is_seen_and_nothing_else(folder: Path, change: Callable[[Path], None]) -> None:
    moment = ticked(folder.parent)
    before = fingerprint(folder)
    for neighbour in (folder.parent / "other", folder.parent.parent / "release-3"):
        neighbour.mkdir()
    assert changed_since(folder, moment) is None, "a folder beside it is nothing to it"
    assert fingerprint(folder) == before
    change(folder)
    assert changed_since(folder, moment) is not None
    assert fingerprint(folder) != before
    assert changed_since(folder, ticked(folder.parent)) is None


@CHANGES
def test_weights_that_change_after_the_process_began_have_no_digest_but_a_problem(
    folder: Path, change: Callable[[Path], None]
) -> None:
    """The engine has read them, and the scheduler side is made after that."""
    moment = ticked(folder.parent)
    change(folder)
    digests = Digests(None, started_ns=lambda: moment)
    assert "model_revision" in problem(digests, folder)
    assert digests.get(folder) is None
    digests.close()


def problem(digests: Digests, folder: Path) -> str:
    until = Deadline(10)
    while not digests.problem(folder):
        assert digests.get(folder) is None
        assert not until.is_over()
        time.sleep(0.005)
    return digests.problem(folder)


def test_weights_that_change_while_they_are_digested_have_no_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = ticked(folder.parent)
    read = FileDigests.digest

    def digest(self: FileDigests, path: Path) -> str:
        found = read(self, path)
        if path.name == "model.safetensors":
            same_times(folder)
        return found

    monkeypatch.setattr(FileDigests, "digest", digest)
    digests = Digests(None, started_ns=lambda: moment)
    assert folder.name in problem(digests, folder)
    digests.close()


@pytest.mark.parametrize("swapped", ["link", "target"])
def test_a_link_to_the_folder_that_leads_elsewhere_is_a_change(folder: Path, swapped: str) -> None:
    current = folder.parent / "current"
    current.symlink_to("m" if swapped == "link" else "via")
    (folder.parent / "via").symlink_to("m")
    moment = ticked(folder.parent)
    before = fingerprint(current)
    assert changed_since(current, moment) is None
    new = folder.parent / "new"
    new.symlink_to(folder.parent / "prepared")
    new.replace(current if swapped == "link" else folder.parent / "via")
    assert changed_since(current, moment) == (current if swapped == "link" else folder.parent / "via")
    assert fingerprint(current) != before


def test_in_a_hub_s_cache_a_link_or_a_branch_that_moves_is_a_change(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--m"
    snapshot = repository / "snapshots" / ("0" * 40)
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    for blob in "ab":
        (repository / "blobs" / blob).write_text(blob)
    (snapshot / "model.safetensors").symlink_to("../../blobs/a")
    (repository / "refs" / "main").write_text("1" * 40)
    moment = ticked(tmp_path)
    (repository / "blobs" / "c").write_text("of another commit")
    assert changed_since(snapshot, moment) is None
    (repository / "refs" / "main").write_text("0" * 40)
    assert changed_since(snapshot, moment) == repository / "refs" / "main"
    moment = ticked(tmp_path)
    (snapshot / "new").symlink_to("../../blobs/b")
    (snapshot / "new").replace(snapshot / "model.safetensors")
    assert changed_since(snapshot, moment) is not None


def test_files_written_just_before_the_process_began_are_older(folder: Path) -> None:
    """A script that writes a model and starts an engine at once: the moment is rounded up, not down."""
    started = os.posix_spawn(shutil.which("sleep") or "sleep", ["sleep", "10"], {})
    try:
        fields = Path(f"/proc/{started}/stat").read_bytes().rpartition(b")")[2].split()
        boot = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        moment = (int(fields[19]) + 1) * 10**9 // os.sysconf("SC_CLK_TCK") + boot
    finally:
        os.kill(started, 9)
        os.waitpid(started, 0)
    assert changed_since(folder, moment) is None


def test_a_process_knows_when_it_began(tmp_path: Path) -> None:
    assert process_started_ns() < ticked(tmp_path)
    assert process_started_ns() == pytest.approx(process_started_ns(), abs=1e6)


@pytest.mark.parametrize("step_seconds", [-3600, 3600, 2])
def test_where_the_wall_clock_was_set_there_is_no_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step_seconds: int
) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + step_seconds * 10**9)
    digests = Digests(None)
    assert "clock was set" in problem(digests, folder)
    digests.close()


def test_a_clock_set_forward_before_this_module_was_imported_is_seen_by_the_process_s_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10**15)
    monkeypatch.setattr(file_state, "_WALL_AHEAD_AT_IMPORT_NS", file_state._wall_ahead_ns())
    with pytest.raises(OSError, match="clock was set"):
        process_started_ns()


def test_where_another_host_s_clock_sets_the_times_only_what_is_much_older_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_state, "OWN_CLOCK", frozenset())
    assert changed_since(folder, time.time_ns()) is not None
    assert changed_since(folder, time.time_ns() + FOREIGN_CLOCK_NS) is None


def test_folders_that_contain_links_to_themselves_end(folder: Path) -> None:
    (folder / "self").symlink_to(folder)
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("absent")
    before = fingerprint(folder)
    assert folder_digest(folder, FileDigests(None))
    (folder / "nowhere").unlink()
    assert fingerprint(folder) != before


def test_a_user_without_a_home_has_no_cache_of_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_path: str) -> str:
        return "~"

    monkeypatch.setattr(os.path, "expanduser", nobody)
    assert cache_path({}) is None
    assert cache_path({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/kvdepot/file-digests.json")


NOBODY = """
import os, sys
from pathlib import Path
from kvdepot.client.vllm.identity.weights import FileDigests, cache_path, folder_digest
os.setgroups([]), os.setgid(54321), os.setuid(54321)
digests = FileDigests(cache_path())
print(cache_path(), folder_digest(Path(sys.argv[1]), digests))
digests.save()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_uid_without_a_passwd_entry_digests_without_a_cache() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = model(Path(name) / "m")
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            [sys.executable, "-c", NOBODY, str(folder)], env=environment, capture_output=True, text=True, check=False
        )
        assert ran.stdout.split() == ["None", folder_digest(folder, FileDigests(None))], ran.stderr


@pytest.mark.parametrize("kind", ["folder", "below a file", "no text", "deep", "dangling"])
def test_a_cache_that_cannot_be_read_or_written_costs_reading_again(folder: Path, tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache" / "file-digests.json"
    cache.parent.mkdir()
    match kind:
        case "folder":
            cache.mkdir()
        case "below a file":
            cache.parent.rmdir()
            cache.parent.write_text("")
        case "no text":
            cache.write_bytes(b"\xff\xfe{")
        case "deep":
            cache.write_text("[" * 100_000)
        case "dangling":
            cache.symlink_to("absent/absent")
    digests = FileDigests(cache)
    assert folder_digest(folder, digests) == folder_digest(folder, FileDigests(None))
    digests.save()
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_young_file_is_read_only_once_a_further_change_would_have_another_time(tmp_path: Path) -> None:
    """A file system's clock stands still for milliseconds: two changes within these have one time."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    FileDigests(None).digest(path)
    assert time.time() >= path.stat().st_ctime + weights.TICK_SECONDS


@pytest.mark.parametrize(
    ("kind", "lasts"),
    [("ext4", True), ("nfs4", True), ("squashfs", False), ("fuse.x", False), ("overlay", False), ("", False)],
)
def test_digests_of_files_in_images_are_not_kept_for_the_next_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lasts: bool
) -> None:
    """Two images may have the same inodes, sizes and times, and be mounted one after the other."""
    monkeypatch.setattr(file_state, "file_system", lambda _: kind)
    for read in (True, not lasts):
        digests = FileDigests(tmp_path / "cache.json")
        digests.digest(folder / "model.safetensors")
        assert digests._saved is not read
        digests.digest(folder / "model.safetensors")
        digests.save()


def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    opened = Path.open

    def open_(of: Path, mode: str = "r") -> IO[Any]:
        with opened(of, "wb") as file:
            file.write(b"y" * 100)
        return opened(of, mode)

    monkeypatch.setattr(Path, "open", open_)
    digests = FileDigests(None)
    with pytest.raises(OSError, match="changes while it is read"):
        digests.digest(path)
    monkeypatch.undo()
    assert digests.digest(path) == FileDigests(None).digest(path)
