"""`check-config` names a capacity that its file system cannot have; it neither refuses it nor waits for an answer."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kvdepot.server.config import capacity_check
from kvdepot.server.daemon import app

from tests.rigs.patience import patient


class File:
    """A configuration with one tier."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._path = folder / "kvdepot.toml"
        self._socket = Path(tempfile.gettempdir(), f"kvdepot-capacity-{os.getpid()}.sock")  # none is made
        self._capsys = capsys
        self.tier = folder / "not" / "there" / "yet"

    def said(self, capacity: str, *options: str) -> str:
        tier = f'[[tier]]\nname = "nvme"\nkind = "disk"\npath = "{self.tier}"\ncapacity = "{capacity}"\n'
        daemon = f'[daemon]\nlisten = ["unix://{self._socket}"]\nmetrics = ""\n'
        self._path.write_text(f'{daemon}[ram]\ncapacity = "2GiB"\n{tier}')
        assert app.main(["check-config", str(self._path), *options]) == 0
        return self._capsys.readouterr().out


@pytest.fixture
def file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> File:
    return File(tmp_path, capsys)


def too_much(folder: Path) -> str:
    room = os.statvfs(folder)
    return f"{(room.f_blocks * room.f_frsize >> 20) + 1}MiB"


def test_a_capacity_above_the_file_system_is_named(file: File, tmp_path: Path) -> None:
    above = too_much(tmp_path)
    text = file.said(above)
    assert ": ok, capacity 2.00 GiB, arena " in text
    assert "\nwarning: tier.nvme.capacity: " in text and "more than the" in text and str(file.tier) in text
    assert "nvme" in json.loads(file.said(above, "--json"))["warnings"][0]
    assert "warning" not in file.said("64MiB")
    assert json.loads(file.said("64MiB", "--json"))["warnings"] == []


def of_the_tier(monkeypatch: pytest.MonkeyPatch, folder: Path, answer: Callable[[], os.statvfs_result]) -> None:
    """The tier's file system answers so; that of the arena is as it is."""
    real = os.statvfs

    def answered(path: str | Path) -> os.statvfs_result:
        return answer() if Path(path).is_relative_to(folder) else real(path)

    monkeypatch.setattr(os, "statvfs", answered)


def test_a_file_system_that_does_not_tell_its_size_is_not_too_small(
    file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks() -> os.statvfs_result:
        raise OSError(errno.ENOSYS, "no statvfs")

    above = too_much(tmp_path)
    of_the_tier(monkeypatch, tmp_path, lacks)
    assert "warning" not in file.said(above)


def test_a_file_system_that_hangs_is_not_waited_for(
    file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, above, room = threading.Event(), too_much(tmp_path), os.statvfs(tmp_path)

    def hang() -> os.statvfs_result:
        assert released.wait(patient(60))
        return room

    monkeypatch.setattr(capacity_check, "_SECONDS_MAX", 0.05)
    of_the_tier(monkeypatch, tmp_path, hang)
    assert "warning" not in file.said(above)
    released.set()
