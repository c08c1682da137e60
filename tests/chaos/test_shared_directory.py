"""The audit of a shared directory at the end of a chaos run: it finds what the run has not done itself."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import Codec, ObjectHeader, ObjectName, payload_sum
from kvdepot.core.units import parse_size_bytes
from kvdepot.server.storage import shared_layout as layout

from tests.chaos.shared_directory import SHARED_CAPACITY, SharedDirectory

BYTES = 5000


@pytest.fixture
def shared(tmp_path: Path) -> SharedDirectory:
    """With four objects."""
    directory = SharedDirectory(tmp_path)
    for number in range(4):
        payload = bytes([number]) * BYTES
        total = payload_sum([payload])
        name = ObjectName(bytes(16), bytes([number]) * 16, bytes(16), Kind.ATTENTION, 64, BYTES)
        header = ObjectHeader(name, Codec.NONE, BYTES, total, total, sequence=0, created_at=0)
        path = directory.root / layout.object_file(name)
        path.parent.mkdir(parents=True)
        path.write_bytes(header.pack() + payload)
    return directory


def test_what_the_run_has_damaged_itself_is_no_finding(shared: SharedDirectory) -> None:
    assert len(shared.files()) == 4
    shared.cut_off(random.Random(1), 2)
    shared.flip(random.Random(2), 4)
    shared.delete(random.Random(3), 1)
    assert len(shared.files()) == 3
    assert not shared.audit()


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("size_bytes", [0, 100, 4096, 4096 + BYTES - 1])
def test_a_file_that_somebody_else_has_cut_off_is_found(shared: SharedDirectory, size_bytes: int) -> None:
    os.truncate(shared.files()[2], size_bytes)
    (found,) = shared.audit()
    assert f"not by us: {shared.files()[2]}" in found


@pytest.mark.requirement("I1")
def test_another_byte_is_found(shared: SharedDirectory) -> None:
    with shared.files()[0].open("r+b") as file:
        file.seek(4096 + 77)
        file.write(b"?")
    (found,) = shared.audit()
    assert "checksum" in found


@pytest.mark.requirement("I4")
def test_more_than_the_capacity_is_found(shared: SharedDirectory) -> None:
    with (shared.root / "large").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, parse_size_bytes(SHARED_CAPACITY))
    (found,) = shared.audit()
    assert found.startswith("I4")


def test_it_goes_away_and_comes_back(shared: SharedDirectory) -> None:
    shared.move_away()
    assert not shared.files()
    assert not shared.move_back()
    assert len(shared.files()) == 4


@pytest.mark.requirement("T5")
def test_one_that_was_made_anew_meanwhile_is_found(shared: SharedDirectory) -> None:
    shared.move_away()
    shared.root.mkdir()
    assert "made" in shared.move_back()
