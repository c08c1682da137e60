"""Folders below a directory are found without following a symbolic link, with openat2(2) and without it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from kvdepot.server.platform import beneath
from kvdepot.server.platform.beneath import open_folder, within

_NO_SUCH_CALL = 1 << 20
"""For which the kernel answers ENOSYS."""


@pytest.fixture(params=["openat2", "walk"])
def root(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "walk":
        monkeypatch.setattr(beneath, "_OPENAT2", _NO_SUCH_CALL)
    (tmp_path / "root" / "a" / "b").mkdir(parents=True)
    (tmp_path / "root" / "file").touch()
    (tmp_path / "outside" / "b").mkdir(parents=True)
    return tmp_path / "root"


@pytest.mark.parametrize("file", ["file", "a/file", "a/b/file"])
def test_a_file_is_named_in_its_folder(root: Path, file: str) -> None:
    with within(root, file) as (name, folder):
        assert name == "file"
        assert os.path.samestat(os.fstat(folder), (root / file).parent.stat())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(folder)


@pytest.mark.parametrize("link", ["a", "a/b"])
@pytest.mark.parametrize("to", ["outside", "inside", "nothing"])
def test_a_symbolic_link_is_no_folder(root: Path, link: str, to: str) -> None:
    (root / link).rename(root / "moved")
    target = {"outside": root.parent / "outside", "inside": root / "moved", "nothing": root / "nothing"}[to]
    (root / link).symlink_to(target)
    with pytest.raises(NotADirectoryError), within(root, f"{link}/file"):
        pytest.fail("it was followed")


@pytest.mark.parametrize("folder", ["..", "a/../../outside", "/"])
def test_nothing_above_the_directory_is_reached(root: Path, folder: str) -> None:
    with pytest.raises(NotADirectoryError):
        open_folder(root, folder)


@pytest.mark.parametrize(
    ("folder", "error"), [("gone", errno.ENOENT), ("a/gone", errno.ENOENT), ("file", errno.ENOTDIR)]
)
def test_an_error_names_the_folder(root: Path, folder: str, error: int) -> None:
    with pytest.raises(OSError, match=os.strerror(error)) as raised:
        open_folder(root, folder)
    assert (raised.value.errno, raised.value.filename) == (error, str(root / folder))


def test_the_directory_itself_may_be_a_symbolic_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    with within(link, "a/b/file") as (_, folder):
        assert os.path.samestat(os.fstat(folder), (root / "a" / "b").stat())


def test_no_descriptor_is_left_behind(root: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for folder in ("a/b", "a", ""):
        os.close(open_folder(root, folder))
    for folder in ("gone", "a/gone/deeper", "file/x", "a/b/gone"):
        with pytest.raises(OSError):
            open_folder(root, folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
