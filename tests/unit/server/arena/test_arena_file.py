"""The arena's file: created, adopted, refused, recreated; populated up to where there is room."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from kvdepot.core.arena import PAGE_BYTES, ArenaLayout, ArenaTables, LentMode, RowState
from kvdepot.core.errors import ArenaInUse, ConfigError
from kvdepot.server.arena.arena_file import (
    NOTHING_KEPT,
    ArenaFile,
    KeptFiles,
    Origin,
    describe,
    open_arena,
)
from kvdepot.server.arena.arena_request import ArenaRequest
from kvdepot.server.arena.populate import PIECE_BYTES, Growth, Populator
from kvdepot.server.config.memory_room import Room
from kvdepot.server.depot.types import Liveness, ProcessIdentity
from kvdepot.server.platform import processes
from kvdepot.server.platform.file_lock import FileLock

from tests.rigs.patience import patient

MIB = 1 << 20
SIZE_BYTES = 48 * MIB
BOOT = bytes(range(16))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/dev/shm") as name:
        yield Path(name)


def _open(
    path: Path, size_bytes: int = SIZE_BYTES, *, boot: bytes = BOOT, alive: Liveness = Liveness.DEAD,
    kept: KeptFiles = NOTHING_KEPT, sealed: bool = False,
) -> ArenaFile:  # fmt: skip
    request = ArenaRequest(path, size_bytes, size_bytes, "test.toml", sealed)
    return open_arena(request, kept=kept, boot_id=boot, random_bytes=os.urandom, alive=lambda _: alive)


SEALED = pytest.mark.parametrize("sealed", [False, True], ids=["files", "sealed"])


def _data(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _names(path: Path) -> dict[str, Path]:
    return {"tables": path, "generations": path.with_name(f"{path.name}.generations"), "data": _data(path)}


def _remove(path: Path) -> None:
    for name in _names(path).values():
        name.unlink()


def _kept(arena: ArenaFile) -> KeptFiles:
    return KeptFiles((os.dup(arena.tables_fd),), tuple(map(os.dup, arena.files[1:])))


def _pages(arena: ArenaFile) -> int:
    return sum(os.fstat(fd).st_blocks for fd in arena.files)


def _lend(tables: ArenaTables, mode: LentMode = LentMode.WRITE) -> None:
    """One extent lent to one process, as the engine writes it down."""
    tables.sessions["used"][3] = 1
    tables.attachments["session"][5] = 3
    tables.attachments["pid"][5] = 4711
    tables.attachments["used"][5] = 1
    tables.lent["session"][7] = 3
    tables.lent["mode"][7] = mode


@pytest.mark.requirement("I3", "S1")
def test_sealed_data_has_no_name_and_nobody_changes_its_size(folder: Path) -> None:
    arena = _open(folder / "a", sealed=True)
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert all(os.fstat(fd).st_mode & 0o777 == 0o600 for fd in arena.files)
    data, generations = arena.open_for_engine(0)
    mapped = mmap.mmap(data, arena.layout.data_bytes)
    for size_bytes in (0, arena.layout.data_bytes - PAGE_BYTES, arena.layout.data_bytes + PAGE_BYTES):
        for change in (os.ftruncate, os.truncate):
            with pytest.raises(PermissionError):
                change(data, size_bytes)
    with pytest.raises(PermissionError):
        os.posix_fallocate(data, arena.layout.data_bytes, PAGE_BYTES)
    with pytest.raises(PermissionError):
        fcntl.fcntl(data, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    mapped[-5:] = b"hello"
    assert bytes(arena.data[-5:]) == b"hello"
    os.close(data)
    os.close(generations)


@pytest.mark.requirement("T6")
def test_sealed_data_is_adopted_from_whoever_has_kept_it_also_twice(folder: Path) -> None:
    first = _open(folder / "a", sealed=True)
    first.data[-5:] = b"hello"
    twice = KeptFiles(others=tuple(map(os.dup, first.files[1:] * 2)))
    second = _open(folder / "a", sealed=True, kept=twice)
    assert second.origin is Origin.ADOPTED
    assert describe(second).startswith(f"{folder / 'a'} adopted, ")
    assert bytes(second.data[-5:]) == b"hello"


@pytest.mark.requirement("T6")
def test_an_arena_kept_twice_whose_name_was_removed_is_adopted_whole(folder: Path) -> None:
    first = _open(folder / "a", sealed=True)
    first.data[-5:] = b"hello"
    first.tables.extents["state"][9] = RowState.COMMITTED
    (folder / "a").unlink()
    second = _open(folder / "a", sealed=True, kept=_kept(first) + _kept(first))
    assert second.origin is Origin.ADOPTED
    assert bytes(second.data[-5:]) == b"hello"
    assert second.tables.extents["state"][9] == RowState.COMMITTED


@pytest.mark.requirement("I1c", "T1")
def test_sealed_data_that_nobody_has_kept_is_made_anew(folder: Path) -> None:
    _open(folder / "a", sealed=True).data[-5:] = b"hello"
    second = _open(folder / "a", sealed=True)
    assert second.origin is Origin.RECREATED
    assert "its data is missing" in second.note


@pytest.mark.requirement("I3", "T1")
@SEALED
def test_another_value_of_the_setting_makes_the_arena_anew_unless_it_is_lent(folder: Path, sealed: bool) -> None:
    first = _open(folder / "a", sealed=sealed)
    first.data[-5:] = b"hello"
    _lend(first.tables)
    with pytest.raises(ConfigError, match=r"sealed.*pid 4711"):
        _open(folder / "a", sealed=not sealed, kept=_kept(first), alive=Liveness.ALIVE)
    second = _open(folder / "a", sealed=not sealed, kept=_kept(first))
    assert second.origin is Origin.RECREATED
    assert os.fstat(first.parts[0][0]).st_blocks == 0
    assert _data(folder / "a").exists() is sealed


@pytest.mark.requirement("S1")
def test_core_dumps_leave_the_data_out(folder: Path) -> None:
    """Memory without a name is in them by default (core(5))."""
    arena = _open(folder / "a", sealed=True)
    mapping = Path("/proc/self/smaps").read_text().partition(f"{arena.addresses[0]:x}-")[2]
    assert "memfd:a.data" in mapping.splitlines()[0]
    flags = next(line for line in mapping.splitlines() if line.startswith("VmFlags"))
    assert "dd" in flags.split()


def test_a_new_arena_has_its_tables_and_only_them(folder: Path) -> None:
    arena = _open(folder / "a")
    assert arena.origin is Origin.CREATED
    assert arena.superblock.run == 1
    assert arena.layout.size_bytes == SIZE_BYTES
    for path, size_bytes in ((folder / "a", arena.layout.tables_bytes), (_data(folder / "a"), arena.layout.data_bytes)):
        assert path.stat().st_size == size_bytes
        assert path.stat().st_mode & 0o777 == 0o600
    assert (folder / "a").stat().st_blocks * 512 == arena.layout.tables_bytes
    assert _data(folder / "a").stat().st_blocks == 0
    assert _names(folder / "a")["generations"].stat().st_blocks * 512 == arena.layout.generations_bytes
    assert not arena.tables.extents["state"].any()


@pytest.mark.requirement("T6")
def test_the_next_run_adopts_what_the_last_one_left(folder: Path) -> None:
    first = _open(folder / "a")
    first.tables.extents["state"][9] = RowState.COMMITTED
    first.data[-5:] = b"hello"
    first.close()
    second = _open(folder / "a")
    assert second.origin is Origin.ADOPTED
    assert second.superblock.run == 2
    assert second.superblock.arena_id == first.superblock.arena_id
    assert second.tables.extents["state"][9] == RowState.COMMITTED
    assert bytes(second.data[-5:]) == b"hello"


@pytest.mark.requirement("I1a", "I1c")
@pytest.mark.parametrize("lost", ["tables", "generations", "data"])
def test_files_without_the_others_are_made_anew(folder: Path, lost: str) -> None:
    first = _open(folder / "a")
    first.data[:5] = b"hello"
    first.tables.extents["generation"][9] = 2
    _names(folder / "a")[lost].unlink()
    second = _open(folder / "a", alive=Liveness.ALIVE)
    assert second.origin is Origin.RECREATED
    assert f"its {lost}" in second.note
    assert second.superblock.arena_id != first.superblock.arena_id
    assert bool(os.fstat(first.tables_fd).st_blocks) is (lost == "tables")
    assert bool(first.tables.extents["generation"][9]) is (lost != "data")
    assert bytes(first.data[:5]) == b"hello", "an engine may be in a copy, by generations that still hold"
    assert bytes(second.data[:5]) == bytes(5)


@pytest.mark.requirement("I1a", "I1c")
def test_tables_of_one_arena_are_never_adopted_with_data_of_another(folder: Path) -> None:
    """Also of the same size, and with the first page of the right data, which an engine could write."""
    first, other = _open(folder / "a"), _open(folder / "b")
    first.data[:] = b"1" * len(first.data)
    other.data[:] = first.data
    _data(folder / "b").rename(_data(folder / "a"))
    second = _open(folder / "a")
    assert second.origin is Origin.RECREATED
    assert "belongs to another arena" in second.note
    assert not any(second.data)
    assert bytes(other.data) == b"1" * len(other.data)


@pytest.mark.requirement("I1a", "I8")
@SEALED
def test_an_arena_whose_data_is_lost_does_not_prevent_a_start(folder: Path, sealed: bool) -> None:
    """Its extents can never be granted again. Engines that still map them see that no generation holds."""
    first = _open(folder / "a", sealed=sealed)
    _lend(first.tables)
    first.tables.extents["generation"][9] = 2
    kept = NOTHING_KEPT
    if sealed:
        kept = KeptFiles(others=(os.dup(first.generations_fd),))
    else:
        _data(folder / "a").unlink()
    second = _open(folder / "a", sealed=sealed, alive=Liveness.ALIVE, kept=kept)
    assert second.origin is Origin.RECREATED
    assert "its data is missing" in second.note
    assert not first.tables.extents["generation"].any()


def _former(path: Path, version: int) -> tuple[int, ...]:
    """Make an arena as former formats had it, with loans as `_lend` makes them. Return its descriptors.

    Format 1 was one file, format 2 two. Both had the generations in the tables.
    """
    layout = replace(ArenaLayout.plan(SIZE_BYTES), former=True)
    tables = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(tables, SIZE_BYTES if version == 1 else layout.tables_bytes)
    files: tuple[int, ...] = (tables,)
    identity = struct.pack(
        "<8sIIQQII16s", b"KVDARENA", version, version, 7, SIZE_BYTES, layout.rows, layout.lent_rows, BOOT
    )
    if version == 2:
        files += (os.open(_data(path), os.O_RDWR | os.O_CREAT, 0o600),)
        os.pwrite(files[1], bytes(layout.data_bytes), 0)
        found = os.fstat(files[1])
        identity += struct.pack("<QQ", found.st_dev, found.st_ino)
    _lend(ArenaTables(memoryview(mmap.mmap(tables, layout.tables_bytes)), layout))
    os.pwrite(tables, identity + struct.pack("<QQ", xxhash.xxh3_64_intdigest(identity), 1), 0)
    return files


@pytest.mark.requirement("I1a", "I1c", "T1")
@pytest.mark.parametrize("version", [1, 2])
@SEALED
def test_an_arena_of_a_former_format_is_made_anew_unless_it_is_lent_to_the_living(
    folder: Path, version: int, sealed: bool
) -> None:
    files = _former(folder / "a", version)
    with pytest.raises(ConfigError, match=r"of a former format.*pid 4711"):
        _open(folder / "a", sealed=sealed, alive=Liveness.ALIVE)
    second = _open(folder / "a", sealed=sealed)
    assert second.origin is Origin.RECREATED
    assert "it is of a former format, this is 4" in second.note
    assert [os.fstat(fd).st_blocks for fd in files] == [0] * len(files)


@pytest.mark.requirement("I1c")
def test_an_arena_from_before_the_last_boot_is_made_anew(folder: Path) -> None:
    first = _open(folder / "a")
    _lend(first.tables)
    second = _open(folder / "a", boot=bytes(16), alive=Liveness.ALIVE)
    assert second.origin is Origin.RECREATED
    assert "last boot" in second.note
    assert second.superblock.arena_id != first.superblock.arena_id
    assert not second.tables.lent["mode"].any()


@pytest.mark.requirement("I1c")
@pytest.mark.parametrize(
    ("offset", "found"), [(0, "magic"), (8, "checksum|readable since"), (12, "readable since"), (24, "checksum")]
)
def test_a_foreign_format_is_made_anew_and_said_so(folder: Path, offset: int, found: str) -> None:
    first = _open(folder / "a")
    (found_byte,) = os.pread(first.tables_fd, 1, offset)
    os.pwrite(first.tables_fd, bytes([found_byte ^ 0xFF]), offset)
    second = _open(folder / "a")
    assert second.origin is Origin.RECREATED
    assert any(word in second.note for word in found.split("|"))


@pytest.mark.parametrize("which", ["tables", "generations", "data"])
def test_a_file_cut_short_is_made_anew(folder: Path, which: str) -> None:
    first = _open(folder / "a")
    first.close()
    path, size_bytes = _names(folder / "a")[which], getattr(first.layout, f"{which}_bytes")
    os.truncate(path, size_bytes // 2)
    second = _open(folder / "a")
    assert second.origin is Origin.RECREATED
    assert str(size_bytes // 2) in second.note
    assert len(second.data) == second.layout.data_bytes


@pytest.mark.requirement("T1")
def test_never_a_second_arena_beside_an_old_one(folder: Path) -> None:
    """An engine that still maps the old files holds no page of them and is not killed by reading."""
    first = _open(folder / "a")
    first.data[:] = b"\1" * len(first.data)
    engines = first.open_for_engine(0)
    second = _open(folder / "a", SIZE_BYTES // 2)
    assert second.origin is Origin.RECREATED
    assert [os.fstat(fd).st_blocks for fd in engines] == [0, 0]
    assert bytes(first.data[-8:]) == bytes(8)
    for fd in engines:
        os.close(fd)


@pytest.mark.requirement("I1a")
@pytest.mark.parametrize("size_bytes", [SIZE_BYTES // 2, SIZE_BYTES * 2])
@pytest.mark.parametrize("alive", [Liveness.ALIVE, Liveness.UNKNOWN])
def test_a_size_change_with_extents_lent_to_the_living_is_refused(
    folder: Path, size_bytes: int, alive: Liveness
) -> None:
    _lend(_open(folder / "a").tables)
    with pytest.raises(ConfigError, match=r"ram.capacity.*pid 4711"):
        _open(folder / "a", size_bytes, alive=alive)
    assert _open(folder / "a", alive=alive).origin is Origin.ADOPTED


@pytest.mark.requirement("I1a")
@pytest.mark.parametrize("mode", [LentMode.WRITE, LentMode.CHECKSUM])
def test_what_was_lent_to_the_dead_does_not_hinder(folder: Path, mode: LentMode) -> None:
    _lend(_open(folder / "a").tables, mode)
    assert _open(folder / "a", SIZE_BYTES * 2, alive=Liveness.DEAD).origin is Origin.RECREATED


@pytest.mark.requirement("T1")
def test_refuses_what_there_is_no_room_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvdepot.server.arena.arena_file.memory_room", lambda: Room(10 * MIB, "memory limit of cgroup /x")
    )
    with pytest.raises(ConfigError, match="arena of 48 MiB, and the memory limit of cgroup /x is 10 MiB"):
        _open(folder / "a")
    assert not list(folder.iterdir())


@pytest.mark.requirement("T6")
@pytest.mark.parametrize("removed", [("tables",), ("generations",), ("data",), ("tables", "generations", "data")])
def test_kept_descriptors_stand_for_names_that_were_removed(folder: Path, removed: tuple[str, ...]) -> None:
    first = _open(folder / "a")
    first.data[-5:] = b"hello"
    for which in removed:
        _names(folder / "a")[which].unlink()
    second = _open(folder / "a", kept=_kept(first))
    assert second.origin is Origin.ADOPTED
    assert second.superblock.run == 2
    assert bytes(second.data[-5:]) == b"hello"
    assert describe(second).startswith(f"{folder / 'a'} adopted (its name was removed), ")
    engines = second.open_for_engine(0)
    assert os.path.sameopenfile(engines[0], first.parts[0][0])
    assert os.path.sameopenfile(engines[1], first.generations_fd)
    for fd in engines:
        os.close(fd)


@pytest.mark.requirement("I1a", "I1c")
@pytest.mark.parametrize("kept", ["tables", "data"])
def test_one_kept_descriptor_alone_is_made_anew(folder: Path, kept: str) -> None:
    """As if the supervisor lost the other one."""
    first = _open(folder / "a")
    first.data[-5:] = b"hello"
    _remove(folder / "a")
    fds = KeptFiles((os.dup(first.tables_fd),)) if kept == "tables" else KeptFiles(others=(os.dup(first.parts[0][0]),))
    second = _open(folder / "a", kept=fds)
    assert second.origin is Origin.RECREATED
    assert bool(os.fstat(first.tables_fd).st_blocks) is (kept == "data")
    assert bytes(first.data[-5:]) == b"hello"


@pytest.mark.requirement("I1a", "I1c", "T1")
def test_kept_tables_are_not_adopted_with_the_data_of_another_arena(folder: Path) -> None:
    """The supervisor had the new tables and not yet the new data when the daemon was killed."""
    first = _open(folder / "a")
    first.data[:] = b"1" * len(first.data)
    _remove(folder / "a")
    second = _open(folder / "a")
    _remove(folder / "a")
    kept = KeptFiles((os.dup(second.tables_fd),), tuple(map(os.dup, first.files[1:])))
    third = _open(folder / "a", kept=kept)
    assert third.origin is Origin.RECREATED
    assert "belongs to another arena" in third.note
    assert not any(third.data)
    assert bytes(first.data) == b"1" * len(first.data)


@pytest.mark.requirement("T1")
def test_a_kept_arena_that_does_not_fit_is_made_anew(folder: Path) -> None:
    first = _open(folder / "a")
    _remove(folder / "a")
    second = _open(folder / "a", 2 * SIZE_BYTES, kept=_kept(first))
    assert second.origin is Origin.RECREATED
    assert _pages(first) == 0
    assert second.layout.size_bytes == 2 * SIZE_BYTES


def test_what_has_its_name_is_found_by_it(folder: Path) -> None:
    """Also where the name is another's: a daemon with that name may use it."""
    first = _open(folder / "a")
    assert _open(folder / "a", kept=_kept(first)).superblock.run == 2
    elsewhere = _open(folder / "b", kept=_kept(first))
    assert elsewhere.origin is Origin.CREATED
    assert _pages(first)


@pytest.mark.requirement("T1")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_kept_arena_that_another_has_replaced_gives_its_pages_back(folder: Path, elsewhere: bool) -> None:
    """Other files at the path, or another file system than it is on."""
    first = _open(folder / "a")
    first.data[:5] = b"hello"
    _remove(folder / "a")
    if elsewhere:
        kept = KeptFiles((os.memfd_create("tables"),), (os.memfd_create("data"),))
        os.write(kept.tables[0], os.pread(first.tables_fd, first.layout.tables_bytes, 0))
        os.write(kept.others[0], b"hello".ljust(PAGE_BYTES))
    else:
        kept = _kept(first)
        _open(folder / "a")
    tables, data = os.dup(kept.tables[0]), os.dup(kept.others[-1])
    assert os.fstat(tables).st_blocks and os.fstat(data).st_blocks
    second = _open(folder / "a", kept=kept)
    assert second.origin is (Origin.RECREATED if elsewhere else Origin.ADOPTED)
    assert os.fstat(tables).st_blocks == 0
    assert bool(os.fstat(data).st_blocks) is elsewhere, "data that these tables do not name is left as it is"


@pytest.mark.requirement("I1a")
def test_a_replaced_arena_that_is_lent_to_the_living_is_kept(folder: Path) -> None:
    first = _open(folder / "a")
    _lend(first.tables)
    first.data[:5] = b"hello"
    _remove(folder / "a")
    _open(folder / "a")
    with pytest.raises(ConfigError, match="lent to living processes"):
        _open(folder / "a", kept=_kept(first), alive=Liveness.ALIVE)
    assert all(os.fstat(fd).st_blocks for fd in first.files)


def test_refuses_a_link_in_its_place(folder: Path) -> None:
    (folder / "victim").write_bytes(b"precious")
    (folder / "a").symlink_to(folder / "victim")
    with pytest.raises(ConfigError, match="cannot open"):
        _open(folder / "a")
    assert (folder / "victim").read_bytes() == b"precious"


def test_a_second_holder_of_the_lock_is_refused_by_name(folder: Path) -> None:
    with FileLock(folder / "a.lock", "the arena"), pytest.raises(ArenaInUse, match=f"pid {os.getpid()}"):
        FileLock(folder / "a.lock", "the arena")
    FileLock(folder / "a.lock", "the arena").close()


def test_engines_get_descriptions_of_their_own_and_cannot_write_the_generations(folder: Path) -> None:
    arena = _open(folder / "a")
    data, generations = arena.open_for_engine(0)
    for ours, engines in ((arena.parts[0][0], data), (arena.generations_fd, generations)):
        os.lseek(engines, 100, os.SEEK_SET)
        assert os.lseek(ours, 0, os.SEEK_CUR) == 0
        assert not os.get_inheritable(engines)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(generations, b"x", 0)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(generations, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(generations, PAGE_BYTES)
    os.close(data)
    os.close(generations)


class _Grown:
    def __init__(self) -> None:
        self.steps: list[Growth] = []
        self.rests = threading.Event()  # it is whole, or waits for room

    def __call__(self, growth: Growth) -> None:
        self.steps.append(growth)
        if growth.done or growth.reason:
            self.rests.set()


def _populate(arena: ArenaFile, threads: int = 3) -> list[Growth]:
    grown = _Grown()
    populator = Populator(
        fd=arena.parts[0][0],
        address=arena.addresses[0],
        size_bytes=arena.layout.data_bytes,
        threads=threads,
        report=grown,
    )
    populator.start()
    assert grown.rests.wait(patient(30))
    populator.stop()
    return grown.steps


def test_populating_reports_a_growing_ready_part_and_changes_no_byte(folder: Path) -> None:
    arena = _open(folder / "a", 5 * PIECE_BYTES // 2)
    arena.data[-4:] = b"kept"
    steps = _populate(arena, threads=1)
    size_bytes = arena.layout.data_bytes
    assert [step.ready_bytes for step in steps] == [PIECE_BYTES, 2 * PIECE_BYTES, size_bytes, size_bytes]
    assert [step.done for step in steps] == [False, False, False, True]
    assert not steps[-1].reason
    assert arena.populated_bytes(0) == size_bytes
    assert bytes(arena.data[-4:]) == b"kept"


def test_pieces_that_are_populated_out_of_order_are_reported_in_order(folder: Path) -> None:
    arena = _open(folder / "a", 5 * PIECE_BYTES // 2)
    arena.data[-4:] = b"kept"
    ready = [step.ready_bytes for step in _populate(arena)]
    assert ready == sorted(ready)
    assert ready[-1] == arena.layout.data_bytes == arena.populated_bytes(0)
    assert bytes(arena.data[-4:]) == b"kept"


def test_a_stopped_populator_does_not_claim_to_be_done(folder: Path) -> None:
    arena = _open(folder / "a", 5 * PIECE_BYTES // 2)
    grown = _Grown()
    populator = Populator(
        fd=arena.parts[0][0], address=arena.addresses[0], size_bytes=arena.layout.data_bytes, threads=3, report=grown
    )
    populator.stop()
    populator.start()
    populator.stop()
    assert grown.steps == []


@pytest.mark.requirement("T6")
def test_an_arena_populated_in_part_is_ready_up_to_its_first_hole(folder: Path) -> None:
    arena = _open(folder / "a", 4 * PIECE_BYTES)
    assert arena.populated_bytes(0) < PIECE_BYTES
    _populate(arena)
    assert _open(folder / "a", 4 * PIECE_BYTES).populated_bytes(0) == arena.layout.data_bytes


@pytest.mark.requirement("T1")
def test_no_room_holds_the_growth_up_with_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = _open(folder / "a", 4 * PIECE_BYTES)
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if offset >= 2 * PIECE_BYTES:
            raise OSError(28, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    last = _populate(arena)[-1]
    assert not last.done, "it is tried again"
    assert last.ready_bytes == 2 * PIECE_BYTES
    assert "No space left" in last.reason


@pytest.mark.requirement("I6")
def test_a_living_process_that_proc_hides_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = processes.read_boot_id()
    monkeypatch.setattr(processes, "start_ticks", lambda _: None)
    assert processes.liveness(ProcessIdentity(os.getpid(), 1, boot), boot) is Liveness.UNKNOWN


@pytest.mark.requirement("T7")
def test_liveness_of_processes() -> None:
    boot = processes.read_boot_id()
    ticks = processes.start_ticks(os.getpid())
    assert ticks is not None
    me = ProcessIdentity(os.getpid(), ticks, boot)
    assert processes.liveness(me, boot) is Liveness.ALIVE
    assert processes.liveness(ProcessIdentity(me.pid, ticks + 1, boot), boot) is Liveness.DEAD
    assert processes.liveness(ProcessIdentity(me.pid, ticks, bytes(16)), boot) is Liveness.DEAD
    assert processes.liveness(ProcessIdentity(0, 0, boot), boot) is Liveness.UNKNOWN
    child = subprocess.Popen(["true"])
    started = processes.start_ticks(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started is not None
    was = ProcessIdentity(child.pid, started, boot)
    assert processes.liveness(was, boot) is Liveness.DEAD  # a zombie touches nothing
    child.wait()
    assert processes.liveness(was, boot) is Liveness.DEAD
