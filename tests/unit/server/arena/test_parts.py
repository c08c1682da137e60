"""The data of several tenants: a file for each, all adopted or none (docs/adr/0070)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.server.arena.arena_file import NOTHING_KEPT, ArenaFile, KeptFiles, check_arena, open_arena
from kvdepot.server.arena.arena_request import ArenaRequest
from kvdepot.server.depot.types import Liveness

MIB = 1 << 20
BOOT = bytes(range(16))
SIZE = 64 * MIB


@pytest.fixture
def request_() -> Iterator[ArenaRequest]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/dev/shm") as folder:
        plain = ArenaRequest(Path(folder) / "a", SIZE, SIZE, "file.toml")
        yield divided(plain, {"a": 8 * MIB, "b": plain.layout.data_bytes - 8 * MIB})


def divided(request: ArenaRequest, parts: Mapping[str, int]) -> ArenaRequest:
    return replace(request, parts=parts)


def opened(request: ArenaRequest, kept: KeptFiles = NOTHING_KEPT) -> ArenaFile:
    return open_arena(
        request, kept=kept, boot_id=BOOT, random_bytes=lambda count: bytes(range(1, count + 1)),
        alive=lambda _: Liveness.DEAD,
    )  # fmt: skip


def kept(arena: ArenaFile, but: int | None = None) -> KeptFiles:
    """What a holder has, except this one of its files."""
    return KeptFiles(others=[os.dup(fd) for at, fd in enumerate(arena.files[1:]) if at != but])


def inodes(arena: ArenaFile) -> list[int]:
    return [os.fstat(fd).st_ino for fd in arena.files]


@pytest.mark.requirement("S2")
def test_an_engine_gets_the_file_of_its_part_alone(request_: ArenaRequest) -> None:
    arena = opened(request_)
    assert [os.fstat(fd).st_size for fd, _ in arena.parts] == list(request_.parts.values()) == list(arena.layout.parts)
    assert len(arena.data) == arena.layout.data_bytes
    arena.data[8 * MIB] = 7
    for part, (fd, _) in enumerate(arena.parts):
        data, generations = arena.open_for_engine(part)
        assert os.path.sameopenfile(data, fd) and os.pread(data, 1, 0) == bytes([7 * part])
        os.close(data)
        os.close(generations)
    arena.close()


@pytest.mark.requirement("I8", "S2")
def test_all_parts_are_adopted(request_: ArenaRequest) -> None:
    first = opened(request_)
    first.data[0], first.data[8 * MIB] = 1, 2
    second = opened(request_, kept(first))
    assert (second.origin.value, second.superblock.version) == ("adopted", 4)
    assert inodes(second) == inodes(first) and (second.data[0], second.data[8 * MIB]) == (1, 2)
    assert not check_arena(request_, BOOT, kept(second)).loss
    for arena in (first, second):
        arena.close()


@pytest.mark.requirement("I8", "I1")
@pytest.mark.parametrize("missing", [0, 1, 2], ids=["generations", "part of a", "part of b"])
def test_without_one_of_its_files_an_arena_is_made_anew(request_: ArenaRequest, missing: int) -> None:
    first = opened(request_)
    second = opened(request_, kept(first, but=missing))
    assert second.origin.value == "recreated" and not set(inodes(first)) & set(inodes(second))
    assert "missing, or belong" in second.note
    for arena in (first, second):
        arena.close()


@pytest.mark.requirement("S2")
@pytest.mark.parametrize("change", ["names", "sizes", "one", "none"])
def test_other_tenants_or_sizes_make_another_arena_and_the_price_is_told(request_: ArenaRequest, change: str) -> None:
    total = sum(request_.parts.values())
    others = {
        "names": dict(zip(("a", "c"), request_.parts.values(), strict=True)),
        "sizes": {"a": 16 * MIB, "b": total - 16 * MIB},
        "one": {"a": 8 * MIB, "b": 8 * MIB, "c": total - 16 * MIB},
        "none": {},
    }
    first = opened(request_)
    other = divided(request_, others[change])
    why = "its tenants, or the sizes of their parts, change"
    assert check_arena(other, BOOT, kept(first)).loss == why
    second = opened(other, kept(first))
    assert (second.origin.value, second.note) == ("recreated", why)
    assert not any(os.fstat(fd).st_blocks for fd in first.files[1:]), "its memory is free"
    for arena in (first, second):
        arena.close()
