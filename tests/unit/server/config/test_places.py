"""Two paths to one directory, through mounts: as mountinfo says it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.core.proc_text import Mount, mounts
from kvdepot.server.config import places as config_places
from kvdepot.server.config.config import check
from kvdepot.server.config.places import resolved

ROOT = b"1 0 8:1 / / rw - ext4 /dev/root rw\n"


def mounted(
    number: int, point: str, *, root: str = "/", device: str = "8:1", kind: str = "ext4", parent: int = 1
) -> bytes:
    return f"{number} {parent} {device} {root} {point} rw - {kind} none rw\n".encode()


def document(*paths: str, state: str = "", listen: str = "/run/x/k.sock") -> dict[str, object]:
    return {
        "daemon": {"listen": [f"unix://{listen}"], "state": state},
        "ram": {"capacity": "1GiB", "path": "/tmp"},
        "tier": [
            {"name": f"t{number}", "kind": "shared", "path": path, "capacity": "64MiB"}
            for number, path in enumerate(paths)
        ],
    }


@pytest.mark.parametrize(
    ("found", "paths"),
    [
        (mounted(2, "/mnt/b", root="/data"), ("/data", "/mnt/b")),
        (mounted(2, "/mnt/b", root="/data/sub"), ("/data", "/mnt/b")),
        (mounted(2, "/mnt/b", root="/data"), ("/data/sub", "/mnt/b")),
        (mounted(2, "/mnt/b", root="/data"), ("/mnt/b/sub", "/data")),
        (mounted(2, "/m", device="0:9", kind="ceph") + mounted(3, "/n", device="0:9", root="/x"), ("/m", "/n/y")),
    ],
)  # fmt: skip
def test_a_bind_mount_of_a_tier_s_directory_is_that_directory(
    found: bytes, paths: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_places, "read_mounts", lambda: mounts(ROOT))
    assert len(check("test", document(*paths)).tables.tier) == 2
    monkeypatch.setattr(config_places, "read_mounts", lambda: mounts(ROOT + found))
    with pytest.raises(ConfigError, match="overlap") as refusal:
        check("test", document(*paths))
    assert refusal.value.key == "tier.t1.path"


def test_other_file_systems_are_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ROOT + mounted(2, "/one", device="8:2", root="/data") + mounted(3, "/two", device="8:3", root="/data")
    monkeypatch.setattr(config_places, "read_mounts", lambda: mounts(found))
    check("test", document("/one", "/two", "/data"))


@pytest.mark.parametrize("kind", ["nfs", "nfs4"])
def test_two_exports_of_one_file_system_are_two_places(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one superblock, so one device, and "/" for a root whatever was exported (nfs_show_path)."""
    both = mounted(2, "/mnt/a", device="0:50", kind=kind) + mounted(3, "/mnt/b", device="0:50", kind=kind)
    monkeypatch.setattr(config_places, "read_mounts", lambda: mounts(ROOT + both))
    check("test", document("/mnt/a", "/mnt/b"))
    check("test", document("/mnt/a/kv", "/mnt/b/kv"))
    check("test", document("/mnt/a", state="/mnt/b/state"))
    for paths in (("/mnt/a", "/mnt/a/kv"), ("/mnt/b/kv", "/mnt/b/kv"), ("/mnt/a", "/mnt")):
        with pytest.raises(ConfigError, match="overlap"):
            check("test", document(*paths))


def test_a_mount_in_a_tier_s_directory_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is not there at a start, its files would be made in that tier's directory."""
    monkeypatch.setattr(config_places, "read_mounts", lambda: mounts(ROOT + mounted(2, "/data/mnt", device="8:2")))
    with pytest.raises(ConfigError, match="overlap"):
        check("test", document("/data", "/data/mnt"))


@pytest.mark.parametrize("keys", [{"state": "/mnt/b/state"}, {"listen": "/mnt/b/k.sock"}])
def test_a_file_in_a_tier_by_a_bind_mount_is_refused(keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = ROOT + mounted(2, "/mnt/b", root="/data/sub")
    monkeypatch.setattr(config_places, "read_mounts", lambda: mounts(found))
    with pytest.raises(ConfigError, match="lies in the directory of tier 't0'"):
        check("test", document("/data", **keys))


def test_without_mountinfo_paths_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_places, "read_mounts", list)
    check("test", document("/data/a", "/data/b"))
    with pytest.raises(ConfigError, match="overlap"):
        check("test", document("/data", "/data/b"))


def test_a_mount_whose_server_may_hang_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def readlink(path: str) -> str:
        asked.append(path)
        raise OSError

    monkeypatch.setattr(config_places.os, "readlink", readlink)  # type: ignore[attr-defined]
    for kind in ("nfs4", "fuse", "fuse.sshfs", "autofs", "ceph"):
        found = [
            Mount("/", "ext4", frozenset(), "8:1", "/", 1, 0),
            Mount("/far", kind, frozenset(), "0:5", "/", 2, 1),
        ]
        assert resolved("/far/a/b", found) == "/far/a/b"
    assert asked == []
    assert resolved("/near/a", [Mount("/", "fuse.overlay", frozenset(), "0:5")]) == "/near/a"
    assert asked == ["/near", "/near/a"]


def test_links_are_followed_as_the_kernel_follows_them(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "one").symlink_to("a/b")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    (tmp_path / "a/up").symlink_to("..")
    (tmp_path / "loop").symlink_to("loop")
    for path in ("two", "one/..", "a/up/two/x", "absent/../one", "./one/./", "a/up/a/up/one"):
        assert resolved(f"{tmp_path}/{path}", []) == os.path.realpath(tmp_path / path)
    assert resolved(f"{tmp_path}/loop/x", []).startswith(str(tmp_path))
